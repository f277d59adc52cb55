"""A check as its children would have said it, without running any."""

from __future__ import annotations

from typing import Any

from gemma4_compat._doctor.check.run import Found, Outcome, Settings

GIB = 1 << 30
SAME = {"equal": True, "difference": 0.0, "tokens": 8, "tokens_equal": 8, "first": None}
OTHER = {"equal": False, "difference": 2.5, "tokens": 8, "tokens_equal": 1, "first": "forward 2"}
PLANNED = {"loading": 2 * GIB, "prefill": 3 * GIB, "decode": 2 * GIB}
AWAY = dict.fromkeys(("per_layer_embeddings", "embeddings", "towers", "layers", "experts"), 0)


def survey(**changes: Any) -> dict[str, Any]:
    """That of a card of 12 GiB."""
    gpu = {"name": "NVIDIA GeForce RTX 3060", "memory": 12 * GIB, "free": 11 * GIB, "multiprocessors": 28}
    gpu |= {"ghz": 1.78, "capability": "8.6", "driver": "580.159.04", "cuda": "13.0"}
    copies = {"pinned": 24 * GIB, "pageable": 6 * GIB, "device": 300 * GIB, "host": 20 * GIB}
    machine = {"system": "Linux", "machine": "x86_64", "python": "3.12.3", "cores": 16, "gpu": gpu, "copies": copies}
    model = {"model_class": "Gemma4ForConditionalGeneration", "variant": "E2B", "parameters": 5_104_297_504}
    model |= {"layers": 35, "hidden": 1536, "vocabulary": 262144, "stored_quantized": False}
    return {
        "machine": machine | {"versions": {"torch": "2.11.0", "transformers": "5.24.0"}},
        "patches": {"off": [], "failed": []},
        "model": model | {"quantization": "4bit", "quantized_experts": False},
        "adapter": {"type": "LORA", "ranks": [16], "keys": 400, "problems": []},
        "budget": 10 * GIB,
        "note": "",
        "context": 4096,
        "kinds": ["text", "image"],
        **changes,
    }


def answer(against: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"against": against, "finite": True, "digest": "0123456789abcdef", **changes}


def speed(context: int, fast: float | None = 200.0) -> dict[str, Any]:
    found = None if fast is None else {"tokens_s": fast, "first_token_s": 0.1}
    return {"context": context, "eager": {"tokens_s": 15.0, "first_token_s": 0.2}, "fast": found}


def outcome(title: str = "everything on the card", against: dict[str, Any] | None = None, **away: int) -> Outcome:
    """A placement in which all went well; ``against``: the comparison with the reference."""
    order = {"away": AWAY | away, "planned": PLANNED, "expects_replay": True}
    fast = answer(against, against_eager=SAME, replayed=6, fused=1, reasons=[])
    done: dict[str, dict[str, Any]] = {"load": {"seconds": 3.0, "peak": 2 * GIB}}
    for with_adapter in ("", " with the adapter"):
        changed = {"changed": True} if with_adapter else {}
        done |= {f"{kind}{with_adapter}": answer(against, **changed) for kind in ("text", "image")}
        done |= {f"fast decoding{with_adapter}": fast, f"speed at 64 tokens{with_adapter}": speed(64)}
    done |= {"load the adapter": {"seconds": 0.5}, "peak": {"peak": 3 * GIB}}
    return Outcome(title, order, list(done), done, seconds=20.0)


def found(*placements: Outcome, **changes: Any) -> Found:
    """Two placements that agree, unless others are given."""
    chosen = list(placements) or [outcome(), outcome("in host memory: 2 towers", SAME, towers=2)]
    return Found(Settings(folder=None), survey(**changes), chosen, seconds=50.0)


def error(kind: str = "ValueError", message: str = "broken", **changes: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "message": message,
        "refusal": False,
        "frames": [],
        "patches": [],
        "advice": None,
    } | changes
