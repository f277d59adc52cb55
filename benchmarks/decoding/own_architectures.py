"""Kernels as older GPUs get them, on this one: compiled for their compute capability, to PTX, which the driver
translates for the GPU that is here.

For ``own_kernels.py``. Code for 7.5 has no bfloat16 and no asynchronous copies, and multiplies half as many inputs at
once; no kernel starts early. Its branches are those that a T4 runs, on the arithmetic units of this GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.common import Data
from benchmarks.decoding import own_products
from gemma4_compat._kernels import compiling, kernels
from gemma4_compat._kernels.fuse import pointwise

#: Compute capabilities. For the first, tensor cores add up fewer products at once, so sums may round otherwise.
OLDER = ((7, 5), (8, 0))
#: Outputs and inputs of products, keys and widths of attention.
PRODUCTS = ((256, 1536), (1536, 6144), (2048, 1536))
ATTENTION = ((256, 500), (512, 64), (512, 8192))


class OlderCompiler(compiling.CudaCompiler):
    """Compiles to PTX for :attr:`capability`."""

    capability: tuple[int, int]

    @functools.cached_property
    def _capability(self) -> tuple[int, int]:
        return self.capability  # kernels start early only from 9.0 on

    @functools.cached_property
    def _options(self) -> tuple[str, ...]:
        return compiling.options(self._nvrtc.architecture(self.capability).replace("sm_", "compute_"))


def compiler_for(capability: tuple[int, int]) -> Any:
    """The class for a compute capability."""
    return type(f"CompilerFor{capability[0]}{capability[1]}", (OlderCompiler,), {"capability": capability})


@contextlib.contextmanager
def compiled_by(kind: Any, device: Any) -> Iterator[None]:
    """Inside, the kernels of a device come from this compiler."""
    kept = kernels._kernels.pop(device, None)
    try:
        with mock.patch.dict(kernels.COMPILERS, {device.type: kind}):
            yield
    finally:
        kernels._kernels.pop(device, None)
        if kept is not None:
            kernels._kernels[device] = kept


def signatures() -> Iterator[tuple[Any, ...]]:
    """Of operations on single elements, each in every dtype, to be tried against PyTorch's."""
    import torch

    for dtype, name in itertools.product((torch.bfloat16, torch.float16, torch.float32), pointwise.operations()):
        how = pointwise.operations()[name]
        if how.reference is not None and name not in ("where", "divide_by_number", pointwise.MEAN):
            yield name, (dtype,) * (how.source.count("{1}") + 1), dtype
    for one, other in itertools.permutations((torch.bfloat16, torch.float16, torch.float32), 2):
        yield "cast", (one,), other


def computed(device: Any, attention: Any) -> dict[str, Any]:
    """What the custom kernels give, by name: products and attention of fixed random numbers."""
    import torch

    products = own_products.Products(device)
    found = {}
    for dtype, (outputs, inputs) in itertools.product((torch.bfloat16, torch.float16), PRODUCTS):
        wanted = own_products.asked(dtype, inputs, outputs, rows=own_products.ROWS, device=device)
        found[f"product {dtype} {outputs} x {inputs}"] = products.computed(wanted)
    one = attention(device)
    for dtype, (width, keys) in itertools.product((torch.bfloat16, torch.float16), ATTENTION):
        given = one.inputs((width, 1, 8, keys + 300, keys), dtype)
        found[f"attention {dtype} {width}, {keys} keys"] = one.ours(*given, width**-0.5)
    return found


def architectures(
    device: Any, few: bool, *, trials: Callable[..., Data], attention: Any, compiler: Callable[..., Any] = compiler_for
) -> Data:
    """For each older capability: the trials that fail, errors, and where bits are not those of this GPU's own code.

    Args:
        device: the GPU.
        few: try a few shapes.
        trials: of ``own_kernels``.
        attention: the class there.
        compiler: the class of a capability.
    """
    import torch

    expected = computed(device, attention)
    result: Data = {}
    for capability in OLDER:
        with compiled_by(compiler(capability), device):
            found = computed(device, attention)
            one, several = own_products.Products(device), attention(device)
            cells = itertools.product((torch.bfloat16, torch.float16), PRODUCTS[: 1 if few else None])
            errors = [one.errors(dtype, *shape) for dtype, shape in cells]
            lengths = ATTENTION[: 1 if few else None]
            errors += [several.errors(dtype, *cell) for dtype in (torch.bfloat16, torch.float16) for cell in lengths]
            result[".".join(map(str, capability))] = {
                "trials": trials(device, few, signatures()),
                "others": [name for name, bits in found.items() if not torch.equal(bits, expected[name])],
                "compared": len(found),
                "errors": errors,
            }
    return result
