"""The same weights for llama.cpp: a tokenizer that its converter takes; its converter, quantizer and benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Data

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
#: What the converter and the quantizer make, and of what.
FILES = {"bf16": "bf16", "q4_0": "bf16", "q8_0": "bf16"}


def write_tokenizer(checkpoint: Path) -> None:
    """Made-up tokens, as many as the model has: nothing here is text, and the converter wants a tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    size = config.get("text_config", config)["vocab_size"]
    tokens = [*SPECIAL, "a", "b", "ab", *(f"token{number}" for number in range(len(SPECIAL) + 3, size))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True, **flags} for number, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [["a", "b"]],
        },
    }
    named = {f"{token.strip('<>')}_token": token for token in SPECIAL}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (checkpoint / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_processor(checkpoint: Path) -> None:
    """What the converter of towers wants of a processor: pixels are not shifted, as in released ones."""
    made = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(made), encoding="utf-8")


class Llama:
    """llama.cpp: its source tree, built into ``build/bin``."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree.resolve()
        self.programs = self.tree / "build" / "bin"

    def missing(self) -> str | None:
        """Why it cannot be run, if it cannot."""
        wanted = [self.tree / "convert_hf_to_gguf.py", self.programs / "libllama.so", self.programs / "llama-quantize"]
        lacking = [str(path.relative_to(self.tree)) for path in wanted if not path.exists()]
        return f"no {', '.join(lacking)} in what --llama-cpp names" if lacking else None

    def _run(self, command: list[str], folder: Path, timeout: float) -> str:
        """Its standard output.

        Raises:
            RuntimeError: it failed, or took too long; with the end of what it said.
        """
        environment = dict(os.environ, GEMMA4_COMPAT_DISABLE="all", HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=max(1.0, timeout)
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{Path(command[0]).name}: no end after {timeout:.0f} s") from None
        if done.returncode:
            said = " ".join((done.stderr or done.stdout)[-300:].split())
            for path, name in ((folder, "WORK"), (self.tree, "LLAMA"), (ROOT, ".")):
                said = said.replace(str(path), name)
            raise RuntimeError(f"it ended with {done.returncode}: {said}")
        return done.stdout

    def convert(self, kind: str, folder: Path, timeout: float) -> Data:
        """Of the checkpoint in ``folder`` a GGUF file in one of the :data:`FILES`, or, as "lora", of the adapter.

        "mmproj-bf16" and "mmproj-f32" are those of its towers.
        """
        made, started = folder / f"{kind}.gguf", time.perf_counter()
        checkpoint = folder / "checkpoint"
        if kind in ("bf16", "f32"):
            script, given = "convert_hf_to_gguf.py", [str(checkpoint), "--outtype", kind]
        elif kind.startswith("mmproj-"):
            given = [str(checkpoint), "--mmproj", "--outtype", kind.removeprefix("mmproj-")]
            script = "convert_hf_to_gguf.py"
        elif kind == "lora":
            script, given = "convert_lora_to_gguf.py", [str(folder / "adapter"), "--base", str(checkpoint)]
        else:
            threads = str(os.cpu_count() or 1)
            command = [
                str(self.programs / "llama-quantize"),
                str(folder / "bf16.gguf"),
                str(made),
                kind.upper(),
                threads,
            ]
            self._run(command, folder, timeout)
            script, given = "", []
        if script:
            self._run([sys.executable, str(self.tree / script), *given, "--outfile", str(made)], folder, timeout)
        return {"seconds": time.perf_counter() - started, "gib": made.stat().st_size / 2**30}

    def bench(self, file: Path, options: list[str], folder: Path, timeout: float) -> Data:
        """What its own benchmark says of a file: tokens a second of a prompt, and of tokens one by one."""
        program = self.programs / "llama-bench"
        command = [str(program), "-m", str(file), "-p", "512", "-n", "128", "-r", "3", "-o", "json", *options]
        found: Data = {}
        runs: list[dict[str, Any]] = json.loads(self._run(command, folder, timeout))
        for one in runs:
            key = "decode" if one["n_gen"] else "prompt"
            found[key] = {"tok_s": one["avg_ts"], "deviation": one["stddev_ts"]}
            found["build"] = f"{one['build_commit']} ({one['build_number']}), {one['backends']}"
        return found
