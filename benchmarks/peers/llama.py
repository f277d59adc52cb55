"""What a process of peers.py does that runs llama.cpp: load a GGUF file, decode, compare, through the C API.

It is called through llama-cpp-python's declarations (``llama_cpp.llama_cpp``), so that the prompt, the clock and the
way to count tokens are those of the other peers. The next token is the likeliest one, found by NumPy in the logits
that llama.cpp copies to the host. `peers.py --llama-cpp` says where the libraries are. This process has no torch, but
for the part that profiles.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.peers import answers

#: Where llama.cpp's libraries are; llama-cpp-python reads it, too.
LIBRARIES = "LLAMA_CPP_LIB_PATH"
TABLE = b"per_layer_token_embd"
BUFFER = re.compile(r"(\S+)\s+(model|KV|compute|output)\s+buffer size\s*=\s*([\d.]+) MiB")

_model: Any = None
_context: Any = None
_adapter: Any = None
_said: list[str] = []
_position = 0  # of deepen() and deep()
_kept: list[Any] = []  # what C still points to

#: Tokens that are read at once.
BATCH = 512


def libraries(tree: Path) -> str:
    """Where the linker finds those of a built tree, and cuBLAS as PyTorch has it."""
    installed = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/lib")
    found = [tree / "build" / "bin", *installed, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return ":".join(map(str, found))


def api() -> Any:
    """llama-cpp-python's declarations; its backends are loaded at the first call."""
    from llama_cpp import llama_cpp as found

    if not _kept:
        logged = found.llama_log_callback(lambda level, text, data: _said.append(text.decode(errors="replace")))
        found.llama_log_set(logged, ctypes.c_void_p(0))
        folder = Path(os.environ[LIBRARIES])
        registry, base = (ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml", "ggml-base"))
        registry.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        registry.ggml_backend_load_all_from_path(str(folder).encode())
        registry.ggml_backend_dev_by_name.restype = ctypes.c_void_p
        registry.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
        base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
        base.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
        _kept.extend([logged, registry, base])
        found.llama_backend_init()
    return found


class _Override(ctypes.Structure):
    """`llama_model_tensor_buft_override`: tensors by a pattern, and the kind of memory that they go to."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def load(order: Order) -> Data:
    """Another model in place of the one before: so many layers on the GPU, the table there or on the host."""
    global _model, _context, _position
    llama = api()
    release()
    _position = 0
    _said.clear()
    device = _kept[1].ggml_backend_dev_by_name(b"CUDA0")
    if order["gpu"] and not device:
        raise RuntimeError("llama.cpp found no CUDA device")
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = order["layers"]
    if order["table"] == "device" and device:
        overrides = (_Override * 2)(
            _Override(TABLE, _kept[2].ggml_backend_dev_buffer_type(device)), _Override(None, None)
        )
        _kept.append(overrides)
        settings.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    started = time.perf_counter()
    _model = llama.llama_model_load_from_file(order["file"].encode(), settings)
    if not _model:
        raise RuntimeError(f"llama.cpp did not load the model: {_last()}")
    _context = _new_context(order)
    return {"load_s": time.perf_counter() - started, "buffers_mib": buffers(), "system": system()}


def _new_context(order: Order) -> Any:
    llama = api()
    settings = llama.llama_context_default_params()
    settings.n_ctx = order["context"]
    settings.n_batch = settings.n_ubatch = BATCH
    settings.n_threads = settings.n_threads_batch = order["threads"]
    if order.get("exact"):  # keys and values in float32, not in its default, float16
        settings.type_k = settings.type_v = llama.GGML_TYPE_F32
        settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if order.get("flash"):
        settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
    found = llama.llama_init_from_model(_model, settings)
    if not found:
        raise RuntimeError(f"llama.cpp made no context: {_last()}")
    return found


def release() -> None:
    global _model, _context, _adapter
    llama = api()
    if _context:
        llama.llama_free(_context)
    if _model:
        llama.llama_model_free(_model)
    _model = _context = _adapter = None


def _last() -> str:
    return " ".join("".join(_said).split())[-300:]


def buffers() -> Data:
    """MiB by device and use, as llama.cpp logs them."""
    found: Data = {}
    for device, use, mib in BUFFER.findall("".join(_said)):
        key = f"{device} {use}"
        found[key] = found.get(key, 0.0) + float(mib)
    return found


def system() -> str:
    """What llama.cpp says that it was built with."""
    return " ".join(api().llama_print_system_info().decode().split())


def model() -> Any:
    """The model that is loaded, for the C API."""
    return _model


def width() -> int:
    """Of the embeddings that :func:`embed` takes."""
    return int(api().llama_model_n_embd_inp(_model))


def decode(tokens: list[int], first: int, *, every: bool = False) -> Any:
    """Feed tokens from position ``first`` on; the logits of the last one, or of every one."""

    def fill(batch: Any) -> None:
        for number, token in enumerate(tokens):
            batch.token[number] = token

    return _decoded(len(tokens), 0, fill, first, every=every)


def embed(rows: Any, first: int, *, both_ways: bool) -> Any:
    """Likewise, rows of float32 in place of tokens; the logits of every one. ``both_ways``: they see one another."""

    def fill(batch: Any) -> None:
        ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)

    api().llama_set_causal_attn(_context, not both_ways)
    try:
        return _decoded(len(rows), rows.shape[1], fill, first, every=True)
    finally:
        api().llama_set_causal_attn(_context, True)


def _decoded(count: int, size: int, fill: Callable[[Any], None], first: int, *, every: bool) -> Any:
    import numpy

    llama = api()
    batch = llama.llama_batch_init(count, size, 1)
    try:
        batch.n_tokens = count
        fill(batch)
        for number in range(count):
            batch.pos[number] = first + number
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, 0
            batch.logits[number] = every or number == count - 1
        if code := llama.llama_decode(_context, batch):
            raise RuntimeError(f"llama_decode: {code}; {_last()}")
        rows = range(count) if every else (count - 1,)
        words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(_model))
        found = [numpy.ctypeslib.as_array(llama.llama_get_logits_ith(_context, row), (words,)) for row in rows]
        return numpy.stack(found) if every else found[0]
    finally:
        llama.llama_batch_free(batch)


def forget() -> None:
    """Empty the cache of keys and values."""
    llama = api()
    llama.llama_memory_clear(llama.llama_get_memory(_context), True)


def turn(order: Order) -> Data:
    """Seconds to the first token and tokens a second after the first ``settled`` of them, of one greedy answer."""
    prompt = answers.prompt(Path(order["folder"]))
    forget()
    started = time.perf_counter()
    times = _timed(prompt, 0, order["count"])
    return {
        "seconds": times[-1] - started,
        "first_token_s": times[0] - started,
        "tok_s": _rate(times, order["settled"]),
    }


def _timed(prompt: list[int], position: int, count: int) -> list[float]:
    """When each of so many tokens was there, after a prompt that begins at that position."""
    token, times = int(decode(prompt, position).argmax()), [time.perf_counter()]
    for after in range(position + len(prompt), position + len(prompt) + count - 1):
        token = int(decode([token], after).argmax())
        times.append(time.perf_counter())
    return times


def _rate(times: list[float], settled: int) -> float:
    return (len(times) - 1 - settled) / (times[-1] - times[settled])


def deepen(order: Order) -> Data:
    """Read on until the text has as many tokens as the prompt of an order for :func:`deep` is to have."""
    global _position
    if order["prompt"] < _position:
        forget()
        _position = 0
    started = time.perf_counter()
    chance = random.Random(_position)
    while _position < order["prompt"]:
        count = min(BATCH, order["prompt"] - _position)
        decode([chance.randrange(3, order["vocabulary"]) for _ in range(count)], _position)
        _position += count
    _timed([3], _position, order["settled"])
    _position += order["settled"]
    return {"read_s": time.perf_counter() - started}


def deep(order: Order) -> Data:
    """Tokens a second of some that go on from there."""
    global _position
    times = _timed([3], _position, order["tokens"])
    _position += order["tokens"]
    return {"tok_s": _rate(times, order["settled"])}


def read(order: Order) -> Data:
    """Milliseconds to the first token of a text of so many random ones, in pieces of :data:`BATCH`."""
    global _position
    import numpy

    llama = api()
    forget()
    _position = 0
    chance = random.Random(order["seed"])
    count = order["prompt"]
    tokens = (llama.llama_token * count)(*(chance.randrange(3, order["vocabulary"]) for _ in range(count)))
    size, pointer = ctypes.sizeof(llama.llama_token), ctypes.POINTER(llama.llama_token)
    pieces = [
        llama.llama_batch_get_one(ctypes.cast(ctypes.byref(tokens, first * size), pointer), min(BATCH, count - first))
        for first in range(0, count, BATCH)
    ]
    started = time.perf_counter()
    for piece in pieces:
        if code := llama.llama_decode(_context, piece):
            raise RuntimeError(f"llama_decode: {code}; {_last()}")
    words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(_model))
    numpy.ctypeslib.as_array(llama.llama_get_logits_ith(_context, -1), (words,)).argmax()
    return {"ms": 1000 * (time.perf_counter() - started)}


def profiled(order: Order) -> Data:
    """The kernels of tokens that come after ``settled`` others. torch is imported here, for its profiler alone."""
    from benchmarks.decoding import kernel_times as kernels

    prompt = answers.prompt(Path(order["folder"]))

    def run(start: Callable[[], None]) -> None:
        forget()
        token = int(decode(prompt, 0).argmax())
        for number in range(order["settled"] + kernels.TOKENS):
            if number == order["settled"]:
                start()
            token = int(decode([token], len(prompt) + number).argmax())

    return kernels.recorded(run)


def agree(order: Order) -> Data:
    """What it says of the prompt, against bf16."""
    folder = Path(order["folder"])
    forget()
    return answers.compared(folder, decode(answers.prompt(folder), 0, every=True))


def adapt(order: Order) -> Data:
    """A LoRA adapter on it."""
    global _adapter
    llama = api()
    started = time.perf_counter()
    _adapter = llama.llama_adapter_lora_init(_model, order["adapter"].encode())
    if not _adapter:
        raise RuntimeError(f"llama.cpp did not load the adapter: {_last()}")
    adapters, scales = (llama.llama_adapter_lora_p_ctypes * 1)(_adapter), (ctypes.c_float * 1)(1.0)
    if code := llama.llama_set_adapters_lora(_context, adapters, 1, scales):
        raise RuntimeError(f"llama_set_adapters_lora: {code}; {_last()}")
    return {"adapter_load_s": time.perf_counter() - started}


ACTIONS: dict[str, Callable[[Order], Data]] = {
    "load": load,
    "turn": turn,
    "deepen": deepen,
    "deep": deep,
    "read": read,
    "agree": agree,
    "profile": profiled,
    "adapt": adapt,
}

if __name__ == "__main__":
    sys.exit(common.serve(ACTIONS, stack=False))
