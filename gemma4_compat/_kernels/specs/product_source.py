"""The CUDA C of products with 4-bit weights (:mod:`products`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import kinds
from gemma4_compat._kernels.specs import several

#: The name in an operation's signature.
OPERATION = "4-bit product"
WARPS = 8  # of a block: as many threads as a code of nested scales has values
_GROUP = 1024  # inputs that a warp reads at once
_THREAD = 32  # of them, of one thread
_SHARED = 47 << 10  # bytes of a block for inputs; nested scales take another 1 KiB

#: ``csrc/gemm_4bit_common.cuh`` (0.50.2).
VALUES = {
    "nf4": (
        *("-1.0f", "-0.6961928009986877f", "-0.5250730514526367f", "-0.39491748809814453f", "-0.28444138169288635f"),
        *("-0.18477343022823334f", "-0.09105003625154495f", "0.0f", "0.07958029955625534f", "0.16093020141124725f"),
        *("0.24611230194568634f", "0.33791524171829224f", "0.44070982933044434f", "0.5626170039176941f"),
        *("0.7229568362236023f", "1.0f"),
    ),
    "fp4": (
        *("0.0f", "0.005208333333f", "0.66666667f", "1.0f", "0.33333333f", "0.5f", "0.16666667f", "0.25f"),
        *("-0.0f", "-0.005208333333f", "-0.66666667f", "-1.0f", "-0.33333333f", "-0.5f", "-0.16666667f", "-0.25f"),
    ),
}


class Format(NamedTuple):
    """What a kernel's text depends on, apart from the number of weights.

    Attributes:
        operation: ``gemm_4bit`` (bitsandbytes 0.50 and newer) or ``gemv_4bit`` (older): the order of additions.
        dtype: of inputs and results, a ``torch.dtype``.
        rows: of the input.
        inputs: of each row.
        quant_type: ``nf4`` or ``fp4``.
        blocksize: weights per scale.
        nested: whether scales are quantized.
        bias: whether there is one.
    """

    operation: str
    dtype: Any
    rows: int
    inputs: int
    quant_type: str
    blocksize: int
    nested: bool
    bias: bool

    @property
    def signature(self) -> tuple[Any, ...]:
        """As for other operations: name, operands, dtype."""
        return OPERATION, tuple(self)[:1] + tuple(self)[2:], self.dtype

    @property
    def fields(self) -> list[tuple[str, str] | None]:
        """C types and names of what a weight has, in the order of ``FourBit`` in ``four_bit.cuh``."""
        kind = kinds()[self.dtype].c
        nested = [("const unsigned char", "quantized"), ("const float", "codes"), ("const float", "offset")]
        return [
            ("const unsigned char", "packed"),
            ("const float", "absmax"),
            *(nested if self.nested else [None] * 3),
            ("const float", "values") if self.operation == "gemv_4bit" else None,
            (f"const {kind}", "bias") if self.bias else None,
            (kind, "output"),
        ]


def fits(layout: Format) -> bool:
    """Whether a kernel can read rows of so many inputs."""
    inputs = layout.inputs
    return not inputs % _THREAD and layout.dtype.itemsize * min(inputs, _GROUP) * layout.rows <= _SHARED


def rows_of_a_warp(inputs: int) -> int:
    """How many rows share the last group of inputs."""
    rest = inputs % _GROUP
    return _GROUP // rest if rest in (_GROUP // 2, _GROUP // 4) else 1


class _Order(NamedTuple):
    """How one release of bitsandbytes adds: C that adds a pair of products, and the shuffles of the last sums."""

    added: str
    shuffles: tuple[int, ...]


_ORDERS = {
    # csrc/gemm_4bit_simt.cu (0.50.2): pairs are added first.
    "gemm_4bit": _Order("sum = add_flushed(sum, add_flushed(low, high));", (16, 8, 4, 2, 1)),
    # csrc/kernels.cu (0.49.2), kgemm_4bit_inference_naive: one after the other; cub::WarpReduce adds neighbours first.
    "gemv_4bit": _Order("sum = add_flushed(add_flushed(sum, low), high);", (1, 2, 4, 8, 16)),
}


@functools.cache
def text_of(layout: Format, weights: int) -> str:
    return _Writer(layout, weights).text()


class _Writer:
    """Writes the kernel of a format."""

    def __init__(self, layout: Format, weights: int) -> None:
        import torch

        self._layout, self._weights = layout, weights
        self._wide = layout.dtype == torch.float32
        self._kind = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[layout.dtype]
        self._order = _ORDERS[layout.operation]
        self._warp_rows = rows_of_a_warp(layout.inputs)
        rest = layout.inputs % _GROUP
        self._shared_rest = rest if self._warp_rows > 1 else 0
        whole = layout.inputs - self._shared_rest
        self._groups = -(-whole // _GROUP)
        #: 16-byte words of a thread's inputs in a group.
        self._words = _THREAD * layout.dtype.itemsize // 16
        # Groups of inputs that are in shared memory at once, for all rows.
        room = _SHARED // (_GROUP * layout.dtype.itemsize * layout.rows)
        room = room if layout.rows == 1 else min(room, 4)  # registers: each row of the input has sums of its own
        every = self._groups + (1 if self._shared_rest else 0)
        self._steps = [list(range(every))[at : at + room] for at in range(0, every, room)]

    def text(self) -> str:
        lines = [self._head()]
        for number, groups in enumerate(self._steps):
            lines.append(self._step(groups, first=number == 0))
        lines.append(self._tail())
        return "\n".join(lines) + "\n}\n"

    # Parameters

    def _names(self) -> list[tuple[str, str]]:
        """What belongs to a weight."""
        kind = "float" if self._wide else "u16"
        found = [("const unsigned char*", "packed"), ("const float*", "absmax")]
        if self._layout.nested:
            found += [("const unsigned char*", "quantized"), ("const float*", "codes")]
            found.append(("const float*", "offset"))
        if self._layout.operation == "gemv_4bit":
            found.append(("const float*", "values"))
        if self._layout.bias:
            found.append((f"const {kind}*", "bias"))
        return found

    def _head(self) -> str:
        layout, kind = self._layout, "float" if self._wide else "u16"
        names = self._names()
        parameters = several.parameters("const Word16* __restrict__ input", names, kind, self._weights)
        longest = max(len(groups) for groups in self._steps)
        lines = [
            f'extern "C" __global__ void __launch_bounds__({WARPS * 32}) product({", ".join(parameters)}) {{',
            f"__shared__ Word16 given[{longest * 32 * self._words * layout.rows}];",
            "const int lane = threadIdx.x & 31;",
            f"int first = (threadIdx.x >> 5) * {self._warp_rows}, outputs = outputs0;",
            "unsigned int block = blockIdx.x;",
        ]
        lines += [f"{c} {name} = {name}0;" for c, name in names]
        lines.append(f"{kind}* output = output0;")
        lines += several.choice(names, self._weights)
        lines.append(f"first += block * {WARPS * self._warp_rows};")
        rows = self._warp_rows * layout.rows
        lines.append(f"float sums[{rows}];")
        lines += [f"sums[{number}] = 0.0f;" for number in range(rows)]
        lines.append(self._value_of_a_lane())
        if layout.nested:  # in shared memory at once: to look them up later would cost the memory's latency again
            lines.append(f"__shared__ float known[{WARPS * 32}];")
            lines.append("const float code = __ldg(codes + threadIdx.x), shift = __ldg(offset);")
        return "\n".join(lines)

    def _value_of_a_lane(self) -> str:
        """The value that the lane keeps for others: of the nibble with its number."""
        layout = self._layout
        if layout.operation == "gemv_4bit":
            value = "values[lane & 15]"
        else:
            listed = ", ".join(VALUES[layout.quant_type])
            return (
                f"const float listed[16] = {{{listed}}};\nfloat own = listed[0];\n#pragma unroll\n"
                "for (int n = 1; n < 16; ++n) if ((lane & 15) == n) own = listed[n];\n" + self._kept("own")
            )
        return self._kept(value)

    def _kept(self, value: str) -> str:
        if self._wide:
            return f"const float mine = {value};"
        return f"const unsigned int mine = to_{self._kind}({self._rounded(value)});"

    def _rounded(self, value: str) -> str:
        return f"round_{self._kind}({value})"

    # Groups of inputs

    def _step(self, groups: list[int], *, first: bool) -> str:
        """Load all weights and scales of these groups, stage the inputs, and add the products."""
        layout = self._layout
        lines = ["{"]
        for group in groups:
            rows = 1 if self._is_shared(group) else self._warp_rows
            lines += [self._loads(group, row) for row in range(rows)]
        scales = "\n".join(
            self._scale(f"{group}_{row}")
            for group in groups
            for row in range(1 if self._is_shared(group) else self._warp_rows)
        )
        lines.append("let_next_kernel_begin();\nwait_for_kernel_before();" if first else "__syncthreads();")
        lines.append(self._staged(groups))
        if first and layout.nested:
            lines.append("known[threadIdx.x] = code;")
        lines += ["__syncthreads();", scales]
        for position, group in enumerate(groups):
            if self._is_shared(group):
                lines.append(self._shared_group(group, (position, len(groups))))
                continue
            for row in range(self._warp_rows):
                sums = [f"sums[{row * layout.rows + m}]" for m in range(layout.rows)]
                lines.append(self._added(f"{group}_{row}", (position, len(groups)), "lane", sums, self._active(group)))
        lines.append("}")
        return "\n".join(lines)

    def _is_shared(self, group: int) -> bool:
        return bool(self._shared_rest) and group == self._groups

    def _active(self, group: int) -> str | None:
        """The condition for lanes that have inputs; None if all have."""
        left = self._layout.inputs - group * _GROUP
        return None if left >= _GROUP else f"lane < {left // _THREAD}"

    def _loads(self, group: int, row: int) -> str:
        """The packed weights ``w`` of this group and row, and their scale ``s``."""
        layout = self._layout
        name = f"{group}_{row}"
        if self._is_shared(group):
            lanes = self._shared_rest // _THREAD
            of_row, at = f"first + lane / {lanes}", f"{group * _GROUP} + (lane % {lanes}) * {_THREAD}"
            condition = f"of{name} < outputs"
        else:
            of_row, at = f"first + {row}", f"{group * _GROUP} + lane * {_THREAD}"
            active = self._active(group)
            condition = f"of{name} < outputs" + (f" && {active}" if active else "")
        shift = layout.blocksize.bit_length() - 1
        per_row = layout.inputs >> shift
        scale = f"__ldg(absmax + block{name})"
        lines = [
            f"const int of{name} = {of_row}, at{name} = {at};",
            f"const int block{name} = of{name} * {per_row} + (at{name} >> {shift});",
            f"Word16 w{name} = {{{{0u, 0u, 0u, 0u}}}};",
            f"float s{name} = 0.0f;",
        ]
        if layout.nested:
            lines.append(f"unsigned char q{name} = 0;")
            scale = f"__ldg(absmax + (block{name} >> 8)); q{name} = __ldg(quantized + block{name})"
        packed = f"packed + ((unsigned long long)of{name} * {layout.inputs} + at{name}) / 2"
        lines.append(f"if ({condition}) {{ w{name} = load_once({packed}); s{name} = {scale}; }}")
        return "\n".join(lines)

    def _scale(self, name: str) -> str:
        """The scale in the form in which weights are multiplied by it."""
        nested = f"s{name} = fma_flushed(known[q{name}], s{name}, shift);\n"
        pairs = (
            f"{{ const unsigned int both = pair_{self._kind}(s{name}, s{name}); s{name} = __uint_as_float(both); }}"
        )
        return (nested if self._layout.nested else "") + ("" if self._wide else pairs)

    def _staged(self, groups: list[int]) -> str:
        """The inputs in shared memory, in the order in which lanes read them."""
        layout = self._layout
        words = self._words
        per_row = layout.inputs * layout.dtype.itemsize // 16
        begin = groups[0] * 32 * words
        end = min(per_row, (groups[-1] + 1) * 32 * words)
        each = len(groups) * 32 * words
        lines = []
        for m in range(layout.rows):
            to = f"{m * each} + ((c / {32 * words}) * {words} + c % {words}) * 32 + (c % {32 * words}) / {words}"
            lines.append(
                f"for (int c = threadIdx.x; c < {end - begin}; c += {WARPS * 32}) "
                f"given[{to}] = input[{m * per_row + begin} + c];"
            )
        return "\n".join(lines)

    def _shared_group(self, group: int, position: tuple[int, int]) -> str:
        """The last inputs of several rows: each lane continues the sum of the lane that would have them."""
        layout = self._layout
        lanes = self._shared_rest // _THREAD
        lines = [f"const int from = lane % {lanes}, mine_of = lane / {lanes};"]
        for m in range(layout.rows):
            lines.append(f"float t{m} = __shfl_sync(0xffffffffu, sums[{m}], from);")
            for row in range(1, self._warp_rows):
                lines.append(
                    f"{{ const float other = __shfl_sync(0xffffffffu, sums[{row * layout.rows + m}], from); "
                    f"if (mine_of == {row}) t{m} = other; }}"
                )
        lines.append(self._added(f"{group}_0", position, "from", [f"t{m}" for m in range(layout.rows)], None))
        for m in range(layout.rows):
            for row in range(self._warp_rows):
                lines.append(
                    f"{{ const float back = __shfl_sync(0xffffffffu, t{m}, {row * lanes} + from); "
                    f"if (lane < {lanes}) sums[{row * layout.rows + m}] = back; }}"
                )
        return "\n".join(lines)

    def _added(self, name: str, position: tuple[int, int], lane: str, sums: list[str], active: str | None) -> str:
        """Add the products of a group to these sums, one for each row of the input.

        ``position`` is the group's number among those in shared memory, and how many those are.
        """
        layout = self._layout
        lines = ["#pragma unroll", "for (int part = 0; part < 4; ++part) {"]
        for m in range(layout.rows):
            begin = (m * position[1] + position[0]) * self._words
            at = f"({begin} + part{' * 2' if self._wide else ''}) * 32 + {lane}"
            lines.append(f"const Word16 a{m} = given[{at}];")
            if self._wide:
                lines.append(f"const Word16 b{m} = given[{at} + 32];")
        lines.append(self._wide_part(name, sums, active) if self._wide else self._narrow_part(name, sums, active))
        lines.append("}")
        return "\n".join(lines)

    def _nibble(self, name: str, shift: str) -> str:
        return f"__shfl_sync(0xffffffffu, mine, w{name}.part[part] >> ({shift}), 16)"

    def _narrow_part(self, name: str, sums: list[str], active: str | None) -> str:
        lines = ["#pragma unroll", "for (int j = 0; j < 4; ++j) {"]
        lines.append(f"const unsigned int even = {self._nibble(name, '8 * j + 4')};")
        lines.append(f"const unsigned int odd = {self._nibble(name, '8 * j')};")
        lines.append(
            f"const unsigned int w = multiply_pairs_{self._kind}("
            f"__byte_perm(even, odd, 0x5410), __float_as_uint(s{name}));"
        )
        for m, total in enumerate(sums):
            lines.append(f"{{ const unsigned int p = multiply_pairs_{self._kind}(a{m}.part[j], w);")
            if self._kind == "bf16":
                lines.append("const float low = __uint_as_float(p << 16), high = __uint_as_float(p & 0xffff0000u);")
            else:
                lines.append("const float low = from_f16((u16)(p & 0xffffu)), high = from_f16((u16)(p >> 16));")
            added = self._order.added.replace("sum", total)
            lines.append(f"if ({active}) {added} }}" if active else f"{added} }}")
        lines.append("}")
        return "\n".join(lines)

    def _wide_part(self, name: str, sums: list[str], active: str | None) -> str:
        lines = ["float w[8];", "#pragma unroll", "for (int j = 0; j < 4; ++j) {"]
        lines.append(f"w[2 * j] = multiply_flushed({self._nibble(name, '8 * j + 4')}, s{name});")
        lines.append(f"w[2 * j + 1] = multiply_flushed({self._nibble(name, '8 * j')}, s{name});")
        lines.append("}")
        # gemm_4bit takes the numbers of both 16-byte words in turns, gemv_4bit in order.
        order = (0, 4, 1, 5, 2, 6, 3, 7) if self._layout.operation == "gemm_4bit" else tuple(range(8))
        for m, total in enumerate(sums):
            found = "".join(
                f"{total} = fma_flushed(__uint_as_float({'a' if k < 4 else 'b'}{m}.part[{k % 4}]), w[{k}], {total}); "
                for k in order
            )
            lines.append(f"if ({active}) {{ {found}}}" if active else found)
        return "\n".join(lines)

    # Results

    def _tail(self) -> str:
        layout = self._layout
        lines = []
        for row in range(self._warp_rows):
            for m in range(layout.rows):
                total = f"sums[{row * layout.rows + m}]"
                lines += [
                    f"{total} = add_flushed({total}, __shfl_down_sync(0xffffffffu, {total}, {offset}));"
                    for offset in self._order.shuffles
                ]
        lines.append("if (lane == 0) {")
        for row in range(self._warp_rows):
            lines.append(f"if (first + {row} < outputs) {{")
            bias = f"bias[first + {row}]"
            if layout.bias and not self._wide:
                bias = f"from_{self._kind}({bias})"
            for m in range(layout.rows):
                value = f"sums[{row * layout.rows + m}]"
                if layout.operation == "gemm_4bit":
                    value = f"add_flushed({value}, {bias if layout.bias else '0.0f'})"
                stored = value if self._wide else f"to_{self._kind}({self._rounded(value)})"
                lines.append(f"output[(unsigned long long){m} * outputs + first + {row}] = {stored};")
            lines.append("}")
        lines.append("}")
        return "\n".join(lines)
