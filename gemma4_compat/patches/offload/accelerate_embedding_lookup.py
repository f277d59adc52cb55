"""An embedding on the CPU or on disk is looked up where it is stored; only the rows it needs are copied.

Symptom: silent: offloading the per-layer embeddings saves memory only between two forwards, because each forward
copies the whole embedding weight to the GPU. E4B in 4-bit holds 3.45 GiB between forwards but peaks at 8.70 GiB, as
much as with everything on the GPU, and decodes 10 times slower: 1.5 instead of 15.7 tokens a second.

Cause: ``AlignDevicesHook.pre_forward`` onloads all weights of a module for its forward. For an embedding that is the
whole embedding weight, several gigabytes, although a token needs only one row of it (20 KiB of E4B's 5.6 GB).

Fix: An ``nn.Embedding`` that a device map puts on the CPU or on disk is looked up where its weight is stored, and
only the rows travel. The lookup happens in place where possible (pinned host memory that the GPU reads, or the
memory-mapped file on the CPU). Otherwise the host gathers the distinct rows and copies those. Both ways are
bit-exact.

A head that is tied to an embedding reads host memory in place too, for up to eight rows without gradients: those of a
token, or the last one of a prompt. Nothing is copied to the GPU, and the bits are those of the same kernel.

An embedding weight that is being trained is onloaded as before. The same holds for a quantized embedding, one with
``max_norm``, and one that is tied to a weight on the device.

A weight that was parametrized while it was offloaded (``torch.nn.utils.parametrize``) has no values for its
parametrization: a GPU raises an error about ``meta``, a CPU computes with whatever is in its memory. In the next
forward it gets them from the stored weight, and stays on the device. Where the parametrization has a state of its own
(``spectral_norm``), an error says so.

The defect and the fix are the same for every model, so this patch is not restricted to Gemma 4.

Remove when: accelerate looks up the rows of an offloaded embedding instead of moving the whole embedding weight.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._offload.transfer import parametrized, row_lookup
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F12", severity="memory", affected=">=1.12", acts_on="every model", needs="transformers-offloaded-embedding"
)


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.pre_forward")
def pre_forward(original: Original, self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    if self.offload and "parametrizations" in module._modules:
        _outside_graphs(parametrized.settle)(module, self)
    if not self.offload or not row_lookup.may_look_up(self, module):
        return original(self, module, *args, **kwargs)
    return _outside_graphs(_pre_forward)(original, self, module, *args, **kwargs)


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.post_forward")
def post_forward(original: Original, self: Any, module: Any, output: Any) -> Any:
    if not self.offload or not row_lookup.may_look_up(self, module):
        return original(self, module, output)
    return _outside_graphs(_post_forward)(original, self, module, output)


def _pre_forward(original: Original, self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    given = bool(args) or "input" in kwargs
    if isinstance(module, torch.nn.Embedding):
        lookup = row_lookup.lookup_for(self, module)
    else:
        lookup = row_lookup.head_for(self, module, args[0] if args else kwargs.get("input"))
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


def _post_forward(original: Original, self: Any, module: Any, output: Any) -> Any:
    lookup = row_lookup.current(self)
    if lookup is None:
        # Unset if, in nested calls, only our pre_forward ran.
        vars(self).setdefault("tied_pointers_to_remove", set())
        output = original(self, module, output)
        row_lookup.was_copied(self, module)
        return output
    lookup.leave(module)
    self.offload = False
    try:
        return original(self, module, output)
    finally:
        self.offload = True


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile runs it eagerly between its graphs, like upstream's hooks."""
    import torch

    if function not in _disabled:
        _disabled[function] = torch.compiler.disable(function)
    return _disabled[function]


_disabled: dict[Any, Callable[..., Any]] = {}  # not functools.cache, about which torch.compile warns


def reproduce(workspace: Workspace) -> Outcome:
    workspace.needs("per_layer_embeddings")
    name = "model.language_model.embed_tokens_per_layer"
    reference = workspace.reference()
    model = workspace.dispatch(workspace.load(), "none", name)
    found = workspace.difference(reference, model)
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
