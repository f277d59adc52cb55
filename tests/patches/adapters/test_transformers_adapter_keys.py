"""F22 for ``model.load_adapter`` of transformers: the same table, docs/ADAPTERS.md."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab import tiny
from gemma4_compat.patches.adapters.transformers_adapter_keys import PATCH
from tests.patches.adapters.test_peft_adapter_keys import layers, load, noted, output
from tests.patches.promise import Promise
from tools.pages.dialects import DIALECTS, Cell, Dialect

TEXT, MULTIMODAL = "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"model\.load_adapter of a Gemma4ForCausalLM's adapter: logits differ by"


@pytest.fixture(scope="module")
def expected(workspace: Any) -> Callable[[str, str], Any]:
    """What each class answers with an adapter of the multimodal class, loaded by this loader onto that class."""
    known: dict[tuple[str, str], Any] = {}

    def answer(source: str, cls: str) -> Any:
        if (source, cls) not in known:
            model = workspace.load()
            try:
                model.load_adapter(str(workspace.adapter(source)))
            except (ImportError, ValueError) as error:
                pytest.skip(f"these releases of transformers and PEFT do not go together: {error}")
            for name in (TEXT, MULTIMODAL):
                known[source, name] = output(model, tiny.inputs(workspace.main, text_only=name == TEXT))
        return known[source, cls]

    return answer


@pytest.mark.parametrize("cls", [MULTIMODAL, TEXT])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_each_cell_of_the_table(
    workspace: Any, expected: Callable[[str, str], Any], tmp_path: Path, dialect: Dialect, cls: str
) -> None:
    import torch

    reference = expected(dialect.source, cls)
    folder = dialect.write(workspace.adapter(dialect.source), tmp_path / "adapter")
    model = load(workspace, cls)
    batch = tiny.inputs(workspace.main, text_only=cls == TEXT)
    if dialect.cell(cls) is Cell.REFUSED:
        before = output(model, batch)
        with pytest.raises(Gemma4CompatError, match=rf"no weights for {cls}: none of its \d+ keys"):
            model.load_adapter(str(folder))
        assert layers(model) == set()
        assert not getattr(model, "_hf_peft_config_loaded", False)
        assert torch.equal(output(model, batch), before)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_adapter(str(folder))
    said = noted(caught)
    if dialect.cell(cls) is Cell.PART:
        (said_once,) = said
        assert re.search(rf"^\d+ of \d+ keys of the adapter .* belong to no layer of {cls} and were not", said_once)
    else:
        assert said == []
    assert torch.equal(output(model, batch), reference)


def test_a_state_dict_with_its_config(workspace: Any, expected: Callable[[str, str], Any]) -> None:
    import torch
    from peft import PeftConfig
    from safetensors.torch import load_file

    reference = expected("language", TEXT)
    folder = workspace.adapter("language")
    model = load(workspace, TEXT)
    weights = load_file(folder / "adapter_model.safetensors")
    model.load_adapter(peft_config=PeftConfig.from_pretrained(folder), adapter_state_dict=weights)
    assert torch.equal(output(model, tiny.inputs(workspace.main, text_only=True)), reference)
    assert all("language_model" in name for name in weights)


def test_on_a_split_base(workspace: Any, expected: Callable[[str, str], Any]) -> None:
    model = workspace.load()
    expected("language", TEXT)
    adapter = str(workspace.text_adapter())
    model.load_adapter(adapter)
    split = workspace.split()
    split.load_adapter(adapter)
    batch = tiny.inputs(workspace.main)
    assert output(model, batch).equal(output(split, batch))
