"""A page for each question in docs/benchmarks: one table of the committed runs, one picture of it, links to raw data.

tools/docs.py writes what stands between the marks; the sentences around it are by hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.decoding import multiprocessors_fit
from benchmarks.reporting import compare_report
from benchmarks.reporting.compare_report import ROOT, Run
from benchmarks.reporting.pictures import Panel, Row, chart
from tools.pages.markers import details

PAGES = ROOT / "docs" / "benchmarks"
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


@dataclass(frozen=True)
class Question:
    """What one page answers.

    Attributes:
        page: its name, and that of its picture.
        benchmark: whose runs it shows.
        column: a title that only this one of the benchmark's tables has.
        bars: the titles of what the picture shows; none where there is nothing to draw.
        labels: how many columns name the row.
    """

    page: str
    benchmark: str
    column: str
    bars: tuple[str, ...]
    labels: int = 1

    @property
    def asks(self) -> str:
        """The heading of the page, and the title of its picture."""
        with (PAGES / f"{self.page}.md").open(encoding="utf-8") as page:
            return page.readline().removeprefix("# ").strip()


REPLAYED = "graph_decoding"
QUESTIONS = (
    Question("adapter_load", "adapter_load", "placement", ("ratio", "after"), 2),
    Question("adapter_whole", "adapter_whole", "loaded by", ("ratio",)),
    Question("idle_shim", "idle_shim", "overhead", ("overhead", "noise"), 2),
    Question("model_lock", "model_lock", "cost of the lock", ("cost of the lock", "noise")),
    Question("graph_decoding", REPLAYED, "tok/s replayed", ("tok/s eager", "tok/s replayed")),
    Question("same_bits", REPLAYED, "largest difference of logits", ()),
    Question("fused_kernels", REPLAYED, "kernels fused", ("kernels as captured", "kernels fused")),
    Question("late_stops", REPLAYED, "one step late", ("the host waits for each token", "one step late")),
    Question("short_answers", REPLAYED, "an answer, eager -> replayed", ("16 tokens", "64 tokens", "256 tokens")),
    Question("compiled", REPLAYED, "bf16 on the GPU", ("first call", "tok/s")),
    Question("depth", "depth", "tok/s", ("own kernels", "PyTorch's bits", "llama.cpp Q4_0"), 2),
    Question("depth_kernels", "depth", "kernels, ms a token", ("in all", "number of kernels"), 3),
    Question("first_call", "depth", "the first call", ("first token / captures / fused after",), 2),
    Question("peers", "peers", "tok/s per GiB", ("tok/s", "on the card")),
    Question("peers_kernels", "peers", "ms a token", ("in all", "4-bit and 8-bit products", "attention")),
    Question(
        "peers_adapter", "peers", "with a LoRA adapter", ("with a LoRA adapter", "half of the layers on the host")
    ),
    Question("experts", "experts", "VRAM loaded, GiB", ("VRAM loaded, GiB", "tok/s replayed")),
    Question("experts_buses", "experts", "MiB a token", ("measured here", "12 GiB/s (PCIe 3 x16)", "24 (PCIe 4 x16)")),
    Question("experts_training", "experts", "steps of QLoRA", ("seconds", "VRAM peak, GiB"), 2),
    Question("experts_loading", "experts_loading", "loaded", ("seconds", "peak while loading")),
    Question("disk_reads", "disk_reads", "cold, ms", ("cold: times as fast, announced",)),
    Question("training", "training", "step", ("seconds", "VRAM peak, GiB"), 2),
    Question("trainers", "trainers", "tokens/s", ("tokens/s", "VRAM peak, GiB"), 2),
    Question("longest_sequence", "trainers", "longest sequence in", ("8 GiB", "6 GiB")),
    Question("alternatives", "alternatives", "works", ("decode, of all-GPU", "peak"), 2),
)
CARDS = Question("model_of_cards", "", "the model", ("a step", "the model"), 3)
Table = tuple[list[str], list[list[str]]]


def tables(text: str) -> list[Table]:
    """The titles and the rows of each table in Markdown."""
    found = []
    for part in re.findall(r"(?m)(?:^\|.*\n?)+", text):
        lines = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in part.splitlines()]
        titles, _, *rows = [[cell.strip() for cell in line] for line in lines]
        found.append((titles, rows))
    return found


def runs(question: Question) -> list[tuple[Path, Run, Table]]:
    """The runs that have the table of a question, by their shape and their day."""
    benchmark = question.benchmark
    known = {file: compare_report.read(file) for file in compare_report.committed(benchmark).values()}
    found = []
    for file, run in (known | compare_report.earlier(benchmark)).items():
        for titles, rows in tables(compare_report.TABLES[benchmark](run)):
            rows = [row for row in rows if set(row[question.labels :]) - {"-", ""}]
            if question.column in titles and rows:
                found.append((file, run, (titles, rows)))
    order = [*compare_report.SHAPES[:-1], "26B-A4B", "31B"]
    return sorted(found, key=lambda item: ([*order, item[1]["shape"]].index(item[1]["shape"]), item[0]))


def merged(question: Question) -> Table:
    """One table of all runs, each row with the model and a link to the raw result."""
    parts = runs(question)
    titles = list(dict.fromkeys(title for _, _, (titles, _) in parts for title in titles if title != "shape"))
    rows = []
    for file, run, (own, lines) in parts:
        link = f"[{compare_report.named(run)}](../../{file.relative_to(ROOT).as_posix()})"
        for line in lines:
            cells = dict(zip(own, line))
            rows.append([link, *(cells.get(title, "-") or "-" for title in titles)])
    return ["model, transformers", *titles], rows


def section(question: Question) -> str:
    """What a page's generated part says."""
    titles, rows = merged(question)
    if not rows:
        return f"No result is committed yet; `python {common.script(question.benchmark)}` makes one."
    table, pictured = _markdown(titles, rows), _pictured(question)
    parts = [*pictured, details("All figures", table), ""] if pictured else [table, ""]
    said = []
    for file, run, _ in runs(question):
        machine = run["machine"]
        missing = _missing(question, run)
        said.append(
            f"- [{compare_report.named(run)}](../../{file.relative_to(ROOT).as_posix()}), {run['date']}: "
            f"{machine['device']}, torch {machine['versions']['torch']}; `{run['command']}`."
            + (f" {run['note'].rstrip('.')}." if run.get("note") else "")
            + (f" Not run, for lack of time: {', '.join(missing)}." if missing else "")
        )
    return "\n".join([*parts, *dict.fromkeys(said)])


def _markdown(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def _pictured(question: Question) -> list[str]:
    shown = " and ".join(question.bars)
    return [f"![{question.asks} {shown}, as in the figures below]({question.page}.svg)", ""] if question.bars else []


def _missing(question: Question, run: Run) -> list[str]:
    others = [other for _, other, _ in runs(question)]
    found: list[str] = run["not_run"]
    return compare_report.not_run(run, others) if question.benchmark in compare_report.EVERY else found


def picture(question: Question, table: Table) -> str:
    """The bars of a question, from its table; "" where there is nothing to draw."""
    titles, rows = table
    shown = []
    for row in rows:
        cells = [row[titles.index(bar)] if bar in titles else "-" for bar in question.bars]
        values, intervals = tuple(map(_value, cells)), tuple(map(_interval, cells))
        if any(value is not None for value in values):
            shown.append(Row(_label(row, question.labels), _kind(row), values, intervals))
    panels = [
        Panel(bar, 1.0 if bar == "ratio" else None, "other" if bar.startswith("llama.cpp") else "")
        for bar in question.bars
    ]
    return chart(question.asks, panels, shown) if shown else ""


def _label(row: list[str], labels: int) -> str:
    model, *what = (re.sub(r"\[(.*?)\]\(.*?\)|[*`]|\\", r"\1", cell) for cell in row[: 1 + labels])
    said = " ".join({"off": "(shim off)", "on": "(shim on)"}.get(cell, cell) for cell in what)
    return f"{said if len(said) <= 90 else said[:87] + '...'}\n{model}"


def _value(cell: str) -> float | None:
    """The last of what a cell compares, without the interval behind it."""
    found = _NUMBER.search(re.split(r" / | -> ", cell)[-1].replace("*", ""))
    return None if found is None or re.match(r"\W*(?:no:|does not)", cell) else float(found.group().replace(",", ""))


def _interval(cell: str) -> tuple[float, float] | None:
    found = re.search(r"\(([\d.]+) to ([\d.]+)", cell)
    return None if found is None or " / " in cell else (float(found[1]), float(found[2]))


def _kind(row: list[str]) -> str:
    what = " ".join(row[1:3])
    if re.search(r"\bllama\.cpp|\b[Uu]nsloth", what):
        return "other"
    off = "**off**" in what or re.match(r"(upstream|transformers)\b|compiled by upstream", what)
    return "upstream" if off else "ours"


def cards() -> Table:
    """The table of :mod:`multiprocessors_fit`."""
    ((titles, rows),) = tables(multiprocessors_fit.section())
    return titles, rows


def pages() -> dict[Path, str]:
    """The generated part of each page."""
    found = {question: section(question) for question in QUESTIONS}
    found[CARDS] = "\n".join([*_pictured(CARDS), multiprocessors_fit.section()])
    return {PAGES / f"{question.page}.md": text for question, text in found.items()}


def pictures() -> dict[Path, str]:
    """The picture of each page."""
    found = {question: merged(question) for question in QUESTIONS if question.bars} | {CARDS: cards()}
    drawn = {question: picture(question, table) for question, table in found.items()}
    return {PAGES / f"{question.page}.svg": text for question, text in drawn.items() if text}
