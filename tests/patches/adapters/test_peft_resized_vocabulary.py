"""peft-resized-vocabulary: an adapter of a model with new tokens answers as it did, saved and loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.adapters.peft_resized_vocabulary import PATCH
from tests.helpers import without
from tests.patches.promise import Promise

# Upstream saves the copies of the text-only class once more, under names that it does not read.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the vocabulary was resized", "ignore:[0-9]+ of [0-9]+ keys of the adapter"
)
NEW = 8
PER_LAYER = "embed_tokens_per_layer.weight"
#: Settings of LoRA, by what they do with the embeddings.
KINDS: dict[str, dict[str, Any]] = {
    "layers": {},
    "tokens": {"trainable_token_indices": {"embed_tokens": [5, 6]}},
    "copy": {"modules_to_save": ["embed_tokens"]},
    "tied copy": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"target_modules": ["embed_tokens", "gate_proj"]},
    "per-layer": {"target_modules": ["embed_tokens_per_layer", "gate_proj"]},
    "head": {"target_modules": ["lm_head", "gate_proj"]},
}
LAYERS = r".*layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"an adapter of a model with 8 new tokens, saved and loaded: logits differ by"


def resized(workspace: Any, seed: int, cls: str = "", split: bool = False) -> Any:
    """The base with new tokens, whose rows differ from those of another seed."""
    import torch

    model = workspace.load_text() if cls else workspace.load()
    if split:
        model = workspace.dispatch(model, "both")
    torch.manual_seed(seed)
    model.resize_token_embeddings(model.config.get_text_config().vocab_size + NEW, mean_resizing=False)
    return model


def logits(model: Any) -> Any:
    import torch

    last = model.config.get_text_config().vocab_size
    tokens = torch.cat([torch.arange(5, 12), torch.arange(last - NEW, last)])[None]
    with torch.no_grad():
        return model.eval()(input_ids=tokens.to(model.get_input_embeddings().weight.device)).logits.float()


def adapted(model: Any, kind: str) -> Any:
    """With weights of the base's dtype, in which ``model.load_adapter`` reads them."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(**{"target_modules": LAYERS, "init_lora_weights": False, **KINDS[kind]})
    found = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for value in found.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.02)
    return found


def reloaded(base: Any, folder: Path, loader: str) -> Any:
    from peft import PeftModel

    if loader == "PEFT":
        return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
    base.load_adapter(str(folder))
    return base


def keys(folder: Path) -> list[str]:
    from safetensors.torch import load_file

    return sorted(load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize("cls", ["", "text"])
@pytest.mark.parametrize("loader", ["PEFT", "transformers"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_it_answers_as_before_it_was_saved(workspace: Any, tmp_path: Path, kind: str, loader: str, cls: str) -> None:
    import torch

    model = adapted(resized(workspace, 0, cls), kind)
    model.save_pretrained(tmp_path)
    expected = logits(model)
    assert torch.equal(expected, logits(reloaded(resized(workspace, 1, cls), tmp_path, loader)))
    if cls == "":
        split = reloaded(resized(workspace, 1, split=True), tmp_path, loader)
        assert torch.equal(expected, logits(split))


@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_a_split_model_saves_what_one_device_saves(workspace: Any, tmp_path: Path, kind: str) -> None:
    import torch
    from safetensors.torch import load_file

    for name, split in (("whole", False), ("split", True)):
        adapted(resized(workspace, 0, split=split), kind).save_pretrained(tmp_path / name)
    whole, split = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "split"))
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[key], split[key]) for key in whole)


def test_the_embedding_and_the_head_stay_one_parameter(workspace: Any, tmp_path: Path) -> None:
    adapted(resized(workspace, 0), "layers").save_pretrained(tmp_path)
    for loader in ("PEFT", "transformers"):
        model = reloaded(resized(workspace, 1), tmp_path, loader)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("asked, saved", [("auto", True), (True, True), (False, False)])
def test_what_save_embedding_layers_asks_for(workspace: Any, tmp_path: Path, asked: Any, saved: bool) -> None:
    adapted(resized(workspace, 0), "layers").save_pretrained(tmp_path, save_embedding_layers=asked)
    found = keys(tmp_path)
    assert any(key.endswith("embed_tokens.weight") for key in found) == saved
    assert any(key.endswith(PER_LAYER) for key in found) == saved


def test_it_says_once_what_to_do_before_a_load(workspace: Any, tmp_path: Path) -> None:
    model = adapted(resized(workspace, 0), "layers")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path)
    (said,) = [str(one.message) for one in caught if "vocabulary was resized" in str(one.message)]
    tokens = model.config.get_text_config().vocab_size
    assert f"resize_token_embeddings({tokens})" in said
    with pytest.raises(Gemma4CompatError, match=rf"a vocabulary of {tokens} tokens: call resize_token_embeddings"):
        reloaded(workspace.load(), tmp_path, "PEFT")


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_vocabulary_of_the_same_size_is_left_to_upstream(workspace: Any, tmp_path: Path, kind: str) -> None:
    for name in ("on", "off"):
        if name == "on":
            adapted(workspace.load(), kind).save_pretrained(tmp_path / name)
            continue
        with without(PATCH.id):
            adapted(workspace.load(), kind).save_pretrained(tmp_path / name)
    assert keys(tmp_path / "on") == keys(tmp_path / "off")


def test_an_adapter_inside_a_transformers_model(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig

    model = resized(workspace, 0)
    model.add_adapter(LoraConfig(target_modules=tiny_adapters.SOME_LINEARS, init_lora_weights=False))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert any(key.endswith(PER_LAYER) for key in keys(tmp_path))
    assert torch.equal(expected, logits(reloaded(resized(workspace, 1), tmp_path, "transformers")))


def test_a_trainer_s_checkpoint_goes_on(workspace: Any, tmp_path: Path) -> None:
    """What the Trainer does to resume: the weights of an adapter that is there are read again."""
    import torch
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    model = adapted(resized(workspace, 0), "tokens")
    model.save_pretrained(tmp_path)
    other = adapted(resized(workspace, 1), "tokens")
    set_peft_model_state_dict(other, load_peft_weights(str(tmp_path), device="cpu"))
    assert torch.equal(logits(model), logits(other))


def test_a_merged_model_has_the_rows(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(resized(workspace, 0).float(), "layers")
    model.save_pretrained(tmp_path)
    expected = logits(model)
    loaded = PeftModel.from_pretrained(resized(workspace, 1).float(), tmp_path).merge_and_unload()
    assert float((expected - logits(loaded)).abs().max()) < 1e-3
