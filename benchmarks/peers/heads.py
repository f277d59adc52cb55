"""The heads of GGUF files: what stands before the weights, as llama.cpp's converter makes it, to be filled elsewhere.

python benchmarks/peers/heads.py --shape E2B --llama-cpp TREE    writes TREE/heads/E2B-q4_0.json and the like

llama.cpp's converter and quantizer take minutes for a real shape, and write 12 GB of E2B for a file of 3. They need no
GPU. Here they are given a checkpoint of zeros, which takes no room on a disk that knows holes. Kept is the head of each
file, and where which type of data stands; depth.py fills it with random blocks of those types in seconds. So the
weights of llama.cpp are other random numbers than the shim's: answers cannot be compared, speed can.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import zlib
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
            pattern = patterns.setdefault(tensor["type"], random_data(tensor["type"]))
            file.seek(tensor["offset"])
            whole, rest = divmod(tensor["nbytes"], len(pattern))
            for _ in range(whole):
                file.write(pattern)
            file.write(pattern[:rest])
        file.truncate(said["size"])
    return made


def random_data(kind: str) -> bytes:
    """Some blocks of a type; of F32, which norms and scales have, ones."""
    import numpy

    chance = numpy.random.default_rng(0)
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
    from gemma4_compat._models import variants
    from gemma4_compat._reproduction import tiny_adapters, tiny_models

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
    write_tokenizer(checkpoint)
    rank = 4 if variant == "tiny" else 16
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=tiny_adapters.TARGETS["language"])
    adapted = get_peft_model(model, lora)
    adapter.mkdir()
    adapted.peft_config["default"].save_pretrained(adapter)
    names = {name.replace(".default", ""): tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    write(names, adapter / "adapter_model.safetensors")


def head_of(file: Path, tree: Path) -> Data:
    """What stands before the weights of a file, and where they are."""
    sys.path.insert(0, str(tree / "gguf-py"))
    from gguf import GGUFReader

    reader = GGUFReader(str(file))
    with file.open("rb") as opened:
        head = opened.read(reader.data_offset)
    tensors: list[dict[str, Any]] = [
        {
            "name": tensor.name,
            "type": tensor.tensor_type.name,
            "offset": int(tensor.data_offset),
            "nbytes": int(tensor.n_bytes),
        }
        for tensor in reader.tensors
    ]
    packed = base64.b64encode(zlib.compress(head, 9)).decode()
    return {"size": file.stat().st_size, "tensors": tensors, "head": packed}


def main(argv: list[str] | None = None) -> int:
    from benchmarks.decoding import models
    from benchmarks.peers.models import FILES, Llama

    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=30.0)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's tree, with llama-quantize built")
    arguments = parser.parse_args(argv)
    llama = Llama(arguments.llama_cpp)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        folder = Path(work)
        zeros(arguments.shape, folder)
        for kind in KINDS:
            made = named(llama.tree, arguments.shape, kind)
            made.parent.mkdir(exist_ok=True)
            for step in (FILES.get(kind), kind):
                if step is not None:
                    print(step, llama.convert(step, folder, 60 * arguments.minutes), flush=True)
            made.write_text(json.dumps(head_of(folder / f"{kind}.gguf", llama.tree)), encoding="utf-8")
            print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB", flush=True)
            for file in folder.glob("*.gguf"):
                file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
