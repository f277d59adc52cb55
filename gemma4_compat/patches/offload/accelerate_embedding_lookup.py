"""silent: with the per-layer embedding on the CPU the memory is saved between two forwards only. E4B in 4-bit: 3.45
GiB resident, but 8.70 GiB at the peak, as much as with everything on the GPU, and 1.5 instead of 15.7 tokens a second.

Why: accelerate brings a module's weights in for its forward. For an embedding that is the whole table, gigabytes of
which a token needs one row (20 KiB of E4B's 5.6 GB).

Here: an ``nn.Embedding`` that a device map puts on the CPU or on disk is looked up where it lives (see
:mod:`gemma4_compat._offload.row_lookup`); only the rows travel. A table that learns is brought in as before.

The defect and the repair are the same for every model, so this one is not restricted to Gemma 4.

Goes when accelerate looks rows up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._offload import row_lookup

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def pre_forward(original: Callable[..., Any], self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.offload or not _is_embedding(module):
        return original(self, module, *args, **kwargs)
    return _outside_graphs(_pre_forward)(original, self, module, *args, **kwargs)


def post_forward(original: Callable[..., Any], self: Any, module: Any, output: Any) -> Any:
    if not self.offload or not _is_embedding(module):
        return original(self, module, output)
    return _outside_graphs(_post_forward)(original, self, module, output)


def _pre_forward(original: Callable[..., Any], self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    lookup = row_lookup.lookup_for(self, module)
    given = bool(args) or "input" in kwargs
    by_rows = given and row_lookup.reads_rows_only(module)  # without tokens the caller wants the whole weight
    if lookup is None or not (lookup.in_place or by_rows):
        return original(self, module, *args, **kwargs)
    # Upstream only moves the inputs.
    self.offload = False
    try:
        args, kwargs = original(self, module, *args, **kwargs)
    finally:
        self.offload = True
    if args:
        return (lookup.enter(module, args[0]), *args[1:]), kwargs
    tokens = lookup.enter(module, kwargs.get("input"))
    return args, {**kwargs, "input": tokens} if given else kwargs


def _post_forward(original: Callable[..., Any], self: Any, module: Any, output: Any) -> Any:
    lookup = row_lookup.current(self)
    if lookup is None:
        # Unset where, in nested calls, only our pre_forward ran.
        vars(self).setdefault("tied_pointers_to_remove", set())
        return original(self, module, output)
    lookup.leave(module)
    self.offload = False
    try:
        return original(self, module, output)
    finally:
        self.offload = True


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile runs it as it is between its graphs, as it runs upstream's hooks."""
    import torch

    if function not in _disabled:
        _disabled[function] = torch.compiler.disable(function)
    return _disabled[function]


_disabled: dict[Any, Callable[..., Any]] = {}  # no functools.cache: torch.compile warns of it


def _is_embedding(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Embedding)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    workspace.needs("per_layer_embeddings")
    name = "model.language_model.embed_tokens_per_layer"
    reference = workspace.answers(workspace.load())
    placement = tiny.device_map(workspace.load(), "none", main=workspace.main, offloaded=workspace.offloaded)
    model = workspace.dispatch_map(workspace.load(), {**placement, name: workspace.offloaded})
    found = difference(reference, workspace.answers(model))
    embedding = model.get_submodule(name)
    tokens = workspace.inputs(text_only=True)["input_ids"]
    largest = largest_tensor(lambda: embedding(tokens))
    if largest >= embedding.weight.numel():
        return Outcome(
            True, f"to look up {tokens.numel()} rows, a tensor of {largest} values was created: the whole weight"
        )
    return Outcome.of_parity(found, "per-layer embedding offloaded")


def largest_tensor(action: Callable[[], Any]) -> int:
    """Numel of the largest tensor that an operation of ``action`` returned."""
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        largest: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes = [value.numel() for value in _pytree.tree_leaves(result) if hasattr(value, "numel")]
            self.largest = max(self.largest, *sizes, 0)
            return result

    watch = Watch()
    with watch:
        action()
    return int(watch.largest)


PATCH = Patch(
    id="accelerate-embedding-lookup",
    summary="an embedding on the CPU or on disk is looked up where it lives; only the rows travel",
    symptom="silent: the whole table goes to the GPU for each forward: the peak is that of no offload, decoding is 10 "
    "times slower",
    severity=Severity.MEMORY,
    failure_points=("F12",),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    retire_when="accelerate looks up the rows of an offloaded embedding instead of moving its table",
    targets=(
        Target(
            module="accelerate.hooks",
            name="AlignDevicesHook.pre_forward",
            replacement=pre_forward,
            known={"99706bc047d2": "1.12.0", "35d1eaf055d5": "1.13.0", "534615b0c491": "1.14.0 - 1.15.0"},
        ),
        Target(
            module="accelerate.hooks",
            name="AlignDevicesHook.post_forward",
            replacement=post_forward,
            known={"897cfca1d585": "1.12.0", "b7640a384479": "1.13.0 - 1.15.0"},
        ),
    ),
    reproduce=reproduce,
)
