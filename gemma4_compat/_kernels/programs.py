"""Kernels as CUDA C++: the files of ``cuda``, and programs that include them.

Each file says who launches its kernels, and which test proves them.

* ``prelude.cuh``: what every kernel needs. ``tensor_cores.cuh``: one multiplication by tensor cores.
* ``attention.cuh``, ``attention_tensor.cuh``: attention of one query. ``flash.cuh``: of a prompt. ``shares.cuh``: of
  training, between its products.
* ``nf4_gemv.cuh``, ``nf4_exact.cuh``: products with 4-bit weights, with custom numerics and with bitsandbytes'.
  ``nf4_rows.cuh``: the former, of more than eight rows.
  ``nf4_dequantize.cuh``, ``experts.cuh``: such weights, and rows of experts, dequantized. ``four_bit.cuh``: how they
  are stored.
* ``expert_products.cuh``: products with experts' weights. ``expert_slots.cuh``: experts of the host that are kept on
  the card.
* ``dense.cuh``: products with weights that are not quantized. ``head.cuh``: the best words of a head.
* ``pointwise.cuh``, ``rows.cuh``, ``runs.cuh``: what fused kernels call, whose bodies :mod:`fuse` writes.
* ``shifting.cuh``: rows of a sliding cache. ``top_tokens.cuh``: top-k and top-p.
* ``cross_entropy.cuh``: training's loss.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

#: Threads of a block, unless a kernel says otherwise.
BLOCK = 128
#: Kernels count elements in 32 bits.
FAR = 1 << 31
_PRELUDE = "prelude.cuh"
INCLUDE = re.compile(r'#include "(\w+\.cuh)"\n')
BOUNDS = re.compile(r"__launch_bounds__\([^)]*\) ")
_WAITS = "wait_for_kernel_before()"


@functools.cache
def headers() -> dict[str, str]:
    """The files of ``cuda``, by the name that a text includes. They are read once."""
    folder = resources.files("gemma4_compat._kernels").joinpath("cuda")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".cuh")), key=lambda file: file.name)
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def included(text: str) -> list[str]:
    """The files that a text includes by itself, not through other files."""
    return [headers()[name] for name in INCLUDE.findall(text)]


def length(text: str) -> int:
    """Characters of a text, and of what it includes."""
    return sum(map(len, (text, *included(text))))


def waits(text: str) -> bool:
    """Whether a kernel waits for the kernel before it. In a file all kernels do, or none."""
    return any(_WAITS in part for part in (text, *included(text)))


def program(texts: Sequence[str]) -> tuple[str, list[str]]:
    """One program with a kernel for each text, and what NVRTC calls each: its name, or an instance of a template."""
    files, pieces, names = [_PRELUDE], [], []
    for number, text in enumerate(texts):
        files += INCLUDE.findall(text)
        own = INCLUDE.sub("", text)
        if "{" in own:
            names.append(f"{name_of(own)}_{number}")
            pieces.append(own.replace(f" {name_of(own)}(", f" {names[-1]}(", 1))
        else:
            names.append(own)
    return "".join([*(f'#include "{name}"\n' for name in dict.fromkeys(files)), *pieces]), names


def span(tensor: Any) -> int:
    """Elements from the first to the last one in memory."""
    return int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def name_of(text: str) -> str:
    """The name of the kernel with this text, as a profile shows it, without its number."""
    return BOUNDS.sub("", text, count=1).partition("(")[0].rpartition(" ")[2]


def instance(file: str, template: str, *arguments: str | int | bool) -> str:
    """The text of an instance of a kernel that is a template in a file."""
    return f'#include "{file}"\n{with_arguments(template, arguments)}'


def with_arguments(template: str, arguments: Iterable[str | int | bool]) -> str:
    """An instance of a template, as C++ writes it."""
    return f"{template}<{', '.join(str(one).lower() if isinstance(one, bool) else str(one) for one in arguments)}>"


@dataclass(frozen=True)
class Kind:
    """How a dtype is stored: its name in ``prelude.cuh``, its C type, and its conversions to and from ``float``."""

    name: str
    c: str
    load: str
    store: str
    rounded: str


def kinds() -> dict[Any, Kind]:
    """By dtype."""
    import torch

    return {
        torch.float32: Kind("Float32", "float", "{}", "{}", "{}"),
        torch.bfloat16: Kind("BFloat16", "u16", "from_bf16({})", "to_bf16({})", "round_bf16({})"),
        torch.float16: Kind("Float16", "u16", "from_f16({})", "to_f16({})", "round_f16({})"),
        torch.bool: Kind("Bool", "unsigned char", "{}", "", ""),
    }


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        text: of CUDA C++; kernels with the same text are the same kernel. After lines that include files of
            ``cuda``, either the kernel, or an instance of a template in them: ``attention::bounds<Bool>``.
        tensors: its arguments, in order: memory that it reads, then memory that it writes.
        written: how many of them it writes.
        sizes: arguments after those: 32-bit unsigned integers, or 32-bit floats. For pointwise operations they are the
            results' element counts, each number once, the largest first.
        block: threads of a block.
        grid: blocks in x and y; None for as many as have a thread for each of the first of ``sizes``.
        shared: bytes of shared memory of a block, beyond that in the text.
    """

    text: str
    tensors: tuple[Any, ...]
    written: int
    sizes: tuple[int | float, ...]
    block: int = BLOCK
    grid: tuple[int, int] | None = None
    shared: int = 0

    @property
    def blocks(self) -> tuple[int, int]:
        """The grid: blocks in x and y."""
        return self.grid or (-(-int(self.sizes[0]) // self.block), 1)
