"""The measured parts of docs/DECODING_MEASURED.md about prompts and drafts."""

from __future__ import annotations

import json
from typing import Any

from tools.pages.markers import ROOT

_RAW = "benchmarks/results/2026-11-27-h100"
#: Of sampled texts and streamed layers.
_ROUNDS = "benchmarks/results/2026-11-28-h200"
_ON_CPU = ("2026-11-27-cpu", "2026-11-30-cpu")
#: Of cases of benchmarks/decoding/rounds_trained.py.
_PLACED = {
    "device": "all on the device",
    "host": "table and towers on the host",
    "streamed": "table, towers and layers on the host",
    "experts": "experts on the host",
    "disk": "table, towers and layers on disk",
}
_DTYPES = {"experts-in-4bit": "bf16, experts in 4bit"}
_WAYS = {
    "default": "`generate`",
    "at_once": "`decode_fast`, at once",
    "any_length": "`any_length=True`",
    "llama.cpp": "llama.cpp, Q4_0",
}
_WHERE = {"gpu": "all on the card", "host": "table and towers on the host", "streamed": "layers on the host"}
_SHARES = (0.0, 0.5, 0.7, 0.95)
#: Of a text, where a row of the table of drafts says nothing else.
_TOKENS = 256
#: Lengths whose graphs are fused, in `prompts-fused`.
_FUSED = ("64", "512")
_CACHES = {
    "default cache": "default",
    "decode_fast": "`decode_fast`",
    "any_length": "`decode_fast(any_length=True)`",
}


def first_tokens(length: str = "64") -> tuple[float, ...]:
    """Milliseconds to the E2B's first token for a length that was read before: with ``decode_fast``, and without."""
    found = _lengths("prompts-fused")[length]["summary"]
    return found["at_once"]["median"], found["default"]["median"]


def prompts() -> str:
    """Milliseconds to the first token by the length of the prompt, and GiB above the loaded model."""
    rows = []
    for shape in ("E2B", "E4B", "12B", "26B-A4B"):
        run = {} if shape == "26B-A4B" else _lengths("prompts-fused", shape=shape)
        fused = {length: run[length] for length in _FUSED if length in run}
        ways = _lengths(shape=shape) | fused
        with_peer = ways if shape in ("E2B", "26B-A4B") else _lengths("prompts-llama", shape=shape) | fused
        for length, found in with_peer.items():
            cells = (
                next((_cell(one, way) for one in (found, ways[length]) if way in one["summary"]), "-") for way in _WAYS
            )
            rows.append(f"| {shape} | {int(length):,} | " + " | ".join(cells) + " |")
    heads = "| model | tokens | " + " | ".join(_WAYS.values()) + " |"
    return "\n".join((heads, "|---|---:" + "|---" * len(_WAYS) + "|", *rows))


def fused() -> str:
    """Graphs of prompts as captured and with fused kernels, by run: kernels, milliseconds on the GPU, first token."""
    shapes = ("E2B", "E4B", "12B")
    files = sorted(
        (ROOT / _RAW).glob("fused_prompts-*.json"), key=lambda file: (shapes.index(file.stem.split("-")[1]), file.stem)
    )
    rows = []
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        for length, found in run["lengths"].items():
            assert found["equal"], file
            ways = found["captured"], found["fused"]
            columns = ([f"{way['graph']['kernels']:,}" for way in ways], [f"{way['graph']['ms']:.1f}" for way in ways])
            cells = (" -> ".join(column) for column in (*columns, [f"{way['ms']:.1f}" for way in ways]))
            cells = *cells, f"{found['fusing_ms'] / 1000:.1f}"
            link = f"[{run['shape']}](../{file.relative_to(ROOT).as_posix()})"
            rows.append(f"| {link} | {int(length):,} | " + " | ".join(cells) + " |")
    heads = "| model, raw | tokens | kernels | ms of the graph on the GPU | ms to the first token | s to fuse |"
    return "\n".join((heads, "|---|---:|---|---|---|---:|", *rows))


def attention() -> str:
    """Prompts with PyTorch's attention and with kernels of this package, from several runs."""
    rows = [
        ("8192", "in chunks of 512", ("prompts-before", "chunks"), ("chunks-512", "chunks")),
        ("8192", "in chunks of 2,048", None, ("chunks-2048", "chunks")),
        ("8192", "at once", ("prompts-before", "at_once"), ("prompts", "at_once")),
        ("32768", "in chunks of 512", ("prompts-before", "chunks"), ("chunks-512", "chunks")),
        ("32768", "in chunks of 2,048", None, ("chunks-2048", "chunks")),
        ("32768", "at once", ("prompts-before", "at_once"), ("chunks-512", "at_once")),
    ]
    cells = [
        f"| {int(length):,} tokens | {how} | "
        + " | ".join("-" if one is None else _cell(_lengths(one[0])[length], one[1]) for one in (before, after))
        + " |"
        for length, how, before, after in rows
    ]
    return "\n".join(("| prompt | read | PyTorch's attention | ours |", "|---|---|---|---|", *cells))


def turns() -> str:
    """Milliseconds to the first token of later turns, read whole and with ``reuse_prefix``."""
    found: dict[str, Any] = json.loads((ROOT / _RAW / "turns-E2B.json").read_text(encoding="utf-8"))["found"]
    rows = [
        f"| {_CACHES[way]} | {turn} | {whole['prompt']:,} | {reused['read']} | "
        f"{whole['median']:.0f} -> {reused['median']:.0f} |"
        for way, ways in found.items()
        for turn, whole, reused in ((turn, ways["whole"][turn], ways["reused"][turn]) for turn in ways["whole"])
    ]
    heads = "| cache | turn | tokens of the prompt | read | ms to the first token |"
    return "\n".join((heads, "|---|---:|---:|---:|---|", *rows))


def rounds() -> str:
    """How many times as fast the second text with drafts is, by the share of drafts that are right.

    Without a second text, the one with four drafts in each round stands for it.

    The text without an assistant was timed once, and host load slows it down: the faster of it and of rounds without
    drafts counts as 1.
    """
    shapes = ("E2B", "E4B", "12B", "31B")
    found_in = [file for folder in (_RAW, _ROUNDS) for file in (ROOT / folder).glob("rounds-*.json")]
    lines = []
    for file in sorted(found_in, key=lambda file: (shapes.index(file.stem.split("-")[1]), file.stem)):
        measured = json.loads(file.read_text(encoding="utf-8"))
        tokens, sampled = measured["options"]["tokens"], measured["options"]["sampled"]
        for case, found in measured["cases"].items():
            assert found["equal"], case
            shape, where, adapter = case.split()
            speeds = {(row["drafts"], row["share"]): row["tokens_s"] for row in found["rounds"]}
            plain = max(found["plain_tokens_s"][str(tokens)], speeds[0, 0.0])
            more = {"LoRA": adapter == "lora", "sampled": sampled, f"{tokens} tokens": tokens != _TOKENS}
            what = ", ".join((shape, _WHERE[where], *(name for name, holds in more.items() if holds)))
            second = (speeds.get((f"then {tokens}", share), speeds.get((4, share))) for share in _SHARES)
            cells = ("-" if speed is None else f"{speed / plain:.2f}" for speed in second)
            lines.append(f"| {what} | {plain:.0f} | " + " | ".join(cells) + " |")
    heads = "| model | tokens a second without | " + " | ".join(f"{share:.0%} right" for share in _SHARES) + " |"
    return "\n".join((heads, "|---|---:" + "|---:" * len(_SHARES) + "|", *lines))


def drafted() -> str:
    """How many tokens of the trained tiny models were compared with drafts and without, by placement."""
    folder = ROOT / "benchmarks" / "results"
    files = [file for name in _ON_CPU for file in (folder / name).glob("rounds-trained-*.json")]
    found: dict[str, Any] = {}
    for file in sorted(files, key=lambda file: file.name):
        found |= json.loads(file.read_text(encoding="utf-8"))["cases"]
    lines = []
    for case, one in found.items():
        shape, dtype, adapter, where = case.split()
        grown = one["live_bytes"]["most_since"] - one["live_bytes"]["at_half"]
        right = f"{one['accepted']:,} of {one['drafted']:,}" if one["rounds"] else "-"
        what = f"{shape}, {_DTYPES.get(dtype, dtype)}{', LoRA' if adapter == 'lora' else ''}"
        lines.append(
            f"| {what} | {_PLACED[where]} | {one['texts']} | "
            f"{one['tokens']:,} | {len(one['differing'])} | {right} | {grown / 2**20:.1f} | "
            f"{one['captured_since_half']} |"
        )
    tokens, texts = (sum(one[name] for one in found.values()) for name in ("tokens", "texts"))
    differing = sum(len(one["differing"]) for one in found.values())
    heads = "| model | where | texts | tokens | differ | right drafts | MiB of later growth | graphs since then |"
    total = f"In all, {differing} of {texts:,} texts differ, of {tokens:,} tokens."
    notes = "-: drafted by transformers, or not at all. Growth: of all live tensors, from half of the texts on."
    return "\n".join((heads, "|---|---|---:|---:|---:|---:|---:|---:|", *lines, "", f"{total} {notes}"))


def contexts() -> str:
    """A long text in little memory: the last of its runs, and what is planned for it (tools.pages.contexts)."""
    lines = []
    planned = json.loads((ROOT / "benchmarks/results/planned_contexts.json").read_text(encoding="utf-8"))
    for shape in ("E2B", "E4B", "26B-A4B"):
        found = json.loads((ROOT / _RAW / f"contexts-{shape}.json").read_text(encoding="utf-8"))
        assert not found["problems"], shape
        one = found["ways"]["chosen"]["runs"][-1]
        plan = planned[shape]["peak"] / 2**30
        cells = (f"{one[name]:.1f}" for name in ("first_token_s", "peak_gib", "peak_reserved_gib"))
        more = f"{plan:.1f} ({plan / one['peak_gib'] - 1:+.1%}) | {one['tokens_s']:.0f} |"
        lines.append(f"| {shape} | {found['budget_gib']:.0f} GiB | " + " | ".join(cells) + f" | {more}")
    heads = "| model | free | seconds to the first token | tensors at most, GiB | reserved at most, GiB |"
    heads += " planned tensors, against measured |"
    return "\n".join((f"{heads} tokens a second after it |", "|---|---:|---:|---:|---:|---:|---:|", *lines))


def _lengths(run: str = "prompts", *, shape: str = "E2B") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / _RAW / f"{run}-{shape}.json").read_text(encoding="utf-8"))["lengths"]
    return found


def _cell(found: dict[str, Any], way: str) -> str:
    summary, peak = found["summary"][way], found["peak"].get(way)
    once = " (one try)" if summary["of"] == 1 else ""
    return f"{summary['median']:.1f}{once}" + ("" if peak is None else f", {peak:.2f} GiB")
