"""Of the pages on caches, quantization and merging."""

from __future__ import annotations

import json

import gemma4_compat
from gemma4_compat._adapter_tools.merge import check
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._memory import layout
from gemma4_compat._plan import prompt_kernels, speed
from tools.claims.form import Claim, copied_heads, in_file, own_layers, result, text_of
from tools.pages import once
from tools.pages.markers import ROOT

#: Tokens of the longest text in docs/CACHES.md.
LONG = 131_072
#: What stands before the releases in docs/CACHES.md, and the patch whose releases they are.
RELEASES = {
    "static caches: | 26B-A4B, 31B": "static-cache",
    "in all layers | 12B, 26B-A4B, 31B": "sliding-cache",
    "rejected drafts | all": "draft-windows",
    "static caches with : , | all": "static-chunks",
    "other answers, silently | 26B-A4B, 31B": "image-masks",
    "silently other answers | 26B-A4B, 31B": "vision-masks",
    "not there yet, silently | all": "offloaded-cache",
    "images and sounds, silently | all": "chunked-media",
    "the beginning: other tokens, silently | all": "chunked-turns",
    "see each other, silently | 12B, 26B-A4B, 31B": "chunked-images",
}
_CACHES = "docs/CACHES.md"


def first_and_last(patch_id: str) -> tuple[str, str]:
    """Of the measured releases of transformers that a patch repairs."""
    file = ROOT / "gemma4_compat" / "patches" / "measured.json"
    measured = json.loads(file.read_text(encoding="utf-8"))["releases"]["transformers"]
    (patch,) = (patch for patch in gemma4_compat.patches() if patch.id == patch_id)
    affected = [release for release in measured if versions.admits(patch.affected, release)]
    return affected[0], affected[-1]


def kept(shape: str) -> float:
    """GiB of the keys and values of the full layers, in bf16, of the longest text."""
    text = text_of(shape)
    heads = getattr(text, "num_global_key_value_heads", None) or text.num_key_value_heads
    return float(own_layers(shape).count("full_attention") * 2 * heads * text.global_head_dim * LONG * 2 / 2**30)


def shared(shape: str) -> tuple[int, int]:
    """Layers without keys and values of their own, and layers."""
    return text_of(shape).num_kv_shared_layers, text_of(shape).num_hidden_layers


def full(shape: str) -> tuple[int, int]:
    """Full layers that keep keys and values, and layers."""
    return own_layers(shape).count("full_attention"), text_of(shape).num_hidden_layers


def capability() -> tuple[int, int]:
    return prompt_kernels.LEAST


def _bytes(which: str) -> str:
    return f"{int(in_file('docs/evidence/patches/transformers-sliding-cache.json', which)[0]):,}"


def _in_8_bits() -> list[float]:
    found = result("*-cpu/cache_8bit.json")
    return [one[kind]["mean"] for kind in ("in_8_bits", "bf16") for one in found]


def of_packed(what: str) -> tuple[float, ...]:
    """Of an E2B whose layers stay packed, one that is decompressed, and one that unpacks layers in each step."""
    found = result("*-h200/packed-E2B.json")
    assert all(found[way]["same_tokens"] for way in ("exact", "split"))
    assert not any(found[way]["apart"] for way in ("exact", "split"))
    return tuple(found[way][what] for way in ("packed", "unpacked", "exact"))


CLAIMS = (
    Claim(
        "docs/QUANTIZATION.md",
        "an E2B decodes a token in {:.1f} ms that way, in {:.1f} ms if all layers are decompressed, and in {:.1f} ms "
        "if each step unpacks them; it takes {:.1f}, {:.1f} and {:.1f} GiB",
        lambda: (*of_packed("ms_a_token"), *of_packed("after_gib")),
    ),
    *(
        Claim(_CACHES, words + " | {} - {} |", lambda patch=patch: first_and_last(f"transformers-{patch}"))
        for words, patch in RELEASES.items()
    ),
    Claim(_CACHES, "5.12.0 - 5.13.1; with {} - {} |", lambda: first_and_last("transformers-assisted-cache")),
    Claim(
        _CACHES,
        "After 201 tokens with a window of 8 the tiny 31B's holds {} bytes; without the fix, {}.",
        lambda: (_bytes(r"has (\d+) bytes: .*?hold 7"), _bytes(r"has (\d+) bytes: .*?, hold 201")),
    ),
    Claim(
        _CACHES,
        "The real window is {} or {} tokens",
        lambda: tuple(sorted({text_of(shape).sliding_window for shape in variants.NAMES})),
    ),
    Claim(_CACHES, "{} of {} layers of the E2B, {} of {} of the E4B", lambda: (*shared("E2B"), *shared("E4B"))),
    Claim(_CACHES, "the prompt in chunks of {:,} tokens", lambda: (layout.PREFILL_CHUNK,)),
    Claim(_CACHES, "compute capability {}.{} or newer", capability),
    Claim(
        _CACHES,
        "{} of {} in the E2B, {} of {} in the E4B, {} of {} in the 12B, {} of {} in the 26B-A4B, {} of {} in the 31B",
        lambda: tuple(number for shape in variants.NAMES for number in full(shape)),
    ),
    Claim(
        _CACHES,
        "{:.0f} MiB for {:,} tokens in {:,}. PyTorch's attention makes numbers of it twice, {:.1f} GiB.",
        lambda: (
            layout.PREFILL_CHUNK * LONG / 2**20,
            *(layout.PREFILL_CHUNK, LONG),
            2 * 2 * layout.PREFILL_CHUNK * LONG / 2**30,
        ),
    ),
    Claim(
        _CACHES,
        "while it reads a chunk: {:.0f}, {:.0f} and {:.0f} GiB at {:,} tokens",
        lambda: (*(copied_heads(shape, LONG) for shape in ("E4B", "26B-A4B", "31B")), LONG),
    ),
    Claim(
        _CACHES,
        "a chunk's other memory to {:.0f} %",
        lambda: (100 * float(in_file("tests/unit/memory/test_long_contexts.py", r"rel=([\d.]+)")[0]),),
    ),
    Claim(
        _CACHES,
        "what grows, {:.0f} GiB of the 31B at {:,} tokens to {:.1f}, {:.2f} of the E2B to {:.2f}.",
        lambda: (kept("31B"), LONG, kept("31B") / 2, kept("E2B"), kept("E2B") / 2),
    ),
    Claim(_CACHES, "and {:.0f} % of their numbers differ in bf16", lambda: (100 * once.differing(),)),
    Claim(
        _CACHES,
        "a token of the 12B moves {:.0f} GiB more, of the 26B-A4B {:.0f}, and of the 31B {:.0f}.",
        lambda: tuple(map(once.price, once.shapes())),
    ),
    Claim(
        _CACHES,
        "The memory of an RTX 3060 is {:.0f} times as fast as its bus, that of an RTX 3090 {:.0f} times.",
        lambda: tuple(1e9 * card.gb_s / card.bus for card in map(speed.CARDS.__getitem__, ("RTX 3060", "RTX 3090"))),
    ),
    *(
        Claim(_CACHES, words, lambda where=where: (where[1], *reversed(once.longest(*where))))
        for words, where in (
            ("In {} GiB a 31B in 4 bits would have {:,} tokens instead of {:,}", ("31B", 23)),
            ("in {} GiB a 12B {:,} instead of {:,}", ("12B", 11)),
        )
    ),
    Claim(_CACHES, "saves more ({:.0f} GiB)", lambda: (copied_heads("31B", LONG),)),
    Claim(
        _CACHES,
        "off by {:.1f} % (E2B) and {:.1f} % (E4B) of their standard deviation on average, where bf16 rounds by "
        "{:.0f} and {:.0f} %",
        lambda: tuple(100 * value for value in _in_8_bits()),
    ),
    Claim(_CACHES, "one of them full, {} tokens", lambda: (result("*-cpu/cache_8bit.json")[0]["prompt"],)),
    Claim(
        "docs/MERGING.md",
        "it may differ by {} times (rms) what the same quantization",
        lambda: (check.OF_QUANTIZATION[1],),
    ),
    Claim(
        "docs/MERGING.md",
        "A checkpoint of {:.0f} GB.",
        lambda: (result("*-cpu/checkpoints-E4B.json")["checkpoint"] / 1e9,),
    ),
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    _CACHES: ("half a GiB to one GiB more", "batch 1, "),
    "docs/QUANTIZATION.md": (
        "of a block (64 values)",
        "integers of 2,",
        "to 256 steps",
        "those of layer 0",
        "gptqmodel 7.7 needs",
        "so 7.6 was tried",
    ),
    "docs/MERGING.md": ("exit code is 1", "exits 1 and leaves"),
}
