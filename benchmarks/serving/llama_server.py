"""llama.cpp's own server: how it is started, and what it is asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers import llama

#: Where it chooses tokens, and its options for that. On the GPU, which it calls experimental, only the likeliest.
SAMPLINGS = {"host": [], "device": ["--backend-sampling", "--samplers", "temperature"]}
#: Every prompt is read, texts do not end, and none is cached: random weights have no answers.
REQUEST = {"cache_prompt": False, "ignore_eos": True}
_TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
_OF_TEMPLATE = 4  # tokens that serving.TEMPLATE adds to the words of a question; llama.cpp adds one, <bos>


def prompt(question: str) -> str:
    """As many tokens as our server reads for the question, of benchmarks.peers.models.write_tokenizer."""
    return "ab" * (len(question.split()) + _OF_TEMPLATE)


def version(tree: Path) -> str:
    """What it says of itself.

    Raises:
        SystemExit: it does not run.
    """
    words = [str(tree / "build" / "bin" / "llama-server"), "--version"]
    environment = dict(os.environ, LD_LIBRARY_PATH=llama.libraries(tree))
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{words[0]} does not run: {done.stderr[-500:]}")
    return " ".join((done.stderr + done.stdout).split())


def words(tree: Path, file: Path, found: dict[str, Any], context: int, *, on_gpu: bool) -> list[str]:
    """Its command: everything on the first GPU if there is one, flash attention, so many slots with that context."""
    parallel: int = found["parallel"]
    made = [str(tree / "build" / "bin" / "llama-server"), "--model", str(file), "--port", "0", "--no-ui"]
    made += ["--ctx-size", str(context * parallel), "--parallel", str(parallel), "--no-kv-unified"]
    made += ["--flash-attn", "on", "--fit", "off", "--cache-ram", "0", "--ctx-checkpoints", "0"]
    if on_gpu:
        made += ["--device", "CUDA0", "--gpu-layers", "99", "--override-tensor", "token_embd=CUDA0"]
        made += ["--threads", "1"]  # nothing is left to them, and threads that wait keep cores from clients
    return [*made, *SAMPLINGS[found["sampling"]], "--chat-template", _TEMPLATE]
