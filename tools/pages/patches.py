"""The patches: docs/PATCHES.md, which lists them by what one sees, and a page for each area in docs/patches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import gemma4_compat
from gemma4_compat._engine.patch import ActsOn, Kind
from tools import variants
from tools.matrix import measure
from tools.pages import errors, failure_points, gpu, matrix
from tools.pages.markers import ROOT, generated, shorten


def index() -> str:
    """docs/PATCHES.md: every patch's symptom, errors before silent ones, by area."""
    patches = gemma4_compat.patches()
    raised = sum(not errors.is_silent(patch) for patch in patches)
    parts = [
        "# Patches, by what you see",
        "",
        generated("the patch files"),
        "",
        f"Every failure that `import gemma4_compat` repairs: {raised} raise, {len(patches) - raised} say nothing and",
        "are wrong, large or slow. [Find the error](ERRORS.md) takes a pasted error or traceback. Each link says why",
        "it happens, in which releases, and how it is repaired. `gemma4-compat explain ID` prints the same,",
        "`gemma4-compat doctor ID` shows it on your machine. [Failure points](FAILURE_POINTS.md) say what a repair",
        "must show. After the link to a repair are the affected releases of the library that its name begins with;",
        "[the matrix](EVIDENCE.md#the-matrix) says with which ones everything was measured.",
    ]
    for area, heading in errors.AREAS.items():
        parts += ["", f"## {heading}"]
        for silent, title in ((False, "Errors"), (True, "No error, but")):
            cards = [_card(patch) for patch in _of(area) if errors.is_silent(patch) == silent]
            parts += ["", f"**{title}**", "", *cards] if cards else []
    missing = {patch.area for patch in patches} - errors.AREAS.keys()
    if missing:
        raise SystemExit(f"tools/pages/errors.py has no heading for {', '.join(sorted(missing))}")
    return "\n".join(parts) + "\n"


def _card(patch: gemma4_compat.Patch) -> str:
    """An item of a list, which the site shows as a card (docs/site.css)."""
    seen = patch.first_symptom.removeprefix("silent: ")
    return f'- <a id="{patch.id}"></a>{seen}<br>Fix: {link(patch.id)}: {patch.affected}'


def _of(area: str) -> list[gemma4_compat.Patch]:
    found = [patch for patch in gemma4_compat.patches() if patch.area == area]
    return sorted(found, key=lambda patch: patch.id)


def pages() -> dict[str, str]:
    """Name of a file -> a page with the entries of an area, or those of its errors, or of what is silent."""
    found = {}
    for area, heading in errors.AREAS.items():
        if area in errors.TWO_PAGES:
            found[f"{area}.md"] = _page(f"{heading}: errors", [it for it in _of(area) if not errors.is_silent(it)])
            silent = [patch for patch in _of(area) if errors.is_silent(patch)]
            found[f"{area}-silent.md"] = _page(f"{heading}: no error, but", silent)
        else:
            found[f"{area}.md"] = _page(f"{heading}: the patches", _of(area))
    return found


def _page(heading: str, patches: Sequence[gemma4_compat.Patch]) -> str:
    parts = [
        f"# {heading}",
        "",
        generated("the patch files and what was measured"),
        "",
        "`import gemma4_compat` applies those that your releases need. The same, by [what you see](../PATCHES.md);",
        "[how to read an entry](#how-to-read-an-entry).",
        "",
    ]
    for patch in patches:
        upstream = [*patch.bug, *filter(None, [patch.applied_upstream])]
        parts += [
            f"## {patch.id}",
            "",
            *_with_example(patch),
            "",
            f"- **Failure points:** {', '.join(failure_points.link(point, '../') for point in patch.failure_points)}",
            f"- **Affected:** {affected(patch)} ({patch.severity}; fixed in {patch.fixed or 'no release so far'})",
            *([f"- **Kind:** {patch.kind}"] if patch.kind is not Kind.REPAIR else []),
            *([f"- **Acts on:** {patch.acts_on}"] if patch.acts_on is not ActsOn.GEMMA4 else []),
            *([f"- **Upstream:** {', '.join(f'<{url}>' for url in upstream)}"] if upstream else []),
            *([f"- **Not exact without:** {', '.join(f'`{name}`' for name in patch.needs)}"] if patch.needs else []),
            f"- **Replaces:** {_replaced(patch)}",
            f"- **Measured** {'; '.join(_measured(patch))}",
            "",
        ]
    parts += [
        "## How to read an entry",
        "",
        "**Measured** counts [stacks](../EVIDENCE.md#the-matrix) on CPUs, and names releases of transformers for a",
        "[GPU](../GPU.md); variants are [those of Gemma 4](../VARIANTS.md) made small. A release newer than the",
        "measured one gets a patch only where the code that it replaces is the same. Where an entry does not say",
        "otherwise, it is a repair and acts only on Gemma 4.",
    ]
    return "\n".join(parts).rstrip() + "\n"


def _with_example(patch: gemma4_compat.Patch) -> Iterator[str]:
    """The documentation, with what was seen before and after below its first sentence."""
    first, _, rest = patch.documentation.partition("\n\n")
    yield first
    if seen := _seen(patch):
        yield from ("", f"- **Before:** {seen[0]}", f"- **After:** {seen[1]}")
    yield from ("", rest)


def _seen(patch: gemma4_compat.Patch) -> tuple[str, ...]:
    """What the trained model says without the patch and with it, or what the reproduction found in the first stack
    that it repairs. Empty if neither was recorded.
    """
    for file in sorted((ROOT / "docs" / "evidence" / "show").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        answers = run["answers"].get(patch.id)
        if answers and answers["with"] != answers["without"]:
            who = f"a trained tiny model, transformers {run['versions']['transformers']}"
            shown = f"{_code(answers['with'])} (`gemma4-compat doctor --show {patch.id}`)"
            return f"{_code(answers['without'])} ({who})", shown
    for result in matrix.results().values():
        found = result["patches"].get(patch.id)
        if found and found["verdict"] == measure.REPAIRED:
            release = f"{patch.distribution} {result['versions'][patch.distribution]}"
            return f"{_code(found['off']['detail'])} ({release})", _code(found["on"]["detail"])
    return ()


def _code(text: str) -> str:
    """``text`` as code, on one line."""
    text = " ".join("".join(sign for sign in text if sign.isprintable()).split())
    return f"`` {text if len(text) <= 200 else text[:197] + '...'} ``"


def _measured(patch: gemma4_compat.Patch) -> Iterator[str]:
    """What was measured, and where."""
    raw = f"../evidence/patches/{patch.id}.json"
    yield f"up to {patch.distribution} {patch.measured} ([raw]({raw}))"
    yield "on CPUs " + ", ".join(f"{name}: {len(stacks)}" for name, stacks in matrix.verdicts(patch).items())
    yield f"variants {shorten(variants.line(patch.id), 160)}"
    if (on_a_gpu := gpu.line(patch)) != gpu.NOT_MEASURED:
        yield f"on a GPU {on_a_gpu}"


def _replaced(patch: gemma4_compat.Patch) -> str:
    """What the patch replaces, each module named once."""
    found: dict[str, list[str]] = {}
    for one in patch.targets:
        here = " (where the release has it)" if one.optional else ""
        found.setdefault(one.module, []).append(f"`{one.name}`{here}")
    return "; ".join(f"{', '.join(names)} of `{module}`" for module, names in found.items())


def link(patch_id: str, to: str = "") -> str:
    """A link to a patch's entry; ``to`` leads to docs/."""
    patch = next(patch for patch in gemma4_compat.patches() if patch.id == patch_id)
    return f"[`{patch_id}`]({to}{errors.entry(patch)})"


def affected(patch: gemma4_compat.Patch) -> str:
    return "; with ".join([f"{patch.distribution} {patch.affected}", ", ".join(patch.requires)]).removesuffix(
        "; with "
    )
