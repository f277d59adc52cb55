"""S6: ``PeftMixedModel`` loads, fails and merges as a model with one kind of adapters does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab.workspace import difference
from tests.helpers import without


def mixed(base: Any, folder: Path) -> Any:
    from peft import PeftMixedModel

    return PeftMixedModel.from_pretrained(base, folder, "first").eval()


def both(workspace: Any, base: Any) -> Any:
    model = mixed(base, workspace.adapter("language"))
    model.load_adapter(workspace.adapter("towers"), "second")
    model.set_adapter(["first", "second"])
    return model.eval()


def second(workspace: Any, folder: Path) -> Any:
    model = mixed(workspace.load(), workspace.adapter("language"))
    model.load_adapter(folder, "second")
    model.set_adapter("second")
    return model.eval()


@pytest.mark.parametrize("kind", ["first", "both"])
def test_it_loads_as_upstream_does(workspace: Any, kind: str) -> None:
    def loaded() -> Any:
        base = workspace.load()
        return mixed(base, workspace.adapter("language")) if kind == "first" else both(workspace, base)

    found = workspace.outputs(loaded())
    with without("peft-adapter-keys"):
        expected = workspace.outputs(loaded())
    assert difference(expected, found) == 0.0
    assert difference(workspace.reference(), found) > 0.0


def test_a_state_dict_is_set_as_upstream_does(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    folder = str(workspace.adapter("language"))

    def loaded() -> Any:
        model = get_peft_model(workspace.load(), LoraConfig.from_pretrained(folder), mixed=True)
        assert set_peft_model_state_dict(model, load_peft_weights(folder, device="cpu")).unexpected_keys == []
        return model.eval()

    found = workspace.outputs(loaded())
    with without("peft-adapter-keys"):
        assert difference(workspace.outputs(loaded()), found) == 0.0


@pytest.mark.parametrize("offload", ["layers", "both"])
def test_a_split_model_has_the_answers_of_one_device(workspace: Any, offload: str) -> None:
    whole, split = both(workspace, workspace.load()), both(workspace, workspace.split(offload=offload))
    assert difference(workspace.outputs(whole), workspace.outputs(split)) == 0.0
    whole, split = whole.merge_and_unload(), split.merge_and_unload()
    assert difference(workspace.outputs(whole), workspace.outputs(split)) == 0.0
    assert difference(workspace.reference(), workspace.outputs(split)) > 0.0


def test_layers_on_layers_are_merged_in_a_split_model(workspace: Any, tmp_path: Path) -> None:
    """A LoRA around a LoHa: each is merged into the same weight, in upstream's order."""
    import torch
    from peft import LoHaConfig, get_peft_model

    torch.manual_seed(0)
    config = LoHaConfig(r=4, target_modules=["q_proj", "up_proj"], init_weights=False)
    get_peft_model(workspace.load(), config).save_pretrained(tmp_path)

    def merged(base: Any) -> Any:
        model = mixed(base, tmp_path)
        model.load_adapter(workspace.adapter("language"), "second")
        model.set_adapter(["first", "second"])
        return workspace.outputs(model.eval().merge_and_unload())

    assert difference(merged(workspace.load()), merged(workspace.split())) == 0.0


def test_an_adapter_of_another_class_is_translated(workspace: Any) -> None:
    """The first is read in the dtype of the base, and those after it in float32, by upstream, too."""
    from peft import PeftModel

    folder = workspace.text_adapter()
    found = [mixed(base, folder) for base in (workspace.load(), workspace.load_text())]
    found += [second(workspace, folder), PeftModel.from_pretrained(workspace.load_text(), folder).eval()]
    first, text, beside, alone = (workspace.outputs(model, text_only=True) for model in found)
    assert difference(text, first) == difference(alone, beside) == 0.0
    assert difference(text, workspace.outputs(workspace.load_text(), text_only=True)) > 0.0


def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was(workspace: Any) -> None:
    base = workspace.load()
    with pytest.raises(
        Gemma4CompatError, match=r"does not fit PeftMixedModel: 2 of its tensors.*the model was not changed"
    ):
        mixed(base, workspace.mismatched_adapter())
    assert difference(workspace.reference(), workspace.outputs(base)) == 0.0
    model = mixed(workspace.load(), workspace.adapter("language"))
    before = workspace.outputs(model)
    with pytest.raises(Gemma4CompatError, match="the model was not changed"):
        model.load_adapter(workspace.mismatched_adapter(), "second")
    assert list(model.peft_config) == ["first"]
    assert difference(before, workspace.outputs(model)) == 0.0
