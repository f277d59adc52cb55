"""What depth.py's results say: summaries, tables, and what is wrong with them. Imports nothing upstream."""

from __future__ import annotations

from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import kernel_times
from benchmarks.peers.report import KERNELS

LLAMA = "llama.cpp"
#: Ways, as the columns of a table.
TITLES = {"before": "the release before", "exact": "PyTorch's bits", "own": "own kernels", LLAMA: "llama.cpp Q4_0"}


def summary(rounds: list[Data]) -> Data:
    """Of the rounds so far, by way: of its rates, and of its share of the one before it in the first round."""
    return {
        way: common.spread([turns[way] for turns in rounds if way in turns])
        for way in dict.fromkeys(way for turns in rounds for way in turns)
    }


def problems(result: Data) -> list[str]:
    """What should not be: a step that was not replayed, or not fused."""
    found = []
    if result["machine"]["device"] == "CPU":
        return found
    for name, entry in result["cases"].items():
        for context, data in entry.get("contexts", {}).items():
            for way, warm in data["warm"].items():
                steps = warm.get("steps")
                if steps is not None and not (steps["replayed"] and steps["fused"]):
                    why = [*steps["reasons"], *warm["not_fused"]]
                    found.append(f"{name} at {context}, {way}: not fused: {'; '.join(why) or 'no reason given'}")
            if data.get("captured"):
                found.append(f"{name} at {context}: {data['captured']} captures in turns that should have had theirs")
    return found


# Lines, as the benchmark runs


def line(name: str, context: int, found: Data) -> str:
    rates = ", ".join(f"{way} {_rate(data)}" for way, data in found.get("summary", {}).items())
    return f"{name:<10} {context:>6}: {rates}"


def first_line(name: str, entry: Data) -> str:
    said = [f"{way} {_first(found)}" for way, found in entry["first"].items()]
    return f"{name:<10} first call, first token / captures / fused after, cold, later: {'; '.join(said)}"


def check_line(name: str, entry: Data) -> str:
    found = entry["check"]["summary"]
    return f"{name:<10} at 2,048: read {_rate(found['read'])}, filled {_rate(found['filled'])}"


def profile_lines(at: str, profiles: Data, lines: int) -> str:
    """Of each way what kernels do, and the longest of them."""
    said = []
    for way, profile in profiles.items():
        if "longest" not in profile:
            continue
        spent = kernel_times.spent(profile, KERNELS)
        kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in spent.items() if ms >= 0.005)
        said.append(
            f"{at}, {way}: {profile['ms_a_token']:.2f} ms in {profile['kernels_a_token']:.0f} kernels a token: {kinds}"
        )
        said += [f"  {one['ms']:7.3f} ms {one['count']:6.1f} x {one['name']}" for one in profile["longest"][:lines]]
    return "\n".join(said)


# Tables


def _rate(spread: Data | None) -> str:
    if spread is None:
        return "-"
    low, high = spread["quartiles"]
    return f"{spread['median']:.1f} ({low:.1f} to {high:.1f})"


def _first(found: Data) -> str:
    def said(one: Data, key: str) -> str:
        return "-" if one.get(key) is None else f"{one[key]:.2f} s"

    keys = ("first_token_s", "capture_s", "fused_s")
    return ", ".join(" / ".join(said(found[when], key) for key in keys) for when in ("cold", "later"))


def _speed(run: Data) -> str:
    found = [
        (entry, context, data["summary"])
        for entry in run["cases"].values()
        for context, data in entry.get("contexts", {}).items()
        if data.get("summary")
    ]
    ways = [way for way in TITLES if any(way in rates for _, _, rates in found)]
    bus = [_of_the_bus(run, entry, rates) for entry, _, rates in found]
    rows = [
        [entry["what"], f"{int(context):,}", *(_rate(rates.get(way)) for way in ways), *([share] if any(bus) else [])]
        for (entry, context, rates), share in zip(found, bus, strict=True)
    ]
    titles = (
        "tok/s",
        "tokens of context",
        *(TITLES[way] for way in ways),
        *(["of the bus' bound"] if any(bus) else []),
    )
    return _table(titles, rows)


def _of_the_bus(run: Data, entry: Data, rates: Data) -> str:
    """What share of the bus' bound streamed layers reach in the last of our ways."""
    bus, nbytes = run["host_to_device_gib_s"], entry["load"]["streamed_bytes"] if "load" in entry else 0
    own = [way for way in rates if way != LLAMA]
    if bus is None or not nbytes or not own:
        return ""
    bound = bus["pinned"] * 2**30 / nbytes
    return f"{100 * rates[own[-1]]['median'] / bound:.0f} % of {bound:.1f}"


def _firsts(run: Data) -> str:
    rows = [
        [entry["what"], TITLES[way], *_first(found).split(", ")]
        for entry in run["cases"].values()
        for way, found in entry.get("first", {}).items()
    ]
    titles = ("the first call", "way", "first token / captures / fused after", "the same, kernels compiled before")
    return _table(titles, rows)


def _profiles(run: Data) -> str:
    rows = []
    kinds = list(dict.fromkeys(kind for kind, _ in KERNELS))
    for entry in run["cases"].values():
        for context, data in entry.get("contexts", {}).items():
            for way, profile in data.get("profile", {}).items():
                if "longest" in profile:
                    spent = kernel_times.spent(profile, KERNELS)
                    times = (profile["ms_a_token"], *(spent[kind] for kind in [*kinds, "others"]))
                    cells = [*(f"{ms:.2f}" for ms in times), f"{profile['kernels_a_token']:.0f}"]
                    rows.append([entry["what"], f"{int(context):,}", TITLES[way], *cells])
    titles = ("kernels, ms a token", "tokens of context", "way", "in all", *kinds, "others", "number of kernels")
    return _table(titles, rows)


def _table(titles: tuple[str, ...], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(line)} |" for line in (titles, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])


TABLES = (_speed, _firsts, _profiles)


def table(run: Data) -> str:
    """All of them, for a run as a whole."""
    cut = [f"{run['shape']} is {run['cut_down']}."] if run.get("cut_down") else []
    return "\n\n".join([*cut, *(text for part in TABLES if (text := part(run)))])
