"""The type of a report of ``gemma4-compat check``. Imports msgspec, so import it only where a report is read.

Bounds are far above what any machine has. A text is one that this package or a library writes: no path fits its
pattern. ``tests/unit/plan/test_measured.py`` holds the files to it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

_Bytes = Annotated[int, Meta(ge=0, le=2**50)]
_Count = Annotated[int, Meta(ge=0, le=2**45)]
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Rate = Annotated[float, Meta(gt=0, le=1e6)]
_Word = Annotated[str, Meta(max_length=60, pattern=r"^[\w .+()-]*$")]
_Words = Annotated[str, Meta(max_length=2000, pattern=r"^[^/\\]*$")]
_Prompt = Literal["text", "long text", "image", "sound"]
_Way = Literal["eager", "fast", "fast against eager", "own kernels"]


class Gpu(Struct, kw_only=True, forbid_unknown_fields=True):
    """The first GPU."""

    name: _Word
    memory: _Bytes | None
    free: _Bytes | None
    multiprocessors: Annotated[int, Meta(ge=1, le=1000)] | None
    ghz: Annotated[float, Meta(gt=0, le=20)] | None
    capability: _Word | None
    driver: _Word | None
    cuda: _Word | None


class Copies(Struct, kw_only=True, forbid_unknown_fields=True):
    """Bytes per second."""

    pinned: _Bytes | None
    pageable: _Bytes | None
    device: _Bytes | None
    host: _Bytes | None


class Machine(Struct, kw_only=True, forbid_unknown_fields=True):
    """What it ran on."""

    system: _Word | None
    machine: _Word | None
    python: _Word
    cores: Annotated[int, Meta(ge=0, le=10_000)] | None
    versions: Annotated[dict[_Word, _Word], Meta(max_length=50)]
    gpu: Gpu | None
    copies: Copies


class Patches(Struct, kw_only=True, forbid_unknown_fields=True):
    """Ids."""

    off: list[_Word]
    failed: list[_Word]


class Model(Struct, kw_only=True, forbid_unknown_fields=True):
    """Its shape, and how its weights are stored."""

    tiny: bool
    model_class: _Word
    variant: Literal["E2B", "E4B", "12B", "26B-A4B", "31B"] | None
    parameters: _Count
    layers: Annotated[int, Meta(ge=1, le=1000)]
    hidden: Annotated[int, Meta(ge=1, le=2**20)]
    vocabulary: Annotated[int, Meta(ge=1, le=2**24)]
    stored_quantized: bool
    quantization: Literal["4bit", "4bit-double", "8bit"] | None
    quantized_experts: bool


class Adapter(Struct, kw_only=True, forbid_unknown_fields=True):
    """Its kind and size."""

    type: _Word
    ranks: list[Annotated[int, Meta(ge=0, le=2**20)]]
    keys: _Count
    problems: list[_Word]


class Planned(Struct, kw_only=True, forbid_unknown_fields=True):
    """Peaks in bytes."""

    loading: _Bytes | None
    prefill: _Bytes
    decode: _Bytes


class Speed(Struct, kw_only=True, forbid_unknown_fields=True):
    """After a prompt of ``context`` tokens."""

    adapter: bool
    context: Annotated[int, Meta(ge=1, le=2**20)]
    eager_tokens_s: _Rate | None
    eager_first_token_s: _Seconds | None
    fast_tokens_s: _Rate | None
    fast_first_token_s: _Seconds | None


class Answer(Struct, kw_only=True, forbid_unknown_fields=True):
    """A comparison; ``equal`` is None for the reference that others are compared with."""

    prompt: _Prompt
    way: _Way
    adapter: bool
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")] | None
    finite: bool | None
    changed: bool | None
    equal: bool | None
    difference: float | Literal["Infinity"] | None
    tokens: _Count | None
    tokens_equal: _Count | None


class Repair(Struct, kw_only=True, forbid_unknown_fields=True):
    """A patch and its state."""

    id: _Word
    state: _Word


class Failure(Struct, kw_only=True, forbid_unknown_fields=True):
    """A crash."""

    step: _Word
    type: _Word
    frames: list[Annotated[str, Meta(max_length=300, pattern=r"^[a-z0-9_]+/[\w/.]+:\d+ [\w<>.]+$")]]
    patches: list[Repair]


class Placement(Struct, kw_only=True, forbid_unknown_fields=True):
    """What was measured of one placement."""

    title: _Words
    merged: bool
    away: dict[Literal["per_layer_embeddings", "embeddings", "towers", "layers", "experts"], _Count]
    planned: Planned | None
    loading_peak: _Bytes | None
    running_peak: _Bytes | None
    load_s: _Seconds | None
    seconds: _Seconds | None
    replayed: _Count
    fused: _Count
    speeds: list[Speed]
    answers: list[Answer]
    failures: list[Failure]
    skipped: list[_Word]


class Parity(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a merged model compares with the loaded adapter."""

    ok: bool
    difference: float | Literal["NaN", "Infinity"]
    bound: float
    kl_max: float | Literal["NaN", "Infinity"]
    greedy_tokens: _Count
    greedy_equal: list[_Count]


class Merge(Struct, kw_only=True, forbid_unknown_fields=True):
    """A merge."""

    seconds: _Seconds
    parity: Parity | None
    failures: list[Failure]


class Verdict(Struct, kw_only=True, forbid_unknown_fields=True):
    """In words of this package."""

    ok: bool
    text: _Words
    problems: list[_Words]


class Report(Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: Literal[1]
    gemma4_compat: _Word
    form: Literal[1]
    source: Annotated[
        str, Meta(max_length=200, pattern=r"^(check|benchmarks/results/[\w./-]+(, benchmarks/[\w./-]+)*)$")
    ]
    date: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
    quick: bool
    seconds: _Seconds | None
    machine: Machine
    patches: Patches
    model: Model
    adapter: Adapter | None
    budget: _Bytes | None
    note: _Words
    context: Annotated[int, Meta(ge=1, le=2**21)]
    placements: Annotated[list[Placement], Meta(min_length=1, max_length=20)]
    merge: Merge | None
    verdict: Verdict
