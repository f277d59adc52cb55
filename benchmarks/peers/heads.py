"""The heads of GGUF files: what stands before the weights, as llama.cpp's converter makes it, to be filled elsewhere.

python benchmarks/peers/heads.py --shape E2B --llama-cpp TREE    writes TREE/heads/E2B-q4_0.json and E2B-lora.json

llama.cpp's converter and quantizer take minutes for a real shape, and write 12 GB of E2B for a file of 3. They need no
GPU, and here they need no weights: the converter is given a checkpoint of zeros (no room on a disk that knows holes)
and kept from writing any; types are those of llama-quantize. depth.py fills a file with random blocks of those types
in seconds. So llama.cpp has other random numbers than the shim: answers cannot be compared, speed can.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data

KINDS = ("q4_0", "lora")
#: Bytes of a block by type, and where in it its scale stands, as fp16.
BLOCKS = {"Q4_0": (18, 0), "Q6_K": (210, 208), "Q8_0": (34, 0)}
#: A scale with which random blocks are weights of about 0.02.
SCALES = {"Q4_0": 0.004, "Q6_K": 2e-5, "Q8_0": 3e-4}
_CHUNK = 1 << 22  # bytes of random data, about, which are repeated


def named(tree: Path, shape: str, kind: str) -> Path:
    """The head of a file."""
    return tree / "heads" / f"{shape}-{kind}.json"


def filled(head: Path, folder: Path) -> Path:
    """The file of a head, with random weights.

    Raises:
        OSError: there is no such head, or no room.
    """
    said: Data = json.loads(head.read_text(encoding="utf-8"))
    made = folder / f"{head.stem}.gguf"
    patterns: dict[str, bytes] = {}
    with made.open("wb") as file:
        file.write(zlib.decompress(base64.b64decode(said["head"])))
        for tensor in said["tensors"]:
            kind = "adapter" if ".lora_" in tensor["name"] else tensor["type"]
            if kind not in patterns:
                patterns[kind] = random_data(kind)
            pattern = patterns[kind]
            file.seek(tensor["offset"])
            whole, rest = divmod(tensor["nbytes"], len(pattern))
            for _ in range(whole):
                file.write(pattern)
            file.write(pattern[:rest])
        file.truncate(said["size"])
    return made


def random_data(kind: str) -> bytes:
    """Some blocks of a type; of F32, which norms and scales have, ones; of an adapter's F32, small numbers."""
    import numpy

    chance = numpy.random.default_rng(0)
    if kind == "adapter":
        return chance.normal(0, 0.02, _CHUNK // 4).astype(numpy.float32).tobytes()
    if kind == "F32":
        return numpy.ones(_CHUNK // 4, numpy.float32).tobytes()
    if kind == "F16":
        return chance.normal(0, 0.02, _CHUNK // 2).astype(numpy.float16).tobytes()
    if kind == "BF16":
        wide = chance.normal(0, 0.02, _CHUNK // 2).astype(numpy.float32).view(numpy.uint32)
        return (wide >> 16).astype(numpy.uint16).tobytes()
    size, at = BLOCKS[kind]
    blocks = chance.integers(0, 256, (_CHUNK // size, size), dtype=numpy.uint8)
    blocks[:, at : at + 2] = numpy.frombuffer(numpy.float16(SCALES[kind]).tobytes(), numpy.uint8)
    return blocks.tobytes()


# Making them


def zeros(shape: str, folder: Path) -> None:
    """A checkpoint and an adapter of zeros."""
    import struct

    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from benchmarks.decoding import models
    from benchmarks.peers.models import write_tokenizer
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_adapters, tiny_models

    variant, layers, _ = models.SHAPES[shape]
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    if variant == "tiny":
        tiny_models.build_checkpoint(checkpoint, variant=shape.removeprefix("tiny-"))
        config = models.config_of(folder)
    else:
        config = variants.config(variant, layers=layers)
        config.save_pretrained(checkpoint)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = getattr(transformers, tiny_models.class_name(checkpoint))(config)

    def write(tensors: Data, file: Path) -> None:
        described, at = {}, 0
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * 2
            described[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(described).encode()
        with file.open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            opened.truncate(8 + len(text) + at)

    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write(weights, checkpoint / "model.safetensors")
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(checkpoint)
    saved = checkpoint / "config.json"
    said = json.loads(saved.read_text(encoding="utf-8"))
    said["text_config"].setdefault("moe_intermediate_size", None)  # the converter also asks a 12B for it
    saved.write_text(json.dumps(said), encoding="utf-8")
    write_tokenizer(checkpoint)
    rank = 4 if variant == "tiny" else 16
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=tiny_adapters.TARGETS["language"])
    adapted = get_peft_model(model, lora)
    adapter.mkdir()
    adapted.peft_config["default"].save_pretrained(adapter)
    names = {name.replace(".default", ""): tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    write(names, adapter / "adapter_model.safetensors")


def quantized(name: str, shape: Sequence[int]) -> str | None:
    """The type that llama-quantize gives a tensor for Q4_0 (src/llama-quant.cpp); None: as it is.

    The embeddings are also the head of the model, which is why they get more bits.
    """
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "Q8_0" if shape[-1] % 256 else "Q6_K"
    kept = len(shape) < 2 or not name.endswith("weight") or "_norm" in name
    return None if kept or "per_layer_model_proj" in name or "ffn_gate_inp" in name else "Q4_0"


def head_of(tree: Path, script: str, arguments: list[str], *, quantizes: bool, out: Path) -> Data:
    """What a converter writes before the weights, and where they would be."""
    import runpy
    from unittest import mock

    sys.path[:0] = [str(tree / "gguf-py"), str(tree)]
    import gguf

    tensors: list[dict[str, Any]] = []

    def described(writer: Any, **_: Any) -> None:
        (infos,), (file,) = writer.tensors, writer.fout
        for name, info in infos.items():
            kind = quantized(name, info.shape) if quantizes else None
            if kind is not None:
                info.dtype = gguf.GGMLQuantizationType[kind]
                elements, (block, nbytes) = math.prod(info.shape), gguf.GGML_QUANT_SIZES[info.dtype]
                info.nbytes = elements // block * nbytes
            tensors.append({"name": name, "type": info.dtype.name, "nbytes": int(info.nbytes)})
        writer.write_ti_data_to_file()
        writer.write_padding(file, file.tell())

    patched = mock.patch.object(gguf.GGUFWriter, "write_tensors_to_file", described)
    with patched, mock.patch.object(sys, "argv", [script, *arguments, "--outfile", str(out)]):
        runpy.run_path(str(tree / script), run_name="__main__")
    head = out.read_bytes()
    at = len(head)
    for tensor in tensors:
        tensor["offset"] = at
        at += -(-tensor["nbytes"] // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
    return {"size": at, "tensors": tensors, "head": base64.b64encode(zlib.compress(head, 9)).decode()}


def main(argv: list[str] | None = None) -> int:
    from benchmarks.decoding import models

    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=30.0)
    parser.add_argument(
        "--llama-cpp", type=Path, required=True, help="llama.cpp's source tree, which need not be built"
    )
    arguments = parser.parse_args(argv)
    tree = arguments.llama_cpp.resolve()
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        folder = Path(work)
        zeros(arguments.shape, folder)
        checkpoint, adapter = str(folder / "checkpoint"), str(folder / "adapter")
        converters = {
            "q4_0": ("convert_hf_to_gguf.py", [checkpoint, "--outtype", "bf16"]),
            "lora": ("convert_lora_to_gguf.py", [adapter, "--base", checkpoint]),
        }
        for kind, (script, given) in converters.items():
            made = named(tree, arguments.shape, kind)
            made.parent.mkdir(exist_ok=True)
            head = head_of(tree, script, given, quantizes=kind == "q4_0", out=folder / f"{kind}.gguf")
            made.write_text(json.dumps(head), encoding="utf-8")
            print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB for {head['size'] / 2**30:.3f} GiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
