"""Find the patch that an error concerns.

Known errors come from the patches: the messages quoted in the ``Symptom:`` of their files, and those that their
reproductions raised in the measured releases (``RAISED``). Numbers, shapes, devices and paths in a message are not
compared. Other programs may also raise a text that names nothing of these libraries, so it is
only a possible match, unless the traceback goes through code that the patch replaces. If a message was cut short, a
class that only these libraries raise is enough. If nothing else is found, a name that only one patch has is a possible
match, unless it is a layer's or a model's. Where other software raises an error, only its class, or such a name in
its message, is evidence.
"""

from __future__ import annotations

import builtins
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from gemma4_compat._doctor.explain import common_errors
from gemma4_compat._doctor.explain.common_errors import Advice
from gemma4_compat._doctor.explain.messages import Frame, Message, Said
from gemma4_compat._engine.patch import Patch
from gemma4_compat.patches.registry import RAISED

#: Patch -> where the errors of its reproduction leave the libraries, and what is called there: see :func:`place_of`.
#: ``python -m tools.pasted_errors`` writes it.
PLACES: dict[str, list[str]] = json.loads(
    resources.files(__package__).joinpath("places.json").read_text(encoding="utf-8")
)
#: A message matches a pattern if it has this share of the pattern's weight, in the same order.
_ENOUGH = 0.82
#: Below this share, no pattern is named as the nearest.
_NEAR = 0.4
#: What `_seen` gives for a frame in code that the patch replaces.
_THROUGH = 2
#: How many words of a message are compared.
_WORDS = 400
_DEVICE = re.compile(r"\b(cpu|meta|cuda|xpu|mps)\b")
_ERROR_NAME = re.compile(r"\w+(?:Error|Exception|Warning)")
_PATH = re.compile(r"[\w.\-]*[\\/][\w.\-\\/]+|\.{2,}")
_MODULE = re.compile(r"(?:\w+\.){2,}\w+")  # model.layers.3.mlp, which varies between messages
_WORD = re.compile(r"[A-Za-z_]\w*")
_NAME = re.compile(r"[a-z]_[a-z]|[a-z][A-Z]|\d[a-z]")  # quant_state, PeftModel, Params4bit
# Names of devices, and the remains of a number or a shape.
_LEFT_OUT = frozenset({"cpu", "cuda", "xpu", "mps", "npu", "hpu", "x", "e", "a", "an", "the"})
#: What people meet first, in the order of README's table: before others about the same text.
MET_FIRST = (
    "accelerate-hf-initialized",
    "peft-clippable-linear",
    "transformers-shared-kv",
    "bitsandbytes-meta-quant-state",
    "transformers-model-device",
    "accelerate-train-offloaded",
    "peft-keep-dispatch",
    "transformers-auto-map",
    "peft-adapter-keys",
    "peft-quantized-merge",
    "transformers-text-only-checkpoint",
    "transformers-quantized-vision",
    "transformers-reentrant-checkpointing",
    "accelerate-paged-layers",
)
#: Parts and classes of models, which other software names as well.
_PART = re.compile(
    r"(?:.*_)?(?:proj\w*|norm|attn|mlp|tower|embed\w*|layers?|model|experts?|scal\w*|bias\w*|weights?)|gemma\w*(?:generation|lm|model|config|attention|layer)"
)
#: Words of a description have more letters, or are not compared; and there are as many of them.
_SHORT = 3
#: Names that occur in errors of any program.
_ANYBODYS = frozenset(dir(builtins)).union(
    ("NoneType", "Parameter", "Tensor", "FloatTensor", "Float", "BFloat16", "Half", "ModuleList"),
    ("Conv1d", "Conv2d", "Conv3d", "state_dict", "load_state_dict", "input_ids", "inputs_embeds", "in_features"),
    ("out_features", "model_kwargs", "padding_idx", "pin_memory", "device_map", "base_model", "github", "lm_head"),
    ("ignore_mismatched_sizes",),
    ("index_copy_", "masked_scatter", "embed_tokens", "language_model", "self_attn", "q_proj", "k_proj"),
)
#: Error classes, beside Python's own, that other programs raise.
COMMON = _ANYBODYS | {"OutOfMemoryError", "HFValidationError", "SafetensorError", "JSONDecodeError"}
_SAME = frozenset({"RuntimeError", "NotImplementedError"})  # torch raises one or the other, depending on the release


@dataclass(frozen=True)
class Match:
    """A patch that an error concerns.

    Attributes:
        patch: the patch.
        message: the error as it was given.
        known: the known message that it resembles.
        certain: whether no other program raises this; False if the text by itself does not tell.
        quoted: whether the patch's ``Symptom:`` quotes it; False if only its reproduction raised it.
    """

    patch: Patch
    message: Message
    known: str
    certain: bool
    quoted: bool


@dataclass(frozen=True)
class Answer:
    """Matches, best first; if there are none, the ids of patches with the most similar messages.

    ``advice`` is about a common error: that of the matches, or one that no patch is about.
    """

    matches: tuple[Match, ...]
    nearest: tuple[str, ...] = ()
    advice: Advice | None = None


@dataclass(frozen=True)
class _Pattern:
    patch: Patch
    text: str
    kind: str
    words: tuple[str, ...]
    quoted: bool
    names: frozenset[str]  # words of these libraries, which no other program's errors have
    shape: re.Pattern[str] | None  # of a message that is one name with a part left out: ``KeyError: 'model...weight'``


def answer(said: Said, patches: Sequence[Patch]) -> Answer:
    """The patches that a text concerns, and what else is known about it.

    Certain patches are the answer. A common error comes before patches that are only possible, with those that the
    table names for it first.
    """
    advice = common_errors.advice(said)
    found = Answer(()) if advice is not None and advice.alone else search(said, patches)
    certain = [match.patch.id for match in found.matches if match.certain]
    if advice is not None and advice.symptom and found.matches:
        return found  # the words have a name of one patch
    if advice is None or (certain and not set(certain) & set(advice.patches)):
        return found if found.matches or not common_errors.is_a_description(said) else described(said, patches)
    if certain:
        return replace(found, advice=advice)
    known = {patch.id: patch for patch in patches}
    named = [Match(known[name], said.messages[0], "", False, True) for name in advice.patches if name in known]
    others = [match for match in found.matches if match.patch.id not in advice.patches]
    return Answer((*named, *others), advice=advice)


def described(said: Said, patches: Sequence[Patch]) -> Answer:
    """The silent failures whose symptoms have most of the words of a text, as the nearest."""
    words = {word for word in _words(said.messages[0].text) if len(word) > _SHORT}
    if len(words) < _SHORT:
        return Answer(())
    has = {patch.id: words & {*_words(f"{patch.id} {patch.symptom} {patch.summary}")} for patch in patches}
    count = Counter(word for found in has.values() for word in found)
    weight = {word: math.log(1 + len(patches) / (1 + count[word])) for word in words}
    scores = {name: sum(weight[word] for word in found) for name, found in has.items()}
    near = [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] > sum(weight.values()) / 2]
    return Answer((), tuple(near[:3]))


def search(
    said: Said, patches: Sequence[Patch], raised: Mapping[str, Sequence[str]] = RAISED, *, by_name: bool = True
) -> Answer:
    """The patches that the errors of a text concern, the last error first.

    Args:
        said: errors and frames.
        patches: those to look among.
        raised: known errors of each patch beside those that its symptom quotes.
        by_name: if nothing else is found, a name that only one patch has is enough.
    """
    patterns = [pattern for patch in patches for pattern in patterns_of(patch, raised.get(patch.id, ()))]
    weights = weights_of(patterns)
    near = dict.fromkeys((patch.id for patch in patches), 0.0)
    place = place_of(said.frames)
    elsewhere = common_errors.raised_by(said) is not None
    for message in said.messages:
        found: dict[str, tuple[tuple[float, ...], Match]] = {}
        words = _words(message.text)
        present = set(words)
        for pattern in patterns:
            own = pattern.kind == message.kind and pattern.kind not in COMMON | {""}
            shaped = pattern.shape is not None and pattern.shape.fullmatch(message.text) is not None
            whole = shaped or (own and _is_cut_short(pattern, words)) or _is_headline(pattern, words)
            covered = 1.0 if whole else _covered(pattern, words, weights)
            if message.text:
                near[pattern.patch.id] = max(near[pattern.patch.id], covered * (0.5 + 0.5 * _same(pattern, message)))
            if covered < _ENOUGH or not _same(pattern, message) or not (shaped or _fits(pattern, words)):
                continue
            if elsewhere and not own and (shaped or not any(_is_telling(name) for name in pattern.names & present)):
                continue
            seen = 0 if elsewhere else _seen(pattern.patch, said.frames)
            there = not elsewhere and _is_there(pattern.patch, place)
            if not message.text and not own and not (there or seen) and (said.frames or pattern.kind != message.kind):
                continue  # without a message, only its traceback tells a common error from others
            certain = own or shaped or there or seen > 0 or not pattern.names.isdisjoint(words)
            match = Match(pattern.patch, message, pattern.text, certain, pattern.quoted)
            weight = len(pattern.text) if shaped else sum(weights[word] for word in pattern.words)
            agree, first = _devices_agree(pattern.text, message.text), pattern.patch.id in MET_FIRST
            rank = (match.certain, there, agree, pattern.quoted, seen, weight, first)
            if pattern.patch.id not in found or rank > found[pattern.patch.id][0]:
                found[pattern.patch.id] = (rank, match)
        if found:
            ordered = sorted(found.values(), key=lambda item: item[0], reverse=True)
            return Answer(tuple(match for _, match in ordered))
    possible = _on_the_way(said, patterns) or (_named(said, patterns) if by_name else [])
    if possible and not elsewhere:
        return Answer(tuple(possible))
    closest = sorted(near, key=lambda name: -near[name])[:3]
    return Answer((), tuple(name for name in closest if near[name] >= _NEAR))


def _on_the_way(said: Said, patterns: Sequence[_Pattern]) -> list[Match]:
    """Possible matches of an unknown text: its class is one of the patch, and its traceback goes through the code."""
    found: dict[str, tuple[int, Match]] = {}
    for message in said.messages[:1]:
        for pattern in patterns:
            seen = _seen(pattern.patch, said.frames) if pattern.kind == message.kind != "" else 0
            if seen >= _THROUGH and seen > found.get(pattern.patch.id, (0,))[0]:
                found[pattern.patch.id] = (seen, Match(pattern.patch, message, pattern.text, False, pattern.quoted))
    return [match for _, match in sorted(found.values(), key=lambda item: -item[0])]


def _named(said: Said, patterns: Sequence[_Pattern]) -> list[Match]:
    """The possible match of a text in the words of people or of another release: it has a name of one patch only."""
    owners: dict[str, set[str]] = {}
    for pattern in patterns:
        for name in pattern.names:
            owners.setdefault(name, set()).add(pattern.patch.id)
    for message in said.messages:
        present = {*_words(message.text)}
        for pattern in patterns:
            only = [name for name in pattern.names & present if len(owners[name]) == 1 and _is_telling(name)]
            if only and _same(pattern, message):
                return [Match(pattern.patch, message, pattern.text, False, pattern.quoted)]
    return []


def _is_telling(name: str) -> bool:
    return _PART.fullmatch(name) is None


def patterns_of(patch: Patch, raised: Sequence[str]) -> list[_Pattern]:
    """The known messages of a patch: those that its symptom quotes, and those that its reproduction ``raised``."""
    quoted = re.findall(r"``(.+?)``", patch.symptom)
    first = patch.symptom.startswith("``")
    found = []
    for index, text in enumerate(quoted):
        # A bare class is meaningful only if the symptom begins with it.
        is_error = _ERROR_NAME.match(text) and (": " in text or (first and index == 0))
        if is_error or _is_sentence(text):
            found.append(_pattern(patch, text, quoted=True))
    found += [_pattern(patch, text, quoted=False) for text in raised]
    return found


def _is_sentence(text: str) -> bool:
    words = text.split()
    return len(words) >= 4 and sum(word.strip("`'\".,").isalpha() for word in words) >= len(words) / 2


def _pattern(patch: Patch, text: str, *, quoted: bool) -> _Pattern:
    found = re.match(rf"({_ERROR_NAME.pattern})(?:: ?|$)", text)
    kind, message = (found[1], text[found.end() :]) if found else ("", text)
    words = tuple(_words(_MODULE.sub(" ", _PATH.sub(" ", message))) or _words(message))
    names = frozenset(word.lower() for word in _WORD.findall(message) if _NAME.search(word) and word not in _ANYBODYS)
    one_name = kind and "..." in message and not re.search(r"\s", message)
    shape = re.compile(".*".join(map(re.escape, message.split("...")))) if one_name else None
    return _Pattern(patch, text, kind, words, quoted, names, shape)


def _words(text: str) -> list[str]:
    """The words of a message that are compared: not numbers, shapes, paths or devices."""
    shown = _PATH.sub(" ", text[:4000])
    words = [word.lower() for word in _WORD.findall(shown)]
    left = [word for word in words if word not in _LEFT_OUT][:_WORDS]
    if not left:  # a key, or nothing at all
        left = ["<number>" if re.search(r"\d", text) else "<nothing>"] if not text.strip("0123456789 ") else []
    return left


def weights_of(patterns: Sequence[_Pattern]) -> dict[str, float]:
    """The weight of each word: a word that few patterns have counts more."""
    count = Counter(word for pattern in patterns for word in set(pattern.words))
    return {word: math.log(1 + len(patterns) / number) for word, number in count.items()}


def _same(pattern: _Pattern, message: Message) -> bool:
    kinds = {pattern.kind, message.kind}
    return "" in kinds or len(kinds) == 1 or kinds <= _SAME


def _devices_agree(known: str, text: str) -> int:
    """1 if both name the same kinds of devices, -1 if they name others, 0 if one of them names none."""
    first, second = (sorted(_DEVICE.findall(each)) for each in (known, text))
    return 0 if not first or not second else 1 if first == second else -1


def _is_cut_short(pattern: _Pattern, words: Sequence[str]) -> bool:
    return set(words) <= {*pattern.words, "<nothing>"}


def _is_headline(pattern: _Pattern, words: Sequence[str]) -> bool:
    """Whether a message stops early: it is how the pattern begins, with a name that only these libraries have."""
    return tuple(words) == pattern.words[: len(words)] and not pattern.names.isdisjoint(words)


def _fits(pattern: _Pattern, words: Sequence[str]) -> bool:
    """A pattern of a word or two occurs in any long message, so the message must be as short."""
    return len(pattern.words) > 3 or len(words) <= len(pattern.words) + 3


def _covered(pattern: _Pattern, words: Sequence[str], weights: dict[str, float]) -> float:
    """The share of the pattern's weight in ``words``, in its order and not scattered over a long message."""
    whole = sum(weights[word] for word in pattern.words)
    present = set(words)
    if not whole or sum(weights[word] for word in pattern.words if word in present) < _NEAR * whole:
        return 0.0
    size = 2 * len(pattern.words) + 12
    step = len(pattern.words) + 6
    starts = range(0, max(1, len(words) - size + step), step)
    return max(_common(pattern.words, words[start : start + size], weights) for start in starts) / whole


def _common(first: Sequence[str], second: Sequence[str], weights: dict[str, float]) -> float:
    """The weight of the heaviest common subsequence."""
    row = [0.0] * (len(second) + 1)
    for word in first:
        above = row
        row = [0.0]
        for index, other in enumerate(second):
            both = above[index] + weights[word] if word == other else 0.0
            row.append(max(both, above[index + 1], row[index]))
    return row[-1]


_LIBRARY = re.compile(r"(?:.*/)?((?:transformers|accelerate|peft|bitsandbytes)/.*\.py)")
_TORCH = re.compile(r"(?:.*/)?(torch/(?!distributed/(?:run|launcher|elastic)).*\.py)")
#: How torch calls every module.
_CALLS = "torch/nn/modules/module.py"
#: Decorators around every forward.
_AROUND = ("transformers/utils/generic.py", "transformers/utils/output_capturing.py")


def place_of(frames: Sequence[Frame]) -> str | None:
    """Where a traceback leaves the libraries that are patched, as in :data:`PLACES`.

    That is the last file of theirs with its function, and what it calls. Without them it is what the program
    called.
    """
    called = ""
    for file, function in reversed(frames):
        if (found := _LIBRARY.fullmatch(file)) is not None and found[1] not in _AROUND:
            return f"{found[1]} {function}{called}"
        if (other := _TORCH.fullmatch(file)) is not None and other[1] != _CALLS:
            called = f" > {other[1]} {function}"
    calls = [function for file, function in frames if file.endswith(_CALLS)]
    return f"{_CALLS} {calls[0]}" if calls else None


def _is_there(patch: Patch, place: str | None) -> bool:
    """Whether a reproduction of the patch was raised in this place. A function that is not given is any."""
    if place is None:
        return False
    return any(known == place or known.split(" ", 1)[0] + " " == place for known in PLACES.get(patch.id, ()))


def _seen(patch: Patch, frames: Sequence[Frame]) -> int:
    """How much a traceback goes through what a patch concerns: what it replaces, and what its symptom names."""
    if not frames:
        return 0
    targets, named = files_of(patch), named_in(patch)
    found = 0
    for file, function in {*frames}:
        found += _THROUGH * any(file.endswith(f"/{module}") and function in (name, "") for module, name in targets)
        found += function in named and bool(re.search(r"/(?:transformers|accelerate|peft|bitsandbytes)/", file))
    return found


def files_of(patch: Patch) -> list[tuple[str, str]]:
    """The files of what a patch replaces, as a traceback ends with them, each with a function."""
    return [(target.module.replace(".", "/") + ".py", target.name.rpartition(".")[2]) for target in patch.targets]


def named_in(patch: Patch) -> set[str]:
    """Functions that a symptom names."""
    return set(re.findall(r"``(?:[\w.]*\.)?(_?[a-z]\w{5,})(?:\(.*?\))?``", patch.symptom))
