"""Products of up to eight rows with 4-bit weights: how far they are from float64, and how long they take.

For ``own_kernels.py``. The weights have nested scales, NF4, blocks of 64.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.common import Data
from benchmarks.decoding import graph_times

#: Outputs and inputs of weights that differ in what is hard: few outputs, few inputs, many of each.
EIGHT = (
    (2048, 1536),
    (256, 1536),
    (1536, 256),
    (1536, 12288),
    (10240, 2560),
    (15360, 3840),
    (3840, 15360),
    (5376, 21504),
)
VARIANTS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
#: Linear layers that read the same input.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROWS = 8
#: More of them, for their bits.
MANY = (9, 17, 32, 64)
#: bitsandbytes computes so many with one kernel.
THEIR_ROWS = 3
#: Rows of a weight that are in float64 at once.
_EXACT_ROWS = 4096


def asked(
    dtype: Any, inputs: int, outputs: int, *, rows: int = 1, nested: bool = True, bias: bool = False,
    quant_type: str = "nf4", blocksize: int = 64, seed: int = 0, device: Any = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """The arguments of ``bitsandbytes::gemm_4bit``, with random numbers."""
    import torch
    from bitsandbytes.functional import create_dynamic_map

    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Any:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=device)

    def uniform(number: int) -> Any:
        return torch.rand(number, generator=generator, device=device)

    number = outputs * inputs // blocksize
    found = {
        "given": torch.randn(rows, inputs, generator=generator, device=device).to(dtype),
        "packed": drawn(outputs * inputs // 2, 1),
        "shape": [outputs, inputs],
        "absmax": uniform(-(-number // 256) if nested else number),
        "blocksize": blocksize,
        "quant_type": quant_type,
    }
    if bias:
        found["bias"] = torch.randn(outputs, generator=generator, device=device).to(dtype)
    if nested:
        found |= {"absmax_8bit": drawn(number), "absmax_code": create_dynamic_map().to(device)}
        found["absmax_offset"] = torch.tensor(0.1, device=device)
    return found


def of_type(quant_type: str, array: str) -> list[float]:
    """An array of a 4-bit type in ``four_bit.cuh``."""
    from gemma4_compat._kernels import programs

    _, _, type_of = programs.headers()["four_bit.cuh"].partition(f"struct {quant_type.capitalize()} ")
    found = re.search(rf"{array}\[\d+\] = {{([^}}]*)}}", type_of)
    assert found is not None
    texts = re.split(r",\s+", found[1])
    return [float(int(text[:-1], 16)) if text.endswith("u") else float(text[:-1]) for text in texts]


def exact(wanted: dict[str, Any]) -> Any:
    """The product in float64, ``[rows, outputs]``."""
    import torch

    values = torch.tensor(of_type(wanted["quant_type"], "values")).double()
    values = values.to(wanted["packed"].device)
    outputs, inputs = wanted["shape"]
    scales = wanted["absmax"].double()
    if "absmax_8bit" in wanted:
        quantized = wanted["absmax_8bit"].long()
        scales = wanted["absmax_code"].double()[quantized] * scales.repeat_interleave(256)[: len(quantized)]
        scales = scales + wanted["absmax_offset"].double()
    packed, given = wanted["packed"].reshape(outputs, -1), wanted["given"].double()
    scales = scales.reshape(outputs, -1)  # of blocks, which end with a row of the weight
    found = []
    for first in range(0, outputs, _EXACT_ROWS):
        some = packed[first : first + _EXACT_ROWS].int()
        weight = values[torch.stack((some >> 4, some & 15), -1).reshape(len(some), -1, wanted["blocksize"])]
        weight = weight * scales[first : first + _EXACT_ROWS, :, None]
        found.append(given @ weight.reshape(len(some), inputs).t())
    result = torch.cat(found, -1)
    return result + wanted["bias"].double() if "bias" in wanted else result


def groups(variant: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Every kind of quantized linear layers in the language model that one launch may compute: the names, outputs of
    each, inputs of all. Experts are looked up and multiplied otherwise.
    """
    import torch
    import transformers

    from gemma4_compat._gemma4.models import variants

    kind = "Gemma4Unified" if variant == variants.UNIFIED else "Gemma4"
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}TextModel")(variants.config(variant).get_text_config())
    seen = set()
    for layer in model.layers:
        linear = {
            name.rpartition(".")[2]: module
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear) and "router" not in name
        }
        alone = ((name,) for name in linear if not any(name in names for names in TOGETHER))
        for names in (*TOGETHER, *alone):
            there = [name for name in names if name in linear]
            if there:
                outputs = tuple(linear[name].out_features for name in there)
                found = "+".join(there), outputs, linear[there[0]].in_features
                if found not in seen:
                    seen.add(found)
                    yield found


class Products:
    """The products of a device, by kernels of this package and by bitsandbytes.

    Args:
        device: ``torch.device``, with an index if it is a GPU.
    """

    def __init__(self, device: Any) -> None:
        from gemma4_compat._kernels import kernels

        self._device, self._kernels = device, kernels.of(device)

    def prepare(self, texts: Iterable[str]) -> None:
        """Compile what has not been compiled, all of it at the same time."""
        self._kernels.prepare(sorted({text for text in texts if not self._kernels.is_prepared(text)}), [])

    def launches(self, wanted: Sequence[dict[str, Any]], *, bits: bool = False) -> list[Any]:
        """The fewest kernels for weights with one input; with ``bits`` those with bitsandbytes' bits."""
        return [kernel for kernels, _ in self._kernels_of(wanted, bits) for kernel in kernels]

    def texts(
        self, dtype: Any, outputs: Sequence[int], inputs: int, *, rows: int = 1, bits: bool = False
    ) -> Iterator[str]:
        """Those of :meth:`launches`."""
        wanted = [asked(dtype, inputs, number, rows=rows, device=self._device) for number in outputs]
        yield from (one.text for one in self.launches(_of_one_input(wanted), bits=bits))

    @staticmethod
    def _kernels_of(wanted: Sequence[dict[str, Any]], bits: bool) -> Iterator[tuple[Any, list[Any]]]:
        from gemma4_compat._kernels.specs import nf4_exact, nf4_gemv, products

        found: list[Any] = [nf4_exact.gemm(THEIR_ROWS, **one) if bits else nf4_gemv.match(**one) for one in wanted]
        together: list[list[Any]] = []
        for one in found:
            if together and one.can_join(together[-1][0]):
                together[-1].append(one)
            else:
                together.append([one])
        for several in together:
            results = [one.empty() for one in several]
            yield products.kernels_of((several, results)), results

    def computed(self, wanted: dict[str, Any], *, bits: bool = False) -> Any:
        """One product."""
        ((kernels, (result,)),) = self._kernels_of([wanted], bits)
        self.prepare([kernel.text for kernel in kernels])
        for kernel in kernels:
            self._kernels.launch(kernel)
        return result

    def theirs(self, wanted: dict[str, Any]) -> Any:
        """What bitsandbytes' kernel computes; without a GPU, or before bitsandbytes 0.50, ours with its bits."""
        import torch

        if self._device.type != "cuda" or not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
            return self.computed(wanted, bits=True)
        return _by_bitsandbytes(wanted)

    def errors(self, dtype: Any, outputs: int, inputs: int) -> Data:
        """Mean and largest errors of ours and of bitsandbytes' kernel, and whether a row's bits depend on others."""
        wanted = asked(dtype, inputs, outputs, rows=ROWS, device=self._device)
        some = wanted | {"given": wanted["given"][:THEIR_ROWS].contiguous()}
        together = self.computed(wanted)
        equal = [self._has_rows_of(wanted, together, (0, 3, ROWS - 1))]
        for rows in MANY if self._device.type == "cuda" else ():
            more = asked(dtype, inputs, outputs, rows=rows, device=self._device)
            equal.append(self._has_rows_of(more, self.computed(more), (0, rows // 2, rows - 1)))
        found = compared(exact(some), together[:THEIR_ROWS], self.theirs(some))
        return {"dtype": str(dtype), "outputs": outputs, "inputs": inputs, **found, "same_bits": all(equal)}

    def _has_rows_of(self, wanted: dict[str, Any], together: Any, rows: Iterable[int]) -> bool:
        """Whether each of these rows has the same bits in a product of all as in one of its own."""
        import torch

        alone = {row: wanted["given"][row : row + 1].contiguous() for row in rows}
        return all(torch.equal(self.computed(wanted | {"given": one})[0], together[row]) for row, one in alone.items())

    def microseconds(self, outputs: Sequence[int], inputs: int, memory: float) -> Data:
        """Of one token in a graph of many; ``memory``: bytes that the GPU reads in a microsecond."""
        import torch

        nbytes = sum(map(self._nbytes, (self._asked(number, inputs) for number in outputs)))
        several = [
            _of_one_input([self._asked(number, inputs, seed) for number in outputs])
            for seed in range(graph_times.copies(nbytes))
        ]
        launched = {bits: [self.launches(group, bits=bits) for group in several] for bits in (False, True)}
        self.prepare(one.text for groups in launched.values() for group in groups for one in group)

        def launch(bits: bool) -> Callable[[int], None]:
            def call(number: int) -> None:
                for one in launched[bits][number % len(several)]:
                    self._kernels.launch(one)

            return call

        calls: dict[str, Callable[[int], Any]] = {"ours": launch(False), "bits": launch(True)}
        if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
            calls["bitsandbytes"] = lambda number: [_by_bitsandbytes(one) for one in several[number % len(several)]]
        found = graph_times.in_turns(calls)
        shares = {name: nbytes / one["median"] / memory for name, one in found.items()}
        return {"bytes": nbytes, "us": found, "share_of_memory": shares}

    def _asked(self, outputs: int, inputs: int, seed: int = 0) -> dict[str, Any]:
        import torch

        return asked(torch.bfloat16, inputs, outputs, seed=seed, device=self._device)

    @staticmethod
    def _nbytes(wanted: dict[str, Any]) -> int:
        """Of the weight and its scales."""
        return sum(wanted[name].nbytes for name in ("packed", "absmax", "absmax_8bit") if name in wanted)


def _by_bitsandbytes(wanted: dict[str, Any]) -> Any:
    """What its operator computes on any device. Its first parameters have other names than ours."""
    import torch

    given, packed, shape, absmax, blocksize, quant_type = list(wanted.values())[:6]
    more = {name: wanted[name] for name in ("bias", "absmax_8bit", "absmax_code", "absmax_offset") if name in wanted}
    return torch.ops.bitsandbytes.gemm_4bit(given, packed, shape, absmax, blocksize, quant_type, **more)


def _of_one_input(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one | {"given": wanted[0]["given"]} for one in wanted]


def compared(right: Any, ours: Any, theirs: Any) -> Data:
    """Mean and largest distance of both from what is right, and ours as a share of theirs.

    Args:
        right: float64.
        ours: of the same shape.
        theirs: of the same shape.
    """
    apart = [(one.double() - right).abs() for one in (ours, theirs)]
    mean, largest = ([getattr(one, name)().item() for one in apart] for name in ("mean", "max"))
    shares = {name: one / other if other else 1.0 for name, (one, other) in (("mean", mean), ("largest", largest))}
    return {"mean": mean, "largest": largest, "share_of_theirs": shares}


def memory_speed(device: Any) -> float:
    """Bytes that a GPU reads or writes in a microsecond while it copies."""
    import torch

    large = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    other.copy_(large)
    begin.record()
    for _ in range(10):
        other.copy_(large)
    end.record()
    end.synchronize()
    return float(20 * large.nbytes / (begin.elapsed_time(end) * 1000))


def products(device: Any, few: bool) -> Data:
    """Errors of the eight shapes and those of all variants in two dtypes, and microseconds on a GPU."""
    import torch

    one = Products(device)
    if few:
        return {"errors": [one.errors(dtype, 32, 256) for dtype in (torch.bfloat16, torch.float16)]}
    found = {variant: list(groups(variant)) for variant in VARIANTS}
    shapes = {(number, inputs) for kinds in found.values() for _, several, inputs in kinds for number in several}
    cells = list(itertools.product((torch.bfloat16, torch.float16), (*EIGHT, *sorted(shapes - set(EIGHT)))))
    texts = [one.texts(dtype, shape[:1], shape[1], rows=rows) for dtype, shape in cells for rows in (1, ROWS)]
    texts += [
        one.texts(torch.bfloat16, several, inputs, bits=bits)
        for kinds in found.values()
        for _, several, inputs in kinds
        for bits in (False, True)
    ]
    one.prepare(itertools.chain.from_iterable(texts))
    result: Data = {"rows": ROWS, "format": "nested NF4, blocks of 64"}
    result["errors"] = [one.errors(dtype, *shape) for dtype, shape in cells]
    if device.type == "cuda":
        memory = memory_speed(device)
        result["memory_gb_s"] = memory / 1000
        result["us"] = {
            f"{variant} {name} {list(outputs)} x {inputs}": one.microseconds(outputs, inputs, memory)
            for variant, kinds in found.items()
            for name, outputs, inputs in kinds
        }
    return result
