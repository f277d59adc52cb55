"""Of the pages of benchmarks, and of programs that ran with the shim."""

from __future__ import annotations

import re

from gemma4_compat._memory import formulas
from tools.claims.form import Claim, in_file, result
from tools.pages.markers import ROOT

_RUN, _TRAINERS, _IDLE = "docs/RUN.md", "docs/benchmarks/trainers.md", "docs/benchmarks/idle_shim.md"
#: Rows of the table in docs/RUN.md, with exit codes and patches applied in each process, and the name of the program.
PROGRAMS = {
    "| {} | {} | two ranks: {}, {} |": "torchrun",
    "| {} | {} | the launcher: {}; the script: {} |": "accelerate",
    "exits with 3 | {} | {} | the launcher: {}; the script: {}, it": "accelfail",
    "one bad | {} | {} | one: {} |": "pytest",
    "| {} | {} | one: {} |": "lm_eval",
    "| {} | {} | the command: {}; the training it starts: {} |": "trl",
    "which it refuses | {} | {} | the command: {} |": "trlbad",
    "| {} | {} | the command: {}, it imports little; the training it starts: {} |": "swift2",
    "newer one saved | {} | {} | the accelerate it becomes: {}; the training: {} |": "axolotl",
}


def ran(program: str) -> tuple[str, ...]:
    """Exit codes without and with `run`, and patches applied in each process with it; parents first."""
    text = (ROOT / "docs" / "evidence" / "run" / "programs.txt").read_text(encoding="utf-8")
    codes = [re.findall(rf"^{program} {how}: rc (\d+)", text, re.MULTILINE)[0] for how in ("without", "with")]
    (processes,) = re.findall(rf"^== {program} with\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return (*codes, *reversed(re.findall(r"shim, (\d+) applied", processes)))


def of_unsloth() -> tuple[float, ...]:
    """Seconds of its first compiled step and until it was ended, GiB before a step and in one, and in one of ours."""
    compiled = result("*-h200-trainers/trainers-unsloth-compiled-E2B.json")
    plain = result("*-h200-trainers/trainers-unsloth-E2B.json")
    (longest,) = (run for run in plain["runs"] if run["sequence"] == 16_384)
    (ended,) = re.findall(r"no end after (\d+) s", compiled["problems"][0])
    ways = r"\| the same, attention by windows and products \| 16,384 \| .*? \| ([\d.]+) \|"
    before = plain["loads"]["upstream, unsloth"]["memory"]["resident_gib"]
    ours = float(in_file(_TRAINERS, ways)[0])
    return compiled["runs"][0]["settling_s"][0], int(ended), before, longest["memory"]["peak_gib"], ours


def endurance() -> tuple[int, int]:
    """Tokens, and calls."""
    found = result("2026-11-23-h200-fused/graph_decoding-E2B.json")["cases"]["host+lora"]["endurance"]["summary"]
    return found["tokens"], found["calls"]


CLAIMS = (
    *(Claim(_RUN, text, lambda program=program: ran(program)) for text, program in PROGRAMS.items()),
    Claim(_TRAINERS, "after a first step of {:.0f} s", lambda: of_unsloth()[:1]),
    Claim(_TRAINERS, "had not finished after {} s", lambda: of_unsloth()[1:2]),
    Claim(
        _TRAINERS, "on the GPU, {:.0f} GiB before a step, and such a step takes {:.1f} GiB", lambda: of_unsloth()[2:4]
    ),
    Claim(_TRAINERS, "the shim takes {:.1f} GiB", lambda: of_unsloth()[4:]),
    Claim("docs/benchmarks/same_bits.md", "{:,} tokens in {} calls", endurance),
    Claim(
        "docs/benchmarks/adapter_load.md",
        "its workspace ({} MiB on Hopper)",
        lambda: (formulas.MEASURED.blas_workspace >> 20,),
    ),
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    _RUN: (
        "127 (not found)",
        "126 (cannot",
        "a Python (3.10 or later)",
        "Running it twice changes",
        "error (exit 2)",
        "fails (exit 1)",
        "exits with 2",
        "each started twice",
        "3.6 to 3.13 ran",
        "3.12 and 3.13 without",
        "of a 3.11 environment",
    ),
    _TRAINERS: ("up to 1,024 tokens", "with 8,192 tokens", "With 16,384 tokens", "trains 16,384 tokens"),
    _IDLE: ("Noise is the 95 %", "holds 6 and 36 layers", "and 36 layers to", "layers to 1 %", "beside the 1 %"),
    "docs/benchmarks/adapter_whole.md": (),
    "docs/benchmarks/alternatives.md": (),
    "docs/benchmarks/compiled.md": (),
    "docs/benchmarks/depth.md": ("64 to 32,768", "batch 1"),
    "docs/benchmarks/depth_kernels.md": ("at 64 tokens", "the times of kernels"),
    "docs/benchmarks/disk_reads.md": (),
    "docs/benchmarks/experts.md": ("all 30 layers", "8,192 tokens at once", "whose times include"),
    "docs/benchmarks/experts_buses.md": (),
    "docs/benchmarks/experts_loading.md": (),
    "docs/benchmarks/experts_training.md": ("rank 16",),
    "docs/benchmarks/first_call.md": ("of 64 tokens",),
    "docs/benchmarks/fused_kernels.md": (),
    "docs/benchmarks/graph_decoding.md": (),
    "docs/benchmarks/late_stops.md": (),
    "docs/benchmarks/longest_sequence.md": (),
    "docs/benchmarks/model_lock.md": ("Noise is the 95 %",),
    "docs/benchmarks/model_of_cards.md": ("A share above 0",),
    "docs/benchmarks/peers.md": ("batch 1",),
    "docs/benchmarks/peers_adapter.md": ("half of the layers", "12 cores"),
    "docs/benchmarks/peers_kernels.md": (),
    "docs/benchmarks/short_answers.md": (),
    "docs/benchmarks/training.md": ("rank 16",),
    "docs/ADAPTERS.md": ("its default is 16",),
    "docs/DEPRECATION.md": ("major version is 0", "(0.1 to", "to 0.2)"),
    "docs/INTERPRETERS.md": (),
    "docs/OPERATIONS.md": (),
    "docs/SERVE.md": (),
    "docs/SETTINGS.md": (),
    "docs/STATES.md": (),
    "docs/JSON.md": (
        "no JSON (exit 2)",
        "of this format: 1",
        "best first. Exit 1",
        "as given; 0: not given",
        "chunks of 1,024 tokens",
        "if that is less; else 0",
        "if that is more; else 0",
        "less than 0.5 GiB is left",
        "## Exit 1 prints",
        "of this report: 1;",
    ),
    "docs/VARIANTS.md": ("install 5.10 or newer",),
}
