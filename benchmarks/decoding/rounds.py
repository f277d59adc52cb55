"""What drafts give on this GPU: tokens a second by the share of drafts that are right, against decoding without them.

python benchmarks/decoding/rounds.py --shape E2B --out FILE.json [--where gpu,host,streamed] [--adapters no,lora]
    [--sampled] [--counts 4,7] [--shares 0,0.3,0.5,0.7,0.95] [--tokens 256] [--long 1024] [--hidden 256] [--equal 40]
    [--timed 3] [--limit 60]

The model has random weights. Its text without an assistant is decoded first; then a drafter drafts that text, each
token altered with a given probability, after an assistant of four layers with random weights has drafted as well, so
that its time counts. Numbers of drafts are fixed, and then ``speculative/draft_length.py`` decides: in a text for
which nothing is known ("pace"), and in the one after it ("then"). With each fixed number: milliseconds of the graphs
that draft and read, one after the other, and of a round. Every text is compared with the one without an assistant: the
exit code is 1 if a token differs. The file is written after every row. ``--limit SECONDS`` begins no row later than
that after a placement was loaded, and lists those that are left out. Where layers are streamed, each step waits for
the bus: graphs are not fused there, so that texts may be short.

``--equal SECONDS`` only compares texts, for so long in each placement: prompts and lengths vary, and drafts' numbers
and quality from round to round and text to text. Without a GPU (only ``--where gpu``), a tape
stands in for graphs, and speeds mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.small_card import device as small_card_device

#: Tokens of the prompt.
PROMPT = 64
#: Texts, at most, until no graph is captured in them.
SETTLED = 8
#: Placements with layers in host memory.
STREAMED = ("half", "streamed")


def paced(decide: Callable[[int], int]) -> contextlib.AbstractContextManager[Any]:
    """Inside, ``decide`` says how many drafts a round has, given how many it may have."""
    from gemma4_compat._generation.speculative import draft_length

    class Decided(draft_length.DraftLength):
        def __init__(self, most: int, known: Any = None) -> None:
            super().__init__(most, known)
            self._most = most

        def next(self) -> int:
            return min(decide(self._most), self._most)

    return mock.patch.object(draft_length, "DraftLength", Decided)


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

    from gemma4_compat._generation.speculative import assisted

    drafted = assisted.Text._drafted
    generator = torch.Generator().manual_seed(1)
    right = (torch.rand(text.shape, generator=generator) < share).to(text.device)
    tokens = torch.nn.functional.pad(torch.where(right, text, (text + 1) % 200), (0, 16))

    def method(self: Any, count: int) -> Any:
        drafted(self, count)
        places = self._state["held"] + torch.arange(1, count + 1, device=tokens.device)
        return tokens.index_select(1, places)

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


@contextlib.contextmanager
def graphs() -> Iterator[dict[str, Any]]:
    """A dictionary that fills with the graphs that texts replay, by what they do. They hold no cache."""
    from gemma4_compat._generation.speculative import assisted

    found: dict[str, Any] = {}
    decode = assisted.Text.decode

    def noted(self: Any, *args: Any) -> Any:
        tokens = decode(self, *args)
        for key, last in self._last.items():
            found[f"reads {key + 1}" if isinstance(key, int) else f"drafts {key[0]}"] = last.graph
        return tokens

    with mock.patch.object(assisted.Text, "decode", noted):
        yield found


def milliseconds(graph: Any) -> float:
    """Of a graph: ten replays, one after the other."""
    small_card_device.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        graph.recording.replay()
    small_card_device.synchronize()
    return 100 * (time.perf_counter() - begun)


class Case:
    """All shares and numbers of drafts, on one placement.

    Args:
        model: PEFT may wrap it.
        assistant: of the model.
        options: of the command.
        sampling: options of ``generate``.
        streamed: whether its layers are.
        write: called after every row, with what was found and the row as text.
    """

    def __init__(
        self, model: Any, assistant: Any, options: Any, sampling: Data, write: Any, *, streamed: bool = False
    ) -> None:
        from gemma4_compat._graphs import decoder

        self.model, self.assistant, self.options = model, assistant, options
        self.sampling, self.write = sampling, write
        gemma4_compat.decode_fast(model, assistants=True)
        self.found: Data = {"rounds": [], "equal": True, "texts": 0, "compared": 0}
        for one in (models.base(model), assistant):
            decoder.of(one).fuses = not streamed
        self._begun, self._warm = time.perf_counter(), 0 if streamed else options.warm

    def prepare(self) -> None:
        """The text without an assistant, and how fast it is."""
        self.batch = models.text_prompt(self.model, PROMPT)
        most = max(self.options.tokens, self._warm, self.options.long)
        models.base(self.model).generation_config.max_cache_len = PROMPT + most  # all texts share graphs
        self.longest, _ = self._settled(lambda: timed(self.model, self.batch, most, **self.sampling))
        self.plain: dict[int, float] = {}
        for tokens in dict.fromkeys((self.options.long, self.options.tokens)):
            seconds = [timed(self.model, self.batch, tokens, **self.sampling)[1] for _ in range(self.options.timed)]
            self.plain[tokens] = statistics.median(seconds)
        speeds = {str(tokens): tokens / seconds for tokens, seconds in self.plain.items()}
        self.found["plain_tokens_s"] = speeds
        shown = ", ".join(f"{speed:.0f} tokens/s in {tokens}" for tokens, speed in speeds.items())
        self.write(self.found, f"without drafts: {shown}")

    def _in_time(self, row: str) -> bool:
        """Whether a row may begin. One that may not is noted."""
        within = not self.options.limit or time.perf_counter() - self._begun < self.options.limit
        if not within:
            self.found.setdefault("left_out", []).append(row)
            self.write(self.found, f"  {row:>10}: left out")
        return within

    def _settled(self, run: Callable[[], Any]) -> Any:
        """What ``run`` returns, once no graph is captured or fused in it: those of full windows come late."""
        inner = models.base(self.model)
        for _ in range(SETTLED):
            counted = [gemma4_compat.statistics(one).decoding for one in (inner, self.assistant)]
            before = [(one.captured, one.fused) for one in counted]
            found = run()
            if before == [(one.captured, one.fused) for one in counted]:
                break
        else:
            self.found["unsettled"] = True
        return found

    def one(self, share: float, tokens: int) -> Data:
        """A text with drafts of which such a share is right."""
        from gemma4_compat._generation.speculative import assisted

        before = gemma4_compat.statistics(self.model).decoding
        counted = before.drafted, before.accepted, before.rounds
        options = {**self.sampling, "assistant_model": self.assistant}
        with mock.patch.object(assisted.Text, "_drafted", drafter(self.longest, share)):
            text, seconds = timed(self.model, self.batch, tokens, **options)
        after = gemma4_compat.statistics(self.model).decoding
        self.found["equal"] &= bool(text.equal(self.longest[:, : text.shape[1]]))
        self.found["texts"] += 1
        names = ("drafted", "accepted", "rounds")
        counts = {name: getattr(after, name) - number for name, number in zip(names, counted)}
        of_plain = self.plain[tokens] / seconds if tokens in self.plain else 0.0
        return {"share": share, "tokens": tokens, "tokens_s": tokens / seconds, "of_plain": of_plain, **counts}

    def row(self, name: Any, rows: list[Data], more: str = "") -> None:
        """Keep and show a row."""
        self.found["rounds"] += [{"drafts": name, **row} for row in rows]
        cells = "  ".join(f"{row['share']:.2f}: {row['of_plain']:.2f}x" for row in rows)
        self.write(self.found, f"  {name!s:>10}: {cells}{more}")

    def fixed(self, count: int) -> None:
        """Always so many drafts."""
        from gemma4_compat._graphs import decoder

        shares = [share for share in self.options.shares if share > 0] if count else [0.0]
        inner = models.base(self.model)
        with paced(lambda _most: count), graphs() as replayed:
            self._settled(lambda: self.one(0.0, max(self._warm, self.options.tokens)))
            rows = [self.one(share, self.options.tokens) for share in shares]
        wall = 1000 * decoder.of(inner).draft_lengths[self.assistant].seconds.get(count, float("nan"))
        names = (f"drafts {count}", f"reads {count + 1}")
        took = {name: milliseconds(replayed[name]) for name in names if name in replayed}
        self.found.setdefault("ms", {})[str(count)] = {"graphs": took, "round": wall}
        shown = ", ".join(f"{name} {ms:.2f}" for name, ms in took.items())
        self.row(count, rows, f"  ms: {shown}, round {wall:.2f}")

    def decided(self, shares: list[float], tokens: int) -> None:
        """As the pace decides, knowing nothing and then knowing the text before."""
        from gemma4_compat._graphs import decoder

        rows: tuple[list[Data], list[Data]] = ([], [])
        for share in shares:
            decoder.of(models.base(self.model)).draft_lengths.clear()
            for found in rows:
                found.append(self.one(share, tokens))
        for name, found in zip(("pace", "then"), rows):
            self.row(f"{name} {tokens}", found)

    def run(self) -> None:
        """All of it."""
        self.prepare()
        from gemma4_compat._generation.speculative import draft_length

        for count in (0, *self.options.counts):
            if self._in_time(f"{count} drafts"):
                self.fixed(count)
        lengths = {self.options.tokens: self.options.shares}
        lengths.setdefault(self.options.long, [share for share in self.options.shares if share < 0.5])
        with mock.patch.object(draft_length, "COUNTS", tuple(self.options.counts)):  # whose graphs are there
            for tokens, shares in lengths.items():
                if self._in_time(f"pace {tokens}"):
                    self.decided(shares, tokens)

    def compare(self) -> None:
        """Compare texts of varied prompts, for a time."""
        from gemma4_compat._generation.speculative import assisted

        dice, begun = random.Random(0), time.perf_counter()
        models.base(self.model).generation_config.max_cache_len = 1024
        options = {**self.sampling, "assistant_model": self.assistant}
        while time.perf_counter() - begun < self.options.equal:
            given = models.text_prompt(self.model, dice.choice((5, 64, 300, 600)), seed=dice.randrange(1000))
            tokens = dice.randrange(50, 400)
            expected, _ = timed(self.model, given, tokens, **self.sampling)
            counts = random.Random(tokens)
            with (
                paced(lambda _most: counts.choice((0, *self.options.counts))),  # noqa: B023 (called here)
                mock.patch.object(assisted.Text, "_drafted", drafter(expected, dice.choice((0.3, 0.7, 0.95)))),
            ):
                text, _ = timed(self.model, given, tokens, **options)
            self.found["equal"] &= bool(text.equal(expected))
            self.found["texts"] += 1
            self.found["compared"] += tokens
        self.write(self.found, f"{self.found['compared']:,} tokens of {self.found['texts']} texts")

    def finish(self) -> None:
        """Add what was used, and release it."""
        counted = gemma4_compat.statistics(self.model).decoding
        self.found["memory"] = small_card_device.memory()
        self.found["statistics"] = {
            "reasons": list(counted.reasons),
            "not_fused": list(counted.not_fused),
            "fused": counted.fused,
            "captured": counted.captured,
            "accepted": counted.accepted,
            "drafted": counted.drafted,
            "assistant_fused": gemma4_compat.statistics(self.assistant).decoding.fused,
        }
        gemma4_compat.decode_fast(self.model, enabled=False)
        reasons = "".join(f"; {reason}" for reason in (*counted.reasons, *counted.not_fused))
        self.write(self.found, f"  texts equal: {self.found['equal']}{reasons}")


def numbers(kind: Any) -> Any:
    """A type of an argument: numbers between commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def stand_in() -> contextlib.AbstractContextManager[Any]:
    """Without a GPU: inside, a tape stands in for CUDA graphs, and PyTorch computes each token in its own call."""
    import torch

    stack = contextlib.ExitStack()
    if not torch.cuda.is_available():
        from gemma4_compat._graphs import recording
        from gemma4_compat._kernels.match import custom
        from gemma4_compat._lab.stand_ins import tape
        from tests.unit.kernels.by_rows import ByRows

        stack.enter_context(tape.standing_in(recording.RECORDERS))
        stack.enter_context(mock.patch.object(custom, "CustomKernels", ByRows))
        stack.enter_context(mock.patch.object(custom, "unsupported_reason", return_value=None))
    return stack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.SHAPES, default="tiny")
    parser.add_argument("--where", default="gpu,host,streamed")
    parser.add_argument("--adapters", default="no,lora")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--warm", type=int, default=220, help="tokens after which graphs are fused")
    parser.add_argument("--long", type=int, default=1024, help="tokens of longer texts, where drafts do not pay")
    parser.add_argument("--shares", type=numbers(float), default=[0.0, 0.3, 0.5, 0.7, 0.95])
    parser.add_argument("--counts", type=numbers(int), default=[4, 7], help="numbers of drafts")
    parser.add_argument("--equal", type=float, default=0.0, help="seconds in which texts are only compared")
    parser.add_argument("--timed", type=int, default=3, help="texts without an assistant, of which the median counts")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds of a placement; no limit without")
    parser.add_argument("--hidden", type=int, default=256, help="width of the assistant")
    parser.add_argument("--sampled", action="store_true", help="temperature 1, top-k 64, top-p 0.95; greedy without")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    given = sampled if options.sampled else {"do_sample": False}
    with tempfile.TemporaryDirectory(dir=models.work_folder(options.shape)) as name:
        folder, weights = Path(name), {}
        found: Data = {"options": {name: value for name, value in vars(options).items() if name != "out"}}
        found |= {"built": models.build(options.shape, folder, weights), "cases": {}}
        with stand_in():  # transformers has been imported
            for where in options.where.split(","):
                for adapter in options.adapters.split(","):
                    model = models.load(where, folder, weights)
                    assistant = assistant_of(model, options.hidden)
                    if adapter == "lora":
                        model = models.adapt(model, folder)
                    key = f"{options.shape} {where} {adapter}"

                    def write(one: Data, row: str, key: str = key) -> None:
                        found["cases"][key] = one
                        options.out.write_text(json.dumps(found, indent=1, default=str))
                        print(row, flush=True)

                    print(f"{key}:", flush=True)
                    case = Case(model, assistant, options, given, write, streamed=where in STREAMED)
                    if options.equal:
                        case.compare()
                    else:
                        case.run()
                    case.finish()
                    del model, assistant, case
    return int(not all(one["equal"] for one in found["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
