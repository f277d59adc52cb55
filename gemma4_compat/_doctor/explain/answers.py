"""What a user is told about an error, as text and as JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemma4_compat._doctor.explain.common_errors import advice
from gemma4_compat._doctor.explain.messages import Said
from gemma4_compat._doctor.explain.search import Answer, Match
from gemma4_compat._engine import versions
from gemma4_compat._engine.io.address import report_request
from gemma4_compat._engine.io.text import table_text, wrapped
from gemma4_compat._engine.patch import Patch, PatchState, PatchStatus, Reason
from gemma4_compat._engine.reports import words
from gemma4_compat._errors import Gemma4CompatError, printable

#: How many matches are shown in full; the others are only named.
_SHOWN = 3
_LONGEST = 400
#: What a bug report needs.
REPORT = (
    f"if a program with Gemma 4 raises this, please {report_request()}, with the whole traceback, the lines that load "
    "and place the model, and what `gemma4-compat env` prints."
)


def sorted_answer(answer: Answer, statuses: Mapping[str, PatchStatus]) -> Answer:
    """The answer with patches that may be needed here before the others; certain matches stay first."""

    def order(match: Match) -> tuple[bool, bool]:
        return not match.certain, words.of(statuses[match.patch.id]) is words.Verdict.NOT_NEEDED

    return Answer(tuple(sorted(answer.matches, key=order)), answer.nearest)


def remedy(status: PatchStatus) -> str:
    """What to do about an error that a patch fixes, given the patch's state here."""
    state, name = status.state, status.id
    if words.of(status) is words.Verdict.NOT_NEEDED:
        return (
            "if the program runs with the releases installed here, this is not its error, because they do not have "
            "the defect: report it. If it runs elsewhere, run this command there."
        )
    if state is PatchState.SKIPPED:
        return f"the patch is off here: {status.reason}. Change that, and put `import gemma4_compat` into the program."
    if state is PatchState.FAILED:
        return f"the patch cannot be applied here; `gemma4-compat doctor {name}` says what to report."
    if status.reason_code is Reason.NEEDS:
        return f"the patch needs {', '.join(status.unmet)}, which is off: enable it."
    return (
        "put `import gemma4_compat` at the top of the program, or start it with `gemma4-compat run`. If that is done: "
        f"`gemma4-compat doctor {name}` shows whether the patch works here."
    )


def here(patch: Patch, status: PatchStatus) -> str:
    """The state of a patch in this environment, as a reader of an error needs it."""
    release = status.versions.get(patch.distribution)
    if status.reason_code is not Reason.WAITING or release is None:
        return f"{words.of(status).word}: {status.reason}"
    has = "has this bug" if versions.admits(f"<={patch.measured}", release) else "may have this bug (not measured yet)"
    return f"{patch.distribution} {release} {has}; it is repaired as soon as {patch.distribution} is imported"


def answer_text(said: Said, answer: Answer, statuses: Mapping[str, PatchStatus], width: int | None = None) -> str:
    """The error, its fix and what to do, or what to report. Lines have up to ``width`` characters; None: any."""
    if not answer.matches:
        parts = [_cut(str(message)) for message in said.messages[:1]]
        if said.messages and not said.messages[0].text:
            parts[0] += " (without a message)"
        known = advice(said)
        if said.messages[:1] and said.messages[0].kind == Gemma4CompatError.__name__:
            parts.append("gemma4_compat itself raises this, before anything is changed. The message says what to do.")
        elif known:
            parts += [f"{known.what} No patch is about that.", f"To do: {known.to_do}"]
            return "\n\n".join(wrapped(part, width) for part in parts)
        else:
            parts.append("No known patch concerns this error.")
        if answer.nearest:
            parts.append(f"The most similar errors: {', '.join(answer.nearest)} (`gemma4-compat explain ID`).")
        return "\n\n".join(wrapped(part, width) for part in [*parts, f"What to report: {REPORT}"])
    parts = [wrapped(_cut(str(answer.matches[0].message)), width)]
    if not answer.matches[0].certain:
        more = "." if said.frames else "; the whole traceback tells more: gemma4-compat explain - < traceback.txt"
        parts.append(
            wrapped(f"Programs without Gemma 4 also raise this text. With Gemma 4 it is one of these{more}", width)
        )
    # If one is certain, those that any program raises are only named.
    shown = ([match for match in answer.matches if match.certain] or answer.matches)[:_SHOWN]
    parts += [table_text(_rows(match, statuses[match.patch.id]), width=width) for match in shown]
    if left := [match.patch.id for match in answer.matches if match not in shown]:
        parts.append(wrapped(f"Other patches about this text: {', '.join(left)}", width))
    parts.append(wrapped(f"If that does not help: {REPORT}", width))
    return "\n\n".join(parts)


def answer_data(said: Said, answer: Answer) -> dict[str, Any]:
    """The answer as plain data, without the patches."""
    messages = [match.message for match in answer.matches[:1]] or list(said.messages[:1])
    known = None if answer.matches else advice(said)
    return {
        "error": _cut(str(messages[0])) if messages else "",
        "matches": [
            {"id": match.patch.id, "certain": match.certain, "known": match.known, "quoted": match.quoted}
            for match in answer.matches
        ],
        "nearest": list(answer.nearest),
        "advice": f"{known.what} {known.to_do}" if known else None,
    }


def _rows(match: Match, status: PatchStatus) -> list[tuple[str, str]]:
    patch = match.patch
    points = ", ".join(patch.failure_points)
    return [
        ("patch", f"{patch.id} ({patch.area}; {points} of docs/FAILURE_POINTS.md)"),
        ("repairs", patch.summary),
        ("known as", match.known if match.quoted else f"{match.known} (raised by its reproduction)"),
        ("here", here(patch, status)),
        ("to do", remedy(status)),
        ("more", f"gemma4-compat explain {patch.id}"),
    ]


def _cut(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."
