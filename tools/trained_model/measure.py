"""How good the model is on questions that training did not draw, and what quantizing and merging do to its answers.

``python -m tools.trained_model.measure`` measures the model of this checkout, writes ``measured.json`` beside it, and
ends with 1 if it is not good enough. Without the shim: set ``GEMMA4_COMPAT_DISABLE=all``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab.trained import Trained
from tools.trained_model import batches, questions

FILE = "measured.json"
SEED = 10**9  # training's is another: pictures, sounds and stories are drawn anew
_EACH, _TOGETHER = 200, 50
#: At least this share of answers is right, word for word. Facts and docstrings are those of training.
BOUNDS = {"picture": 0.75, "sound": 0.85, "fact": 0.95, "docstring": 0.95, "adapter": 0.75}
#: Nats a token of the answers, over all kinds as training mixes them. Seeing and hearing, the 12B forgot some of them.
LOSS, LOSSES = 0.1, {"12B": 0.5}
#: Two ways to a merged model in 4 bits.
MERGES = ("4-bit, merged into the 4-bit weights", "4-bit, merged in bf16 before it was quantized")
#: Kinds of questions that have one right answer.
DEFINITE = ("picture", "sound", "fact", "docstring", "addition", "reading")
#: Those that quantized and merged models are asked: of these the model knows nearly all.
COMPARED = ("picture", "sound", "fact", "docstring")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of another model")
    trained = Trained.find(parser.parse_args(argv).folder)
    file = trained.folder / FILE
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = measured(trained) | {name: before[name] for name in ("training", "drafts") if name in before}
    write(found, trained.folder)
    return verdict(found)


def write(found: dict[str, Any], folder: Path) -> None:
    """Write what was measured beside the model."""
    (folder / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def missed(found: dict[str, Any]) -> list[str]:
    """What is not within the bounds. A model that hears nothing was not asked about sounds."""
    right = found["right"]
    bad = [
        f"{kind}: {right[kind]:.0%} right, not {bound:.0%}"
        for kind, bound in BOUNDS.items()
        if (kind != "sound" or kind in right) and right[kind] < bound
    ]
    most = LOSSES.get(found.get("kind", ""), LOSS)
    return bad + ([f"held-out loss {found['held_out_loss']}, not {most}"] if found["held_out_loss"] > most else [])


def verdict(found: dict[str, Any]) -> int:
    """Print what was found; 0 if it is within the bounds, else 1, and what is not goes to standard error."""
    print(json.dumps(found, indent=2))
    bad = missed(found)
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


def measured(trained: Trained) -> dict[str, Any]:
    """The held-out loss, the share of right answers by kind, and the same for quantized and merged models."""
    draw, model = random.Random(SEED), trained.load()
    mix = batches.mix(model)
    rows = [batches.row(draw, mix) for _ in range(_EACH // 2)]
    shares = {
        kind: _share(right(model, [questions.asked(draw, kind) for _ in range(_EACH)]))
        for kind in mix
        if kind in DEFINITE
    }
    shares["unseen_colour"] = _share(right(model, [questions.colour(draw) for _ in range(_EACH)]))
    shares["unseen"] = _share(right(model, [questions.asked(draw, "picture", unseen=True) for _ in range(_EACH)]))
    compared = {name: result for name, result in _compared(trained, [kind for kind in COMPARED if kind in mix])}
    shares["adapter"] = compared["bf16, adapter loaded"]["right"]
    found = {"held_out_loss": round(_loss(model, rows), 4), "right": shares, "compared": compared}
    return {"kind": variants.UNIFIED, **found} if model.config.model_type == "gemma4_unified" else found


def _compared(trained: Trained, kinds: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """How many answers are right, and how far the next token's probabilities are from those in bf16 (in nats,
    Kullback and Leibler), after each way to quantize the model or to merge its adapter.
    """
    for pirate, models in ((False, _plain(trained)), (True, _adapted(trained))):
        draw = random.Random(SEED)
        rows = [questions.asked(draw, kind, pirate=pirate) for kind in kinds for _ in range(_EACH // len(kinds))]
        reference: list[Any] = []
        for name, build in models.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a merge into 4 bits says what it loses
                model = build()
            found = _logits(model, rows)
            reference = reference or found
            apart = [_apart(one, other, labels) for (one, labels), (other, _) in zip(reference, found, strict=True)]
            yield name, {"right": _share(_exact(found)), "nats": round(sum(apart) / len(apart), 5)}


def _plain(trained: Trained) -> dict[str, Callable[[], Any]]:
    experts = {"4-bit, its experts too": lambda: _load(trained, "experts")} if _has_experts(trained) else {}
    return {
        "bf16": trained.load,
        "8-bit": lambda: _load(trained, "8bit"),
        "4-bit": lambda: _load(trained, "4bit"),
        **experts,
    }


def _adapted(trained: Trained) -> dict[str, Callable[[], Any]]:
    import gemma4_compat

    def loaded(quantization: str | None = None) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(_load(trained, quantization), str(trained.adapter)).eval()

    def merged_first(quantization: str) -> Any:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            merged = Trained(Path(folder))
            gemma4_compat.merge_adapter(trained.checkpoint, trained.adapter, merged.checkpoint)
            return _load(merged, quantization)

    experts: dict[str, Callable[[], Any]] = {
        "4-bit, its experts too, adapter loaded": lambda: loaded("experts"),
        "4-bit, its experts too, merged in bf16 before it was quantized": lambda: merged_first("experts"),
    }
    return {
        "bf16, adapter loaded": loaded,
        "bf16, merged": lambda: loaded().merge_and_unload(),
        "4-bit, adapter loaded": lambda: loaded("4bit"),
        MERGES[1]: lambda: merged_first("4bit"),
        MERGES[0]: lambda: loaded("4bit").merge_and_unload(),
        **(experts if _has_experts(trained) else {}),
    }


def _load(trained: Trained, quantization: str | None) -> Any:
    """As :meth:`Trained.load` does, or, with ``"experts"``, in 4 bits with its experts."""
    import gemma4_compat

    if quantization != "experts":
        return trained.load(quantization)
    with gemma4_compat.quantize(experts=True):
        return trained.load("4bit")


def _has_experts(trained: Trained) -> bool:
    from transformers import AutoConfig

    return bool(getattr(AutoConfig.from_pretrained(trained.checkpoint).get_text_config(), "enable_moe_block", False))


def _share(right: list[bool]) -> float:
    return sum(right) / len(right)


def _logits(model: Any, rows: list[batches.Row]) -> list[tuple[Any, Any]]:
    """Logits of the places before each token of an answer (the others are anything), and the labels, by batch."""
    import torch

    found = []
    with torch.no_grad():
        for start in range(0, len(rows), _TOGETHER):
            batch = batches.batch(rows[start : start + _TOGETHER], model)
            labels = batch.pop("labels")[:, 1:]
            found.append((model(**batch).logits[:, :-1].float(), labels))
    return found


def right(model: Any, rows: list[batches.Row]) -> list[bool]:
    """Which answers greedy decoding gives word for word: their tokens are the likeliest at each place."""
    return _exact(_logits(model, rows))


def _exact(made: list[tuple[Any, Any]]) -> list[bool]:
    found: list[bool] = []
    for logits, labels in made:
        found += ((logits.argmax(-1) == labels) | (labels == batches.IGNORED)).all(1).tolist()
    return found


def _loss(model: Any, rows: list[batches.Row]) -> float:
    """Nats a token of the answers."""
    from torch.nn.functional import cross_entropy

    total = count = 0
    for logits, labels in _logits(model, rows):
        kept = labels != batches.IGNORED
        total += cross_entropy(logits[kept], labels[kept], reduction="sum").item()
        count += int(kept.sum())
    return total / count


def _apart(one: Any, other: Any, labels: Any) -> float:
    from torch.nn.functional import kl_div, log_softmax

    kept = labels != batches.IGNORED
    expected, found = (log_softmax(logits[kept], -1) for logits in (one, other))
    return float(kl_div(found, expected, reduction="batchmean", log_target=True))


if __name__ == "__main__":
    raise SystemExit(main())
