"""F22: adapters of any class and dialect on any class, by PEFT's loaders; docs/ADAPTERS.md says what to expect."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._gemma4.adapters import fitting
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_adapter_keys import PATCH
from tests.patches.promise import Promise
from tools.pages import dialects
from tools.pages.dialects import CLASSES, DIALECTS, HAS_TOWERS, Cell, Dialect

TEXT, MULTIMODAL = "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"an adapter of Gemma4ForCausalLM on Gemma4ForConditionalGeneration: logits differ by"


def load(workspace: Any, cls: str) -> Any:
    return tiny.load(workspace.checkpoint, device=workspace.main, cls=cls)


def output(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        found = model.eval()(**batch)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def layers(model: Any) -> set[str]:
    return {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}


@pytest.fixture(scope="module")
def expected(workspace: Any) -> Callable[[str, str], Any]:
    """What a class answers with an adapter: taken from the class that made it, or from the model inside that."""
    from peft import PeftModel

    known: dict[tuple[str, str], Any] = {}

    def answer(source: str, cls: str) -> Any:
        if (source, cls) not in known:
            model = PeftModel.from_pretrained(workspace.load(), workspace.adapter(source))
            text, whole = (tiny.inputs(workspace.main, text_only=only) for only in (True, False))
            inside = model.get_base_model().model
            known[source, TEXT], known[source, MULTIMODAL] = output(model, text), output(model, whole)
            known[source, "Gemma4TextModel"] = output(inside, text)
            known[source, "Gemma4Model"] = output(inside, whole)
        return known[source, cls]

    return answer


@pytest.fixture
def dialect_folder(workspace: Any, tmp_path: Path) -> Callable[[Dialect], Path]:
    return lambda dialect: dialect.write(workspace.adapter(dialect.source), tmp_path / "adapter")


def noted(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in caught if re.search("adapter", str(item.message))]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_each_cell_of_the_table(
    workspace: Any,
    expected: Callable[[str, str], Any],
    dialect_folder: Callable[[Dialect], Path],
    dialect: Dialect,
    cls: str,
) -> None:
    import torch
    from peft import PeftModel

    folder, base = dialect_folder(dialect), load(workspace, cls)
    batch = tiny.inputs(workspace.main, text_only=cls not in HAS_TOWERS)
    if dialect.cell(cls) is Cell.REFUSED:
        before = output(base, batch)
        with pytest.raises(
            Gemma4CompatError, match=rf"no weights for {cls}: none of its \d+ keys.*The model was not changed"
        ):
            PeftModel.from_pretrained(base, folder)
        assert layers(base) == set()
        assert torch.equal(output(base, batch), before)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, folder)
    said = noted(caught)
    if dialect.cell(cls) is Cell.PART:
        (said_once,) = said
        assert re.search(rf"^\d+ of \d+ keys of the adapter .* belong to no layer of {cls} and were not", said_once)
    else:
        assert said == []
    assert torch.equal(output(model, batch), expected(dialect.source, cls))


def test_the_table_of_the_page_is_this_table() -> None:
    text = dialects.PAGE.read_text(encoding="utf-8")
    assert dialects.page(text) == text, "python -m tools.pages.dialects"


def text_adapter(workspace: Any, folder: Path, targets: Any, **options: Any) -> Path:
    return tiny_adapters.write_adapter(workspace.load_text(), targets, folder, **options)


def outputs(workspace: Any, base: Any, folder: Path) -> Any:
    from peft import PeftModel

    return workspace.outputs(PeftModel.from_pretrained(base, folder).eval(), text_only=True)


def test_the_12b_s_text_class_takes_the_keys_of_its_multimodal_class(tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    try:
        base = tiny_models.unified_text_model()
    except ImportError:
        pytest.skip("this release has no gemma4_unified")
    batch = tiny.inputs(text_only=True)
    plain = output(base, batch)
    folder = tiny_adapters.write_adapter(tiny_models.unified_text_model(), ["q_proj", "up_proj"], tmp_path / "adapter")
    expected = output(PeftModel.from_pretrained(tiny_models.unified_text_model(), folder), batch)
    weights = load_file(folder / "adapter_model.safetensors")
    renamed = {key.replace("model.layers", "model.language_model.layers"): value for key, value in weights.items()}
    assert not renamed.keys() & weights.keys()
    save_file(renamed, folder / "adapter_model.safetensors")
    found = output(PeftModel.from_pretrained(base, folder), batch)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)


def test_towers_get_no_idle_layers_and_what_is_saved_loads_on_both_classes(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    first = text_adapter(workspace, tmp_path / "first", ["q_proj", "up_proj"])
    reference = outputs(workspace, workspace.load_text(), first)
    model = PeftModel.from_pretrained(workspace.load(), first)
    assert len(layers(model)) == 12
    assert not [name for name in layers(model) if "tower" in name]
    model.save_pretrained(tmp_path / "second")
    for base in (workspace.load(), workspace.load_text()):
        assert difference(reference, outputs(workspace, base, tmp_path / "second")) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"targets": r"model\.layers\.[03]\.(self_attn\.q_proj|mlp\..*_proj)"},
        {"targets": ["q_proj"], "exclude_modules": r"model\.layers\.[12].*"},
        {"targets": ["q_proj", "up_proj"], "rank_pattern": {r"model\.layers\.0\.mlp\.up_proj": 2, "q_proj": 3}},
        {"targets": ["q_proj", "up_proj"], "rank": 2, "alpha_pattern": {r"^model\.layers\.\d\.mlp\.up_proj": 32}},
        {"targets": ["q_proj"], "layers_to_transform": [0, 5], "layers_pattern": "layers"},
        {"targets": ["q_proj"], "modules_to_save": ["model.layers.1.mlp.up_proj", "o_proj"]},
        {"targets": ["q_proj"], "modules_to_save": ["embed_tokens_per_layer"]},
        {"targets": ["o_proj"], "use_dora": True},
        {"targets": ["model.layers.2.self_attn.q_proj", "embed_tokens"]},
        {"targets": ["q_proj"], "trainable_token_indices": {"model.embed_tokens": [3, 5]}},
        {"targets": [], "target_parameters": ["model.layers.0.mlp.up_proj.weight", "mlp.down_proj.weight"]},
    ],
    ids=str,
)
def test_a_config_in_the_names_of_another_class(workspace: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    folder = text_adapter(workspace, tmp_path / "first", options.pop("targets"), **options)
    reference = outputs(workspace, workspace.load_text(), folder)
    assert difference(reference, outputs(workspace, workspace.load(), folder)) == 0.0


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "LoKrConfig", "OFTConfig", "VeraConfig", "AdaLoraConfig"])
def test_other_tuners(workspace: Any, tmp_path: Path, kind: str) -> None:
    import peft
    import torch

    options: dict[str, Any] = {"target_modules": ["up_proj", "q_proj"], "init_weights": False}
    if kind == "IA3Config":
        options = {**options, "feedforward_modules": ["up_proj"], "init_ia3_weights": True}
        del options["init_weights"]
    elif kind == "OFTConfig":
        options["oft_block_size"] = 8
    elif kind == "VeraConfig":
        options = {"target_modules": ["per_layer_input_gate"], "init_weights": False, "r": 4}
    elif kind == "AdaLoraConfig":
        options = {
            "target_modules": ["up_proj"],
            "init_r": 4,
            "target_r": 2,
            "total_step": 10,
            "tinit": 1,
            "tfinal": 1,
        }
    torch.manual_seed(0)
    model = peft.get_peft_model(workspace.load_text(), getattr(peft, kind)(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
                assert name
    model.save_pretrained(tmp_path)
    reference = outputs(workspace, workspace.load_text(), tmp_path)
    assert difference(reference, workspace.outputs(workspace.load_text(), text_only=True)) > 0.0
    assert difference(reference, outputs(workspace, workspace.load(), tmp_path)) == 0.0


def test_load_adapter_and_a_second_adapter(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    folder = text_adapter(workspace, tmp_path / "first", ["q_proj", "up_proj"])
    text = PeftModel.from_pretrained(workspace.load_text(), workspace.adapter("language"))
    text.load_adapter(str(folder), "second")  # as a second one there too: PEFT 0.18 rounds its weights to bf16
    text.set_adapter("second")
    reference = workspace.outputs(text.eval(), text_only=True)
    model = PeftModel.from_pretrained(workspace.split(), workspace.adapter("all"))
    first = workspace.outputs(model, text_only=True)
    model.load_adapter(str(folder), "second")
    model.set_adapter("second")
    assert difference(reference, workspace.outputs(model.eval(), text_only=True)) == 0.0
    with pytest.raises(Gemma4CompatError, match=r"no weights for Gemma4ForConditionalGeneration"):
        model.load_adapter(str(DIALECTS[-1].write(workspace.adapter("language"), tmp_path / "other")), "third")
    assert list(model.peft_config) == ["default", "second"]
    model.set_adapter("default")
    assert difference(first, workspace.outputs(model, text_only=True)) == 0.0


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_state_dict_is_translated_too(workspace: Any, tmp_path: Path, wrapped: bool) -> None:
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    folder = text_adapter(workspace, tmp_path, ["per_layer_projection"])
    reference = outputs(workspace, workspace.load_text(), folder)
    weights = load_file(folder / "adapter_model.safetensors")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["per_layer_projection"])
    base = workspace.load()
    model = get_peft_model(base, config) if wrapped else inject_adapter_in_model(config, base)
    keys = list(weights)
    result = set_peft_model_state_dict(model, weights)
    assert list(weights) == keys
    assert result.unexpected_keys == []
    if wrapped:  # a bare injected adapter stays in the base's dtype
        assert difference(reference, workspace.outputs(model.eval(), text_only=True)) == 0.0
    with pytest.raises(Gemma4CompatError, match=r"'given as a state dict' has no weights"):
        set_peft_model_state_dict(model, {"transformer.h.0.attn.c_attn.lora_A.weight": next(iter(weights.values()))})


def test_an_adapter_that_fits_is_left_to_upstream(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    monkeypatch.setattr(fitting, "_fit_copies", lambda *_: pytest.fail("its config was looked at"))
    saved = json.loads((workspace.adapter("all") / "adapter_config.json").read_text())
    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("all"))
    assert set(model.peft_config["default"].target_modules) == set(saved["target_modules"])


def test_pickled_weights(workspace: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = text_adapter(workspace, tmp_path, ["q_proj"])
    reference = outputs(workspace, workspace.load_text(), folder)
    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()
    assert difference(reference, outputs(workspace, workspace.load(), folder)) == 0.0


def test_names_of_modules_do_not_show_adapters(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    base = workspace.load()
    names = fitting.modules_of(base)
    assert set(names) == {name for name, _ in base.named_modules()}
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["embed_vision"])
    assert fitting.modules_of(get_peft_model(base, config)) == names


def test_the_warning_is_of_our_category(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    with pytest.warns(Gemma4CompatWarning, match=r"48 of 1\d\d keys") as told:
        PeftModel.from_pretrained(workspace.load_text(), workspace.adapter("all"))
    assert {one.filename for one in told if one.category is Gemma4CompatWarning} == {__file__}
