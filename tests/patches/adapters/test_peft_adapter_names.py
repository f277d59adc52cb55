"""Calls with ``adapter_names``, that fail and that do not (F119, F120)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gemma4_compat._gemma4.adapters import rows
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models
from gemma4_compat.patches.adapters.peft_adapter_names import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"after a call for the base model that failed: logits differ"


NAMES = ["one", "__base__", "other"]
IDS = [list(range(5, 16)), list(range(30, 41)), list(range(50, 61))]


def adapted(model: Any, *configs: Any) -> Any:
    """The model in float32 with the adapters "one" and "other", whose weights are random."""
    import peft
    import torch

    found = peft.get_peft_model(model.float(), configs[0], adapter_name="one")
    found.add_adapter("other", configs[-1])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if ".one" in name or ".other" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return found.eval()


def lora(targets: Any = tiny_adapters.SOME_LINEARS, **options: Any) -> Any:
    import peft

    return peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, **options)


def each(model: Any, call: Callable[..., Any]) -> list[Any]:
    """What ``call(index)`` returns for each row with its adapter alone."""
    found = []
    for index, name in enumerate(NAMES):
        model.set_adapter("other" if name == rows.BASE else name)
        if name == rows.BASE:
            with model.disable_adapter():
                found.append(call(index))
        else:
            found.append(call(index))
    return found


def assert_rows(model: Any) -> None:
    """Each row of a batch has the logits of the row with its adapter alone, whichever adapter is active."""
    import torch

    ids = torch.tensor(IDS)
    with torch.no_grad():
        expected = each(model, lambda index: model(input_ids=ids[index : index + 1]).logits[0])
        for active in ("one", "other"):
            model.set_adapter(active)
            found = model(input_ids=ids, adapter_names=NAMES).logits
            for row, own in zip(found, expected):
                assert (row - own).abs().max() < 1e-4 * own.abs().max()


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture
def experts(workspace: Any) -> Any:
    return tiny.load(workspace.cached(tiny_models.build_moe_checkpoint))


def test_experts_and_router(experts: Any) -> None:
    """Only newer releases of PEFT take a second adapter with ``target_parameters``."""
    adapted_experts = lora(r".*router\.proj", target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    try:
        model = adapted(experts, adapted_experts)
    except ValueError as error:
        if "only one LoRA adapter per model" not in str(error):
            raise
        pytest.skip(str(error))
    assert_rows(model)


def test_experts_of_one_adapter(experts: Any) -> None:
    targets = r".*(router\.proj|self_attn\.q_proj)"
    assert_rows(adapted(experts, lora(targets, target_parameters=["experts.down_proj"]), lora(targets)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"modules_to_save": ["lm_head"]}, {}),
        pytest.param({}, {"modules_to_save": ["embed_tokens"]}, marks=pytest.mark.full),
        ({"trainable_token_indices": {"embed_tokens": [5, 6]}}, {}),
        pytest.param({}, {"trainable_token_indices": {"embed_tokens": [5, 31]}}, marks=pytest.mark.full),
    ],
)
def test_a_row_whose_adapter_saves_no_module_has_the_bases(workspace: Any, first: Any, second: Any) -> None:
    assert_rows(adapted(workspace.load(), lora(**first), lora(**second)))


def generate(model: Any, ids: Any, options: dict[str, Any], index: int) -> Any:
    return model.generate(ids[index : index + 1], **options)


@pytest.mark.parametrize("where", ["options", "config", "model"])
def test_repeated_rows(workspace: Any, where: str) -> None:
    import torch
    from transformers import GenerationConfig

    model, ids = adapted(workspace.load(), lora(r".*\.(q_proj|up_proj)(\.linear)?")), torch.tensor(IDS)
    for asked in (
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    ):
        options = {"max_new_tokens": 4, "eos_token_id": None, **asked}
        inner = model.get_base_model()
        if where == "config":
            options = {"generation_config": GenerationConfig(**options)}
        elif where == "model":
            inner.generation_config = model.generation_config = GenerationConfig(**options)
            options = {}
        expected = each(model, partial(generate, model, ids, options))
        model.set_adapter("one")
        assert torch.equal(model.generate(input_ids=ids, adapter_names=NAMES, **options), torch.cat(expected))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("how", ["forward", "generate"])
def test_a_call_that_fails_leaves_no_hooks(workspace: Any, error: type[BaseException], how: str) -> None:
    import torch

    model, ids = adapted(workspace.load(), lora()), torch.tensor(IDS)
    layers = model.get_base_model().model.language_model.layers
    model.set_adapter("other")
    with torch.no_grad():
        before, expected = hooks(model), model(input_ids=ids).logits

        def fail(*_: Any) -> None:
            raise error

        handle = layers[1].register_forward_pre_hook(fail)
        with pytest.raises(error):
            getattr(model, how)(input_ids=ids, adapter_names=NAMES)
        handle.remove()
        assert hooks(model) == before
        assert rows.current() is None
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert model(input_ids=ids[:1]).logits.shape[0] == 1


@pytest.mark.parametrize(
    ("names", "said"),
    [(["one", "one", "none"], "non-existing adapter"), (["one"], "got 1 and 3 respectively"), ("one", "non-existing")],
)
def test_wrong_names_are_upstreams_errors(workspace: Any, names: Any, said: str) -> None:
    import torch

    model = adapted(workspace.load(), lora())
    before = hooks(model)
    with pytest.raises(ValueError, match=said):
        model(input_ids=torch.tensor(IDS), adapter_names=names)
    assert hooks(model) == before


def test_a_call_inside_a_call(workspace: Any) -> None:
    import torch

    model, ids = adapted(workspace.load(), lora()), torch.tensor(IDS)
    found = []
    with torch.no_grad():
        model.set_adapter("other")
        expected = model(input_ids=ids[:1]).logits, model(input_ids=ids, adapter_names=NAMES).logits

        def inside(*_: Any) -> None:
            if not found:
                found.append(None)
                found.append(model(input_ids=ids[:1]).logits)

        layer = model.get_base_model().model.language_model.layers[1]
        handle = layer.register_forward_pre_hook(inside)
        outer = model(input_ids=ids, adapter_names=NAMES).logits
        handle.remove()
    assert torch.equal(found[1], expected[0])
    assert torch.equal(outer, expected[1])


def test_threads_have_their_own_names(workspace: Any) -> None:
    import torch

    model, ids = adapted(workspace.load(), lora()), torch.tensor(IDS)
    calls: list[dict[str, Any]] = [{"adapter_names": NAMES}, {"adapter_names": NAMES[::-1]}, {}]
    wrong: list[Any] = []
    with torch.no_grad():
        expected = [model(input_ids=ids, **call).logits for call in calls]

    def run(index: int) -> None:
        try:
            for _ in range(4):
                with torch.no_grad():
                    found = model(input_ids=ids, **calls[index]).logits
                if not torch.equal(found, expected[index]):
                    wrong.append(index)
        except (RuntimeError, TypeError, ValueError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_a_tuner_without_names_says_so(workspace: Any) -> None:
    import peft
    import torch

    config = peft.IA3Config(target_modules=tiny_adapters.SOME_LINEARS, feedforward_modules=[])
    model, ids = adapted(workspace.load(), config), torch.tensor(IDS)
    if not is_affected(PATCH):
        pytest.skip("the patch is not for this release")
    with torch.no_grad():
        with pytest.raises(ValueError, match="IA3Model takes no `adapter_names`"):
            model(input_ids=ids, adapter_names=NAMES)
        assert torch.equal(model(input_ids=ids, adapter_names=["one"] * 3).logits, model(input_ids=ids).logits)


def test_a_mixed_model_says_so(workspace: Any) -> None:
    import peft
    import torch

    model = peft.PeftMixedModel.from_pretrained(workspace.load(), workspace.adapter("language"), adapter_name="one")
    with pytest.raises(ValueError, match="takes no `adapter_names`"), torch.no_grad():
        model(input_ids=torch.tensor(IDS), adapter_names=NAMES)


@pytest.mark.parametrize("kind", ["RoadConfig", "GloraConfig"])
def test_other_tuners_with_names(workspace: Any, kind: str) -> None:
    import peft

    if not hasattr(peft, kind):
        pytest.skip(f"this release of PEFT has no {kind}")
    import torch

    model = adapted(workspace.load(), getattr(peft, kind)(target_modules=tiny_adapters.SOME_LINEARS))
    assert_rows(model)
    before = hooks(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.full((3, 2), 10**6), adapter_names=NAMES)
    assert hooks(model) == before
