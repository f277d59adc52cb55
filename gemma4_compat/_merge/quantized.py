"""Write a checkpoint again with its linears in bitsandbytes' 4 bits, as ``save_pretrained`` of a 4-bit model does.

In memory is one weight, or 64 MiB of a tensor that is only copied.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._checkpoint.shards import Entry, Output
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._merge import weights
from gemma4_compat._merge.start import DTYPES, Start, quantization_config
from gemma4_compat._quantization import config as configs
from gemma4_compat._reading import json_files

QUANTIZATIONS = ("4bit", "4bit-double")
#: Values that share a scale, and scales that share one with "4bit-double".
_BLOCK, _NESTED = 64, 256
#: Names of the keys and values of KV-shared layers, which the model does not have.
_SHARED = (".k_proj.weight", ".v_proj.weight")


@dataclass(frozen=True)
class Target:
    """How the result is quantized: ``start`` says the same of a base, for a model to compare with."""

    name: str
    start: Start


def target(model: Any, name: Any, skip: Any, start: Start) -> Target | None:
    """What ``quantize_result`` asks for; None for nothing.

    Raises:
        Gemma4CompatError: it is unknown, or bitsandbytes is missing.
    """
    from gemma4_compat._engine import versions

    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise Gemma4CompatError(f"quantize_result is {' or '.join(QUANTIZATIONS)}, not {name!r}")
    if not versions.installed("bitsandbytes"):
        raise Gemma4CompatError("a result in 4 bits needs bitsandbytes: pip install 'gemma4-compat[stack]'")
    skipped = list(skip) if skip is not None else list(start.skip) or configs.default_skip_modules(model)
    if "lm_head" not in skipped:
        skipped.append("lm_head")  # it shares the embedding's weight, or was given its own by the merge
    kind = start.settings.get("bnb_4bit_quant_type", "nf4")
    settings = {"bnb_4bit_quant_type": kind}
    return Target(name, Start("dequantized", name, False, False, settings, tuple(skipped)))


def write(source: Path, out: Path, model: Any, chosen: Target, dtype: str, largest: int) -> tuple[list[str], int]:
    """Write the checkpoint in ``source`` to ``out`` in 4 bits; returns the names of its weight files, and their bytes.

    Args:
        source: a checkpoint that is not quantized.
        out: a folder.
        model: its model on meta.
        chosen: how.
        dtype: of the weights, a key of ``start.DTYPES``.
        largest: bytes of a file with weights.
    """
    import torch

    kind = chosen.start.settings["bnb_4bit_quant_type"]
    found = weights.find_base(shards.checkpoint(source), model)
    names = configs.linear_names(model, chosen.start.skip)
    packed = {
        found.keys[f"{name}.weight"]: found.disk[f"{name}.weight"] for name in names if f"{name}.weight" in found.disk
    }
    packed |= {key: entry for key, entry in found.rest.items() if key.endswith(_SHARED) and len(entry.shape) == 2}
    values: dict[str, Callable[[], Iterator[Any]]] = {}
    outputs: list[Output] = []
    entries = {found.keys[name]: entry for name, entry in found.disk.items()} | found.rest
    for key, entry in entries.items():
        if key not in packed:
            outputs.append(Output(key, entry.dtype, entry.shape))
            values[key] = functools.partial(shards.pieces, entry)
            continue
        parts = _outputs(entry, kind, chosen.name == "4bit-double", DTYPES[dtype])
        weight = _Weight(entry, kind, chosen.name == "4bit-double", getattr(torch, DTYPES[dtype]))
        for end, part in parts.items():
            outputs.append(Output(key + end, part.dtype, part.shape))
            values[key + end] = functools.partial(weight.part, end)
    files = shards.write(out, shards.shards(outputs, largest), values)
    _write_config(source, out, chosen, dtype)
    return files, sum(output.nbytes for output in outputs)


def _outputs(entry: Entry, kind: str, double: bool, dtype: str) -> dict[str, Output]:
    """The tensors that bitsandbytes stores for a weight, by what their names add to its."""
    count = entry.nbytes // shards.dtype_of(entry.dtype).itemsize
    blocks = -(-count // _BLOCK)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": _BLOCK, "dtype": dtype, "shape": list(entry.shape)}
    found = {"": Output("", "uint8", ((count + 1) // 2, 1))}
    if double:
        found[".absmax"] = Output("", "uint8", (blocks,))
        found[".nested_absmax"] = Output("", "float32", (-(-blocks // _NESTED),))
        found[".nested_quant_map"] = Output("", "float32", (256,))
        offset = _scales(entry, shards.dtype_of(dtype)).mean().item()
        state |= {"nested_blocksize": _NESTED, "nested_dtype": "float32", "nested_offset": offset}
    else:
        found[".absmax"] = Output("", "float32", (blocks,))
    found[".quant_map"] = Output("", "float32", (16,))
    found[f".quant_state.bitsandbytes__{kind}"] = Output("", "uint8", (len(json.dumps(state).encode()),))
    return found


def _scales(entry: Entry, dtype: Any) -> Any:
    """The largest absolute value of each block, as bitsandbytes computes it; nested scales are offset by the mean."""
    import torch

    values = shards.read(entry).to(dtype).reshape(-1)
    values = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK))
    return values.view(-1, _BLOCK).abs().amax(dim=1).float()


class _Weight:
    """A weight that is quantized for its small tensors, and once more for its packed values.

    A file has the widest dtypes first, so the packed values of all its weights would be in memory between the two.
    """

    def __init__(self, entry: Entry, kind: str, double: bool, dtype: Any) -> None:
        self._entry, self._kind, self._double, self._dtype = entry, kind, double, dtype
        self._small: dict[str, Any] = {}

    def part(self, end: str) -> Iterator[Any]:
        if end and end in self._small:
            yield self._small.pop(end)
            return
        packed, state = self._quantized()
        if not end:
            yield packed
            return
        self._small = {f".{name}": value for name, value in state.as_dict(packed=True).items()}
        yield self._small.pop(end)

    def _quantized(self) -> tuple[Any, Any]:
        from bitsandbytes import functional

        packed, state = functional.quantize_4bit(
            shards.read(self._entry).to(self._dtype),
            blocksize=_BLOCK,
            compress_statistics=self._double,
            quant_type=self._kind,
        )
        return packed, state


def _write_config(source: Path, out: Path, chosen: Target, dtype: str) -> None:
    import torch

    data = json_files.settings(source / "config.json")
    settings = quantization_config(chosen.start, getattr(torch, DTYPES[dtype])).to_dict()
    settings["llm_int8_enable_fp32_cpu_offload"] = False  # with it, modules on the CPU would not be read as 4 bits
    text = json.dumps({**data, "quantization_config": settings}, indent=2)
    shards.write_text(out / "config.json", text + "\n")
