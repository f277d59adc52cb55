"""The table of variants: what is committed is complete and good, and a verdict says what was seen."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.models import variants

FILE = Path(__file__).resolve().parents[4] / "tools" / "variants.py"
_spec = importlib.util.spec_from_file_location("variants", FILE)
assert _spec
assert _spec.loader
tool: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

GOOD = {"defect": False, "detail": "bit-exact", "parity": 0.0, "applicable": True}
BAD = {**GOOD, "defect": True, "detail": "KeyError: 3"}
APPLIED, NOT_NEEDED = {"state": "applied"}, {"state": "not_needed"}
PATCHES = [patch.id for patch in gemma4_compat.patches()]


@pytest.mark.parametrize("stack", tool.results())
def test_every_patch_was_measured_on_every_variant_and_none_is_left_broken(stack: str) -> None:
    run = tool.results()[stack]
    assert list(run["variants"]) == list(variants.NAMES)
    for variant, found in run["variants"].items():
        if "missing" in found:
            assert variant == variants.UNIFIED, found
            continue
        unknown = sorted(set(PATCHES) - set(found))
        assert not unknown, f"python tools/variants.py {stack} --patches {' '.join(unknown)}"
        bad = {name: row for name, row in found.items() if row["verdict"] in (tool.UNREPAIRED, tool.BROKEN)}
        assert not bad


def test_every_variant_was_measured() -> None:
    seen = {
        name for run in tool.results().values() for name, found in run["variants"].items() if "missing" not in found
    }
    assert seen == set(variants.NAMES)


def test_what_is_not_applicable_is_what_the_variant_lacks() -> None:
    for run in tool.results().values():
        for variant, found in run["variants"].items():
            for name, row in found.items():
                if name != "missing" and row["verdict"] == tool.NOT_APPLICABLE:
                    detail = row["on"]["detail"]
                    lacks = [f"the {variant} has no {variants.PARTS[part]}" for part in _missing(variant)]
                    others = ("release", "transformers", "no CUDA device", "accelerate does not convert", "no mask of")
                    others += ("is installed", "from left to right by this model")
                    assert detail in lacks or any(text in detail for text in others), (variant, name, detail)


def _missing(variant: str) -> set[str]:
    return set(variants.PARTS) - variants.parts(variant)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({"off": BAD, "on": {**GOOD, **APPLIED}}, "repaired"),
        ({"off": GOOD, "on": {**GOOD, **APPLIED}}, "not affected"),
        ({"off": BAD, "alone": GOOD, "on": {**GOOD, **APPLIED}}, "not affected"),
        ({"off": BAD, "alone": BAD, "on": {**GOOD, **APPLIED}}, "repaired"),
        ({"off": BAD, "on": {**GOOD, **NOT_NEEDED}}, "not affected"),
        ({"off": BAD, "on": {**BAD, **APPLIED}}, "NOT REPAIRED"),
        ({"off": GOOD, "on": {**BAD, **APPLIED}}, "BROKEN BY THE PATCH"),
        (
            {"off": {**GOOD, "applicable": False}, "on": {**GOOD, "applicable": False, **NOT_NEEDED}},
            "not applicable",
        ),
    ],
)
def test_a_verdict_is_of_what_was_seen(runs: dict[str, Any], expected: str) -> None:
    assert tool.verdict(gemma4_compat.patches()[0], runs) == expected


def test_the_line_of_a_patch_says_where_each_verdict_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = {"verdict": "not applicable", "on": {"detail": "no towers"}}
    whole = {name: {"p": {"verdict": "repaired"}, "q": {"verdict": "repaired"}} for name in variants.NAMES}
    other = {name: {"p": {"verdict": "repaired"}, "q": lacks} for name in variants.NAMES}
    runs = {"new": {"variants": whole, "date": "2026-11-26"}, "old": {"variants": other, "date": "2026-11-25"}}
    other[variants.UNIFIED] = {"missing": "no such class"}
    monkeypatch.setattr(tool, "results", lambda: runs)
    assert tool.line("p") == "repaired: all"
    repaired, lacking = tool.line("q").split("; ")
    assert f"E2B in new, E4B in new, {variants.UNIFIED}, " in repaired
    assert lacking.startswith("not applicable (no towers): E2B in old, ")
    assert tool.summary()[1].endswith("old, 2026-11-25: 4 not applicable, 4 repaired")


def test_a_defect_is_the_patchs_own_when_its_test_knows_the_message() -> None:
    patch = next(patch for patch in gemma4_compat.patches() if patch.id == "accelerate-hf-initialized")
    said = "TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'"
    assert tool.is_its_own(patch, {"detail": said})
    assert not tool.is_its_own(patch, {"detail": "KeyError: 3"})


@pytest.mark.parametrize("name", variants.NAMES)
def test_a_small_variant_has_the_parts_of_the_large_one(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from gemma4_compat._lab import tiny_configs

    if name == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    small, large = tiny_configs.config(variant=name), variants.config(name)
    assert type(small) is type(large)
    numbers = {"vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "sliding_window"}
    small_text, large_text = small.text_config.to_dict(), large.text_config.to_dict()
    for key, value in large_text.items():
        if isinstance(value, (bool, str)) or value is None or value == 0:
            assert small_text[key] == value, key
    period = large.text_config.layer_types.index("full_attention") + 1
    assert small.text_config.layer_types[:period] == large.text_config.layer_types[:period]
    assert len(small.text_config.layer_types) % period == 0
    assert {key for key in numbers if small_text[key] >= large_text[key]} == set()
    for part in ("vision_config", "audio_config"):
        assert (getattr(small, part) is None) == (getattr(large, part) is None)
