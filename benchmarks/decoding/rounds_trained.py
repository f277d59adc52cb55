"""Whether texts with drafts are those without, of the trained tiny models, wherever their weights are. Needs no GPU.

python benchmarks/decoding/rounds_trained.py --out FILE.json [--kinds E2B,12B,26B-A4B] [--tokens 8000]

A tape stands in for CUDA graphs, and PyTorch gives each token its own bits (``ByWidth`` in
tests/unit/kernels/by_rows.py). The models of tests/data are asked for facts, stories, sums, docstrings, pictures and
sounds, alone and at the end of conversations that are longer than their sliding window. A model on one device says
each text without drafts. The models in all placements say it again with drafts, until so many tokens are compared in
each case. Drafts come from the trained assistant (E2B), from prompt lookup, or are the text itself with altered
tokens. Their number is fixed, changes from round to round, or is decided by measuring. Each case counts the tokens,
the texts that differ, and the bytes of all live tensors after every fourth text. A model with layers on disk is not
replayed, so transformers decodes it, here in float32. The exit code is 1 if a text differs. The file is written after
every case.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks.common import Data
from benchmarks.decoding import models, rounds
from gemma4_compat._gemma4.quantization import expert_storage, experts
from gemma4_compat._lab import tiny
from gemma4_compat._lab.trained import PLACE, TWINS, Trained
from tools.trained_model import assistant as trained_assistant
from tools.trained_model import batches, questions

ROOT = Path(__file__).resolve().parents[2]
#: The quantization of a model of which only the experts are quantized.
EXPERTS = "experts-in-4bit"
#: By kind of model: quantization, whether it has its LoRA adapter, and where its weights are.
CASES: dict[str, list[tuple[str, bool, str]]] = {
    "E2B": [
        ("bf16", False, "device"),
        ("bf16", False, "host"),
        ("bf16", False, "streamed"),
        ("float32", False, "disk"),
        ("bf16", True, "device"),
        ("bf16", True, "streamed"),
        ("4bit", False, "device"),
        ("4bit", False, "streamed"),
        ("4bit", True, "device"),
        ("4bit", True, "host"),
    ],
    "12B": [("bf16", False, "device"), ("bf16", False, "streamed"), ("4bit", True, "device"), ("4bit", True, "host")],
    "26B-A4B": [
        ("bf16", False, "device"),
        ("bf16", False, "experts"),
        ("bf16", True, "experts"),
        ("bf16", True, "streamed"),
        (EXPERTS, False, "device"),
        (EXPERTS, False, "experts"),
        (EXPERTS, False, "streamed"),
    ],
}
DTYPES = {"bf16": "bfloat16", "float32": "float32"}
#: Positions of each cache, so that texts share graphs.
POSITIONS = 512
#: How many drafts each round has: always so many, any number ("any"), or what is measured to pay ("chosen").
NUMBERS: tuple[int | str, ...] = (2, 4, 7, 7, "any", "chosen")
#: Texts from one look at all live tensors to the next.
MEASURED = 4
#: Shares of right drafts of texts that are drafted with altered tokens.
SHARES = (0.5, 0.8, 0.95)
_TABLE = "model.language_model.embed_tokens_per_layer"


class Prompts:
    """Questions, drawn; the same for each model of a kind.

    Args:
        seed: of the draw.
        model: what it cannot take is not asked.
    """

    def __init__(self, seed: int, model: Any) -> None:
        self._dice, self._model = random.Random(seed), model

    def next(self) -> Data:
        """A question of any kind, or a conversation that ends with one: what ``generate`` takes, and how long."""
        mix = batches.mix(self._model)
        if self._dice.random() < 0.5:
            row = questions.asked(self._dice, self._dice.choice(tuple(mix)))
        else:
            row = batches.row(self._dice, mix)
        given = batches.batch([row], self._model)
        labels = given.pop("labels")[0].tolist()
        answered = [place for place, label in enumerate(labels) if label != batches.IGNORED]
        asked = max(place for place in answered if labels[place - 1] == batches.IGNORED)
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            given[name] = given[name][:, :asked]
        ends = {} if self._dice.random() < 0.25 else {"eos_token_id": None}
        return {**given, "max_new_tokens": self._dice.randrange(40, 220), **ends}


def loaded(trained: Trained, quantization: str) -> Any:
    import torch

    if quantization == "4bit":
        return trained.load("4bit")
    model = trained.load(dtype=getattr(torch, DTYPES.get(quantization, "bfloat16")))
    for module in experts.all_experts(model).values() if quantization == EXPERTS else ():
        expert_storage.quantize_module(module, tiny.quantization_config("4bit-double"))
    return model


def placed(trained: Trained, quantization: str, where: str, folder: Path) -> Any:
    """The model, with its weights where a case has them. Here ``"cpu"`` is the host, and the same CPU the device."""
    import torch
    from accelerate import dispatch_model

    model = loaded(trained, quantization)
    if where == "device":
        return model
    main, away = torch.device("cpu"), "disk" if where == "disk" else "cpu"
    placement = tiny.device_map(model, "none" if where == "experts" else "towers", main=main, offloaded=away)
    if _TABLE in placement and where != "experts":
        placement[_TABLE] = away
    for name in [name for name in placement if ".layers." in name]:
        if where == "experts":
            del placement[name]
            parts = [part for part, _ in model.get_submodule(name).named_children()]
            placement |= {f"{name}.{part}": "cpu" if part == "experts" else main for part in parts}
            placement[f"{name}.layer_scalar"] = main
        elif where in ("streamed", "disk"):
            placement[name] = away
    options = {"main_device": main, "offload_dir": str(folder), "skip_keys": tiny.skip_keys(model)}
    return dispatch_model(model, placement, **options)


def adapted(model: Any, trained: Trained, *, adapter: bool) -> Any:
    if not adapter:
        return model.eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(trained.adapter)).eval()


def live_bytes() -> int:
    """Of all tensors in this process, each storage once."""
    import torch

    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu":
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def drafted(way: str, number: int | str, expected: Any, dice: random.Random) -> Iterator[None]:
    """Inside, texts have drafts of this kind and number."""
    from gemma4_compat._generation.speculative import assisted, draft_length

    with contextlib.ExitStack() as stack:
        if number != "chosen":
            counts = draft_length.COUNTS if number == "any" else (number,)
            choices = (0, *counts) if number == "any" else counts
            stack.enter_context(rounds.paced(lambda _most: dice.choice(choices)))
        if way == "altered":
            stack.enter_context(mock.patch.object(assisted.Text, "_drafted", altered(expected, dice)))
        yield


def altered(text: Any, dice: random.Random) -> Any:
    """A method for ``assisted.Text``: the tokens of ``text``, (1, length), of which some are others."""
    import torch

    share = dice.choice(SHARES)
    tokens = [token if dice.random() < share else (token + 1) % 256 for token in text[0].tolist()] + [0] * 8

    def method(self: Any, count: int) -> Any:
        held = int(self._state["held"])  # the host may not have read it
        return torch.tensor([tokens[held + 1 : held + 1 + count]])

    return method


def computed_by_width() -> contextlib.AbstractContextManager[Any]:
    """Inside, PyTorch computes the tokens of a round at once, with the bits of single ones."""
    from gemma4_compat._kernels.match import custom
    from tests.unit.kernels.by_rows import ByWidth

    return mock.patch.object(custom, "CustomKernels", ByWidth)


def said(model: Any, given: Data, **options: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.generate(**given, do_sample=False, **options)


class Texts:
    """Prompts of a model and its texts without drafts, which all its placements share.

    Args:
        trained: its folder.
        quantization: "4bit", :data:`EXPERTS`, or a name of :data:`DTYPES`.
        adapter: whether it has its adapter.
        seed: of the prompts.
    """

    def __init__(self, trained: Trained, quantization: str, *, adapter: bool, seed: int) -> None:
        self._model = adapted(loaded(trained, quantization), trained, adapter=adapter)
        prepared(self._model)
        self._prompts = Prompts(seed, models.base(self._model))
        self._known: list[tuple[Data, Any]] = []

    def of(self, tokens: int) -> list[tuple[Data, Any]]:
        """Prompts and their texts, which have so many new tokens together at least."""
        while sum(map(new_tokens, self._known)) < tokens:
            given = self._prompts.next()
            self._known.append((given, said(self._model, given)))
        return self._known


def new_tokens(one: tuple[Data, Any]) -> int:
    """Of a prompt and its text."""
    given, text = one
    return int(text.shape[1] - given["input_ids"].shape[1])


def prepared(model: Any) -> None:
    gemma4_compat.decode_fast(model, assistants=True)
    models.base(model).generation_config.max_cache_len = POSITIONS


def case(texts: Texts, model: Any, assistant: Any, ways: tuple[str, ...], tokens: int) -> Data:
    """Compare so many tokens of a model in one placement."""
    prepared(model)
    known = texts.of(-(-tokens // len(ways)))  # before tensors are counted
    dice, begun = random.Random(1), time.perf_counter()
    found: Data = {"texts": 0, "tokens": 0, "past_window": 0, "differing": [], "ways": {}}
    live: list[tuple[int, int]] = []
    window = models.base(model).config.get_text_config().sliding_window
    counted = gemma4_compat.statistics(model).decoding
    while found["tokens"] < tokens:
        given, expected = known[found["texts"] // len(ways)]
        way, number = ways[found["texts"] % len(ways)], dice.choice(NUMBERS)
        options: Data = {"prompt_lookup_num_tokens": 7} if way == "lookup" else {"assistant_model": assistant}
        with drafted(way, number, expected, dice):
            text = said(model, given, **options)
        new = new_tokens((given, expected))
        found["texts"] += 1
        found["tokens"] += new
        found["past_window"] += int(expected.shape[1] > window)
        name = f"{way}, {number}"
        found["ways"][name] = found["ways"].get(name, 0) + new
        if not text.equal(expected):
            found["differing"].append({"text": found["texts"] - 1, "way": name, "reasons": list(counted.reasons)})
        del text
        if found["texts"] % MEASURED == 0 or found["tokens"] >= tokens:
            live.append((live_bytes(), counted.captured + counted.prompts_captured))
    half = live[len(live) // 2 :]
    found["live_bytes"] = {"at_half": half[0][0], "at_end": half[-1][0], "most_since": max(one for one, _ in half)}
    found["captured_since_half"] = half[-1][1] - half[0][1]
    for name in ("rounds", "drafted", "accepted", "replayed", "eager", "captured", "prompts_captured"):
        found[name] = getattr(counted, name)
    found |= {"recaptures": dict(counted.recaptures), "reasons": list(counted.reasons)}
    return found | {"seconds": time.perf_counter() - begun}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(CASES))
    parser.add_argument("--tokens", type=int, default=8000, help="of each case, at least")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch
    import transformers

    versions = {one.__name__: one.__version__ for one in (torch, transformers)}
    found: Data = {"tokens": options.tokens, "versions": versions, "cases": {}}
    for kind in options.kinds.split(","):
        trained = Trained(ROOT / {"E2B": PLACE, **TWINS}[kind])
        first = trained.load()
        has_its_own = trained.assistant.is_dir()
        assistant = trained_assistant.load(trained) if has_its_own else rounds.assistant_of(first, 64)
        ways = ("altered", "altered", "altered", "lookup", *["assistant"] * has_its_own)
        shared: dict[tuple[str, bool], Texts] = {}
        with rounds.stand_in(), computed_by_width():  # the classes have been imported
            assistant.generation_config.num_assistant_tokens = 4  # of transformers' own loop
            for seed, (quantization, adapter, where) in enumerate(CASES[kind]):
                key = quantization, adapter
                if key not in shared:
                    shared[key] = Texts(trained, quantization, adapter=adapter, seed=seed)
                with tempfile.TemporaryDirectory() as folder:
                    model = adapted(placed(trained, quantization, where, Path(folder)), trained, adapter=adapter)
                    made = assistant.float() if quantization == "float32" else assistant.bfloat16()
                    one = case(shared[key], model, made, ways, options.tokens)
                    gemma4_compat.decode_fast(model, enabled=False)
                    del model
                name = f"{kind} {quantization} {'lora' if adapter else 'no'} {where}"
                found["cases"][name] = one
                options.out.write_text(json.dumps(found, indent=1))
                shown = ("texts", "tokens", "drafted", "accepted", "live_bytes", "reasons", "seconds")
                print(name, len(one["differing"]), "differ", {key: one[key] for key in shown}, flush=True)
    return int(any(one["differing"] for one in found["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
