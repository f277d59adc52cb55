"""The experts of a mixture of experts in 4 bits: what they are stored as, and computing with them.

A parameter of all experts, (experts, rows, columns), becomes one ``Params4bit`` with the packed bytes of all and a
``QuantState`` whose scales have a row an expert: each expert is quantized by itself, with its own scales, and its own
offset under double quantization. So experts can be dequantized one by one, and their bits are those of
``dequantize_4bit(quantize_4bit(matrix))``. Whatever moves, offloads, pages, copies or counts 4-bit weights takes it
for one of them.

Imports nothing upstream at module level.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._engine import settings
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import device_maps, placement
from gemma4_compat._quantization import offloaded

ID = "transformers-quantized-experts"
#: The parameters of Gemma 4's experts, in every release.
NAMES = ("gate_up_proj", "down_proj")
#: Beside the packed bytes in a checkpoint, ``<parameter>.<name>``: bitsandbytes' own, and one offset for each expert.
STORED = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "nested_offset")
STORED_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")

_LOGGER = logging.getLogger("gemma4_compat")
_ADDED = "_gemma4_compat_added"  # on an experts module, in a forward of PEFT: what is added to its parameters
_asked: contextvars.ContextVar[bool] = contextvars.ContextVar("gemma4_compat_quantize_experts", default=False)


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """Inside, in this thread (and task) alone, models are loaded in 4 bits with their experts. Nests."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def is_asked() -> bool:
    """Whether somebody asked for it: here, with :func:`asked`, or with ``GEMMA4_COMPAT_ENABLE`` for the process."""
    return _asked.get() or settings.is_enabled(ID)


# --------------------------------------------------------------------------------------------------------- the modules


def is_experts(module: Any) -> bool:
    """Whether this is the experts module of a decoder layer."""
    return any(base.__name__ == "Gemma4TextExperts" for base in type(module).__mro__)


def all_experts(model: Any) -> dict[str, Any]:
    """The experts modules of a model, by path."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def owner_of(model: Any, name: str) -> Any:
    """The experts module whose parameter the path ``name`` is; None where it is something else."""
    path, _, last = name.rpartition(".")
    if last not in NAMES:
        return None
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module if is_experts(module) else None


def quantized_parameter(module: Any, name: str) -> Any:
    """The 4-bit parameter ``name`` of an experts module (quantized, or to be while loading); else None."""
    parameter = module._parameters.get(name) if is_experts(module) else None
    # What was pickled comes back as a plain parameter with the attributes of a Params4bit.
    return parameter if parameter is not None and "quant_state" in vars(parameter) else None


def prepare(model: Any, config: Any, chosen: Callable[[str], bool], *, prequantized: bool) -> None:
    """Mark experts on meta as weights that are to become 4-bit ones, of the kind ``config`` describes.

    Args:
        model: on meta.
        config: a ``BitsAndBytesConfig``.
        chosen: which parameters, by path.
        prequantized: they come from the checkpoint as they are.
    """
    for path, module in all_experts(model).items():
        for name in NAMES:
            old = module._parameters.get(name)
            if old is None or not chosen(f"{path}.{name}"):
                continue
            new = _empty(old.data, config)
            if old[0].numel() % new.blocksize:
                continue  # scales would cross experts; the report says that these stay
            if prequantized:  # older releases cast what they read to the dtype of what is there
                new.data = new.data.to(config.bnb_4bit_quant_storage)
            module._parameters[name] = new
            _remember_states(module)


def _empty(data: Any, config: Any) -> Any:
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        data,
        requires_grad=False,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=config.bnb_4bit_quant_storage,
    )


def quantize_module(module: Any, config: Any) -> None:
    """Quantize the experts of a loaded module where they are; what is quantized already stays.

    Raises:
        Gemma4CompatError: an expert's matrix is no multiple of a block; nothing was changed.
    """
    plain = {name: module._parameters[name] for name in NAMES if quantized_parameter(module, name) is None}
    made = {name: quantized(parameter.data, _empty(parameter.data, config)) for name, parameter in plain.items()}
    module._parameters.update(made)
    _remember_states(module)


def dequantize_module(module: Any, dtype: Any = None) -> None:
    """Give an experts module the bf16 (``dtype``) weights that its 4-bit ones stand for; offloaded ones too."""
    import torch

    with placement.weights_brought_in(module):
        for name in NAMES:
            parameter = quantized_parameter(module, name)
            if parameter is not None:
                values = dequantized(parameter)
                plain = torch.nn.Parameter(values if dtype is None else values.to(dtype), requires_grad=False)
                module._parameters[name] = plain


# --------------------------------------------------------------------------------------------------------- the weights


def quantized(values: Any, like: Any) -> Any:
    """``values`` (experts, rows, columns), bf16, fp16 or fp32, as a ``Params4bit`` of the kind of ``like``, on the
    device they are on.

    Raises:
        Gemma4CompatError: rows x columns is no multiple of the block size.
    """
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import Params4bit

    if values[0].numel() % like.blocksize:
        raise Gemma4CompatError(
            f"experts of {values.shape[1]} x {values.shape[2]} values are no multiple of a block of {like.blocksize}, "
            "so they cannot be quantized one by one. Leave them out: llm_int8_skip_modules=[..., 'experts']."
        )
    packed: Any = None
    states = []
    for index, matrix in enumerate(values):
        data, state = functional.quantize_4bit(
            matrix.contiguous(),
            blocksize=like.blocksize,
            compress_statistics=like.compress_statistics,
            quant_type=like.quant_type,
            quant_storage=like.quant_storage,
        )
        if packed is None:
            packed = torch.empty((len(values), data.numel()), dtype=data.dtype, device=data.device)
        packed[index] = data.flatten()
        states.append(state)
    return Params4bit(
        packed.view(-1, 1),
        requires_grad=False,
        quant_state=_joined(states, values.shape),
        blocksize=like.blocksize,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
        quant_storage=like.quant_storage,
        bnb_quantized=True,
    )


def _joined(states: list[Any], shape: Any) -> Any:
    """One state for all experts: scales, nested scales and offsets have a row for each."""
    import torch

    joined = copy.copy(states[0])
    joined.shape = torch.Size(shape)
    joined.absmax = torch.stack([state.absmax for state in states])
    if joined.nested:
        joined.offset = torch.stack([state.offset for state in states]).view(-1, 1)
        joined.state2 = copy.copy(states[0].state2)
        joined.state2.absmax = torch.stack([state.state2.absmax for state in states])
    return joined


def dequantized(parameter: Any, chosen: Any = None) -> Any:
    """The values of the experts with the numbers ``chosen`` (an int tensor; None: all), (experts, rows, columns), in
    the dtype they were quantized from.
    """
    import torch
    from bitsandbytes import functional

    state = parameter.quant_state
    count, rows, columns = state.shape
    packed = parameter.data.view(torch.uint8).view(count, -1)
    scales = _scales(state, chosen)
    if chosen is not None:
        packed = packed[chosen]
    plain = functional.QuantState(
        absmax=scales.reshape(-1),
        shape=torch.Size((len(packed), rows, columns)),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    return functional.dequantize_4bit(packed.view(-1, 1), plain)


def _scales(state: Any, chosen: Any) -> Any:
    """fp32, a row an expert. Under double quantization as bitsandbytes computes them, operation by operation."""

    def rows(tensor: Any) -> Any:
        return tensor if chosen is None else tensor[chosen]

    scales = rows(state.absmax)
    if not state.nested:
        return scales
    nested = rows(state.state2.absmax).repeat_interleave(state.state2.blocksize, dim=1)
    return state.state2.code[scales.int()] * nested[:, : scales.shape[1]] + rows(state.offset)


def logical(module: Any, name: str) -> Any:
    """A stand-in with the shape, dtype and device (that it computes on) of a 4-bit parameter's values; it takes no
    memory.
    """
    import torch

    parameter = quantized_parameter(module, name)
    state = parameter.quant_state
    device = placement.execution_device(module) or parameter.device
    return torch.zeros(1, dtype=state.dtype, device=device).expand(state.shape)


# -------------------------------------------------------------------------------------------------------- checkpoints


def _remember_states(module: Any) -> None:
    """Have the scales of a module's experts in its state dict, beside the packed bytes."""
    if add_states not in module._state_dict_hooks.values():
        module._register_state_dict_hook(add_states)


def add_states(module: Any, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """The hook of :func:`_remember_states`."""
    for name in NAMES:
        parameter = quantized_parameter(module, name)
        if parameter is not None and parameter.quant_state is not None:
            state_dict.update({f"{prefix}{name}.{key}": value for key, value in _as_dict(parameter).items()})


def _as_dict(parameter: Any) -> dict[str, Any]:
    state = parameter.quant_state
    if not state.nested:
        return dict(state.as_dict(packed=True))
    one = copy.copy(state)
    one.offset = state.offset.new_zeros(())  # bitsandbytes writes one number; there is one for each expert
    return {**one.as_dict(packed=True), "nested_offset": state.offset}


def from_checkpoint(tensors: dict[str, Any]) -> Any:
    """The ``Params4bit`` of one checkpoint's tensors: ``""`` are the packed bytes, the others as in :data:`STORED`."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    rest = dict(tensors)
    data, offset = rest.pop(""), rest.pop("nested_offset", None)
    state = QuantState.from_dict(rest, device=data.device)
    if offset is not None:
        state.offset = offset
    return Params4bit(
        data,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=data.dtype,
        bnb_quantized=True,
    )


def in_checkpoint(files: Iterable[Any]) -> frozenset[str]:
    """Which parameters of experts are quantized in these files, as ``layers.<number>.experts.<name>``."""
    from gemma4_compat._checkpoint import header  # with json, which importing the package does not load

    found = set()
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            for key in header.header(file):
                stem, _, last = key.rpartition(".")
                if last == "absmax" and (tail := tail_of(stem)) is not None:
                    found.add(tail)
    return frozenset(found)


def tail_of(name: str) -> str | None:
    """What names a parameter of experts in every class of the model: ``layers.<number>.experts.<name>``."""
    match = re.search(rf"(?:^|\.)(layers\.\d+\.experts\.(?:{'|'.join(NAMES)}))$", name)
    return match[1] if match else None


# ----------------------------------------------------------------------------------------------------------- computing


def forward(original: Callable[..., Any], self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """``Gemma4TextExperts.forward`` by upstream's own code, over the dequantized weights of the experts that are hit.

    For the backward pass the packed weights are kept, and dequantized again. ``torch.compile`` has to get through it
    in one graph.
    """
    import torch

    if not any(hasattr(getattr(self, name, None), "quant_state") for name in NAMES):
        return original(self, hidden_states, top_k_index, top_k_weights)
    added = getattr(self, _ADDED, {})
    # What PEFT adds is added to all experts, as it does to those in bf16.
    chosen = None if added else _hit(self, top_k_index)
    weights, make = {}, {}
    for name in NAMES:
        parameter = getattr(self, name)
        if hasattr(parameter, "quant_state"):
            make[name] = functools.partial(_values, parameter, chosen, added.get(name, ()))
            weights[name] = make[name]()
        else:
            weights[name] = parameter if chosen is None else parameter[chosen]
    number = self.num_experts if chosen is None else len(chosen)
    stand_in = _Experts(self, number, weights["gate_up_proj"], weights["down_proj"])
    if chosen is not None:
        top_k_index = torch.searchsorted(chosen, top_k_index)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return original(stand_in, hidden_states, top_k_index, top_k_weights)
    with _kept_packed(weights, make):
        return original(stand_in, hidden_states, top_k_index, top_k_weights)


class _Experts:
    """An experts module as its forward sees it, with other weights."""

    def __init__(self, module: Any, num_experts: int, gate_up_proj: Any, down_proj: Any) -> None:
        self._module = module
        self.num_experts = num_experts
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _hit(module: Any, top_k_index: Any) -> Any:
    """The numbers of the experts that tokens are sent to, ascending; None where it is about all of them."""
    import torch

    if (
        top_k_index.numel() >= module.num_experts
        or torch.compiler.is_compiling()  # how many there are would depend on the data
        or getattr(module, "_is_expert_parallel", False)  # then some numbers stand for no expert
    ):
        return None
    if len(top_k_index) == 1:  # a token has no expert twice
        return top_k_index.flatten().sort().values
    return torch.unique(top_k_index)


def _values(parameter: Any, chosen: Any, added: Iterable[Callable[[Any], Any]]) -> Any:
    values = dequantized(parameter, chosen)
    for add in added:
        values = add(values)
    return values


def current(module: Any, name: str) -> Any:
    """The values of all experts that a forward of ``module`` would compute with now, what PEFT adds included."""
    if quantized_parameter(module, name) is None:
        return getattr(module, name)
    return _values(module._parameters[name], None, getattr(module, _ADDED, {}).get(name, ()))


@contextlib.contextmanager
def _kept_packed(weights: Mapping[str, Any], make: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
    """Inside, autograd keeps of ``weights`` how to ``make`` them again: in bf16 they would be the whole model."""
    import torch

    known = {weights[name].untyped_storage().data_ptr(): again for name, again in make.items()}

    def pack(tensor: Any) -> Any:
        again = known.get(tensor.untyped_storage().data_ptr())
        return tensor if again is None else (again, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Any:
        if isinstance(kept, torch.Tensor):
            return kept
        again, size, stride, offset = kept
        with torch.no_grad():
            return again().as_strided(size, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextlib.contextmanager
def adding(module: Any, name: str, add: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``add`` is applied to the values of the 4-bit parameter ``name`` in forwards of ``module``."""
    added = vars(module).setdefault(_ADDED, {})
    added[name] = (*added.get(name, ()), add)
    try:
        yield
    finally:
        rest = added[name][:-1]
        if rest:
            added[name] = rest
        else:
            del added[name]
        if not added:
            del vars(module)[_ADDED]


# ---------------------------------------------------------------------------------------------------------- the report


def report(model: Any, bits: int) -> None:
    """One line for a quantized model whose experts are not, or not all: how much that is, and what to do.

    A warning, as the line about offloaded modules is: a model "in 4 bits" of almost the size it had looks like a
    defect.
    """
    plain: dict[str, int] = {}  # bytes by dtype
    for module in all_experts(model).values():
        for name in NAMES:
            parameter = module._parameters.get(name)
            if parameter is not None and quantized_parameter(module, name) is None:
                kind = offloaded.precision(parameter)
                plain[kind] = plain.get(kind, 0) + offloaded.size(parameter)
    if not plain:
        return
    total = sum(offloaded.size(parameter) for parameter in model.parameters())
    hint = "load inside gemma4_compat.quantize_experts() to quantize them too"
    if bits != 4:
        hint = (
            f"experts can be quantized to 4 bits alone (load_in_4bit, gemma4_compat.quantize_experts()), not to {bits}"
        )
    elif is_asked():
        hint = "they are skipped (llm_int8_skip_modules, offloaded), or are no multiple of a block"
    _LOGGER.warning(
        "gemma4_compat: experts: %s of %s stay %s; %s",
        *(gigabytes(sum(plain.values())), gigabytes(total), " and ".join(sorted(plain)), hint),
    )


def gigabytes(nbytes: int) -> str:
    """``nbytes`` as text, in units of 1000."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def refuse_merge(model: Any) -> None:
    """Raise :class:`Gemma4CompatError` where an adapter on 4-bit experts would be merged into them."""
    for name, module in model.named_modules():
        parameter = getattr(module, "parameter_name", None)
        if parameter is None or not hasattr(module, "get_base_layer"):
            continue
        if quantized_parameter(module.get_base_layer(), parameter) is not None:
            raise Gemma4CompatError(
                f"the adapter on {name!r} cannot be merged into experts in 4 bits. Nothing was changed. To merge "
                "without loss, merge into the unquantized checkpoint: gemma4-compat merge BASE ADAPTER FOLDER; or "
                "call dequantize() on this model before merging."
            )


def chosen_by(skip: Collection[str]) -> Callable[[str], bool]:
    """Whether a parameter is to be quantized with these ``modules_to_not_convert``, by transformers' own rule."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    return lambda name: bool(should_convert_module(name, list(skip)))


def is_moe(model: Any) -> bool:
    """Whether this is a Gemma 4 with experts."""
    return device_maps.is_gemma4(model) and bool(all_experts(model))
