"""F114: what a checkpointed step keeps if its backward pass does not run, or fails."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.cache import shared_kv
from gemma4_compat._lab import tiny
from gemma4_compat.patches.training.transformers_checkpointed_states import PATCH
from tests.conftest import is_affected
from tests.helpers import Finished, pairwise, without
from tests.patches.promise import Promise
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_checkpointing_options import AFFECTED as HAS_OPTIONS
from tests.patches.training.test_transformers_checkpointing_options import OFFLOADS
from tests.patches.training.test_transformers_chunked_loss import CLASSES, batch, built, off, step
from tests.patches.training.test_transformers_chunked_mlp import adapted

AFFECTED = pytest.mark.skipif(not is_affected(PATCH), reason="before 5.5.2 transformers shares through the cache")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a forward without a backward pass leaves [1-9]\d* tensors"


def enable(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the name, from 5.23 on
        model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    return model


class BrokenError(RuntimeError):
    """What the backward pass raises instead of an out-of-memory error."""


def forward(model: Any, given: dict[str, Any]) -> None:
    model.train()(**given)


def failing_forward(model: Any, given: dict[str, Any]) -> None:
    """It fails after the last layer has stored its keys and values."""

    def fail(*_: Any) -> None:
        raise BrokenError

    handle = model.get_decoder().layers[-1].mlp.register_forward_hook(fail)
    with pytest.raises(BrokenError):
        model.train()(**given)
    handle.remove()


def failing_backward(model: Any, given: dict[str, Any]) -> None:
    """It fails in the first layer; the others are done."""

    def fail(*_: Any) -> None:
        raise BrokenError

    handle = model.get_decoder().layers[0].mlp.register_full_backward_hook(fail)
    loss = model.train()(**given).loss
    with pytest.raises(BrokenError):
        loss.backward()
    handle.remove()
    model.zero_grad()


def failing_again(model: Any, given: dict[str, Any]) -> None:
    """It fails where the last layer that stores keys and values for others is computed again, after it stored them."""
    layers = model.get_decoder().layers
    storing = [layer for layer in layers if layer.self_attn.store_full_length_kv][-1]
    loss = model.train()(**given).loss

    def fail(*_: Any) -> None:
        raise BrokenError

    handle = storing.mlp.register_forward_hook(fail)
    with pytest.raises(BrokenError):
        loss.backward()
    handle.remove()
    model.zero_grad()


WAYS: list[Callable[[Any, dict[str, Any]], None]] = [forward, failing_forward, failing_backward, failing_again]


def left(run: Callable[[], None]) -> int:
    """How many tensors more live after a second run than after the first."""
    found = []
    for _ in range(2):
        run()
        found.append(living())
    return found[1] - found[0]


def living() -> int:
    import torch

    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@AFFECTED
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_is_released(
    workspace: Any, tmp_path: Path, name: str | None, way: Callable[[Any, dict[str, Any]], None]
) -> None:
    model, text_only, variant = built(workspace, name, tmp_path)
    given = batch(workspace, text_only=text_only, variant=variant)
    enable(model)
    assert left(lambda: way(model, given)) == 0
    with without(PATCH.id):
        assert left(lambda: way(model, given)) > 0


@AFFECTED
def test_a_smaller_batch_finds_the_memory_of_the_larger(workspace: Any) -> None:
    """The call is tried again with fewer sequences, as Trainer's ``auto_find_batch_size`` does."""
    import torch
    from accelerate.utils import find_executable_batch_size

    model = enable(workspace.load()).train()
    given = batch(workspace, text_only=True)
    before: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(size: int) -> int:
        before.append(living())
        loss = model(**{name: value.repeat(size, 1) for name, value in given.items()}).loss
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.3 GiB.")
        loss.backward()
        return size

    assert train() == 1
    assert len(before) > 3
    assert len(set(before[1:])) == 1
    with without(PATCH.id):
        model.zero_grad()
        before.clear()
        train()
    assert before[1:] == sorted(set(before[1:]))


@pytest.mark.parametrize(
    ("name", "trained", "dtype"), pairwise(CLASSES, ["all", "LoRA"], ["float32", "bfloat16"]), ids=str
)
def test_bits(workspace: Any, tmp_path: Path, name: str | None, trained: str, dtype: str) -> None:
    """Of loss and gradients: those of a step without the patch, and without checkpointing."""
    import torch

    model, text_only, variant = built(workspace, name, tmp_path)
    model = model.to(getattr(torch, dtype))
    model = adapted(model) if trained == "LoRA" else model
    given = batch(workspace, text_only=text_only, variant=variant)
    plain, right = step(model, given)
    enable(model)
    assert_same(model, given, plain, right)
    with without(PATCH.id):
        assert_same(model, given, plain, right)


def assert_same(model: Any, given: dict[str, Any], plain: Any, right: dict[str, Any]) -> None:
    outputs, found = step(model, given)
    assert outputs.loss.equal(plain.loss)
    assert off(right, found) == 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"every_n_layers": 2}, marks=HAS_OPTIONS),
        pytest.param({"every_n_layers": 3}, marks=HAS_OPTIONS),
        pytest.param({"offload": True}, marks=OFFLOADS),
    ],
    ids=str,
)
@AFFECTED
def test_options_of_checkpointing(workspace: Any, options: dict[str, Any]) -> None:
    model, given = workspace.load(), batch(workspace)
    plain, right = step(model, given)
    enable(model, **options)
    assert_same(model, given, plain, right)
    del plain
    for way in (forward, failing_backward):
        assert left(lambda: way(model, given)) == 0  # noqa: B023
    if options.get("every_n_layers") != 3:
        with without(PATCH.id):
            assert left(lambda: forward(model, given)) > 0


@AFFECTED
@pytest.mark.parametrize("parts", [{"loss": True}, {"mlp": 5}], ids=str)
def test_chunks(workspace: Any, parts: dict[str, Any]) -> None:
    model, given = enable(only(adapted(workspace.load()), **parts)), batch(workspace)
    model.enable_input_require_grads()
    outputs, found = step(model, given)
    with without(PATCH.id):
        assert_same(model, given, outputs, found)
    del outputs
    for way in (forward, failing_backward):
        assert left(lambda: way(model, given)) == 0  # noqa: B023


@AFFECTED
def test_a_graph_that_is_kept_can_be_used_again(workspace: Any) -> None:
    model = enable(workspace.load()).train()
    loss = model(**batch(workspace)).loss
    found = []
    for kept in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=kept)
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert off(*found) == 0


def test_keys_and_values_are_returned(workspace: Any) -> None:
    """Those of every layer that stores them, with their graph."""
    import torch

    model = workspace.load_text().train()
    given = {**batch(workspace, text_only=True), "return_shared_kv_states": True}
    expected = getattr(model(**given), "shared_kv_states", None)
    if expected is None:
        pytest.skip("this release returns no keys and values")
    found = enable(model)(**given).shared_kv_states
    assert found.keys() == expected.keys() == set(model.config.layer_types)
    for name, states in expected.items():
        for one, other in zip(found[name], states, strict=True):
            assert one.requires_grad
            assert torch.equal(one, other)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("positional", [False, True])
def test_the_container_of_a_layer(reads: bool, positional: bool) -> None:
    """A layer of no library: what it is given, what the caller's container has afterwards, and what is kept."""
    from types import SimpleNamespace

    layer = SimpleNamespace(
        training=True, gradient_checkpointing=True, self_attn=SimpleNamespace(is_kv_shared_layer=reads)
    )
    states = shared_kv.SharedStates({"a": (1, 2)})
    kept: list[Any] = []

    def original(_: Any, _hidden: Any, given: Any = None, shared_kv_states: Any = None) -> str:
        own = given if positional else shared_kv_states
        kept.append(own)
        assert type(own) is type(states)
        assert own is not states
        assert dict(own) == ({"a": (1, 2)} if reads else {})
        own["a" if reads else "b"] = (3, 4)
        return "output"

    given = (states,) if positional else ()
    named = {} if positional else {"shared_kv_states": states}
    assert shared_kv.checkpointed_layer(original, layer, 0, *given, **named) == "output"
    assert dict(states) == ({"a": (3, 4)} if reads else {"a": (1, 2), "b": (3, 4)})
    assert dict(kept[0]) == ({"a": (3, 4)} if reads else {})


@pytest.mark.parametrize("off", ["training", "gradient_checkpointing", "gradients"])
def test_a_layer_that_is_not_checkpointed_gets_the_container_itself(off: str) -> None:
    from types import SimpleNamespace

    import torch

    layer = SimpleNamespace(training=off != "training", gradient_checkpointing=off != "gradient_checkpointing")
    states: dict[str, Any] = {}
    with torch.set_grad_enabled(off != "gradients"):
        found = shared_kv.checkpointed_layer(
            lambda _, **given: given["shared_kv_states"], layer, shared_kv_states=states
        )
    assert found is states


def test_compiled(workspace: Any) -> None:
    """The bits of the compiled step without the patch: a compiler rounds differently."""
    import torch

    model, given = enable(workspace.load_text()), batch(workspace, text_only=True)
    with without(PATCH.id):
        plain, right = step(torch.compile(model, backend="eager"), given)
        torch._dynamo.reset()
    assert_same(torch.compile(model, backend="eager"), given, plain, right)


#: Keys and values that a layer on the other device reads, and what such a step leaves. The stand-in cannot compute a
#: layer again in a backward pass, with the patch or without.
_TWO_DEVICES = """
import gemma4_compat
import sys
from pathlib import Path
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import Workspace
from gemma4_compat._lab.stand_ins import second_device
from tests.helpers import without
from tests.patches.training.test_transformers_checkpointed_states import PATCH, enable, forward, left
from tests.patches.training.test_transformers_chunked_loss import batch

workspace = Workspace(Path(sys.argv[1]))
given = batch(workspace, text_only=True)
with second_device.second_device():
    expected = enable(workspace.load()).train()(**given).loss
    model = tiny.dispatch_to_two(enable(workspace.load()), second_device.DEVICE)
    assert model.train()(**given).loss.cpu().equal(expected)
    assert left(lambda: forward(model, given)) == 0
    with without(PATCH.id):
        assert left(lambda: forward(model, given)) > 0
print("as on one device")
"""


@AFFECTED
def test_two_devices(workspace: Any, warm_child: Callable[..., Finished]) -> None:
    from gemma4_compat._lab.stand_ins import second_device

    if not second_device.available():
        pytest.skip("this PyTorch takes no backend in Python")
    done = warm_child("-c", _TWO_DEVICES, str(workspace.folder))
    assert done.stdout.endswith("as on one device\n"), done.stderr[-3000:]


@AFFECTED
@pytest.mark.parametrize("skipped", [False, True])
def test_offloaded_layers(workspace: Any, skipped: bool) -> None:
    """Hooks around each layer, which move what it reads to its device, or pass it on."""
    from accelerate import dispatch_model

    given = batch(workspace, text_only=True)
    plain, right = step(adapted(enable(workspace.load())), given)
    placement = tiny.device_map(
        model := workspace.load(), "layers", main=workspace.main, offloaded=workspace.offloaded
    )
    folder = tempfile.mkdtemp(dir=workspace.folder)
    options = {"skip_keys": [*tiny.skip_keys(model), "shared_kv_states"]} if skipped else {}
    model = adapted(enable(dispatch_model(model, placement, offload_dir=folder, **options)))
    assert_same(model, given, plain, right)
    del plain
    for way in (forward, failing_forward, failing_backward):
        assert left(lambda: way(model, given)) == 0  # noqa: B023


#: What a step of a loaded model leaves, in a process in which nobody turns checkpointing on.
_LOADED = """
import gemma4_compat
import gc, sys
import torch
from gemma4_compat._engine import changes

def living():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

model = torch.load(sys.argv[1], weights_only=False)
ids = torch.arange(8)[None]
found = []
for _ in range(2):
    model(input_ids=ids, labels=ids)
    found.append(living())
print("more tensors:", found[1] - found[0], "awake:", "transformers-checkpointed-states" in changes._activated)
"""


@AFFECTED
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_loaded_model_is_released(
    workspace: Any, tmp_path: Path, warm_child: Callable[..., Finished], checkpointed: bool
) -> None:
    """The patch wakes only if it was saved with checkpointing on."""
    import torch

    model = workspace.load_text().train()
    model = enable(model) if checkpointed else model
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()  # nobody can pickle its hook
    torch.save(model, tmp_path / "model.pt")
    done = warm_child("-c", _LOADED, str(tmp_path / "model.pt"))
    assert done.stdout == f"more tensors: 0 awake: {checkpointed}\n", done.stderr[-3000:]
