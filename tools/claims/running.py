"""Of README, and of the pages on running a model: placement, speed, media."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.small_card import report
from gemma4_compat._generation.prefix_cache import parked, rows, session
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import decoder
from gemma4_compat._kernels.match import reading
from gemma4_compat._kernels.specs import flash
from gemma4_compat._plan import prompt_kernels
from gemma4_compat._plan.cards import measured
from tools.claims.form import Claim, copied_heads, evidence, in_file, own_layers, percent, result, text_of
from tools.pages import decoding, fits, gives


def speed(shape: str, case: str) -> float:
    """Tokens a second with ``decode_fast``, as in README's table."""
    measured: float = gives.newest(shape, case)["cases"][case]["speed"]["summary"]["tok_s"]["replayed"]["median"]
    return gives.at_depth(shape, case, "own") or measured


def eager(shape: str, case: str) -> float:
    """Tokens a second without it."""
    found: float = gives.newest(shape, case)["cases"][case]["speed"]["summary"]["tok_s"]["eager"]["median"]
    return found


def peak(shape: str, case: str) -> float:
    """GiB that torch allocated at most."""
    return gives.peak(gives.newest(shape, case)["cases"][case])


def streamed(shape: str) -> tuple[int, float]:
    """How many decoder layers a shape has, and GiB that a token copies if all are streamed, in 4-bit."""
    found = report.read(report.committed()[shape])["cases"]["layers-all"]
    return int(report.layers(found)), found["streamed_bytes"] / 2**30


def head(shape: str) -> float:
    """GiB of a bf16 head."""
    weights: int = result("quantized_bytes.json")["variants"][shape]["keep"]["lm_head"]["parameters"]
    return 2 * weights / 2**30


def minutes(command: str) -> tuple[str, str]:
    """Minutes that a command takes on two cores in words: if it uses both, and if it uses one."""
    walk = evidence("door.json")["walk"]["newest"]
    whole = [math.ceil(walk[command]["user_cpu_s"] / cores / 60) for cores in (2, 1)]
    both, alone = (("no", "one", "two", "three", "four", "five")[number] for number in whole)
    return both, alone


def bus() -> float:
    """GiB/s from the host to the GPU, pinned, of the measured cards."""
    return max(card.machine.copies.pinned for card in measured.reports()) / 2**30


def tokens_at(shape: str, depth: str) -> tuple[float, ...]:
    """Tokens a second of ``decode_fast`` with everything on the card, with custom kernels and with PyTorch's."""
    found = gives.by_depth(shape)["cases"]["gpu"]["contexts"][depth]["summary"]
    return found["own"]["median"], found["exact"]["median"]


def as_it_is(shape: str) -> float:
    """Tokens a second of transformers in 4-bit on an H100, from the table of other software."""
    page = "docs/benchmarks/peers.md"
    return float(in_file(page, rf"\| \[{shape}.*? \| transformers, 4-bit, as it is \| ([\d.]+) ")[0])


def of_serving(file: str, *names: str) -> tuple[float, ...]:
    """Bounds of ``gemma4-compat serve``, read without its libraries."""
    path = f"gemma4_compat/cli/serving/{file}.py"
    return tuple(float(in_file(path, rf"\n *{name}(?:: \w+)? = (\d[\d_]*)")[0]) for name in names)


def served_lengths() -> tuple[int, int]:
    """The shortest and the longest answers."""
    from benchmarks.serving import serving

    longest = int(serving.parser().get_default("answer"))
    return longest // 4, longest


def served_memory(name: str, file: str = "") -> tuple[int, ...]:
    """After how many requests memory was read, which was the same within a percent."""
    several = [one["memory"] for one in result(f"*-h200/serving-E2B{file}.json")["servers"] if "server" not in one]
    for before, after in several:
        assert abs(after[name] / before[name] - 1) < 0.01
    return tuple(one["requests"] for one in several[0])


def served_warm() -> tuple[float, ...]:
    """Seconds between the first answer and the end of the warm-up."""
    ours = [server["seconds"] for server in result("*-h200/serving-E2B-memory.json")["servers"]]
    return tuple(seconds["warm"] - seconds["started"] for seconds in ours)


def by_rows(shape: str) -> tuple[float, ...]:
    """Tokens a second of batches of 1 to 32 rows, each with its bits."""
    found = result(f"*-h200/rows-{shape}.json")
    assert found["checked"]["equal"]
    assert found["never_falls"]
    return tuple(found["tokens_s"][f"{rows} rows"] for rows in found["options"]["rows"])


def clients() -> tuple[int, ...]:
    """How many ask a server at the same time in a test."""
    found = in_file("tests/unit/commands/test_serve.py", r'parametrize\("clients", \[([\d, ]+)\]')[0]
    return tuple(map(int, found.split(", ")))


def both(compute: Callable[[str], float]) -> tuple[float, float]:
    """Of E2B and E4B."""
    return compute("E2B"), compute("E4B")


def saved(shape: str) -> float:
    """GiB that towers and per-layer embeddings in host memory save."""
    return peak(shape, "gpu") - peak(shape, "host")


def kept(shape: str) -> float:
    """Of the speed with ``decode_fast``, with towers and per-layer embeddings in host memory."""
    return speed(shape, "host") / speed(shape, "gpu")


def experts_of_a_layer() -> float:
    """GB of the experts of a layer of the 26B-A4B, in bf16."""
    text = text_of("26B-A4B")
    return float(text.num_experts * 3 * text.hidden_size * text.moe_intermediate_size * 2 / 1e9)


def windows(shape: str) -> float:
    """MiB of the keys and values of the sliding layers that the prefix cache keeps, in bf16."""
    text = text_of(shape)
    positions = own_layers(shape).count("sliding_attention") * (text.sliding_window + rows.SLACK)
    return float(positions * text.num_key_value_heads * text.head_dim * 2 * 2 / 2**20)


def drafted(shape: str, title: str) -> float:
    """How many times as fast a text with an assistant is, everything on the card, from the table of measurements."""
    heads, _, *lines = (line.strip("| ").split(" | ") for line in decoding.rounds().splitlines())
    found = next(line for line in lines if line[0] == f"{shape}, all on the card")
    return float(found[heads.index(title)])


def of_transformers(file: str, name: str) -> int:
    """A default in a file of transformers' Gemma 4, read without its libraries."""
    (folder,) = importlib.util.find_spec("transformers").submodule_search_locations  # type: ignore[union-attr,misc]
    text = (Path(folder) / "models" / "gemma4" / f"{file}_gemma4.py").read_text(encoding="utf-8")
    found = re.search(rf"^    +{name}(?:: int)? = (\d+)", text, re.MULTILINE)
    assert found is not None, (file, name)
    return int(found[1])


def frames() -> tuple[int, int]:
    """Of a video, and tokens of each."""
    video = "video_processing"
    return of_transformers(video, "num_frames"), of_transformers(video, "max_soft_tokens")


def sounds() -> tuple[int, int]:
    """Milliseconds of sound for a token, and tokens at most."""
    return of_transformers("processing", "audio_ms_per_token"), of_transformers("processing", "audio_seq_length")


def multiprocessors() -> tuple[int, int]:
    """To how few an H100 was limited, and how many it has."""
    counts = sorted(map(int, result("*-h100-multiprocessors/multiprocessors-E2B.json")["counts"]))
    return counts[0], counts[-1]


def smallest_card() -> int:
    """GB of the smallest card that was measured, from its name."""
    names = {result("*-h100-depth/depth-E2B.json")["machine"]["device"]} | {
        card.machine.gpu.name for card in measured.reports() if card.machine.gpu
    }
    return min(int(found[1]) for name in names if (found := re.search(r"(\d+)GB", name)))


def searched(test: str) -> int:
    """Seeds of a randomized test."""
    found = in_file(f"tests/generated/search/test_{test}.py", r"SEEDS = range\(([\d, ]+)\)")[0]
    return len(range(*map(int, found.split(", "))))


def experts() -> tuple[int, int]:
    """Of a token, and of a layer."""
    return text_of("26B-A4B").top_k_experts, text_of("26B-A4B").num_experts


def rows_with_experts() -> tuple[int, ...]:
    """Rows whose experts in host memory a graph looks up, and experts of each and of a layer."""
    each, number = experts()
    return (number - 1) // each, each, number


CLAIMS = (
    Claim(
        "README.md",
        "in host memory {:.1f} GiB more are free for long chats, at {} % of the speed",
        lambda: (saved("E4B"), *percent(kept("E4B"))),
    ),
    Claim("README.md", "takes {} to {} minutes on two cores", lambda: minutes("doctor cold")),
    Claim("docs/index.md", "which leaves {:.1f} GiB more for long chats", lambda: (saved("E4B"),)),
    Claim("docs/index.md", "It takes {} to {} minutes on two cores", lambda: minutes("doctor cold")),
    Claim(
        "README.md",
        "On a {} GB card {}, {} and {} fit in 4-bit as a whole; 26B-A4B and 31B run",
        lambda: (fits.whole()[0], *fits.whole()[1]),
    ),
    Claim(
        "docs/SMALL_CARD.md",
        "{} GB hold {}, {} and {} as a whole in 4-bit, and {} GB hold all five models.",
        lambda: (fits.whole()[0], *fits.whole()[1], fits.whole()[2]),
    ),
    Claim("docs/SMALL_CARD.md", "for {:,} tokens of context", lambda: (fits.CONTEXT,)),
    Claim(
        "docs/SMALL_CARD.md",
        "E4B decodes from {:.1f} GiB of VRAM and E2B from {:.1f} GiB, at {:.0f} of {:.0f} tokens a second (E2B) and "
        "{:.0f} of {:.0f} (E4B).",
        lambda: (
            peak("E4B", "streamed"),
            peak("E2B", "streamed"),
            *(speed(shape, case) for shape in ("E2B", "E4B") for case in ("streamed", "gpu")),
        ),
    ),
    Claim(
        "docs/SMALL_CARD.md",
        "that saves {:.1f} GiB (E2B) and {:.1f} GiB (E4B), and keeps {} and {} % of the speed with decode_fast,",
        lambda: (*both(saved), *percent(*both(kept))),
    ),
    Claim(
        "docs/SMALL_CARD.md",
        "{} and {} % without.",
        lambda: percent(*both(lambda shape: eager(shape, "host") / eager(shape, "gpu"))),
    ),
    Claim("docs/LIMITS.md", "whose bus moves {:.0f} GiB/s", lambda: (bus(),)),
    Claim("docs/LIMITS.md", "(E4B, all {} layers in 4-bit: {:.1f} GiB)", lambda: streamed("E4B")),
    Claim("docs/LIMITS.md", "(E4B: {:.2f} GiB)", lambda: (head("E4B"),)),
    Claim("docs/LIMITS.md", "({:.1f} GB for the 26B-A4B)", lambda: (experts_of_a_layer(),)),
    Claim(
        "docs/DECODING.md",
        "an E2B gives {:.0f} tokens per second and an E4B {:.0f} in transformers; after one call they give {:.0f} and "
        "{:.0f} (",
        lambda: (*both(as_it_is), *both(lambda shape: tokens_at(shape, "64")[0])),
    ),
    Claim(
        "docs/DECODING.md",
        "after 32,768 tokens E2B decodes {:.0f} tokens a second, and {:.0f} with PyTorch's (",
        lambda: tokens_at("E2B", "32768"),
    ),
    Claim(
        "docs/DECODING.md",
        "An E2B then answers a prompt of 64 tokens after {:.0f} ms, not {:.0f} (",
        decoding.first_tokens,
    ),
    Claim(
        "docs/DECODING.md",
        "(bf16: {:.0f} MiB each for the E2B, {:.0f} for the E4B, {:.0f} for the 12B, {:.0f} for the 26B-A4B, "
        "{:.0f} for the 31B)",
        lambda: tuple(map(windows, ("E2B", "E4B", "12B", "26B-A4B", "31B"))),
    ),
    Claim(
        "docs/MEDIA.md",
        "An image takes up to {} tokens of the context, a second of sound {}, and a frame of a video up to {}; of a "
        "video {} frames are read.",
        lambda: (of_transformers("image_processing", "max_soft_tokens"), 1000 // sounds()[0], *reversed(frames())),
    ),
    Claim(
        "docs/MEDIA.md", "an image | at most {} |", lambda: (of_transformers("image_processing", "max_soft_tokens"),)
    ),
    Claim(
        "docs/MEDIA.md",
        "1 for each {} ms, at most {} ({} s)",
        lambda: (*sounds(), sounds()[0] * sounds()[1] // 1000),
    ),
    Claim("docs/MEDIA.md", "a frame of a video | at most {},", lambda: (frames()[1],)),
    Claim("docs/MEDIA.md", "frames of a video | {},", lambda: (frames()[0],)),
    Claim("docs/MEDIA.md", "it is ignored, and {} frames are read", lambda: (frames()[0],)),
    Claim("docs/MEDIA.md", "{} frames of {} tokens are {:,}", lambda: (*frames(), math.prod(frames()))),
    Claim("docs/SERVING.md", "the others, {} at most, in host memory", lambda: (parked.MOST,)),
    Claim(
        "docs/SERVING.md",
        "At most {:.0f} requests wait (), each for {:.0f} seconds (). There are at most {:.0f} connections. - A body "
        "has at most {:.0f} MiB,",
        lambda: of_serving("server", "waiting", "patience", "connections", "body"),
    ),
    Claim(
        "docs/SERVING.md",
        "and {:.0f} images and sounds, each with at most {:.0f} MiB and {:.0f} million pixels.",
        lambda: (*of_serving("media", "count", "size"), of_serving("media", "_PIXELS")[0] / 1e6),
    ),
    Claim(
        "docs/SERVING.md",
        "that is not plain WAV lasts at most {:.0f} minutes",
        lambda: of_serving("media", "_MINUTES"),
    ),
    Claim("docs/SERVING.md", "the connection ends after {:.0f} seconds", lambda: of_serving("server", "_SLOW")),
    Claim("docs/SERVING.md", "; {}, {} and {} clients whose texts", clients),
    Claim("docs/SERVING.md", "answers of {} to {} tokens, each client", served_lengths),
    Claim(
        "docs/DECODING.md",
        "(H200, E2B: {:,.0f}, {:,.0f}, {:,.0f} and {:,.0f} tokens a second with 1, 8, 16 and 32 rows; with 1, 2, 4, "
        "8, 16 and 32 rows, before the head had two stages for more than eight, "
        "E4B: {:,.0f}, {:,.0f}, {:,.0f}, {:,.0f}, {:,.0f} and {:,.0f}, "
        "12B: {:,.0f}, {:,.0f}, {:,.0f}, {:,.0f}, {:,.0f} and {:,.0f}, 26B-A4B with experts in 4 bits: "
        "{:,.0f}, {:,.0f}, {:,.0f}, {:,.0f}, {:,.0f} and {:,.0f}",
        lambda: tuple(speed for shape in ("E2B", "E4B", "12B", "26B-A4B") for speed in by_rows(shape)),
    ),
    Claim("docs/SERVING.md", "was the same after {} and after {} requests", lambda: served_memory("host_mib")),
    Claim("docs/SERVING.md", "that of the GPU after {} and after {}", lambda: served_memory("gpu_mib", "-memory")),
    Claim("docs/SERVING.md", "those servers were warm {:.0f} and {:.0f} seconds after", served_warm),
    Claim("docs/DECODING.md", "fewer than {} tokens are shared", lambda: (session.LEAST,)),
    Claim("docs/DECODING.md", "caches of {:,} positions or more", lambda: (reading.POSITIONS,)),
    Claim("docs/DECODING.md", "a model keeps {} graphs", lambda: (decoder.MAX_GRAPHS,)),
    Claim(
        "docs/DECODING.md",
        "If 70 % of the drafts are right, an E2B is {} times as fast, an E4B {} and a 12B {} times",
        lambda: tuple(f"{drafted(shape, '70% right'):.1f}" for shape in ("E2B", "E4B", "12B")),
    ),
    Claim("docs/DECODING.md", "This covers up to {:,} tokens", lambda: (prompts.MAX_TOKENS,)),
    Claim(
        "docs/DECODING.md",
        ": up to {} sequences, {} of {} experts each)",
        rows_with_experts,
    ),
    Claim("docs/PLACEMENT.md", "({} of {} in the 26B-A4B)", experts),
    Claim("docs/PLACEMENT.md", "{:.0f} GiB for a 31B at 131,072 tokens", lambda: (copied_heads("31B", 131_072),)),
    Claim("docs/PLACEMENT.md", "compute capability {}.{} or newer", lambda: prompt_kernels.LEAST),
    Claim("docs/PLACEMENT.md", "the context has {:,} tokens or more", lambda: (flash.POSITIONS,)),
    Claim("docs/PLACEMENT.md", "limited to {} to {} of its SMs", multiprocessors),
    Claim("docs/PLACEMENT.md", "No card with less than {} GB was measured", lambda: (smallest_card(),)),
    Claim(
        "docs/PLACEMENT.md",
        "The tests try {} maps and {} sequences",
        lambda: tuple(map(searched, ("search", "sequence_search"))),
    ),
)

#: Page -> words around numbers that nobody measures.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "README.md": ("12 GB card", "exits 0 if", "and 3.12 on NVIDIA"),
    "docs/index.md": ("12 GB card",),
    "docs/SYSTEMS.md": ("to 3.13 without", "needs 3.11", "of ROCm 5.2", "from 0.50 on"),
    "docs/CARDS.md": (),
    "docs/SMALL_CARD.md": ("half a GiB", "about four times the size"),
    "docs/CHECK.md": ("Exit code 0", "1: it is", "2: it could", "leaves 128 of them"),
    "docs/MEDIA.md": ("70, 140, 280, 560 or 1120",),
    "docs/PLACEMENT.md": ("8,192 tokens: benchmarks",),
    "docs/SERVING.md": ("(0 is greedy)", *(f"| {code}" for code in (400, 401, 404, 413, 422, 503, 500)), "; 403 |"),
}
