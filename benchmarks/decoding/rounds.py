"""What drafts give on this GPU: tokens a second by the share of drafts that are right, against decoding without them.

python benchmarks/decoding/rounds.py --shape E2B --out FILE.json [--where gpu,host,streamed] [--adapters no,lora]
    [--sampled] [--tokens 256] [--hidden 256]

The model has random weights. Its text without an assistant is decoded first; then a drafter drafts that text, each
token altered with a given probability, after an assistant of four layers with random weights has drafted as well, so
that its time counts. Numbers of drafts are fixed, and then :mod:`gemma4_compat._decoding.pace` decides. Every text is
compared with the one without an assistant: exit code 1 if a token differs. The file is written after every case.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.small_card import device as small_card_device

SHARES = (0.3, 0.5, 0.7, 0.8, 0.95)
#: Tokens of the prompt.
PROMPT = 64


class Fixed:
    """In place of :class:`pace.Pace`: always so many drafts."""

    count = 0

    def __init__(self, most: int) -> None:
        self._most = most

    def next(self) -> int:
        """As many as there may be."""
        return min(self.count, self._most)

    def note(self, drafts: int, right: int, seconds: float | None) -> None:
        """Nothing is learnt."""


def assistant_of(model: Any, hidden: int) -> Any:
    """An assistant of four layers for this model, with random weights."""
    import torch
    import transformers

    text = model.config.get_text_config()
    kind = type(model).__name__.replace("ForConditionalGeneration", "")
    shape = text.to_dict() | {"num_hidden_layers": 4, "num_kv_shared_layers": 4, "hidden_size": hidden}
    period = list(text.layer_types[: text.layer_types.index("full_attention") + 1])
    shape |= {"layer_types": [*(period * 4)[:3], "full_attention"], "intermediate_size": 4 * hidden}
    shape |= {"enable_moe_block": False, "use_double_wide_mlp": False, "attention_bias": False}
    if hasattr(text, "hidden_size_per_layer_input"):
        shape |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    given = {name: value for name, value in shape.items() if name not in ("architectures", "per_layer_config")}
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config=type(text)(**given), backbone_hidden_size=text.hidden_size
    )
    torch.manual_seed(0)
    with torch.device(model.device):
        made = getattr(transformers, f"{kind}AssistantForCausalLM")(config)
    return made.to(model.device, model.dtype).eval()


def drafter(text: Any, share: float) -> Any:
    """A method for ``assisted.Text``: the tokens of ``text``, (1, length), each altered with probability 1 - share."""
    import torch

    from gemma4_compat._decoding import assisted

    drafted = assisted.Text._drafted
    generator = torch.Generator().manual_seed(1)
    right = (torch.rand(text.shape, generator=generator) < share).to(text.device)
    tokens = torch.nn.functional.pad(torch.where(right, text, (text + 1) % 1000), (0, 8))

    def method(self: Any, count: int) -> Any:
        drafted(self, count)
        return tokens[:, self._held + 1 : self._held + 1 + count]

    return method


def timed(model: Any, batch: Data, tokens: int, **options: Any) -> tuple[Any, float]:
    """A text, and the seconds that it took."""
    import torch

    torch.manual_seed(0)
    small_card_device.synchronize()
    begun = time.perf_counter()
    with torch.no_grad():
        found = model.generate(**batch, min_new_tokens=None, max_new_tokens=tokens, eos_token_id=None, **options)
    small_card_device.synchronize()
    return found, time.perf_counter() - begun


def case(model: Any, assistant: Any, tokens: int, warm: int, options: Data) -> Data:
    """All shares and numbers of drafts, on one placement."""
    from gemma4_compat._decoding import assisted, pace

    gemma4_compat.decode_fast(model, assistants=True)
    batch = models.text_prompt(model, PROMPT)
    models.base(model).generation_config.max_cache_len = PROMPT + max(tokens, warm)  # all texts share graphs
    timed(model, batch, max(tokens, warm), **options)
    longest, _ = timed(model, batch, max(tokens, warm), **options)
    _, plain = timed(model, batch, tokens, **options)
    found: Data = {"plain_tokens_s": tokens / plain, "rounds": [], "equal": True, "texts": 0}

    def one(share: float, new: int) -> tuple[float, Data]:
        before = gemma4_compat.decoding_statistics(model)
        drafted, accepted, rounds = before.drafted, before.accepted, before.rounds
        with mock.patch.object(assisted.Text, "_drafted", drafter(longest, share)):
            text, seconds = timed(model, batch, new, assistant_model=assistant, **options)
        after = gemma4_compat.decoding_statistics(model)
        found["equal"] &= bool(text.equal(longest[:, : text.shape[1]]))
        found["texts"] += 1
        counts = {"drafted": after.drafted - drafted, "accepted": after.accepted - accepted}
        return seconds, counts | {"rounds": after.rounds - rounds}

    for count in pace.COUNTS:
        with mock.patch.object(pace, "Pace", Fixed), mock.patch.object(Fixed, "count", count):
            one(0.0, warm)  # captures and fuses
            for share in SHARES:
                seconds, counts = one(share, tokens)
                speed = tokens / seconds
                found["rounds"].append(
                    {"drafts": count, "share": share, "tokens_s": speed, "of_plain": speed * plain / tokens, **counts}
                )
    for share in (0.0, *SHARES):
        one(share, tokens)
        seconds, counts = one(share, tokens)
        speed = tokens / seconds
        found["rounds"].append(
            {"drafts": "pace", "share": share, "tokens_s": speed, "of_plain": speed * plain / tokens, **counts}
        )
    found["memory"] = small_card_device.memory()
    found["statistics"] = {
        "reasons": list(gemma4_compat.decoding_statistics(model).reasons),
        "not_fused": list(gemma4_compat.decoding_statistics(model).not_fused),
        "fused": gemma4_compat.decoding_statistics(model).fused,
        "captured": gemma4_compat.decoding_statistics(model).captured,
        "assistant_fused": gemma4_compat.decoding_statistics(assistant).fused,
    }
    gemma4_compat.decode_fast(model, enabled=False)
    return found


def shown(name: str, found: Data) -> str:
    """A table of one case: rows by drafts, columns by share, in multiples of the speed without drafts."""
    lines = [f"{name}: {found['plain_tokens_s']:.0f} tokens/s without drafts; texts equal: {found['equal']}"]
    for count in dict.fromkeys(row["drafts"] for row in found["rounds"]):
        rows = [row for row in found["rounds"] if row["drafts"] == count]
        lines.append(f"  {count:>4}: " + "  ".join(f"{row['share']:.2f}: {row['of_plain']:.2f}x" for row in rows))
    return "\n".join([*lines, *(f"  {reason}" for reason in found["statistics"]["reasons"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.SHAPES, default="tiny")
    parser.add_argument("--where", default="gpu,host,streamed")
    parser.add_argument("--adapters", default="no,lora")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--warm", type=int, default=220, help="tokens after which graphs are fused")
    parser.add_argument("--hidden", type=int, default=256, help="width of the assistant")
    parser.add_argument("--sampled", action="store_true", help="temperature 1, top-k 64, top-p 0.95; greedy without")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    given = sampled if options.sampled else {"do_sample": False}
    with tempfile.TemporaryDirectory(dir=models.work_folder(options.shape)) as name:
        folder, weights = Path(name), {}
        found: Data = {"options": vars(options) | {"out": str(options.out)}}
        found |= {"built": models.build(options.shape, folder, weights), "cases": {}}
        for where in options.where.split(","):
            for adapter in options.adapters.split(","):
                model = models.load(where, folder, weights)
                assistant = assistant_of(model, options.hidden)
                if adapter == "lora":
                    model = models.adapt(model, folder)
                key = f"{options.shape} {where} {adapter}"
                found["cases"][key] = case(model, assistant, options.tokens, options.warm, given)
                options.out.write_text(json.dumps(found, indent=1, default=str))
                print(shown(key, found["cases"][key]), flush=True)
                del model, assistant
    return int(not all(one["equal"] for one in found["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
