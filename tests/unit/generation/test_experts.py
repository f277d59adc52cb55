"""A step that looks its experts up in host memory is replayed: their numbers stay on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import unsupported
from gemma4_compat._lab import tiny_models
from gemma4_compat._offload.transfer import streaming
from tests.unit.generation.calls import ask, assert_equal, compared, generate, steps, text
from tests.unit.offload.test_expert_lookup import loaded, placed

pytestmark = pytest.mark.usefixtures("tapes")


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


@pytest.mark.parametrize(
    ("quantization", "where"),
    [("4bit-double", "nested"), ("4bit-double", "layers"), ("4bit", "layers"), (None, "experts")],
)
def test_the_same_answers(workspace: Any, checkpoint: Path, quantization: str | None, where: str) -> None:
    options = {"experts_implementation": "grouped_mm"}
    model = placed(workspace, loaded(workspace, checkpoint, quantization, **options), where, "memory")
    plain = loaded(workspace, checkpoint, quantization, **options)
    (found,) = compared(model, ask(model, new=12))
    assert steps(model).reasons == ()
    assert_equal(found, generate(plain, text(plain), {"disable_compile": True}, new=12))
    (three,) = compared(model, lambda way: [generate(model, text(model, batch=3), way, new=6)])
    assert_equal(three, generate(plain, text(plain, batch=3), {"disable_compile": True}, new=6))
    assert steps(model).reasons == ()
    (other,) = compared(model, lambda way: [generate(model, text(model, 9, seed=3), way, new=6)])
    assert_equal(other, generate(plain, text(plain, 9, seed=3), {"disable_compile": True}, new=6))


@pytest.mark.parametrize("where", ["card", pytest.param("nested", marks=pytest.mark.full)])
@pytest.mark.parametrize(("batch", "length"), [(6, 4), (12, 4), (1, 12)], ids=["6 rows", "12 rows", "a short prompt"])
def test_several_tokens_that_hit_some_of_the_experts(
    workspace: Any, checkpoint: Path, where: str, batch: int, length: int
) -> None:
    """Which experts are hit is not read by the host, though it would save reading one twice."""
    model = loaded(workspace, checkpoint, "4bit", experts_implementation="grouped_mm")
    if where != "card":
        placed(workspace, model, where, "memory")
    gemma4_compat.decode_fast(model, exact=True)
    for _ in range(3):
        found = generate(model, text(model, length, batch=batch), {}, new=6)
    expected = generate(model, text(model, length, batch=batch), {"disable_compile": True}, new=6)
    assert_equal(found, expected)
    assert steps(model).reasons == ()
    assert steps(model).replayed
    assert steps(model).prompts_replayed


def test_experts_on_disk_are_not_supported(workspace: Any, checkpoint: Path) -> None:
    model = placed(workspace, loaded(workspace, checkpoint, "4bit"), "nested", "disk")
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert reason.endswith("is on disk, and the host reads it for every token")
    assert unsupported.lasting_reason(model) == reason


@pytest.mark.parametrize("where", ["nested", "layers"])
def test_with_an_adapter_on_the_experts(workspace: Any, checkpoint: Path, where: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    def adapted(model: Any) -> Any:
        torch.manual_seed(0)
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=targets)
        return get_peft_model(model, config).eval()

    options = {"experts_implementation": "grouped_mm"}
    plain = adapted(loaded(workspace, checkpoint, "4bit-double", **options))
    model = adapted(placed(workspace, loaded(workspace, checkpoint, "4bit-double", **options), where, "memory"))
    # Adapter weights are drawn where the experts are: a GPU draws others than the host.
    set_peft_model_state_dict(model, get_peft_model_state_dict(plain))
    found = generate(model, text(model), new=6)
    assert (steps(model).captured, steps(model).reasons) == (1, ())
    assert_equal(found, generate(plain, text(plain), {"disable_compile": True}, new=6))


@pytest.mark.parametrize("tokens", [3, 64])
def test_graphs_of_prompts_leave_room_for_the_experts(workspace: Any, checkpoint: Path, tokens: int) -> None:
    """As many of a layer's as tokens choose are dequantized at once, and two layers are brought."""
    model = placed(workspace, loaded(workspace, checkpoint, "4bit"), "nested", "memory")
    plain = loaded(workspace, checkpoint, None)
    generate(model, text(model), new=2)  # now layers are streamed
    sizes = (
        streaming.slots(model),
        [prompts.activations(one, 1, tokens, None, masks=False, copies=True) for one in (model, plain)],
    )
    slots, (brought, resident) = sizes
    config = model.config.get_text_config()
    chosen = min(tokens * config.top_k_experts, config.num_experts)
    layer = next(layer for layer in plain.get_decoder().layers)
    one = sum(weight.nbytes for weight in layer.experts.parameters()) // config.num_experts
    assert slots > 0
    assert brought - resident == slots + chosen * one
