"""Options of commands and functions: sizes, device maps, numbers, names."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.generated.fuzz import values

_SIZES = (
    *(
        "8GiB",
        "12",
        "0",
        "1",
        "1.5GiB",
        "0.1B",
        "8 GB",
        "-1",
        "1e9",
        "nan",
        "inf",
        "1" * 5000,
        "1" * 5000 + "GiB",
        "0x10",
    ),
    *(
        "9" * 400 + ".5GiB",
        "\u0661GiB",
        "1_000",
        " " * 50_000 + "1",
        "1" + " " * 50_000 + "x",
        "GiB",
        "8GiB\n",
        "8\0GiB",
        "1GiB2",
    ),
    *("8589934592", "8EiB", "1.GiB", ".5GiB", "1,5GiB", "0:8GiB", "cpu=8GiB", "\x1b[31m8GiB", "\ud800", "MAX", "auto"),
)
size = (
    st.sampled_from(_SIZES)
    | st.just(10**5000)
    | values.text
    | values.number
    | st.just([])
    | st.just({})
    | st.just(b"8GiB")
)
vram = (
    st.sampled_from(["8GiB", "24GiB", 8 << 30, 1])
    | size
    | st.lists(size, max_size=3)
    | st.dictionaries(st.sampled_from([0, 1, "cuda:0", "cpu", "mars:9", "", -1, None, 10**30]), size, max_size=2)
)
sizes: st.SearchStrategy[dict[str, Any]] = st.builds(
    lambda size, vram: {"size": size, "vram": vram}, st.sampled_from(_SIZES[:7]) | size, vram
)

_quantize = st.sampled_from(["4bit", "4bit-double", "8bit", "none", None]) | values.text
_whole = st.sampled_from([1, 16, 8192]) | st.sampled_from([number for number in values.NUMBERS if type(number) is int])
_flag = st.booleans()

#: Keyword arguments of `plan_device_map`, of the types in its signature but for sizes; each input has some of them.
plan = st.fixed_dictionaries(
    {"vram": vram},
    optional={
        "context": _whole,
        "batch": _whole,
        "prompt": _whole | st.none(),
        "quantize": _quantize,
        "quantize_experts": _flag,
        "vision": _flag,
        "audio": _flag,
        "cpu": size,
        "disk": size,
        "attention": st.sampled_from(["sdpa", "eager"]) | values.text,
        "balanced": _flag,
        "fast": _flag,
        "assistant": _flag,
    },
)

device_map = (
    st.sampled_from([None, "cpu", "auto", "mars:9", "cuda:999", {"": "cpu"}, {"": "mars:9"}, {"model": 10**30}, {}])
    | values.scalar
    | st.dictionaries(values.text, values.scalar, max_size=2)
)
#: Keyword arguments of `merge_adapter`. `check` is 0 or refused: loading two models takes seconds.
merge = st.fixed_dictionaries(
    {"check": st.sampled_from([0, 0, 0, 0, False, -1, -(10**30)])},
    optional={
        "start": st.sampled_from(["original", "original", "dequantized"]) | values.text,
        "quantize": _quantize,
        "skip_modules": st.none() | st.lists(values.text, max_size=2),
        "dtype": st.sampled_from(["bf16", "fp16", "fp32", None]) | values.text,
        "device_map": device_map,
        "max_shard_size": st.sampled_from(["5GB", 1, "4kB"]) | size,
        "tolerance": st.none() | st.sampled_from([0.0, 1e308, float("nan"), float("inf"), -1.0, 10**400]),
        "allow_pickle": st.booleans(),
    },
)
