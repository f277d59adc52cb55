"""Kernels that compute several results at once: products with several weights of one input, or two kernels in one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gemma4_compat._kernels.programs import BOUNDS, INCLUDE, Kernel, with_arguments


def text_of(
    function: str,
    arguments: Sequence[str | int | bool],
    given: str,
    fields: Sequence[tuple[str, str] | None],
    weights: int,
    bounds: str,
) -> str:
    """The kernel that computes products with so many weights.

    Args:
        function: the function template in ``cuda`` that computes them: ``nf4_gemv``, in a file with that name.
        arguments: of the template.
        given: C type of the input's numbers.
        fields: C types and names of what the function is given of a weight; None for what is absent. The last is the
            output.
        weights: how many.
        bounds: of launches: threads, and if need be blocks of an SM.
    """
    name = function.partition("::")[0]
    present = [field for field in fields if field is not None]
    parameters = [f"const {given}* __restrict__ input"]
    for number in range(weights):
        parameters += [f"{c}* __restrict__ {field}{number}" for c, field in present[:-1]]
    parameters += [f"{present[-1][0]}* __restrict__ output{number}" for number in range(weights)]
    for number in range(weights):
        parameters += [f"unsigned int outputs{number}", f"unsigned int blocks{number}"]
    lines = ["unsigned int block = blockIdx.x, outputs = outputs0, blocks = blocks0;"]
    lines += [f"{c}* {field} = {field}0;" for c, field in (present[-1], *present[:-1])]
    for number in range(1, weights):
        before = " + ".join(f"blocks{other}" for other in range(number))
        chosen = "".join(
            f"{field} = {field}{number}; " for field in ("outputs", "blocks", *(name for _, name in present))
        )
        lines.append(f"if (blockIdx.x >= {before}) {{ block = blockIdx.x - ({before}); {chosen}}}")
    own = ", ".join(field[1] if field else "nullptr" for field in fields)
    lines.append(f"{with_arguments(function, arguments)}(block, input, {{{own}, outputs, blocks}});")
    head = f'#include "{name}.cuh"\nextern "C" __global__ void __launch_bounds__({bounds}) {name}'
    body = "\n".join(lines)
    return f"{head}({', '.join(parameters)}) {{\n{body}\n}}\n"


def side_by_side(one: Kernel, other: Kernel) -> Kernel:
    """One kernel that does what two do, neither of which reads what the other writes: each has blocks of its own.

    Both need a grid of one dimension, and ``other`` no more threads a block than ``one``.
    """
    begin, given, body = _parts(one.text)
    _, also_given, also = _parts(other.text)
    includes = "".join(found[0] for text in (one.text, other.text) for found in INCLUDE.finditer(text))
    renamed = {parameter.rpartition(" ")[2]: f"also_{parameter.rpartition(' ')[2]}" for parameter in also_given}

    def renaming(text: str) -> str:
        return re.sub(r"\b\w+\b", lambda found: renamed.get(found[0], found[0]), text)

    if other.block < one.block:
        also = f"if (threadIdx.x >= {other.block}u) return;\n{also}"
    also = renaming(also).replace("blockIdx.x", "(blockIdx.x - also_first)")
    reads, also_reads = len(one.tensors) - one.written, len(other.tensors) - other.written
    also_given = [renaming(parameter) for parameter in also_given]
    parameters = [*given[:reads], *also_given[:also_reads], *given[reads : len(one.tensors)]]
    parameters += also_given[also_reads : len(other.tensors)]
    parameters += [*given[len(one.tensors) :], *also_given[len(other.tensors) :], "unsigned int also_first"]
    head = f"{includes}{INCLUDE.sub('', begin)}({', '.join(parameters)})"
    text = "\n".join([f"{head} {{", "if (blockIdx.x < also_first) {", body, "} else {", also, "}", "}", ""])
    tensors = (*one.tensors[:reads], *other.tensors[:also_reads], *one.tensors[reads:], *other.tensors[also_reads:])
    blocks, also_blocks = one.blocks[0], other.blocks[0]
    sizes = (*one.sizes, *other.sizes, blocks)
    return Kernel(text, tensors, one.written + other.written, sizes, one.block, (blocks + also_blocks, 1))


def _parts(text: str) -> tuple[str, list[str], str]:
    """A kernel's declaration up to its name, its parameters, and its body."""
    bounds = BOUNDS.search(text)
    begin = text.index("(", bounds.end() if bounds else 0)
    end = text.index(")", begin)
    body = text[text.index("{", end) + 1 : text.rindex("}")]
    return text[:begin], text[begin + 1 : end].split(", "), body
