"""Find turns of phrase that no native engineer writes, in what a person reads: README.md and the other pages, and the
docstrings, comments and strings of gemma4_compat/.

python -m tools.english              exit 1 where a file has more findings than tools/english_pending.txt allows it
python -m tools.english FILE...      the findings of these files, whatever that list allows
python -m tools.english --write      write the list anew, from what is found (after a merge)
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PENDING = ROOT / "tools" / "english_pending.txt"

#: What ends a clause: punctuation, a cell of a table, a paragraph, or the text itself (a gap, see ``python``).
GAP = "\0"
_END = rf"(?=\s*(?:[.,;:!?)|{GAP}]|\n\s*\n|$))"
_START = rf"(?:^|[.!?:;|{GAP}]\s*|\n\s*\n\s*|^\s*[-*]\s+)"

#: Turn -> its pattern, and what to write instead.
TURNS = {
    "is none": (r"(?<!there\s)\b(?:is|was)\s+none\b", "is not, has no"),
    ", too": (rf",\s+too\b{_END}", "also"),
    "as ever": (r"\bas\s+ever\b", "as before, as usual"),
    "but for": (r"\bbut\s+for\b(?!\s+(?:example|instance|now|the moment|all)\b)", "except for, apart from"),
    "whoever": (r"(?i:\bwhoever\b)", "anyone who, or the thing itself"),
    "is of": (
        r"\b(?:is|are|was|were)\s+of\b(?!\s+(?:course|the (?:form|order|same)|type"
        r"|(?:no |any |some |little |great )?(?:use|interest|importance|value|help|concern)))",
        "belongs to, covers, has",
    ),
    "alone for only": (
        rf"\w[^\w.]{{0,3}}\s+alone\b(?:{_END}|(?=\s+(?:and|or|that|which|where|there|here|when|for|as|in|on|to|of)\b))",
        "only",
    ),
    "another one": (r"\b(?i:another)\s+one\b", "another, or the noun"),
    "one error that": (r"\bone\s+error\s+that\b", "an error that"),
    "sentence opening with Of": (r"\bOf\b(?!\s+course)", "start with the subject"),
    "sentence opening with Who": (rf"{_START}Who\b(?![^.?!|{GAP}]*\?)", "anyone who, or the thing itself"),
    "be it": (r"(?:,|\band)\s+be\s+it\b", "even, whether"),
    "for ever": (r"\bfor\s+ever\b", "forever"),
    "None where": (r"\b(?i:none|empty|false|true)\s+where\b", "None if"),
    "included at the end": (rf"\w[\"`]*\s+included\b{_END}", "including, also"),
    "once a": (
        r"\b(?:once|twice|times)\s+an?\s+(?:forward|layer|load|model|prompt|row|step|token)\b(?!\s+(?:is|was|has)\b)",
        "once per",
    ),
    "copied out of": (r"\b(?:copy|cop(?:ied|ies)|reads?|written)\s+out\s+of\b(?!\s+meta\s+tensor)", "from"),
    "let go of": (r"\blet(?:s|ting)?\s+go\s+of\b", "release, drop"),
    "put off": (r"\bput(?:s|ting)?\s+off\b", "defer"),
    "held against": (r"\bheld\s+against\b", "compared with"),
    "the same of": (r"\bthe\s+same\s+of\b(?!\s+(?:all|both|each))", "the same for"),
    "lies": (r"\b(?:lies?|lay)\s+(?:at|beside|below|in|inside|on|there|where)\b", "is, stands"),
    # The glossary: words of this project that the field has another word for.
    "own arithmetic": (
        r"\bown\s+arithmetic\b|\b(?:kernels?|arithmetic|numerics)\s+of\s+(?:its|our|their)\s+own\b",
        "custom kernels, numerics",
    ),
    "matrix units": (r"\b(?i:matrix)\s+units?\b", "tensor cores"),
    "multiprocessors": (r"\b(?:all|an?|fewer|its|many|of|one|per|the|their)\s+multiprocessors?\b", "SMs"),
    "words of 16 bytes": (r"\b(?i:words)\s+of\s+(?:16|sixteen)\s+bytes\b", "128-bit loads"),
    "shares of the softmax": (r"\bshares\s+of\s+(?:a|the)\s+softmax\b", "softmax weights"),
    "other bits": (r"\b(?:gave|gives?|ha[ds]|have|with)\s+other\s+bits\b", "differs bitwise"),
    "in rounds": (r"\bin\s+rounds\b|\b(?i:rounds?)\s+(?:of|with|without)\s+drafts\b", "speculative steps"),
    "in pieces": (r"\b(?:MLPs?|norms?|prompts?)\s+in\s+pieces\b", "chunks (MLPs, norms), buckets (prompts)"),
    "round otherwise": (r"\bround(?:s|ed)?\s+otherwise\b", "differently"),
    "wait for Python": (r"\bwaits?\s+for\s+Python\b(?!\s+to\b)", "is CPU-bound"),
    "asleep": (r"\b(?i:asleep|awaken(?:s|ed)?|wakers?)\b", "dormant, activate"),
    "what checkpointing keeps": (r"\bwhat\s+checkpointing\s+keeps\b", "checkpointed activations"),
}
_TURNS = {turn: re.compile(pattern, re.MULTILINE) for turn, (pattern, _) in TURNS.items()}
#: Ends in words that may be far away: whether somebody leaves, or lets, something alone; what is not X but for Y.
_LET_ALONE = re.compile(r"\b(?:leav(?:e|es|ing)|left|let|lets|letting|stand|stands)\b[^.;:]*$", re.IGNORECASE)
_NOT = re.compile(r"\bnot\b[^.;:]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """A turn in a line of a file."""

    file: Path
    line: int
    turn: str
    words: str

    def __str__(self) -> str:
        shown = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file
        return f"{shown}:{self.line}: {self.turn} (better: {TURNS[self.turn][1]}): {self.words}"


def markdown(text: str) -> str:
    """``text`` with its code in blanks: every offset stays."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda block: _blank(block.group(), GAP), text, flags=re.MULTILINE | re.DOTALL)
    return _without_code(text)


def python(source: str) -> str:
    """The comments and strings of ``source``, the rest in gaps: every offset stays. Strings and comments that only
    white space parts are one text.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    shown = [character if character == "\n" else GAP for character in source]
    last: tuple[int, int] | None = None  # the end of the text before, and its kind
    middle = getattr(tokenize, "FSTRING_MIDDLE", -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.STRING, tokenize.COMMENT, middle):
            continue
        begin = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        text = source[begin:end]
        if token.type == tokenize.STRING:
            prefix = re.match(r"[A-Za-z]*(?:\"\"\"|'''|\"|')", text)
            quotes = len(prefix.group().lstrip("rRbBfFuU")) if prefix else 0
            inside = (begin + len(prefix.group()) if prefix else begin, end - quotes)
        else:
            inside = (begin + len(text) - len(text.lstrip("#: ")), end) if text.startswith("#") else (begin, end)
        if last is not None and last[1] == token.type and not source[last[0] : begin].strip():
            between = source[last[0] : inside[0]]
            # a blank line ends a comment; strings that follow each other are one
            joins = token.type == tokenize.STRING or between.count("\n") == 1
            if joins:
                for at in range(last[0] - (token.type == tokenize.STRING), inside[0]):
                    shown[at] = "\n" if source[at] == "\n" else " "
        shown[inside[0] : inside[1]] = source[inside[0] : inside[1]]
        last = (end, token.type)
    return _without_code("".join(shown))


def _blank(text: str, filler: str) -> str:
    return "".join(character if character == "\n" else filler for character in text)


def _without_code(text: str) -> str:
    return re.sub(r"(`+)(?!`)[^\n]*?[^`]\1(?!`)", lambda code: _blank(code.group(), "x"), text)


def findings(file: Path) -> list[Finding]:
    """Every turn in a file, in the order of its lines."""
    source = file.read_text(encoding="utf-8")
    text = python(source) if file.suffix == ".py" else markdown(source)
    found = []
    for turn, pattern in _TURNS.items():
        for match in pattern.finditer(text):
            at = match.end() - 1
            before = text[max(0, match.start() - 120) : match.end()].rstrip(GAP).rpartition(GAP)[2]
            if turn == "alone for only" and _LET_ALONE.search(before):
                continue
            if turn == "but for" and _NOT.search(before):
                continue
            around = text[max(0, match.start() - 30) : match.end() + 20].replace(GAP, " ")
            found.append(Finding(file, text.count("\n", 0, at) + 1, turn, " ".join(around.split())))
    return sorted(found, key=lambda one: one.line)


def files() -> list[Path]:
    """What is looked at."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "benchmarks" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    return pages + sorted((ROOT / "examples").glob("*.py")) + sorted((ROOT / "gemma4_compat").rglob("*.py"))


def pending() -> dict[str, int]:
    """File -> how many findings it may still have."""
    lines = PENDING.read_text(encoding="utf-8").splitlines() if PENDING.exists() else []
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: int(count) for count, name in rows}


def room(file: str) -> str:
    """Where a file belongs: a room of the package, an area of patches, or the pages."""
    folders = Path(file).parts[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ("patches",) else 2]) or "."


def main(arguments: list[str]) -> int:
    named = [Path(name).resolve() for name in arguments if not name.startswith("-")]
    found = [one for file in named or files() for one in findings(file)]
    if named:
        print(*found, sep="\n" if found else "")
        return 1 if found else 0
    counts = Counter(one.file.relative_to(ROOT).as_posix() for one in found)
    if "--write" in arguments:
        head = "# Files whose English is not clean yet, with the findings they have: python -m tools.english --write\n"
        PENDING.write_text(head + "".join(f"{counts[name]} {name}\n" for name in sorted(counts)), encoding="utf-8")
    if "--rooms" in arguments:
        rooms = Counter(room(one.file.relative_to(ROOT).as_posix()) for one in found)
        for name in sorted(rooms):
            print(f"{rooms[name]:4} {name}")
    allowed = pending()
    new = [one for one in found if counts[one.file.relative_to(ROOT).as_posix()] > allowed.get(_name(one), 0)]
    for one in new:
        print(one)
    print(f"{len(found)} findings in {len(counts)} files, {len(new)} of them in files that may have fewer")
    return 1 if new else 0


def _name(one: Finding) -> str:
    return one.file.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
