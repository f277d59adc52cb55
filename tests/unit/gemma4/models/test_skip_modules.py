"""The modules worth keeping in high precision: names that upstream's own matching understands, and true costs."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._gemma4.quantization.bytes import linear_tensors, stored_bytes_of
from gemma4_compat._gemma4.quantization.config import linear_names
from gemma4_compat._lab import tiny, tiny_configs

E = {
    "lm_head",
    "embed_vision.embedding_projection",
    "embed_audio.embedding_projection",
    "per_layer_model_projection",
    "per_layer_input_gate",
    "per_layer_projection",
}
EXPECTED = {
    "E2B": E,
    "E4B": E,
    "12B": {
        "lm_head",
        "embed_vision.multimodal_embedder.embedding_projection",
        "embed_vision.patch_dense",
        "embed_audio.embedding_projection",
    },
    "26B-A4B": {"lm_head", "router.proj", "embed_vision.embedding_projection"},
    "31B": {"lm_head", "embed_vision.embedding_projection"},
}


@pytest.fixture(params=variants.NAMES)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "12B":
        pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
    return name


def test_names_are_those_of_the_variant(variant: str) -> None:
    keep = gemma4_compat.quantization_skip_modules(variant)
    assert set(keep) == EXPECTED[variant]
    assert all(module.reason and module.modules > 0 and module.parameters > 0 for module in keep.values())


def test_upstream_keeps_these_and_no_other(variant: str) -> None:
    keep = gemma4_compat.quantization_skip_modules(variant)
    model, _, _ = build.on_meta(variant)
    kept = linear_names(model, ()) - linear_names(model, list(keep))
    assert all(any(path.endswith(name) for name in keep) for path in kept)
    assert len(kept) == sum(module.modules for module in keep.values())


def test_a_tied_head_costs_nothing(variant: str) -> None:
    keep = gemma4_compat.quantization_skip_modules(variant)
    assert [name for name, module in keep.items() if module.cost == 0] == ["lm_head"]


def test_a_head_of_its_own_costs_what_it_takes() -> None:
    config = tiny_configs.config()
    tied = gemma4_compat.quantization_skip_modules(config)["lm_head"]
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    head = gemma4_compat.quantization_skip_modules(config)["lm_head"]
    assert (tied.cost, tied.parameters) == (0, head.parameters)
    assert head.cost == 2 * head.parameters - sum(linear_tensors(tiny_configs.VOCABULARY, 64, "4bit"))


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_the_cost_is_what_a_load_shows(workspace: Any, quantization: str) -> None:
    keep = gemma4_compat.quantization_skip_modules(str(workspace.checkpoint), quantize=quantization)
    assert set(keep) == E
    recommended = tiny.load(workspace.checkpoint, quantization, towers=True, skip_modules=list(keep))
    everything = tiny.load(workspace.checkpoint, quantization, towers=True)
    for path, module in recommended.named_modules():
        if any(path.endswith(name) for name in keep):
            assert module.weight.dtype.is_floating_point, path
    costs = stored_bytes_of(recommended) - stored_bytes_of(everything)
    assert costs == sum(module.cost for module in keep.values())


def test_a_configuration_and_a_loaded_model_will_do(workspace: Any) -> None:
    model = tiny.load(workspace.checkpoint, "4bit")
    expected = gemma4_compat.quantization_skip_modules(str(workspace.checkpoint))
    assert gemma4_compat.quantization_skip_modules(model) == expected
    assert gemma4_compat.quantization_skip_modules(model.config) == expected
    text = gemma4_compat.quantization_skip_modules(workspace.load_text())
    assert set(text) == {name for name in E if not name.startswith("embed_")}


def test_bad_input_is_one_error() -> None:
    with pytest.raises(Gemma4CompatError, match="'5bit' is unknown; use one of 4bit, 4bit-double, 8bit"):
        gemma4_compat.quantization_skip_modules("E2B", quantize="5bit")
    with pytest.raises(Gemma4CompatError, match="'E9B' is not a folder, not a variant"):
        gemma4_compat.quantization_skip_modules("E9B")
