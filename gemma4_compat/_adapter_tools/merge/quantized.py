"""Rewrite a checkpoint with its linears in bitsandbytes' 4 or 8 bits, as ``save_pretrained`` of such a model does.

Only one weight is in memory at a time, or 64 MiB of a tensor that is only copied.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.merge import weights
from gemma4_compat._adapter_tools.merge.weights import DTYPES, Start, Weights
from gemma4_compat._engine.io import address, json_files
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Entry, Output
from gemma4_compat._gemma4.quantization import config as configs

QUANTIZATIONS = ("4bit", "4bit-double", "8bit")
#: How many values share a scale, and how many scales share one with "4bit-double".
_BLOCK, _NESTED = 64, 256
#: Names of the keys and values of KV-shared layers, which the model does not have.
_SHARED = (".k_proj.weight", ".v_proj.weight")


def target(model: Any, name: Any, skip: Any, start: Start) -> Start | None:
    """What ``quantize_result`` asks for; None for nothing.

    Raises:
        Gemma4CompatError: the name is unknown, or bitsandbytes is missing.
    """
    from gemma4_compat._engine import versions

    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise Gemma4CompatError(f"quantize_result must be 4bit, 4bit-double or 8bit, not {name!r}")
    if not versions.installed("bitsandbytes"):
        raise Gemma4CompatError(f"a result in 4 or 8 bits needs bitsandbytes: {address.install('stack')}")
    skipped = list(skip) if skip is not None else list(start.skip) or configs.default_skip_modules(model)
    if "lm_head" not in skipped:
        skipped.append("lm_head")  # it shares the embedding's weight, or was given its own by the merge
    kind = start.settings.get("bnb_4bit_quant_type", "nf4")
    settings = {"bnb_4bit_quant_type": kind}
    return Start("dequantized", name, settings=settings, skip=tuple(skipped))


def nbytes(base: Weights, outputs: Collection[Output], model: Any, chosen: Start, dtype: str) -> int:
    """Bytes of the weights that :func:`write` will write, without the small texts stored with 4-bit weights.

    Args:
        base: of the merge.
        outputs: the tensors of the merged model.
        model: its model on meta.
        chosen: how to quantize.
        dtype: of the weights, a key of ``weights.DTYPES``.
    """
    packed = _packed(base, model, chosen)
    total = 0
    for output in outputs:
        if output.name in packed:
            entry = Entry(output.name, output.dtype, output.shape, Path(), 0, output.nbytes)
            total += sum(part.nbytes for part in _parts(entry, chosen, DTYPES[dtype], offset=0.0).values())
        else:
            total += output.nbytes
    return total


def write(
    source: Path,
    out: Path,
    model: Any,
    chosen: Start,
    dtype: str,
    largest: int,
    *,
    there: Collection[str] = (),
    done: Callable[[str, str], None] | None = None,
) -> tuple[list[str], int]:
    """Write the checkpoint in ``source`` to ``out``, quantized; returns the names of its weight files and their bytes.

    Args:
        source: a checkpoint that is not quantized.
        out: a folder.
        model: its model on meta.
        chosen: how to quantize.
        dtype: of the weights, a key of ``weights.DTYPES``.
        largest: bytes of a file with weights.
        there: see :func:`shards.write`.
        done: likewise.
    """
    found = weights.find_base(shards.checkpoint(source), model)
    packed = _packed(found, model, chosen)
    values: dict[str, Callable[[], Iterator[Any]]] = {}
    outputs: list[Output] = []
    entries = {found.keys[name]: entry for name, entry in found.disk.items()} | found.rest
    for key, entry in entries.items():
        if key not in packed:
            outputs.append(Output(key, entry.dtype, entry.shape))
            values[key] = functools.partial(shards.pieces, entry)
            continue
        weight = _Weight(entry, chosen, DTYPES[dtype])
        for name, part in _parts(entry, chosen, DTYPES[dtype]).items():
            outputs.append(part)
            values[name] = functools.partial(weight.part, name)
    files = shards.write(out, shards.shards(outputs, largest), values, there=there, done=done)
    _write_config(source, out, chosen, dtype)
    return files, sum(output.nbytes for output in outputs)


def _packed(base: Weights, model: Any, chosen: Start) -> set[str]:
    """Keys of the weights that are quantized; also those that the model does not have, as in KV-shared layers."""
    names = (f"{name}.weight" for name in configs.linear_names(model, chosen.skip))
    packed = {base.keys[name] for name in names if name in base.disk}
    return packed | {key for key, entry in base.rest.items() if key.endswith(_SHARED) and len(entry.shape) == 2}


def _parts(entry: Entry, chosen: Start, dtype: str, offset: float | None = None) -> dict[str, Output]:
    """The tensors that bitsandbytes stores for a weight, by their names.

    ``offset`` is that of nested scales, stored in a text; if None, it is computed from the weight.
    """
    if chosen.quantize == "8bit":
        owner = entry.name.removesuffix("weight")
        found = [
            Output(entry.name, "int8", entry.shape),
            Output(f"{owner}SCB", "float32", entry.shape[:1]),
            Output(f"{owner}weight_format", "uint8", ()),
        ]
        return {output.name: output for output in found}
    kind = chosen.settings["bnb_4bit_quant_type"]
    count = entry.nbytes // shards.dtype_of(entry.dtype).itemsize
    blocks = -(-count // _BLOCK)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": _BLOCK, "dtype": dtype, "shape": list(entry.shape)}
    ends: dict[str, tuple[str, tuple[int, ...]]] = {"": ("uint8", ((count + 1) // 2, 1))}
    if chosen.quantize == "4bit-double":
        ends[".absmax"] = "uint8", (blocks,)
        ends[".nested_absmax"] = "float32", (-(-blocks // _NESTED),)
        ends[".nested_quant_map"] = "float32", (256,)
        if offset is None:
            offset = _scales(entry, shards.dtype_of(dtype)).mean().item()
        state |= {"nested_blocksize": _NESTED, "nested_dtype": "float32", "nested_offset": offset}
    else:
        ends[".absmax"] = "float32", (blocks,)
    ends[".quant_map"] = "float32", (16,)
    ends[f".quant_state.bitsandbytes__{kind}"] = "uint8", (len(json.dumps(state).encode()),)
    return {entry.name + end: Output(entry.name + end, *kept) for end, kept in ends.items()}


def _scales(entry: Entry, dtype: Any) -> Any:
    """The largest absolute value of each block, as bitsandbytes computes it; nested scales are offset by the mean."""
    import torch

    values = shards.read(entry).to(dtype).reshape(-1)
    values = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK))
    return values.view(-1, _BLOCK).abs().amax(dim=1).float()


class _Weight:
    """A weight that is quantized twice: for its small tensors, and later for its packed values.

    A file has the widest dtypes first, so keeping the packed values in between would hold those of all its weights.
    """

    def __init__(self, entry: Entry, chosen: Start, dtype: str) -> None:
        self._entry, self._chosen, self._dtype = entry, chosen, dtype
        self._small: dict[str, Any] = {}

    def part(self, name: str) -> Iterator[Any]:
        """The tensor of that name, one of :func:`_parts`."""
        if name in self._small:
            yield self._small.pop(name)
            return
        packed, small = self._in_8_bits() if self._chosen.quantize == "8bit" else self._in_4_bits()
        if name == self._entry.name:
            yield packed
            return
        self._small = dict(small)
        yield self._small.pop(name)

    def _in_4_bits(self) -> tuple[Any, Mapping[str, Any]]:
        from bitsandbytes import functional

        packed, state = functional.quantize_4bit(
            shards.read(self._entry).to(shards.dtype_of(self._dtype)),
            blocksize=_BLOCK,
            compress_statistics=self._chosen.quantize == "4bit-double",
            quant_type=self._chosen.settings["bnb_4bit_quant_type"],
        )
        return packed, {f"{self._entry.name}.{name}": value for name, value in state.as_dict(packed=True).items()}

    def _in_8_bits(self) -> tuple[Any, Mapping[str, Any]]:
        import torch
        from bitsandbytes import functional

        values = shards.read(self._entry)
        half = values.to(torch.float16)
        if lost := int((~torch.isfinite(half)).sum()):
            raise Gemma4CompatError(
                f"{self._entry.name} has {lost} values that float16 cannot hold, and bitsandbytes quantizes to 8 bits "
                "from float16. Write 4 bits (--quantize-result 4bit), or leave the module out (--skip-module)"
            )
        codes, scales = functional.int8_vectorwise_quant(half)[:2]
        owner = self._entry.name.removesuffix("weight")
        row_major = torch.tensor(0, dtype=torch.uint8)
        return codes, {f"{owner}SCB": scales, f"{owner}weight_format": row_major}


def _write_config(source: Path, out: Path, chosen: Start, dtype: str) -> None:
    import torch

    data = json_files.settings(source / "config.json")
    settings = weights.quantization_config(chosen, getattr(torch, DTYPES[dtype])).to_dict()
    settings["llm_int8_enable_fp32_cpu_offload"] = False  # with it, modules on the CPU would not be read as 4 bits
    text = json.dumps({**data, "quantization_config": settings}, indent=2)
    shards.write_text(out / "config.json", text + "\n")
