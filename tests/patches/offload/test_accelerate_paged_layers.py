"""F31: offloaded layers are paged, and nothing of what a user does with a dispatched model tells."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._models import placement as _placement
from gemma4_compat._offload import idle_hooks, streaming
from gemma4_compat._reproduction import tiny, tiny_adapters
from gemma4_compat._reproduction.workspace import difference
from gemma4_compat.patches.offload.accelerate_paged_layers import PATCH
from tests.conftest import census
from tests.patches.promise import Promise

QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]
#: Of the eight combinations with where the weights are kept, what the slower tests take: each of both, and trainings
#: those that the others leave out.
ANSWERING = pytest.mark.parametrize(
    ("quantization", "store"), [(None, "memory"), ("4bit", "disk"), ("4bit-double", "memory"), ("8bit", "disk")]
)
TRAINING = pytest.mark.parametrize(
    ("quantization", "store"), [(None, "disk"), ("4bit", "memory"), ("4bit-double", "disk"), ("8bit", "memory")]
)
LAYER = "model.language_model.layers.0"  # offloaded by every split of layers
LAST = "model.language_model.layers.5"  # so is this one, which shares its keys and values


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "each travels by itself"


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pagers(monkeypatch: pytest.MonkeyPatch) -> list[streaming.Pager]:
    """Every pager that is made while the test runs."""
    made: list[streaming.Pager] = []
    original = streaming.Pager.__init__

    def noted(self: streaming.Pager, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(streaming.Pager, "__init__", noted)
    return made


def split(workspace: Any, quantization: str | None = None, offload: str = "both", store: str = "disk") -> Any:
    """Like ``workspace.split``; ``offload`` may be ``"all layers"``, and ``store`` says where the weights are kept.

    In host memory they are on a GPU host anyway; elsewhere accelerate keeps there what it is given beside the disk.
    """
    from accelerate import dispatch_model

    model = workspace.load(quantization)
    chosen = "both" if offload == "all layers" else offload
    placement = tiny.device_map(model, chosen, main=workspace.main, offloaded=workspace.offloaded)
    if offload == "all layers":
        placement |= {name: workspace.offloaded for name in placement if ".layers." in name}
    if store == "disk" or workspace.offloaded == "cpu":
        return workspace.dispatch_map(model, placement)
    offloaded = tuple(f"{name}." for name, device in placement.items() if device == workspace.offloaded)
    state = {name: value.clone() for name, value in model.state_dict().items() if name.startswith(offloaded)}
    skip = [*model._skip_keys_device_placement, "shared_kv_states"]
    folder = tempfile.mkdtemp(prefix="offload-", dir=workspace.folder)
    model = dispatch_model(model, placement, state_dict=state, offload_dir=folder, skip_keys=skip)
    weight = next(name for name, parameter in model.named_parameters() if parameter.device.type == "meta")
    module, _, key = weight.rpartition(".")
    assert _placement.offload_hook(model.get_submodule(module)).weights_map[key].data_ptr()
    return model


def pages(pager: streaming.Pager) -> list[streaming.Page]:
    return [page for page in pager._pages if page is not None]


def weights(pagers: list[streaming.Pager]) -> list[streaming._Weight]:
    return [weight for pager in pagers for page in pages(pager) for weight in page._weights]


def bytes_on_device(pager: streaming.Pager) -> int:
    """What the pages of a list take there now."""
    return sum(page._buffer.untyped_storage().nbytes() for page in pages(pager) if page._buffer is not None)


def adapted(workspace: Any, base: Any, adapter: str = "all") -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base, workspace.adapter(adapter), is_trainable=True).train()


def trained(
    workspace: Any, model: Any, *, steps: int = 1, accumulate: int = 1, backwards: int = 1, **batch: Any
) -> tuple[list[float], dict[str, Any]]:
    """The losses of some steps with AdamW, and the gradients of the last one."""
    import torch

    batch = batch or tiny.inputs(workspace.main)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    weights = {name: weight for name, weight in weights.items() if weight.device.type != "meta"}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = model(**batch, labels=batch["input_ids"]).loss
            for left in range(backwards - 1, -1, -1):
                loss.backward(retain_graph=left > 0)
            losses.append(loss.item())
        optimizer.step()
    return losses, {name: weight.grad.cpu() for name, weight in weights.items() if weight.grad is not None}


def assert_equal(found: tuple[list[float], dict[str, Any]], expected: tuple[list[float], dict[str, Any]]) -> None:
    import torch

    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert [name for name, value in expected[1].items() if not torch.equal(value, found[1][name])] == []
    assert any(gradient.any() for gradient in expected[1].values()), "nothing is learnt: the test shows nothing"


def assert_as_accelerate_left_it(model: Any) -> None:
    """Between forwards: weights of offloaded modules on meta, each hook's forward in its place."""
    for name, module in model.named_modules():
        if "_hf_hook" in vars(module):
            assert vars(module)["forward"] is not vars(module)["_old_forward"], name
        if _placement.offload_hook(module) is not None:
            assert {weight.device.type for weight in module.parameters(recurse=False)} <= {"meta"}, name


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("offload", ["layers", "towers", "both", "all layers"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_answers_are_those_of_one_device(
    workspace: Any,
    one_device: Callable[..., Any],
    pagers: list[streaming.Pager],
    quantization: str | None,
    offload: str,
    store: str,
) -> None:
    model = split(workspace, quantization, offload, store)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    expected = {"layers": [3], "towers": [2, 2], "both": [2, 2, 3], "all layers": [2, 2, 6]}[offload]
    assert sorted(len(pages(pager)) for pager in pagers) == expected, "each offloaded layer is a page"
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("when", ["before the dispatch", "after it", "after forwards"])
@ANSWERING
def test_an_adapter(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, when: str, store: str
) -> None:
    from peft import PeftModel

    if when == "before the dispatch":
        base = workspace.load(quantization)
        model = PeftModel.from_pretrained(base, workspace.adapter("all"))
        placement = tiny.device_map(base, "layers", main=workspace.main, offloaded=workspace.offloaded)
        workspace.dispatch_map(base, placement)
    else:
        base = split(workspace, quantization, store=store)
        if when == "after forwards":
            assert difference(one_device(quantization, None), workspace.outputs(base)) == 0.0
        model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    assert difference(one_device(quantization, "all"), workspace.outputs(model)) == 0.0
    with model.disable_adapter():
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    model.load_adapter(str(workspace.adapter("language")), "second")
    for name, adapter in (("second", "language"), ("default", "all")):
        model.set_adapter(name)
        assert difference(one_device(quantization, adapter), workspace.outputs(model)) == 0.0
    model.delete_adapter("second")
    assert difference(one_device(quantization, "all"), workspace.outputs(model)) == 0.0
    assert difference(one_device(quantization, None), workspace.outputs(model.unload())) == 0.0


def test_a_batch_with_padding(workspace: Any, store: str) -> None:
    import torch

    ids = torch.randint(3, 240, (3, 20), generator=torch.Generator().manual_seed(1)).to(workspace.main)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 13)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    found = []
    for model in (workspace.load("4bit"), split(workspace, "4bit", "all layers", store)):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits.cpu()
            tokens = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False).cpu()
        found.append((logits, tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "offloaded_static", "no"])
def test_generate_with_a_cache(workspace: Any, cache: str) -> None:
    import torch

    if "offloaded" in cache and workspace.main == "cpu":
        pytest.skip("transformers' offloaded caches need an accelerator")
    options = {"use_cache": False} if cache == "no" else {"cache_implementation": cache}
    options |= {"max_new_tokens": 12, "do_sample": False}
    batch = tiny.inputs(workspace.main)
    models = workspace.load("4bit-double"), split(workspace, "4bit-double")
    whole, paged = (model.generate(**batch, **options).cpu() for model in models)
    assert torch.equal(whole, paged)


def test_beams_and_sampling(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        tokens = []
        for model in (workspace.load(), split(workspace)):
            torch.manual_seed(5)
            tokens.append(model.generate(**batch, max_new_tokens=8, **options).cpu())
        assert torch.equal(*tokens)


# ------------------------------------------------------------------------------------------------------------ memory


def test_at_most_two_pages_are_on_the_device_and_one_waits_for_the_next_token(
    workspace: Any, pagers: list[streaming.Pager]
) -> None:
    import torch

    model = split(workspace, offload="all layers")
    seen: dict[int, int] = {}

    def look(*_: Any) -> None:
        for index, pager in enumerate(pagers):
            loaded = [page for page in pages(pager) if page.loaded]
            assert bytes_on_device(pager) == pager._size * len(loaded)
            seen[index] = max(seen.get(index, 0), len(loaded))

    for module in model.modules():
        module.register_forward_hook(look)
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(3):
            model(**batch)
            left = {len(pages(pager)): [page.loaded for page in pages(pager)] for pager in pagers}
            assert left == {2: [False, False], 6: [True, False, False, False, False, False]}
        model.generate(**batch, max_new_tokens=4, do_sample=False)
    assert set(seen.values()) == {2}


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_at_most_three_pages_are_on_the_device_in_a_backward_pass(
    workspace: Any, pagers: list[streaming.Pager], monkeypatch: pytest.MonkeyPatch, checkpointing: bool | None
) -> None:
    from accelerate.hooks import AlignDevicesHook

    model = adapted(workspace, split(workspace, offload="all layers"))
    checkpoint(model, checkpointing)
    most = 0
    load = streaming._Device.load

    def counted(self: Any, page: Any, size: int) -> None:
        nonlocal most
        load(self, page, size)
        most = max(most, *(sum(page.loaded for page in pages(pager)) for pager in pagers))

    brought_in: list[Any] = []
    pre_forward = AlignDevicesHook.pre_forward

    def noted(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.offload:
            brought_in.extend(module.parameters(recurse=False))
        return pre_forward(self, module, *args, **kwargs)

    monkeypatch.setattr(streaming._Device, "load", counted)
    monkeypatch.setattr(AlignDevicesHook, "pre_forward", noted)
    trained(workspace, model, steps=2)
    assert most == 3
    outside = [weight for name, weight in model.named_parameters() if weight.device.type == "meta"]
    outside = [weight for weight in outside if not any(weight is own._meta for own in weights(pagers))]
    assert len(brought_in) <= 4 * len(outside), "a weight of a paged layer went its own way, in a recomputation"
    assert sorted(len(pages(pager)) for pager in pagers) == [2, 2, 6]
    assert [bytes_on_device(pager) for pager in pagers] == [0, 0, 0], "after a backward pass"


@ANSWERING
def test_twenty_forwards_leave_nothing_behind(workspace: Any, quantization: str | None, store: str) -> None:
    import torch

    model = split(workspace, quantization, "all layers", store)
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
        before = census()
        for _ in range(20):
            model(**batch)
    assert census() == before


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_forwards_leave_no_weights_of_the_disk_in_memory(
    workspace: Any, pagers: list[streaming.Pager], quantization: str | None
) -> None:
    """Not even those that bitsandbytes repacked for the CPU."""
    import torch

    model = split(workspace, quantization, "all layers", "disk")
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        model(**batch)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for weight in weights(pagers)
        if weight._shown is not None
        for tensor in (weight._shown.data, *vars(weight._shown).values())
        if isinstance(tensor, torch.Tensor)
    }
    assert sum(held.values()) <= max(pager._size for pager in pagers)


@TRAINING
def test_training_steps_leave_nothing_behind(workspace: Any, quantization: str | None, store: str) -> None:
    model = adapted(workspace, split(workspace, quantization, "all layers", store))
    batch = tiny.inputs(workspace.main)

    def step(*, backward: bool = True) -> None:
        loss = model(**batch, labels=batch["input_ids"]).loss
        if backward:
            loss.backward()

    for _ in range(2):
        step()
    before = census()
    for _ in range(5):
        step()
    assert census() == before
    for _ in range(3):
        step(backward=False)
    step()
    assert census() == before


# ------------------------------------------------------------------------------------------------------------ training


def checkpoint(model: Any, reentrant: bool | None) -> None:
    import torch

    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():  # the other kind past transformers-reentrant-checkpointing
            if reentrant and getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = functools.partial(
                    torch.utils.checkpoint.checkpoint, use_reentrant=True
                )


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("offload", ["both", "all layers"])
@TRAINING
def test_training_gives_the_gradients_of_one_device(
    workspace: Any, quantization: str | None, offload: str, checkpointing: bool | None, store: str
) -> None:
    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, offload, store)):
        model = adapted(workspace, base)
        checkpoint(model, checkpointing)
        results.append(trained(workspace, model, steps=3))
    assert_equal(*results)
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_accumulated_gradients_and_a_graph_used_twice(workspace: Any, quantization: str | None) -> None:
    models = [adapted(workspace, base) for base in (workspace.load(quantization), split(workspace, quantization))]
    assert_equal(*(trained(workspace, model, steps=2, accumulate=3) for model in models))
    assert_equal(*(trained(workspace, model, steps=2, backwards=2) for model in models))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_two_graphs_alive_and_their_backward_passes_in_either_order(workspace: Any, quantization: str | None) -> None:
    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, "all layers")):
        model = adapted(workspace, base)
        batch = tiny.inputs(workspace.main)
        for order in ((0, 1), (1, 0)):
            losses = [model(**batch, labels=batch["input_ids"]).loss for _ in order]
            model.eval()(**batch)
            model.train()
            for index in order:
                losses[index].backward()
        results.append(([], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert_equal(*results)


def inner_outputs(model: Any, name: str) -> list[Any]:
    """What the module ``name`` of the base model answers in forwards from now on."""
    found: list[Any] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.get_submodule(name).register_forward_hook(
        lambda _module, _inputs, output: found.append(output[0] if isinstance(output, tuple) else output)
    )
    return found


@pytest.mark.parametrize(
    "name", [LAYER, f"{LAST}.mlp", f"{LAST}.self_attn", f"{LAYER}.mlp", f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn"]
)
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_a_loss_from_the_middle_of_the_model(workspace: Any, quantization: str | None, name: str) -> None:
    """Also of the middle of a layer: the gradient of that layer's output never comes."""
    import torch

    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, "all layers")):
        model = adapted(workspace, base)
        found = inner_outputs(model, name)
        batch = tiny.inputs(workspace.main)
        for _ in range(2):
            model(**batch)
            found.pop().float().square().mean().backward()
        results.append(([], {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    assert torch.is_grad_enabled()
    assert_equal(*results)


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_dora(workspace: Any, quantization: str | None, store: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, "all layers", store)):
        torch.manual_seed(3)
        config = LoraConfig(
            r=2, target_modules=tiny_adapters.TARGETS["language"], use_dora=True, init_lora_weights=False
        )
        model = get_peft_model(base, config).train()
        results.append(trained(workspace, model, steps=2))
    assert_equal(*results)


@TRAINING
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_training_after_forwards_without_gradients(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, mode: str, store: str
) -> None:
    import torch

    base = split(workspace, quantization, store=store)
    with getattr(torch, mode)():
        base(**tiny.inputs(workspace.main))
        base.generate(**tiny.inputs(workspace.main), max_new_tokens=2)
    results = [
        trained(workspace, adapted(workspace, model), steps=2) for model in (workspace.load(quantization), base)
    ]
    assert_equal(*results)
    # And the other way round: pages that a training made serve inference mode.
    model = adapted(workspace, split(workspace, quantization, store=store))
    trained(workspace, model)
    model.load_adapter(str(workspace.adapter("all")), "fresh")
    model.set_adapter("fresh")
    with torch.inference_mode():
        assert difference(one_device(quantization, "all"), workspace.outputs(model.eval())) == 0.0


@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "non-reentrant"])
def test_a_backward_pass_that_fails(workspace: Any, pagers: list[streaming.Pager], checkpointing: bool | None) -> None:
    model = adapted(workspace, split(workspace, "4bit", "all layers"))
    checkpoint(model, checkpointing)
    batch = tiny.inputs(workspace.main)
    middle = model.get_base_model().get_submodule("model.language_model.layers.2")

    def fail(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: 1 / 0)

    handle = middle.register_forward_hook(fail)
    loss = model(**batch, labels=batch["input_ids"]).loss
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    whole = adapted(workspace, workspace.load("4bit"))
    checkpoint(whole, checkpointing)
    assert_equal(trained(workspace, model, steps=2), trained(workspace, whole, steps=2))
    assert [bytes_on_device(pager) for pager in pagers] == [0, 0, 0]


def test_gradients_of_inputs(workspace: Any) -> None:
    import torch

    gradients = []
    for model in (workspace.load(), split(workspace, offload="all layers")):
        embedded = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2)).to(workspace.main, torch.bfloat16)
        embedded.requires_grad_()
        ids = torch.arange(3, 12, device=workspace.main)[None]
        per_layer = model.model.language_model.get_per_layer_inputs
        with contextlib.suppress(TypeError):
            per_layer = per_layer(ids, None)
        if callable(per_layer):
            per_layer = model.model.language_model.get_per_layer_inputs(ids)
        out = model.model.language_model(inputs_embeds=embedded, per_layer_inputs=per_layer).last_hidden_state
        out.float().square().mean().backward()
        gradients.append(embedded.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


# --------------------------------------------------------------------------------------------- what users do otherwise


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [LAYER, f"{LAYER}.mlp", f"{LAST}.self_attn.o_proj"])
def test_an_exception_in_the_middle_of_a_layer(
    workspace: Any, one_device: Callable[..., Any], name: str, kind: type[BaseException]
) -> None:
    import torch

    model = split(workspace, "4bit-double")
    batch = tiny.inputs(workspace.main)

    def fail(*_: Any) -> None:
        raise kind("stop")

    for _ in range(2):
        handle = model.get_submodule(name).register_forward_hook(fail)
        with torch.no_grad(), pytest.raises(kind, match="stop"):
            model(**batch)
        handle.remove()
        if kind is ValueError:
            assert_as_accelerate_left_it(model)
        assert difference(one_device("4bit-double", None), workspace.outputs(model)) == 0.0
        assert_as_accelerate_left_it(model)


@ANSWERING
@pytest.mark.parametrize("first", ["alone", "model"])
def test_a_module_of_a_paged_layer_used_by_itself(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, first: str, store: str
) -> None:
    import torch

    name = f"{LAYER}.mlp.up_proj"
    whole, model = workspace.load(quantization), split(workspace, quantization, store=store)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)).to(workspace.main, torch.bfloat16)
    expected = [whole.get_submodule(part)(x) for part in (name, f"{LAYER}.mlp")]
    for _ in range(3):
        if first == "model":
            assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
        for part, value in zip((name, f"{LAYER}.mlp"), expected):
            assert torch.equal(model.get_submodule(part)(x), value)
        first = "model"
    assert_as_accelerate_left_it(model)


def test_layers_called_by_hand_in_any_order(workspace: Any, one_device: Callable[..., Any]) -> None:
    import torch

    models = workspace.load("4bit"), split(workspace, "4bit", "all layers")
    batch = tiny.inputs(workspace.main)
    calls: dict[int, tuple[Any, Any]] = {}
    for index, layer in enumerate(models[0].model.language_model.layers):
        layer.register_forward_pre_hook(
            lambda _layer, args, kwargs, index=index: calls.update({index: (args, dict(kwargs))}), with_kwargs=True
        )
    with torch.no_grad():
        models[0](**batch, use_cache=False)
        for order in ((0, 3, 1, 1, 2, 3), (3, 2, 1, 0), (2, 0, 2, 0)):
            for index in order:
                args, kwargs = calls[index]
                outputs = [model.model.language_model.layers[index](*args, **kwargs) for model in models]
                outputs = [answer[0] if isinstance(answer, tuple) else answer for answer in outputs]
                assert torch.equal(*outputs)
    assert difference(one_device("4bit", None), workspace.outputs(models[1])) == 0.0


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_weights_that_were_changed_are_seen(workspace: Any, store: str) -> None:
    import torch

    whole, model = workspace.load(), split(workspace, store=store)
    assert difference(workspace.outputs(whole), workspace.outputs(model)) == 0.0
    for name in (f"{LAYER}.mlp.up_proj", f"{LAST}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"):
        before = workspace.outputs(whole)
        for changed in (whole, model):
            module = changed.get_submodule(name)
            with torch.no_grad(), _placement.weights_brought_in(module):
                module.weight.data = module.weight.data * 1.5
        assert difference(before, workspace.outputs(whole)) > 0.0
        assert difference(workspace.outputs(whole), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_merged_adapter_is_seen(workspace: Any, quantization: str | None, store: str) -> None:
    from peft import PeftModel

    models = [
        PeftModel.from_pretrained(base, workspace.adapter("language"))
        for base in (workspace.load(quantization), split(workspace, quantization, "layers", store))
    ]
    start = workspace.outputs(models[0])
    assert difference(start, workspace.outputs(models[1])) == 0.0
    for model in models:
        model.merge_adapter()
    merged = workspace.outputs(models[0])
    assert difference(start, merged) > 0.0
    assert difference(merged, workspace.outputs(models[1])) == 0.0
    for model in models:
        model.unmerge_adapter()
    assert difference(workspace.outputs(models[0]), workspace.outputs(models[1])) == 0.0
    whole, paged = (model.merge_and_unload() for model in models)
    assert difference(workspace.outputs(whole), workspace.outputs(paged)) == 0.0


@ANSWERING
def test_saved_and_loaded_again(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str | None, store: str
) -> None:
    import torch

    model = split(workspace, quantization, store=store)
    keys = set(model.state_dict())
    for _ in range(2):
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = tiny.load(tmp_path, device=workspace.main)
    assert difference(one_device(quantization, None), workspace.outputs(loaded)) == 0.0
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after forwards"])
def test_a_deep_copy(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, used: bool, store: str
) -> None:
    model = split(workspace, quantization, store=store)
    if used:
        workspace.outputs(model)
    copied = copy.deepcopy(model)
    for one in (copied, model, copied, model):
        assert difference(one_device(quantization, None), workspace.outputs(one)) == 0.0
    del model
    gc.collect()
    assert difference(one_device(quantization, None), workspace.outputs(copied)) == 0.0


@ANSWERING
def test_dispatched_again_and_hooks_removed(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, store: str
) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = split(workspace, quantization, "layers", store)
    workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert not [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    for offload in ("both", "towers", "layers"):
        model = workspace.dispatch(model, offload)
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
        remove_hook_from_submodules(model)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0


def test_without_hooks_a_model_can_be_pickled(workspace: Any) -> None:
    import torch
    from accelerate.hooks import remove_hook_from_submodules

    model = split(workspace, offload="all layers")
    workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert not [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    file = io.BytesIO()
    torch.save(model.model.language_model.layers, file)
    assert file.tell()


def test_two_models_at_once(workspace: Any, one_device: Callable[..., Any]) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    models = split(workspace, "4bit"), split(workspace, None, "all layers")
    with torch.no_grad():
        for _ in range(3):
            for model, quantization in zip(models, ("4bit", None)):
                logits = model(**batch).logits.float().cpu()
                assert torch.equal(logits, one_device(quantization, None).logits[0])


# -------------------------------------------------------------------------------------------------------------- hooks


def user_hook() -> Any:
    from accelerate.hooks import ModelHook

    class Counted(ModelHook):  # type: ignore[misc]
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return args, kwargs

    return Counted()


@pytest.mark.parametrize("when", ["fresh", "after forwards"])
@pytest.mark.parametrize("append", [True, False], ids=["sequential", "alone"])
@pytest.mark.parametrize("name", [f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp", "model.language_model.layers.1.mlp", LAYER])
def test_a_hook_of_the_user_runs(
    workspace: Any, one_device: Callable[..., Any], name: str, append: bool, when: str
) -> None:
    from accelerate.hooks import add_hook_to_module

    model = split(workspace)
    if when == "after forwards":
        workspace.outputs(model)
    if not append and name.endswith("up_proj"):
        pytest.skip("it would take the hook that brings the weight in")
    hook = user_hook()
    add_hook_to_module(model.get_submodule(name), hook, append=append)
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert hook.calls >= 4
    calls = hook.calls
    workspace.outputs(model)
    assert hook.calls == 2 * calls


def test_a_hook_that_has_nothing_to_do_is_there_between_forwards(
    workspace: Any, one_device: Callable[..., Any]
) -> None:
    model = split(workspace)
    name = "model.language_model.layers.1.mlp"  # not offloaded
    module = model.get_submodule(name)
    inside: list[bool] = []
    module.register_forward_hook(lambda *_: inside.append(module.forward is module._old_forward))
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert inside
    assert all(inside)
    assert_as_accelerate_left_it(model)


def test_models_that_are_not_gemma_4_have_no_pages(pagers: list[streaming.Pager], tmp_path: Path) -> None:
    import torch
    from accelerate import dispatch_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **shape)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
    placement = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    placement |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = dispatch_model(model, placement, offload_dir=str(tmp_path))
    assert not pagers
    assert not [module for module in model.modules() if module in streaming._handles or module in idle_hooks._handles]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


# ------------------------------------------------------------------------------------------------------ compile, undo


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_torch_compile(workspace: Any, one_device: Callable[..., Any], quantization: str | None) -> None:
    import torch

    model = split(workspace, quantization, "layers")
    compiled = torch.compile(model, backend="eager")
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for expected in one_device(quantization, None).logits:
            assert torch.equal(compiled(**batch).logits.float().cpu(), expected)
    assert_as_accelerate_left_it(model)


def test_undone_a_running_model_stays_right_and_the_next_one_has_no_pages(
    workspace: Any, one_device: Callable[..., Any], pagers: list[streaming.Pager]
) -> None:
    running = split(workspace, "4bit")
    workspace.outputs(running)
    before = len(pagers)
    try:
        assert gemma4_compat.revert(PATCH.id)[PATCH.id].state is gemma4_compat.PatchState.REVERTED
        for _ in range(2):
            assert difference(one_device("4bit", None), workspace.outputs(running)) == 0.0
        after = split(workspace, "4bit")
        assert len(pagers) == before
        assert difference(one_device("4bit", None), workspace.outputs(after)) == 0.0
    finally:
        gemma4_compat.install()
    assert gemma4_compat.status()[PATCH.id].state is gemma4_compat.PatchState.APPLIED
    assert difference(one_device("4bit", None), workspace.outputs(split(workspace, "4bit"))) == 0.0
    assert len(pagers) > before
