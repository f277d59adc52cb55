"""What a user is told about an error, as text and as JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemma4_compat._doctor.explain import common_errors
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


def sorted_answer(answer: Answer, said: Said, statuses: Mapping[str, PatchStatus]) -> Answer:
    """The answer with patches that may be needed here before the others; certain matches stay first.

    What a text names decides before what is installed.
    """

    def order(match: Match) -> tuple[bool, bool]:
        return not match.certain, not _may_be(match.patch, said, statuses[match.patch.id])

    return replace(answer, matches=tuple(sorted(answer.matches, key=order)))


def _may_be(patch: Patch, said: Said, status: PatchStatus) -> bool:
    """Whether the release that a text names, or the installed one, has the defect of a patch."""
    named = said.releases.get(patch.distribution)
    return (
        words.of(status) is not words.Verdict.NOT_NEEDED if named is None else versions.admits(patch.affected, named)
    )


def remedy(patch: Patch, said: Said, status: PatchStatus) -> str:
    """What to do about an error that a patch fixes, given the releases in the text, and the patch's state here."""
    state, name = status.state, status.id
    old, release = patch.distribution, said.releases.get(patch.distribution)
    if release is not None and (too_old := versions.too_old(old, release)):
        return f"{too_old}. Older ones were not tried."
    if not _may_be(patch, said, status):
        with_ = f"{old} {release}" if release else "the releases installed here"
        elsewhere = "" if release else " If it runs elsewhere, run this command there, or give its whole output."
        if patch.fixed and not release:
            elsewhere = (
                f" If it runs elsewhere: {old} {patch.fixed} has it repaired, and the patch repairs older ones."
            )
        return (
            f"if the program runs with {with_}, this is not its error, because they do not have the defect: report "
            f"it.{elsewhere}"
        )
    upgrade = f" Or upgrade: {old} {patch.fixed} has it repaired." if patch.fixed else ""
    if state is PatchState.SKIPPED:
        off = f"the patch is off here: {status.reason}. Change that, and put `import gemma4_compat` into the program."
        return off + upgrade
    if state is PatchState.FAILED:
        return f"the patch cannot be applied here; `gemma4-compat doctor {name}` says what to report.{upgrade}"
    if status.reason_code is Reason.NEEDS:
        return f"the patch needs {', '.join(status.unmet)}, which is off: enable it."
    return (
        "put `import gemma4_compat` at the top of the program, or start it with `gemma4-compat run`. If that is done: "
        f"`gemma4-compat doctor {name}` shows whether the patch works here.{upgrade}"
    )


def here(patch: Patch, said: Said, status: PatchStatus) -> str:
    """The state of a patch in this environment, as a reader of an error needs it."""
    if (named := said.releases.get(patch.distribution)) is not None:
        has = "has this bug" if versions.admits(patch.affected, named) else "does not have this bug"
        fixed = f", which {patch.distribution} {patch.fixed} has repaired" if patch.fixed else ""
        return f"{patch.distribution} {named}, which the text names, {has}{fixed}"
    release = status.versions.get(patch.distribution)
    if status.reason_code is not Reason.WAITING or release is None:
        return f"{words.of(status).word}: {status.reason}"
    has = "has this bug" if versions.admits(f"<={patch.measured}", release) else "may have this bug (not measured yet)"
    return f"{patch.distribution} {release} {has}; it is repaired as soon as {patch.distribution} is imported"


def headline(said: Said, width: int | None = None) -> str:
    """The last error of a text, with which its answer begins."""
    last = said.messages[0]
    return wrapped(_cut(str(last)) + ("" if last.text else " (without a message)"), width)


def answer_text(said: Said, answer: Answer, statuses: Mapping[str, PatchStatus], width: int | None = None) -> str:
    """The error, its fix and what to do, or what to report. Lines have up to ``width`` characters; None: any."""
    parts, known = [headline(said)], answer.advice
    if answer.matches and answer.matches[0].message != said.messages[0]:
        parts.append(f"This is about the error before it: {_cut(str(answer.matches[0].message))}")
    if known is not None:
        parts += [known.what + ("" if answer.matches else " No patch is about that."), f"To do: {known.to_do}"]
        parts += [f"More: {known.more}"] if known.more else []
    if answer.matches:
        return "\n\n".join([*(wrapped(part, width) for part in parts), *_matches(said, answer, statuses, width)])
    if known is None:
        parts.append(_nothing(said))
        if answer.nearest:
            parts.append(f"The most similar errors: {', '.join(answer.nearest)} (`gemma4-compat explain ID`).")
        parts.append(f"What to report: {REPORT}")
    return "\n\n".join(wrapped(part, width) for part in parts)


def _nothing(said: Said) -> str:
    """What is said where nothing is known."""
    if said.messages[0].kind == Gemma4CompatError.__name__:
        return "gemma4_compat itself raises this, before anything is changed. The message says what to do."
    if common_errors.is_a_description(said):
        return (
            "Nothing of ours fits these words. If something is raised, give its last line, or its whole traceback. If "
            "nothing is: `gemma4-compat check MODEL` compares a model with itself on one device, `gemma4-compat "
            "scan ADAPTER BASE` looks at an adapter, and `gemma4-compat list` shows what is repaired."
        )
    return "No known patch concerns this error."


def _matches(said: Said, answer: Answer, statuses: Mapping[str, PatchStatus], width: int | None) -> list[str]:
    parts = []
    if not answer.matches[0].certain and answer.advice is None:
        more = "." if said.frames else "; the whole traceback tells more: `gemma4-compat explain - < traceback.txt`"
        parts.append(f"Programs without Gemma 4 also raise this text. With Gemma 4 it is one of these{more}")
    # If one is certain, those that any program raises are only named.
    shown = ([match for match in answer.matches if match.certain] or answer.matches)[:_SHOWN]
    tables = [table_text(_rows(match, said, statuses[match.patch.id]), width=width) for match in shown]
    end = []
    if left := [match.patch.id for match in answer.matches if match not in shown]:
        end.append(f"Other patches about this text: {', '.join(left)}")
    end.append(f"If that does not help: {REPORT}")
    return [*(wrapped(part, width) for part in parts), *tables, *(wrapped(part, width) for part in end)]


def answer_data(said: Said, answer: Answer) -> dict[str, Any]:
    """The answer as plain data, without the patches."""
    messages = [match.message for match in answer.matches[:1]] or list(said.messages[:1])
    known = answer.advice
    more = f" More: {known.more}" if known and known.more else ""
    return {
        "error": _cut(str(messages[0])) if messages else "",
        "matches": [
            {"id": match.patch.id, "certain": match.certain, "known": match.known, "quoted": match.quoted}
            for match in answer.matches
        ],
        "nearest": list(answer.nearest),
        "advice": f"{known.what} {known.to_do}{more}" if known else None,
    }


def _rows(match: Match, said: Said, status: PatchStatus) -> list[tuple[str, str]]:
    patch = match.patch
    known = match.known if match.quoted else f"{match.known} (raised by its reproduction)"
    points = ", ".join(patch.failure_points)
    return [
        ("patch", f"{patch.id} ({patch.area}; {points} of docs/FAILURE_POINTS.md)"),
        ("repairs", patch.summary),
        *([("known as", known)] if match.known else []),
        ("here", here(patch, said, status)),
        ("to do", remedy(patch, said, status)),
        ("more", f"gemma4-compat explain {patch.id}"),
    ]


def _cut(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."
