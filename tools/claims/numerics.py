"""Of the page on the bits of fast decoding, and on where each of its parts ends."""

from __future__ import annotations

import json
import math
import re
import statistics
from typing import Any

from gemma4_compat._gemma4.state import contents
from gemma4_compat._generation.prefix_cache import rows
from gemma4_compat._generation.prompts import buckets, chunks, prompts
from gemma4_compat._generation.speculative import draft_length
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.guards import model as guards
from gemma4_compat._kernels import kernel_files, kernels
from gemma4_compat._kernels.match import reading
from gemma4_compat._kernels.specs import attention, dense, flash, nf4_gemv
from gemma4_compat._kernels.specs import products as own_products
from gemma4_compat._memory import use
from gemma4_compat._plan import prompt_kernels
from tools.claims.form import Claim, in_file, result, text_of
from tools.claims.running import experts
from tools.pages import gives
from tools.pages.markers import ROOT

_PAGE = "docs/DECODING_NUMERICS.md"


def ends(values: Any) -> tuple[float, float]:
    """The least and the most."""
    found = list(values)
    return min(found), max(found)


def left_by_experts() -> tuple[int]:
    """MiB that stay free at least, where less than a quarter of what is free has as much."""
    assert use.room_for_experts(16 << 30) == 12 << 30
    return (use.SPARE >> 20,)


def products() -> tuple[float, ...]:
    """Errors and times of 4-bit products, of those of bitsandbytes: mean errors, largest errors, times."""
    found = result("2026-11-27-h100/own-kernels.json")["products"]
    shares = [row["share_of_theirs"] for row in found["errors"]]
    times = ends(
        row["us"]["ours"]["median"] / row["us"]["bitsandbytes"]["median"]
        for row in found["us"].values()
        if "bitsandbytes" in row["us"]
    )
    return *ends(row["mean"] for row in shares), *ends(row["largest"] for row in shares), *times


def decoded_attention() -> tuple[Any, ...]:
    """Errors of decoded tokens' attention, of those of PyTorch; and the keys of the longest."""
    rows = [row for row in result("2026-11-26-h100-kernels/attention.json")["errors"] if row[2] > 1]
    mean = ends(ours / theirs for _, _, _, ours, theirs, _, _ in rows)
    return *mean, max(row[5] / row[6] for row in rows), max(row[2] for row in rows)


def read_attention() -> tuple[Any, ...]:
    """Errors of prompts' attention, of those of PyTorch, without the worst; keys of the worst, and its errors."""
    *rows, worst = sorted(result("*-h100-flash/attention.json")["errors"], key=lambda row: row["mean_ratio"])
    assert (worst["D"], worst["dtype"]) == (512, "torch.float16")
    largest = max(row["max_ratio"] for row in rows)
    keys = ends(row["keys"] for row in (*rows, worst))
    return (
        *keys,
        *ends(row["mean_ratio"] for row in rows),
        largest,
        worst["keys"],
        worst["mean_ratio"],
        worst["max_ratio"],
    )


def with_adapter(depth: str) -> tuple[float, float]:
    """Tokens a second of the E2B, without an adapter and with it."""
    cases = result("2026-11-27-h100/adapter-E2B.json")["cases"]
    return tuple(cases[case]["contexts"][depth]["summary"]["own"]["median"] for case in ("gpu", "gpu+lora"))  # type: ignore[return-value]


def lost(depth: str) -> float:
    """Per cent of the speed that the adapter costs."""
    without, with_it = with_adapter(depth)
    return 100 * (1 - with_it / without)


def lost_before() -> tuple[float, float]:
    """The same before, of all shapes and depths."""
    found = []
    for shape in ("E2B", "E4B", "12B"):
        cases = gives.by_depth(shape)["cases"]
        plain, adapted = (cases[case]["contexts"] for case in ("gpu", "gpu+lora"))
        speeds = ((adapted[one]["summary"]["own"], plain[one]["summary"]["own"]) for one in adapted if one in plain)
        found += [100 * (1 - one["median"] / other["median"]) for one, other in speeds]
    return ends(found)


def on_few(way: str) -> tuple[float, float]:
    """Tokens a second of E2B and E4B on 28 multiprocessors."""
    cases = [
        result(f"*-h100-multiprocessors/multiprocessors-{shape}.json")["counts"]["28"]["gpu"]
        for shape in ("E2B", "E4B")
    ]
    found = [case["summary"] if way == "own" else case["before"]["summary"] for case in cases]
    return found[0]["median"], found[1]["median"]


def dequantized() -> tuple[float, float]:
    """Microseconds for the widest MLP of the 12B: of this package, and of bitsandbytes."""
    rows = result("2026-11-26-h100-kernels/dequantizing.json")["times"]
    (row, *_) = (one for one in rows if one["variant"] == "12B" and one["shape"] == [15_360, 3840])
    return row["ours_gpu"], row["bnb_gpu"]


def moved() -> tuple[float, float]:
    """Microseconds for the windows of a layer of the 12B: one kernel, and copies."""
    found = result("2026-11-26-h100-kernels/shift.json")["shift 12B"]
    return found["kernel_us"], found["copies_us"]


def compiled() -> tuple[Any, ...]:
    """Kernels, and seconds in eight threads and in one."""
    found = result("2026-11-26-h100-kernels/compiling.json")
    milliseconds = [found[f"() {threads} parts: ms new, CPU ms, ms again"][0] / 1000 for threads in (8, 1)]
    return re.findall(r"\d+", found["texts, characters"])[0], *milliseconds


def trials() -> tuple[int, int, int, int]:
    """Shapes of norms; combinations of products, those that were equal, and those that did not fit."""
    found = result("2026-11-26-h100-kernels/trials.json")
    tried, failed = found["products"]["tried"], len(found["products"]["errors"])
    return found["means"]["tried"], tried, tried - failed, failed


def turns() -> tuple[Any, ...]:
    """In bf16: the largest logit, how far logits are off, equal texts, of how many; read in chunks; equal then."""
    found = result("*-cpu/turns_bound.json")["found"]
    reused, cut = found["bfloat16, reused"], found["bfloat16, chunks"]
    return reused["largest"], reused["off"], reused["equal"], reused["answers"], cut["off"], cut["equal"]


def histories() -> tuple[int, int]:
    """In float32: equal texts, of how many."""
    found = result("*-cpu/turns_bound.json")["found"]["float32, reused"]
    return found["equal"], found["answers"]


def long_text() -> tuple[int, float]:
    """Tokens of a text, and MiB that memory grew by while it was decoded, to 0.1 above."""
    found = result("2026-11-27-h100/long-text-E2B.json")
    held = [[one["allocated"] for one in run["memory"][1:]] for run in found["runs"]]
    grown = max(max(values) - values[0] for values in held) / 2**20
    return int(re.findall(r"--tokens (\d+)", found["command"])[0]), math.ceil(10 * grown) / 10


def equal_texts() -> tuple[str, ...]:
    """Texts with an assistant that are those without: bf16, of how many, tokens; float32."""
    text = (ROOT / "docs" / "evidence" / "sampled_drafts.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^torch\.\w+: (\d+) of (\d+) texts of (\d+) tokens", text, re.MULTILINE)
    return *rows[0], *rows[1][:2]


def worth(operations: float, gib: float) -> float:
    """Tokens, in hundreds, for which computing 4-bit layers takes as long as copying them."""
    return round(operations / (4 * gib * 2**30), -2)


def captures(file: str) -> tuple[str, ...]:
    """Replays before a fused capture: early, and at the latest."""
    return in_file(f"gemma4_compat/{file}.py", r"early, after = (\d+), (\d+)")


def heads_in_two_stages() -> tuple[str, ...]:
    """Their time against that of the whole head, by model, and that of a greedy token."""
    found = result("*-h200/two_stage_heads-E2B.json")
    heads = [one["us"]["two stages"] / one["us"]["whole"] for one in found["kernels"] if "us" in one]
    return tuple(
        f"{ratio:.2f}" for ratio in (*heads, found["greedy"]["two stages"]["ms"] / found["greedy"]["whole"]["ms"])
    )


def first_texts() -> tuple[str, ...]:
    """Seconds of the first text with nothing, with kernels and with notes, and of a later one."""
    runs = result("*-h200/first_text-E2B.json")["runs"]
    seconds = [runs[name]["texts"][0]["seconds"] for name in ("empty", "kernels", "noted")]
    return tuple(f"{one:.1f}" for one in (*seconds, min(text["seconds"] for text in runs["noted"]["texts"][1:])))


def kept_experts() -> tuple[Any, ...]:
    """GiB of the card, experts that stay of all; for each rate what was there, and ms with and without."""
    found = result("*-h200/kept-26B-A4B.json")
    rates = sorted(found["rates"].values(), key=lambda one: -one["hits"])
    assert all(one["same_logits"] for one in rates)
    gib = float(re.findall(r"--gib ([\d.]+)", found["command"])[0])
    shown = ((f"{100 * one['hits']:.0f}", f"{one['kept_ms']:.1f}", f"{one['without_ms']:.1f}") for one in rates)
    return f"{gib:.0f}", found["slots"], found["experts"], *(value for values in shown for value in values)


def heads_on_host(shape: str) -> tuple[str, ...]:
    """Milliseconds of a greedy token with the head in host memory, on the card, and copied; tokens of a text."""
    found = result(f"*-h200/heads_on_host-{shape}.json")
    greedy = found["host"]["greedy"]
    assert found["host"]["as_on_the_card"] == greedy["texts"] + found["host"]["sampled"]["texts"]
    ms = greedy["in place"]["ms"], found["greedy"]["two stages"]["ms"]
    return *(f"{one:.1f}" for one in ms), f"{greedy['copied']['ms']:.0f}", str(greedy["tokens"])


def large_head_on_host() -> tuple[Any, ...]:
    """The same times of a 12B, and GiB of the card of the three."""
    peaks = result("*-h200/heads_on_host-12B.json")["host"]["peak_gib"]
    return *heads_on_host("12B")[:3], *(peaks[way] for way in ("in place", "two stages", "copied"))


def many_rows() -> tuple[Any, ...]:
    """The most rows of a run, their tokens a second with a head in two stages, and in the run before."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*-h200/rows-E2B.json"))
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    rows = max(after["options"]["rows"])
    return rows, *(found["tokens_s"][f"{rows} rows"] for found in (after, before))


def streamed(kind: str) -> tuple[str, ...]:
    """Milliseconds of a token without a streamer, with transformers' and with a user's, after the first round."""
    rounds = result("*-h200/graph_decoding-E2B-streamed.json")["cases"]["gpu"]["streamed"]["rounds"][1:]
    ways = [[turns[f"{way} {kind}"]["ms"] for turns in rounds] for way in ("none", "transformers", "user")]
    return tuple(f"{statistics.mean(found):.1f}" for found in ways)


CLAIMS = (
    Claim(
        _PAGE,
        "mean error of a product is {:.2f} to {:.2f} of that of bitsandbytes' kernel, the largest {:.2f} to {:.2f}, "
        "and the kernel takes {:.2f} to {:.2f} of its time",
        products,
    ),
    Claim(
        _PAGE,
        "attention is {:.2f} to {:.2f} of that of PyTorch's kernels, and the largest error at most {:.1f} of theirs "
        "(H100; widths 256 and 512, bf16 and fp16, 1 to {:,} keys)",
        decoded_attention,
    ),
    Claim(_PAGE, "three quarters of what is free, or what leaves {} MiB", left_by_experts),
    Claim(_PAGE, "not a power of two from {} to {}", lambda: ends(attention.WIDTHS)),
    Claim(_PAGE, "then cost {:.0f} to {:.0f} % of a token's time", lost_before),
    Claim(
        _PAGE,
        "it costs the E2B {:.0f} to {:.0f} % (H100: {:.0f} tokens a second without and {:.0f} with it at 64 tokens, "
        "{:.0f} and {:.0f} at 2,048)",
        lambda: (*sorted(map(lost, ("64", "2048"))), *with_adapter("64"), *with_adapter("2048")),
    ),
    Claim(
        _PAGE,
        "E2B decoded {:.0f} tokens a second and E4B {:.0f} in the first run; they were {:.0f} and {:.0f} before",
        lambda: (*on_few("own"), *on_few("before")),
    ),
    Claim(_PAGE, "prompts of more than {:,} tokens that", lambda: (prompts.MAX_TOKENS,)),
    Claim(_PAGE, "keeps at most {} graphs of prompts", lambda: (decoder.MAX_PROMPTS,)),
    Claim(_PAGE, "keeps at most {} graphs of steps", lambda: (decoder.MAX_GRAPHS,)),
    Claim(_PAGE, "chunk of up to {} tokens is captured again", lambda: (prompts.MAX_FUSED,)),
    Claim(
        _PAGE,
        "in its {}th replay with the fused kernels of steps, in its {}th",
        lambda: captures("_generation/prompts/prompts"),
    ),
    Claim(_PAGE, "{:.0f} µs for gate or up of the 12B in place of {:.0f} (H100)", dequantized),
    Claim(
        _PAGE,
        "in buckets of up to {:,}, padded to {}, {}, {} ... {:,},",
        lambda: (buckets.SIZES[-1], *buckets.SIZES[:3], buckets.SIZES[-1]),
    ),
    Claim(_PAGE, "of up to {} rows run on tensor cores", lambda: (own_products.MAX_ROWS,)),
    Claim(_PAGE, "by groups of {}, of a multiple of {}, or", lambda: (nf4_gemv.CHUNK // 2, nf4_gemv.CHUNK)),
    Claim(_PAGE, "compute up to {} rows, each as if", lambda: (own_products.MAX_ROWS,)),
    Claim(_PAGE, "for up to {} rows; for one row", lambda: (own_products.MAX_ROWS,)),
    Claim(_PAGE, "more than {} rows,", lambda: (own_products.MAX_ROWS,)),
    Claim(
        _PAGE,
        "activations are those of {:,} tokens; of {:,} or {} where",
        lambda: (*reversed(buckets.SIZES[-2:]), buckets.SMALL),
    ),
    Claim(
        _PAGE,
        "a multiple of {:,} (beyond {:,} tokens up to an eighth longer",
        lambda: (buckets.UNIT, 16 * buckets.UNIT),
    ),
    Claim(_PAGE, "in caches of at least {:,} positions, read", lambda: (flash.POSITIONS,)),
    Claim(_PAGE, "a cache with fewer than {:,} positions", lambda: (flash.POSITIONS,)),
    Claim(_PAGE, "compute capability {}.{} and newer", lambda: prompt_kernels.LEAST),
    Claim(_PAGE, "at {} keys", lambda: (reading._BEFORE + reading._TOKENS_OF_A_TRIAL,)),
    Claim(
        _PAGE,
        "more than {:.0f} % larger on average",
        lambda: (100 * float(in_file("gemma4_compat/_kernels/match/reading.py", r"<= 1(\.\d+) \* theirs.mean")[0]),),
    ),
    Claim(
        _PAGE,
        "on an H100, {:,} to {:,} keys, mean errors were {:.2f} to {:.2f} of PyTorch's and the largest at most "
        "{:.2f}, except for float16 heads of 512 at {:,} keys ({:.2f} and {:.2f})",
        read_attention,
    ),
    Claim(_PAGE, "memory after {:,} keys", lambda: (flash._SEGMENT,)),
    Claim(_PAGE, "a prompt of more than {} tokens, the planner's", lambda: (chunks._FEW,)),
    Claim(_PAGE, "smaller ones, down to {} tokens", lambda: (chunks.SIZES[-1],)),
    Claim(
        _PAGE,
        "The largest of {}, {} ... {:,} tokens that fits (over all rows of a batch {:,})",
        lambda: (*reversed(chunks.SIZES[-2:]), prompts.MAX_TOKENS, prompts.MAX_TOKENS),
    ),
    Claim(_PAGE, "the largest up to {:,}", lambda: (chunks.SIZES[0],)),
    Claim(
        _PAGE,
        "some {:.0f} for 30 TFLOPS and 12 GiB/s, {:,.0f} for 400 and 49.",
        lambda: (worth(30e12, 12), worth(400e12, 49)),
    ),
    Claim(
        _PAGE, "a token takes {} of {} it is {:.0f} times as many", lambda: (*experts(), experts()[1] / experts()[0])
    ),
    Claim(
        _PAGE,
        "first logits of up to {:.1f} differ by at most {:.2f}, and {} of {} texts of 12 tokens were equal; read in "
        "chunks of 16 tokens, they differ by {:.2f}, and {} were equal",
        turns,
    ),
    Claim(_PAGE, "are compared at {} places", lambda: (contents.SAMPLES,)),
    Claim(_PAGE, "above rank {} every B", lambda: (dense.SHORT,)),
    Claim(_PAGE, "An E2B that decoded {:,} tokens, and", lambda: (long_text()[0],)),
    Claim(_PAGE, "did not grow by more than {:.1f} MiB", lambda: (long_text()[1],)),
    Claim(_PAGE, "equal in {} of {} edited histories", lambda: histories()),
    Claim(_PAGE, "and {} tokens before that end need", lambda: (rows.SLACK,)),
    Claim(_PAGE, "are as long as a multiple of {:,}, so one", lambda: (buckets.UNIT,)),
    Claim(_PAGE, "of the tests {} of {} texts of {} tokens are equal, in float32 {} of {}", equal_texts),
    Claim(_PAGE, "normalizes all {:,} scores", lambda: (text_of("E2B").vocab_size,)),
    Claim(_PAGE, "none, {}, {} or {}, whichever", lambda: draft_length.COUNTS),
    Claim(_PAGE, "drafts after {}, {}, ... {:,} tokens", lambda: (draft_length.AGAIN, 2 * draft_length.AGAIN, 1024)),
    Claim(_PAGE, "After {} replays of a graph", lambda: captures("_graphs/fused_steps")[:1]),
    Claim(
        _PAGE,
        "the whole head for an E2B, {} for an E4B, {} for a 12B and {} for a 31B",
        lambda: heads_in_two_stages()[1:4],
    ),
    Claim(_PAGE, "both stages take {} of the time of", lambda: heads_in_two_stages()[:1]),
    Claim(_PAGE, "a greedy token of an E2B takes {} of its time", lambda: heads_in_two_stages()[4:]),
    Claim(
        _PAGE,
        "took {} s with an empty folder, {} s with only the kernels, and {} s with the notes",
        lambda: first_texts()[:3],
    ),
    Claim(
        _PAGE,
        "The first text of {} tokens of an E2B",
        lambda: tuple(re.findall(r"--tokens (\d+)", result("*-h200/first_text-E2B.json")["command"])),
    ),
    Claim(_PAGE, "later texts take {} s", lambda: first_texts()[3:]),
    Claim(_PAGE, "in host memory and {} GiB of an H200 keeps {} of {} experts of a layer", lambda: kept_experts()[:3]),
    Claim(
        _PAGE,
        "With {} % of what a token needs among them it takes {} ms, and {} without; with {} %, {} and {}; with {} %, "
        "{} and {}",
        lambda: kept_experts()[3:],
    ),
    Claim(
        _PAGE,
        "a greedy token of an E2B takes {} ms this way, {} with the head on the card, and {} with a copy (raw; texts "
        "of {} tokens",
        lambda: heads_on_host("E2B"),
    ),
    Claim(_PAGE, "heads in bfloat16 and float16, up to {} rows)", lambda: (own_products.MAX_ROWS,)),
    Claim(_PAGE, "the head, more than {} rows, and with", lambda: (own_products.MAX_ROWS,)),
    Claim(_PAGE, "of a 12B {}, {} and {}, with {:.1f} GiB of the card at most, {:.1f} and {:.1f}", large_head_on_host),
    Claim(
        _PAGE,
        "An E2B with {} rows then decodes {:,.0f} tokens a second on an H200, where it decoded {:,.0f} with the whole "
        "head",
        many_rows,
    ),
    Claim(_PAGE, "took {} ms without a streamer, {} with transformers'", lambda: streamed("greedy")[:2]),
    Claim(_PAGE, "and {} with one of your own, which", lambda: streamed("greedy")[2:]),
    Claim(_PAGE, "a sampled one {}, {} and {}", lambda: streamed("sampled")),
    Claim(_PAGE, "has room for {} more tokens", lambda: captures("_graphs/fused_steps")[:1]),
    Claim(_PAGE, "after {} replays at the latest", lambda: captures("_graphs/fused_steps")[1:]),
    Claim(_PAGE, "all {} shapes tried were equal", lambda: trials()[:1]),
    Claim(_PAGE, "of {} combinations of", lambda: trials()[1:2]),
    Claim(_PAGE, "and bias, {} were equal and {}, with long rows", lambda: trials()[2:]),
    Claim(_PAGE, "{:.1f} µs for a layer of the 12B in place of {:.0f} (H100)", moved),
    Claim(_PAGE, "otherwise with {:,} random ones", lambda: (kernels._TRIED,)),
    Claim(_PAGE, "{} kernels take {:.1f} s ({:.1f} s in one thread)", compiled),
    Claim(_PAGE, "in in or , {} MiB at most", lambda: (kernel_files.LIMIT >> 20,)),
    Claim(_PAGE, "checks one of {} shares", lambda: (guards._TURNS,)),
    Claim(_PAGE, "noticed within {} tokens", lambda: (guards._TURNS,)),
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    _PAGE: (
        "blocks of 64 weights",
        "up to rank 32 in",  # what fits the registers of a thread
        ", 16 on the",
        ", 8 on the",
        "twice that in",
        "a cache twice as long",
        "a LoRA of rank 16",
        "On 28 SMs",
        "other than 1)",
        "a forward twice",
        "heads of 512; PyTorch's",
        "kernel for 256 is",
        "rounded to 16 bits",
        "is larger by half",
        "f / (4 s)",
        "a window and a quarter",
        "or 64 rows if",
        "keys and values twice",
        "5.17 or newer",
    ),
}
