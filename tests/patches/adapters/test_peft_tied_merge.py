"""peft-tied-merge: a LoRA on the head or the embedding, merged: the answers of the loaded adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab import tiny
from gemma4_compat.patches.adapters.peft_tied_merge import PATCH
from tests.helpers import without
from tests.patches.adapters import tied_halves
from tests.patches.promise import Promise

ROUNDING = 1e-4
KINDS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "dora": {"target_modules": ["lm_head"], "use_dora": True},
}
SPLITS = [f"{half}, {place}" for half in tied_halves.HALVES for place in ("disk", "ram")]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a LoRA on the head, merged, unloaded and saved: logits differ by"
    exact = False  # a merge rounds


def base(workspace: Any, split: str | None = None, cls: str = "") -> Any:
    import torch
    from accelerate import dispatch_model

    model = (workspace.load_text() if cls else workspace.load()).float()
    if split is None:
        return model
    if split == "layers":
        return workspace.dispatch(model, "both")
    half, _, place = split.partition(", ")
    main, offloaded = (torch.device("cpu"), "cpu") if place == "ram" else (workspace.main, workspace.offloaded)
    placement = tiny.device_map(model, "none", main=main, offloaded=offloaded)
    placement |= dict.fromkeys(tied_halves.HALVES[half], offloaded)
    if place == "ram":
        return dispatch_model(model, placement, main_device=main, skip_keys=tiny.skip_keys(model))
    return workspace.dispatch_map(model, placement)


def adapter(workspace: Any, folder: Path, kind: str, cls: str = "") -> Path:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(base(workspace, cls=cls), LoraConfig(init_lora_weights=False, **KINDS[kind]))
    model.save_pretrained(folder)
    return folder


def loaded(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder).eval()


def logits(workspace: Any, model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(**tiny.inputs(workspace.main, text_only=True)).logits.float()


def distance(first: Any, second: Any) -> float:
    return float((first - second).abs().max())


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("split", [None, "layers", *SPLITS])
@pytest.mark.parametrize("kind", list(KINDS))
def test_merged_unmerged_and_unloaded(workspace: Any, tmp_path: Path, kind: str, split: str | None) -> None:
    folder = adapter(workspace, tmp_path, kind)
    expected, plain = logits(workspace, loaded(base(workspace), folder)), logits(workspace, base(workspace))
    assert distance(expected, plain) > 0.1, "the adapter changes nothing"
    model = loaded(base(workspace, split), folder)
    for _ in range(2):
        model.merge_adapter()
        assert distance(expected, logits(workspace, model)) < ROUNDING
        model.unmerge_adapter()
        assert distance(expected, logits(workspace, model)) < ROUNDING
    model.merge_adapter()
    with model.disable_adapter():
        assert distance(plain, logits(workspace, model)) < ROUNDING
    for safe_merge in (False, True):
        merged = loaded(base(workspace, split), folder).merge_and_unload(safe_merge=safe_merge)
        assert distance(expected, logits(workspace, merged)) < ROUNDING
        assert merged.config.tie_word_embeddings == (kind == "tied")


@pytest.mark.parametrize("cls", ["", "text"])
@pytest.mark.parametrize("split", [None, "both, ram", "head, disk"])
@pytest.mark.parametrize("kind", ["head", "embedding", "tied"])
def test_the_checkpoint_of_a_merged_model(
    workspace: Any, tmp_path: Path, kind: str, split: str | None, cls: str
) -> None:
    if cls and split:
        pytest.skip("the maps are those of the multimodal class")
    import torch

    folder = adapter(workspace, tmp_path / "adapter", kind, cls)
    expected = logits(workspace, loaded(base(workspace, cls=cls), folder))
    merged = loaded(base(workspace, split, cls), folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    kind_of_merged = type(merged).__name__
    saved = tiny.load(tmp_path / "merged", device=workspace.main, cls=kind_of_merged, dtype=torch.float32)
    assert distance(expected, logits(workspace, saved)) < ROUNDING
    assert is_tied(saved) == (kind == "tied")


def test_a_mixed_model(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftMixedModel

    folder = adapter(workspace, tmp_path, "head")
    for split in (None, "both, disk"):
        model = PeftMixedModel.from_pretrained(base(workspace, split), folder).eval()
        expected = logits(workspace, model)
        assert distance(expected, logits(workspace, model.merge_and_unload())) < ROUNDING


def test_trained_tokens_stay_tied(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        base(workspace), LoraConfig(target_modules=["gate_proj"], trainable_token_indices={"embed_tokens": [5, 6]})
    )
    for name, value in model.named_parameters():
        if "trainable_tokens_delta" in name:
            value.data.add_(1.0)
    expected = logits(workspace, model)
    merged = model.merge_and_unload()
    assert distance(expected, logits(workspace, merged)) < ROUNDING
    assert is_tied(merged)
    assert merged.config.tie_word_embeddings


def test_a_lora_and_trained_tokens_are_refused_before_anything_is_changed(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        target_modules=["lm_head"], trainable_token_indices={"embed_tokens": [5, 6]}, init_lora_weights=False
    )
    model = get_peft_model(base(workspace), config)
    before = logits(workspace, model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(Gemma4CompatError, match=r"both a LoRA .* and trained tokens .* Nothing was changed"):
            merge()
        assert distance(before, logits(workspace, model)) == 0.0


def test_an_adapter_elsewhere_leaves_them_tied(workspace: Any) -> None:
    model = loaded(base(workspace), workspace.adapter("language"))
    model.merge_adapter()
    assert is_tied(model)
    merged = model.merge_and_unload()
    assert is_tied(merged)
    assert merged.config.tie_word_embeddings


def test_unloading_without_a_merge_leaves_them_tied(workspace: Any, tmp_path: Path) -> None:
    assert is_tied(loaded(base(workspace), adapter(workspace, tmp_path, "head")).unload())


def test_undone_it_is_upstream_s_again(workspace: Any, tmp_path: Path) -> None:
    folder = adapter(workspace, tmp_path, "head")
    expected = logits(workspace, loaded(base(workspace), folder))
    with without(PATCH.id):
        merged = loaded(base(workspace), folder).merge_and_unload()
        assert distance(expected, logits(workspace, merged)) > 0.1
        assert is_tied(merged)


def test_a_merge_that_fails_leaves_them_tied(workspace: Any, tmp_path: Path) -> None:
    import torch

    model = loaded(base(workspace), adapter(workspace, tmp_path, "head"))
    model.get_output_embeddings().lora_A["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    base_weights = (model.get_output_embeddings().base_layer.weight, model.get_input_embeddings().weight)
    assert base_weights[0] is base_weights[1]
