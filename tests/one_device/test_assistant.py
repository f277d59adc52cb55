"""Assistant models: whatever is quantized or offloaded, the tokens are those that the model generates alone (F30)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny_configs, tiny_models
from gemma4_compat._lab.scenarios import assisted
from gemma4_compat._lab.workspace import Workspace

pytestmark = pytest.mark.full

VARIANTS = ["E2B", "12B", "31B"]  # with and without layers that share, and of either module


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """``spaces(variant)``: its workspace; skips where this transformers has no assistant for it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    known: dict[str, Any] = {}

    def space(variant: str) -> Any:
        name = "Gemma4UnifiedAssistantForCausalLM" if variant == variants.UNIFIED else "Gemma4AssistantForCausalLM"
        if not hasattr(transformers, name):
            pytest.skip(f"this transformers has no {name}")
        if not versions.admits(">=5.15", transformers.__version__):
            pytest.skip("before 5.15 tokens cannot be taken back from a sliding cache that has seen its window")
        if variant not in known:
            known[variant] = Workspace.build(tmp_path_factory.mktemp(variant), variant)
        return known[variant]

    return space


@pytest.fixture(scope="module")
def alone(spaces: Callable[[str], Any]) -> Callable[[str, str | None], Any]:
    """``alone(variant, quantization)``: what the model generates on one device without an assistant."""
    known: dict[tuple[str, str | None], Any] = {}

    def tokens(variant: str, quantization: str | None) -> Any:
        key = (variant, quantization)
        if key not in known:
            known[key] = generate(spaces(variant), spaces(variant).load(quantization), None)
        return known[key]

    return tokens


def generate(space: Any, model: Any, assistant: Any) -> Any:
    return model.generate(**space.inputs(), max_new_tokens=12, do_sample=False, assistant_model=assistant).cpu()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("quantization", "offload"), [(None, "layers"), ("4bit", "none"), ("4bit", "layers"), ("8bit", "layers")]
)
def test_the_model_may_be_split_and_quantized(
    spaces: Callable[[str], Any], alone: Callable[..., Any], variant: str, quantization: str | None, offload: str
) -> None:
    import torch

    space = spaces(variant)
    assistant = space.load_assistant()
    expected = alone(variant, quantization)
    if quantization == "8bit":  # whose kernel rounds a token by those it is computed with
        expected = generate(space, space.load(quantization), assistant)
    model = space.split(quantization, offload)
    for _ in range(2):
        assert torch.equal(generate(space, model, assistant), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_the_assistant_may_be_quantized(
    spaces: Callable[[str], Any], alone: Callable[..., Any], variant: str, quantization: str
) -> None:
    import torch

    space = spaces(variant)
    assistant = space.load_assistant(quantization)
    assert type(assistant.model.layers[0].mlp.up_proj).__name__ != "Linear"
    assert torch.equal(generate(space, space.load(), assistant), alone(variant, None))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("part", ["model.layers", "post_projection"])
def test_parts_of_the_assistant_may_be_offloaded(
    spaces: Callable[[str], Any], alone: Callable[..., Any], tmp_path: Path, variant: str, part: str
) -> None:
    import torch
    from accelerate import dispatch_model

    space = spaces(variant)
    assistant = space.load_assistant()
    names = [name for name, _ in assistant.named_children() if name != "model"]
    names += [f"model.{name}" for name, _ in assistant.model.named_children()]
    placement = {name: space.offloaded if name == part else space.main for name in names}
    assistant = dispatch_model(assistant, placement, offload_dir=str(tmp_path))
    assert torch.equal(generate(space, space.load(), assistant), alone(variant, None))


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_guesses_are_used(spaces: Callable[[str], Any], variant: str) -> None:
    """Each guess is asked for with the keys and values of the model, of both kinds of layers."""
    space = spaces(variant)
    assistant = space.load_assistant()
    seen: list[set[str]] = []
    assistant.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(set(kwargs["shared_kv_states"])), with_kwargs=True
    )
    generate(space, space.load(), assistant)
    assert len(seen) > 3
    assert all(kinds == {"sliding_attention", "full_attention"} for kinds in seen)


def test_modes_of_models_that_share_among_their_layers_are_upstreams(workspace: Any) -> None:
    config = tiny_configs.config().text_config
    if not hasattr(type(config), "kv_sharing_modes"):
        pytest.skip("this transformers does not write down what layers share")
    assert config.kv_sharing_modes == [None, None, "store", "store", "reuse", "reuse"]
    shared = tiny_configs.config(variant="31B").text_config
    assert shared.kv_sharing_modes == [None, None, None, None, "store", "store"]


def test_a_release_without_assistants_says_so(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> str:
        raise ImportError("transformers 5.6.2 has no Gemma4AssistantForCausalLM")

    monkeypatch.setattr(tiny_models, "assistant_class", missing)
    outcome = assisted(workspace)
    assert (outcome.defect, outcome.applicable) == (False, False)
    assert "has no Gemma4AssistantForCausalLM" in outcome.detail
