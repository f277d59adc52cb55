"""Custom kernels in place of PyTorch's and bitsandbytes', with new numerics: attention (:mod:`attention`) and products
(:mod:`dense`, and :mod:`nf4_gemv` for 4-bit weights, those of :mod:`packed_linear` among them).

:class:`CustomKernels` sees the functions of ``torch`` that a forward calls, and calls operators of this package for
those that the kernels can compute. As operators they are visible to what defers operations (:mod:`fusing`). Their
results are bitwise equal whether they run one by one, in a captured graph, or fused.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from gemma4_compat._gemma4.quantization import packed_linear
from gemma4_compat._gemma4.state import contents
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.fuse import pointwise, row_kernels, writer
from gemma4_compat._kernels.fuse.pointwise import DOT, Load, Value
from gemma4_compat._kernels.match import shares, top_tokens
from gemma4_compat._kernels.specs import (
    attention,
    dense,
    expert_products,
    expert_slots,
    flash,
    head,
    nf4_gemv,
    products,
    shifting,
)

#: Properties of a tensor that its shape, dtype and device decide.
_PROPERTIES = frozenset({"device", "dtype", "is_cuda", "itemsize", "layout", "ndim", "requires_grad", "shape"})
_TRIED_WORDS = 1024  # of a head
_defining = threading.Lock()
_broken: dict[Any, str] = {}  # by device: why these kernels do not run there; decoder.py says it


class Repeats(TorchFunctionMode):  # type: ignore[misc]
    """Inside, transformers' ``repeat_kv`` copies no key-value head: something without memory stands for the copies.

    Args:
        device: whose tensors.
    """

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._repeated: dict[int, tuple[Any, Any]] = {}  # by id: what stands for repeated heads, and those heads

    def repeated(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What stands for the copies that this call would make; None if it is another call."""
        if func is torch.Tensor.reshape and args[0].ndim == 5 and not args[0].stride(2) and args[0].shape[2] > 1:
            return self._stands_for(*args, **kwargs)
        if func is torch.Tensor.contiguous and id(args[0]) in self._repeated:
            return args[0]
        if func is torch.Tensor.__getitem__ and id(args[0]) in self._repeated:
            return self._cut(*args)
        return None

    def shared(self, key: Any, value: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Keys, values and options of a call of attention, without copies where something stands for both."""
        if id(key) not in self._repeated or id(value) not in self._repeated:
            return key, value, kwargs
        key, value = (self._repeated[id(tensor)][1][:, :, 0] for tensor in (key, value))
        return key, value, {**kwargs, "enable_gqa": True}

    def called(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The call, with copies after all where something stands for them."""
        if self._repeated and getattr(getattr(func, "__self__", None), "__name__", "") not in _PROPERTIES:
            args, kwargs = _pytree.tree_map(self._as_it_is, (args, kwargs))
        return func(*args, **kwargs)

    def forget(self) -> None:
        """Nothing stands for copies any more."""
        self._repeated.clear()

    def _stands_for(self, heads: Any, *shape: Any) -> Any:
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        batch, groups, repeats, length, width = heads.shape
        if heads.device != self._device or tuple(size) != (batch, groups * repeats, length, width):
            return None
        return self._stand_in(heads)

    def _stand_in(self, heads: Any) -> Any:
        stand_in = heads.new_empty(()).expand(len(heads), heads.shape[1] * heads.shape[2], *heads.shape[3:])
        self._repeated[id(stand_in)] = stand_in, heads
        return stand_in

    def _cut(self, stand_in: Any, index: Any) -> Any:
        """The same keys or values of fewer positions, where no mask is needed; None for another index."""
        every, heads = slice(None), self._repeated[id(stand_in)][1]
        if not isinstance(index, tuple) or len(index) != 4 or index[:2] != (every, every) or index[3] != every:
            return None
        return self._stand_in(heads[:, :, :, index[2]]) if isinstance(index[2], slice) else None

    def _as_it_is(self, value: Any) -> Any:
        """The tensor itself where something stands for one."""
        if id(value) not in self._repeated:
            return value
        stand_in, heads = self._repeated[id(value)]
        return heads.reshape(stand_in.shape)


class CustomKernels(Repeats):
    """Inside one forward of a decoding step, these kernels compute what they can.

    Args:
        device: whose tensors they may read.
        tokens: of each sequence. Up to ``products.MAX_ROWS`` in all have the bits that each would have in a forward of
            its own.
        head: a :class:`best_words.Head` whose best words are all that matter; None if all do.
    """

    def __init__(self, device: Any, tokens: int = 1, head: Any = None) -> None:
        super().__init__(device)
        self._tokens, self._head = tokens, head
        operators()
        gemm_4bit = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)  # bitsandbytes has it since 0.50
        self._gemm_4bit = None if gemm_4bit is None else gemm_4bit.default
        self._valid: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # by mask: it, and where its keys begin and end

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = None
        if func is torch.nn.functional.linear:
            found = self._linear(*args, **kwargs)
        elif func is self._gemm_4bit:
            found = self._product(*args, **kwargs)
        elif func is packed_linear.product:
            found = self._packed(*args)
        elif func is packed_linear.multiplies_experts:
            found = self._multiplies(*args)
        elif func is packed_linear.expert_product:
            found = self._computed(torch.ops.gemma4_compat.experts, *args[:2], *expert_products.arguments(args[2]))
        elif func is torch.nn.functional.scaled_dot_product_attention:
            found = self._attention(*args, **kwargs)
        elif func is torch.Tensor.mean:
            found = self._means(*args, **kwargs)
        elif func is operator("shift") and args[0].device == self._device:
            found = self._computed(_shifted_by_kernel, *args[:4])
        else:
            found = self.repeated(func, args, kwargs)
        return self.called(func, args, kwargs) if found is None else found

    def _linear(self, given: Any, weight: Any, bias: Any = None) -> Any:
        if given.device != self._device or torch.is_grad_enabled() or not dense.supports(given, weight, bias):
            return None
        if self._head is not None and self._head.is_of(weight):
            return self._computed(torch.ops.gemma4_compat.best, given, weight, *self._head.asked)
        return self._computed(torch.ops.gemma4_compat.dense, given, weight, bias)

    def _means(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        """The means of norms, each as for one token: PyTorch's order of additions depends on how many there are."""
        is_flat = given.ndim == 2  # as experts and their router get the tokens of all sequences
        if given.device != self._device or given.ndim < 2 or not (is_flat or given.shape[1] == self._tokens):
            return None
        rows = len(given) if is_flat else len(given) * self._tokens
        if not 1 < rows <= products.MAX_ROWS or (args, kwargs) != ((-1,), {"keepdim": True}):
            return None
        return self._computed(torch.ops.gemma4_compat.means, given, rows)

    def _product(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        if given.device != self._device or torch.is_grad_enabled():
            return None
        if nf4_gemv.match(given, *args, **kwargs) is None:
            return None
        return self._computed(torch.ops.gemma4_compat.product, given, *args, **kwargs)

    def _packed(self, given: Any, packed: Any, scale: Any, bias: Any) -> Any:
        shape = len(packed), given.shape[-1]
        return self._product(given, packed, shape, scale, math.prod(shape) // scale.numel(), products.INT4, bias)

    def _multiplies(self, given: Any, chosen: Any, parameters: Any) -> bool:
        if given.device != self._device or self._device in _broken:
            return False
        for parameter in parameters:
            what, width = expert_products.arguments(parameter), parameter.quant_state.shape[-1]
            tried = given if width == given.shape[1] else given.new_empty(len(chosen), width)
            if parameter.quant_state.dtype != given.dtype or expert_products.kernel_of(tried, chosen, *what) is None:
                return False
            if not multiplies_experts(given.dtype, *what):
                return False
        return True

    def _attention(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key, value, kwargs = self.shared(key, value, kwargs)
        if query.device != self._device or torch.is_grad_enabled():
            return None
        call = attention.match(query, key, value, *args, **kwargs)
        if call is None:
            return None
        operands = query, key, value, kwargs.get("attn_mask", args[0] if args else None)
        options = call.scale, bool(kwargs.get("enable_gqa", False))
        valid = None if call.mask is None else self._valid_keys(*operands, *options)
        if call.mask is not None and valid is None:
            return None
        return self._computed(torch.ops.gemma4_compat.attend, *operands, valid, *options)

    def _valid_keys(self, query: Any, key: Any, value: Any, mask: Any, scale: float, gqa: bool) -> Any:
        """Where the keys of each query begin and end: found once for all layers with this mask."""
        what = (contents.stamp(mask), mask.shape, mask.stride(), query.shape[:3], key.shape[1])
        if what not in self._valid:
            found = self._computed(torch.ops.gemma4_compat.valid_keys, query, key, value, mask, scale, gqa)
            self._valid[what] = mask, found
        return self._valid[what][1]

    def _computed(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return _computed(self._device, operator, *args, **kwargs)


def _computed(device: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operator of ours returns; None, for good on this device, if its kernels fail here."""
    if device in _broken:
        return None
    try:
        return operator(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _broken[device] = f"this package's kernels failed: {' '.join(str(error).split()):.200}"
        return None


def unsupported_reason(device: Any) -> str | None:
    """Why these kernels cannot run on this device; None if they can."""
    if device in _broken:
        return _broken[device]
    compiler = kernels.COMPILERS.get(device.type)
    return f"there are no kernels for {device.type}" if compiler is None else compiler.unsupported_reason()


def operators() -> Any:
    """Define the operators ``torch.ops.gemma4_compat`` once; the library that keeps them alive."""
    with _defining:
        return _library()


@functools.cache
def _library() -> Any:
    library = torch.library.Library("gemma4_compat", "DEF")
    for function, schema in _OPERATORS.items():
        name = function.__name__.removeprefix("_")
        library.define(name + schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    return library


@functools.cache
def operator(name: str) -> Any:
    """One of these operators: ``product``, ``shift``, ..."""
    operators()
    return getattr(torch.ops.gemma4_compat, name).default


def launch(device: Any, *launched: Any) -> None:
    """Launch kernels in order, compiled before if they are new."""
    known = kernels.of(device)
    known.prepare([kernel.text for kernel in launched], [])
    for kernel in launched:
        known.launch(kernel)


def _call(query: Any, key: Any, value: Any, mask: Any, scale: float, gqa: bool) -> attention.Call:
    found = attention.match(query, key, value, mask, scale=scale, enable_gqa=gqa)
    assert found is not None  # or CustomKernels would not have asked
    return found


def _valid_keys(query: Any, key: Any, value: Any, mask: Any, scale: float, gqa: bool) -> Any:
    found = attention.bounds(_call(query, key, value, mask, scale, gqa))
    assert found is not None  # there is a mask
    kernel, result = found
    launch(query.device, kernel)
    return result


def _attend(query: Any, key: Any, value: Any, mask: Any, valid: Any, scale: float, gqa: bool) -> Any:
    wanted, result = attention.kernels(_call(query, key, value, mask, scale, gqa), valid)
    launch(query.device, *wanted)
    return result


def _flash_bounds(mask: Any) -> Any:
    kernel, result = flash.bounds(mask)
    launch(mask.device, kernel)
    return result


def _flash(query: Any, key: Any, value: Any, mask: Any, bounds: Any, scale: float) -> Any:
    call = flash.Call(query, key, value, mask, scale)
    wanted, result = flash.kernels(call, bounds)
    launch(query.device, *wanted)
    return result


def _dense(given: Any, weight: Any, bias: Any) -> Any:
    if weight.shape[1] <= dense.SHORT:
        value = dot(given, weight, bias)
        value.memory = given.new_empty(value.shape)
        launch(given.device, writer.kernel_of([value]))
        return value.memory
    product = dense.product(given, weight, bias)
    result = product.empty()
    launch(given.device, *products.kernels_of(([product], [result])))
    return result


def _best(given: Any, weight: Any, *asked: Any) -> Any:
    *copy, most, cap = asked
    wanted, result = head.best(given, weight, head.Copy(*copy), most, cap)
    launch(given.device, *wanted)
    return result


def _product(*args: Any, **kwargs: Any) -> Any:
    product = nf4_gemv.match(*args, **kwargs)
    assert product is not None  # or CustomKernels would not have asked
    result = product.empty()
    launch(result.device, *products.kernels_of(([product], [result])))
    return result


def _experts(*args: Any) -> Any:
    found = expert_products.kernel_of(*args)
    assert found is not None  # or CustomKernels would not have asked
    kernel, result = found
    launch(result.device, kernel)
    return result


def _shift(keys: Any, values: Any, new_keys: Any, new_values: Any, by_kernel: bool) -> None:
    found = shifting.kernel_of(keys, values, new_keys, new_values) if by_kernel else None
    if found is not None:
        kernel, signature = found
        known = kernels.of(keys.device)
        if known.prepare([kernel.text], [signature]):
            known.launch(kernel)
            return
    shifting.copied(keys, values, new_keys, new_values)


def _bring(chosen: Any, memory: Any, layout: Any, slots: Any, state: Any, counts: Any, *sizes: int) -> Any:
    wanted, result = expert_slots.kernels(chosen, memory, layout, slots, state, counts, sizes)
    launch(chosen.device, *wanted)
    return result


def _shifted_by_kernel(*args: Any) -> bool:
    operator("shift")(*args, True)
    return True


def _means(given: Any, parts: int) -> Any:
    if given.device.type in kernels.COMPILERS and pointwise.of_rows(given, parts=parts) is not None:
        memory = given.new_empty((*given.shape[:-1], 1))
        operand, shape = Load(given, given.stride()), tuple(memory.shape)
        value = Value(pointwise.MEAN, (operand,), shape, given.dtype, columns=given.shape[-1], parts=parts)
        value.memory = memory
        known, (kernel,) = kernels.of(given.device), row_kernels.kernels_of([value])
        if known.prepare([kernel.text], [value.signature]):
            known.launch(kernel)
            return memory
    separate = given.reshape(parts, -1, given.shape[-1])
    return torch.cat([one.mean(-1, keepdim=True) for one in separate]).view(*given.shape[:-1], 1)


_OPERATORS: dict[Callable[..., Any], str] = {
    _valid_keys: "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, bool gqa) -> Tensor",
    _attend: "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor(a!)? valid, float scale, bool gqa)"
    " -> Tensor",
    _dense: "(Tensor given, Tensor weight, Tensor? bias) -> Tensor",
    _best: "(Tensor given, Tensor weight, Tensor numbers, Tensor scales, Tensor sizes, Tensor(a!) counts, int most,"
    " float cap) -> Tensor",
    # As bitsandbytes::gemm_4bit, and for integers.
    _product: "(Tensor given, Tensor packed, int[] shape, Tensor absmax, int blocksize, str quant_type,"
    " Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
    _experts: "(Tensor given, Tensor chosen, Tensor packed, int[] shape, Tensor absmax, int blocksize, str quant_type,"
    " Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
    _means: "(Tensor given, int parts) -> Tensor",
    _flash_bounds: "(Tensor mask) -> Tensor",
    _flash: "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bounds, float scale) -> Tensor",
    _shift: "(Tensor(a!) keys, Tensor(b!) values, Tensor new_keys, Tensor new_values, bool by_kernel) -> ()",
    _bring: "(Tensor chosen, Tensor memory, Tensor layout, Tensor(a!) slots, Tensor(b!) state, Tensor(c!) counts,"
    " int experts, int held) -> Tensor",
    top_tokens.filtered: "(Tensor scores, int k, float p, int least, bool single) -> Tensor",
    top_tokens.drawn: "(Tensor scores, Tensor noise, int k, float p, int least) -> Tensor",
    shares.shares: f"({shares.SCHEMA}Tensor(a!) found, Tensor(b!) sums) -> ()",
    shares.share_gradients: f"({shares.SCHEMA}Tensor sums, Tensor given, Tensor totals, Tensor(a!) found) -> ()",
}


def computes_best_words(weight: Any) -> bool:
    """Whether a head of this dtype and width can be computed in two stages, with the bits of the whole."""
    own, inputs = kernels.of(weight.device), weight.shape[1]
    key = "head", weight.dtype, inputs

    def has_same_bits() -> bool:
        generator = torch.Generator(weight.device).manual_seed(0)
        options = {"generator": generator, "device": weight.device}
        tried = torch.randn((_TRIED_WORDS, inputs), **options).to(weight.dtype)
        copy = head.Copy.of(tried)
        launch(weight.device, copy.made_from(tried))
        for rows in (1, products.FEW_ROWS + 1):
            given = torch.randn((rows, inputs), **options).to(weight.dtype)
            found, expected = _best(given, tried, *copy, 8, 0.0), _dense(given, tried, None)
            chosen = found != -torch.inf
            same = torch.equal(found[chosen], expected[chosen])
            if not same or not bool(chosen[expected >= expected.topk(8).values[..., -1:]].all()):
                return False
        return True

    return own.selftest(key, "the head in two stages", "the whole head is computed", has_same_bits)


def multiplies_experts(dtype: Any, packed: Any, shape: Any, absmax: Any, *rest: Any) -> bool:
    """Whether products with experts of this format have the bits of those with a weight that is no expert's."""
    device, (_, height, width), (blocksize, quant_type, *nested) = packed.device, shape, rest
    key = "experts", dtype, height, width, blocksize, quant_type, bool(nested)

    def has_same_bits() -> bool:
        generator = torch.Generator(device).manual_seed(0)
        tried = torch.randn((2, width), generator=generator, device=device).to(dtype)
        chosen = torch.tensor([1, 0, shape[0] - 1, 1], device=device)
        found, same = _experts(tried, chosen, packed, shape, absmax, *rest), True
        for number, expert in enumerate(chosen.tolist()):
            own, scales = (one.view(shape[0], -1)[expert].contiguous() for one in (packed, absmax))
            more = []
            if nested:
                of_scales, code, offset = nested
                more = [of_scales.view(shape[0], -1)[expert].contiguous(), code, offset[expert]]
            given = own.view(-1, 1), (height, width), scales, blocksize, quant_type, None, *more
            same &= torch.equal(found[number], _product(tried[number // 2][None], *given)[0])
        return same

    operators()
    what = "products with experts"
    return kernels.of(device).selftest(key, what, "experts are dequantized", has_same_bits)


def brings_experts(device: Any) -> bool:
    """Whether experts can be kept on this device: slots get the bytes that the host has."""

    def has_same_bits() -> bool:
        experts, held, rows, place = 5, 3, (48, 20, 3), 256  # words of 16 and of 4 bytes, and bytes
        generator = torch.Generator(device).manual_seed(0)
        memory = torch.randint(0, 256, (len(rows), place), generator=generator, device=device, dtype=torch.uint8)
        slots, counts = torch.zeros_like(memory), torch.zeros(2, dtype=torch.int64, device=device)
        state = torch.full((expert_slots.state_size(experts, held),), -1, dtype=torch.int32, device=device)
        layout = torch.tensor([(place * k, place * k, row) for k, row in enumerate(rows)], device=device)
        same = True
        for chosen in ([0, 1], [2, 0, 2], [3], [4, 3, 1], [0]):
            numbers = torch.tensor(chosen, device=device)
            into = _bring(numbers, memory, layout, slots, state, counts, experts, held)
            for row, there, here in zip(rows, memory, slots, strict=True):
                there, here = there[: experts * row].view(experts, row), here[: held * row].view(held, row)
                same &= torch.equal(there[numbers], here[into])
        return same and counts.tolist() == [2, 7]

    operators()
    what = "what stays of experts on the card"
    return kernels.of(device).selftest("expert slots", what, "no experts stay on the card", has_same_bits)


def dot(given: Any, weight: Any, bias: Any = None) -> Value:
    """A short product as a pointwise operation."""
    is_constant = isinstance(weight, torch.nn.Parameter)
    operands = [Load(given, (weight.shape[1], 1)), Load(weight.detach(), (weight.shape[1], 1), is_constant)]
    if bias is not None:
        operands.append(Load(bias.detach(), (1,)))
    shape = (*given.shape[:-1], weight.shape[0])
    return Value(DOT, tuple(operands), shape, weight.dtype, columns=weight.shape[1])
