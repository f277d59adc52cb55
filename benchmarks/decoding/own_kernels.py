"""Which kernels of this package have the bits of the originals on this GPU, how far the others are from float64, and
how long they take?

python benchmarks/decoding/own_kernels.py --out FILE.json [--parts trials,attention,products,older] [--few]

trials     means of rows, products with 4-bit weights in the shapes of the five variants, moves of a cache's rows, and
           every format of 4-bit weights: the trials that are made before such a kernel is used
attention  errors of one query's attention against float64, beside PyTorch's, and microseconds of both in a captured
           graph, the keys not in the cache of the GPU
products   errors of up to eight rows with 4-bit weights by tensor cores against float64, beside bitsandbytes' kernel,
           in eight shapes and in those of the five variants; microseconds of both and of the kernels with
           bitsandbytes' bits, and their share of the speed of the memory
older      the code that GPUs of compute capability 7.5 and 8.0 get, run on this one: trials, errors, and where bits
           are not those of this GPU's own code

The file is written after every part. Exit code 1: attention errs more than PyTorch's or a product more than
bitsandbytes', or bits depend on the length of the cache, on padding or on the batch; or code for 8.0 has other bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Data
from benchmarks.decoding import graph_times, own_architectures, own_products

PARTS = ("trials", "attention", "products", "older")
COLUMNS = (32, 64, 96, 128, 256, 512, 1024, 1536, 2560, 2816, 3840, 5376)
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 64)
INPUTS = (256, 1536, 2048, 2560, 2816, 4096, 5376, 6144, 10240, 12288, 21504)
LENGTHS = (1, 64, 500, 2048, 8192, 32768, 131072)
#: Variant and kind of layer: width, key-value heads, query heads of each, keys allocated and valid.
SHAPES = {
    "E2B sliding": (256, 1, 8, 512, 512),
    "E2B full, short": (512, 1, 8, 4096, 64),
    "E2B full": (512, 1, 8, 33000, 30000),
    "E4B full": (512, 2, 4, 32768, 30000),
    "12B sliding": (256, 8, 2, 1024, 1024),
    "12B full": (512, 1, 16, 32768, 30000),
    "31B full": (512, 4, 8, 32768, 8192),
}


def signatures(few: bool) -> Iterator[tuple[Any, ...]]:
    """Of the operations that are tried."""
    import torch

    from gemma4_compat._kernels.fuse import pointwise
    from gemma4_compat._kernels.specs import expert_rows, nf4_dequantize, nf4_exact, shifting

    for columns, rows in itertools.product(COLUMNS[: 2 if few else None], ROWS[: 2 if few else None]):
        if pointwise.order(rows, columns) is not None:
            yield pointwise.MEAN, (rows, columns), torch.float32
    for dtype, inputs, rows in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), INPUTS[: 1 if few else None], (1, 2, 3)
    ):
        for quant_type, nested, bias in itertools.product(("nf4", "fp4"), (True, False), (False, True)):
            one = nf4_exact.Format("gemm_4bit", dtype, rows, inputs, quant_type, 64, nested, bias)
            if nf4_exact.supports(one):
                yield nf4_exact.OPERATION, tuple(one), dtype
        if rows == 1:
            yield nf4_exact.OPERATION, ("gemv_4bit", dtype, 1, inputs, "", 64, False, False), dtype
    for word, times in itertools.product((16, 8, 4, 2), (1, 2, 3, 4)):
        yield shifting.OPERATION, (word, times), torch.bfloat16 if word == 2 else torch.float32
    sizes = sorted(expert_rows.BLOCKSIZES)[: 2 if few else None]
    for dtype, quant_type, size, nested in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), ("nf4", "fp4"), sizes, (0, 256)
    ):
        yield expert_rows.Format(quant_type, size, nested, dtype).signature(nf4_dequantize.OPERATION)


def trials(device: Any, few: bool, more: Iterable[tuple[Any, ...]] = ()) -> Data:
    """How many operations were tried, and which differ or could not be tried; ``more`` are signatures, as well."""
    from gemma4_compat._kernels.kernels import Kernels

    kernels = Kernels(device)
    found: Data = {}
    for signature in (*signatures(few), *more):
        of = found.setdefault(str(signature[0]), {"tried": 0, "differ": [], "errors": {}})
        of["tried"] += 1
        try:
            kernels.prepare([], [signature])
        except RuntimeError as error:
            of["errors"][str(signature[1:])] = str(error).splitlines()[0]
        if not kernels.accepts(signature):
            of["differ"].append(str(signature[1:]))
    return found


class Attention:
    """One query's attention on a device."""

    def __init__(self, device: Any) -> None:
        from gemma4_compat._kernels import kernels

        self._device, self._kernels = device, kernels.of(device)

    def inputs(self, shape: tuple[int, ...], dtype: Any, *, before: int = 0) -> tuple[Any, ...]:
        """Query, keys, values and mask; ``before`` keys come before the first valid one."""
        import torch

        width, kv_heads, heads, length, valid = shape
        generator = torch.Generator(self._device).manual_seed(valid)
        sizes = (1, kv_heads, heads, width), (1, kv_heads, length, width), (1, kv_heads, length, width)
        drawn = [torch.randn(size, generator=generator, device=self._device).to(dtype) for size in sizes]
        mask = torch.zeros(1, 1, 1, length, dtype=torch.bool, device=self._device)
        mask[..., before : before + valid] = True
        return (*drawn, mask)

    def ours(self, query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
        """What the kernels compute."""
        from gemma4_compat._kernels.specs import attention

        call = attention.match(query, key, value, attn_mask=mask, scale=scale)
        assert call is not None
        launched, found = attention.kernels(call)
        self._kernels.prepare([kernel.text for kernel in launched if not self._kernels.is_prepared(kernel.text)], [])
        for kernel in launched:
            self._kernels.launch(kernel)
        return found

    def errors(self, dtype: Any, width: int, valid: int) -> Data:
        """Mean and largest errors of both, and whether bits depend on what they must not depend on."""
        import torch

        before, scale = 7, width**-0.5
        query, key, value, mask = self.inputs((width, 1, 8, valid + 300, valid), dtype, before=before)
        query = query * 3  # scores that differ
        some = slice(before, before + valid)
        exact = (query.double() @ key[:, :, some].double().mT * scale).softmax(-1) @ value[:, :, some].double()
        found = self.ours(query, key, value, mask, scale)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        apart = [(one - exact).abs() for one in (found, theirs)]
        shorter = self.ours(query, *(one[:, :, some].clone() for one in (key, value)), mask[..., some].clone(), scale)
        two = self.ours(*(torch.cat([one, one.flip(1)]) for one in (query, key, value, mask)), scale)
        return {
            "dtype": str(dtype),
            "width": width,
            "keys": valid,
            "mean": [one.mean().item() for one in apart],
            "largest": [one.max().item() for one in apart],
            "same_bits": torch.equal(found, shorter) and torch.equal(found, two[:1]),
        }

    def microseconds(self, shape: tuple[int, ...]) -> Data:
        """Of a call in a graph of many, ours and PyTorch's in turns."""
        import torch

        query, key, value, mask = self.inputs(shape, torch.bfloat16)
        copies = range(graph_times.copies(2 * key.nbytes))
        several = [(key.clone(), value.clone()) for _ in copies]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls: dict[str, Callable[[int], Any]] = {
            "ours": lambda number: self.ours(query, *several[number % len(several)], mask, 1.0),
            "torch": lambda number: sdpa(query, *several[number % len(several)], attn_mask=mask, scale=1.0),
        }
        return graph_times.in_turns(calls)


def attention(device: Any, few: bool) -> Data:
    """Errors of every dtype, width and length, and microseconds on a GPU."""
    import torch

    one = Attention(device)
    cells = itertools.product((torch.bfloat16, torch.float16), (256, 512), LENGTHS[: 2 if few else None])
    found: Data = {"errors": [one.errors(*cell) for cell in cells]}
    if device.type == "cuda":
        found["us"] = {name: one.microseconds(shape) for name, shape in SHAPES.items()}
    return found


def older(device: Any, few: bool) -> Data:
    """What older GPUs compute, on this one."""
    return own_architectures.architectures(device, few, trials=trials, attention=Attention)


def wrong(errors: list[Data]) -> list[Data]:
    """Those that are larger than those of the other kernel, or whose bits depend on something else than the text."""
    return [
        one
        for one in errors
        if one["mean"][0] > one["mean"][1] or one["largest"][0] > one["largest"][1] or not one["same_bits"]
    ]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--few", action="store_true", help="a few shapes: does it run?")
    arguments = parser.parse_args()
    unknown = set(arguments.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; give some of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU, and these kernels are for one")
    device = torch.device("cuda", torch.cuda.current_device())
    result: Data = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    for part in arguments.parts.split(","):
        measured = {"trials": trials, "attention": attention, "products": own_products.products, "older": older}[part]
        result[part] = measured(device, arguments.few)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if failing(result) else 0


def failing(result: Data) -> list[Data]:
    """The errors of a result that are too large, and code for 8.0 with other bits."""
    older = result.get("older", {})
    found = [one for part in ("attention", "products") for one in wrong(result.get(part, {}).get("errors", []))]
    found += [one for of in older.values() for one in wrong(of["errors"])]
    return found + [{"capability": name, **of} for name, of in older.items() if name == "8.0" and of["others"]]


if __name__ == "__main__":
    sys.exit(main())
