"""What does a read of a cold file take whose ranges are announced to the system before, against one whose are not?

python benchmarks/experts/disk_reads.py --shape real --out FILE.json [--work FOLDER] [--rounds 9]

Random bytes in the real sizes, in a file in FOLDER that is mapped, read by the functions that read offloaded weights:

experts     8 of the 128 experts of a layer of the 26B-A4B in 4 bits (2.0 and 1.0 MB each)
prompt      the rows of the per-layer table of E2B that a prompt of 512 tokens takes (17.5 KiB each)
token       the one that a token takes

Before each read the file is dropped from memory; ways alternate, and "warm" reads again what has just been read. What
the ratio is depends on the disk and on the system's read-ahead, which the result names. Needs Linux, and no GPU;
`--shape tiny` is for tests.
Exit code 1: values differ, or the file stayed in memory.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data
from benchmarks.experts import mapped_files
from benchmarks.small_card import device
from gemma4_compat._offload.transfer import expert_lookup, read_ahead, row_lookup

ROUNDS = 9
#: Experts of a layer, those that are hit; tokens of a prompt.
EXPERTS, HIT, PROMPT = 128, 8, 512


class Sizes(NamedTuple):
    """Bytes of an expert (gate and up, down), rows of the table that the file holds, and values of a row, in bf16."""

    experts: tuple[int, int]
    table_rows: int
    row: int


SHAPES = {
    "real": Sizes((2 * 704 * 2816 // 2, 704 * 2816 // 2), 65536, 35 * 256),
    "tiny": Sizes((8192, 4096), 1024, 512),
}
#: Announced or not, and in which order they are taken in a round.
WAYS = ("plain", "announced")


def mapped(folder: Path, name: str, size: int) -> Any:
    """``size`` random bytes in a file, mapped."""
    import numpy as np
    import torch

    random, path = np.random.default_rng(0), folder / name
    with path.open("wb") as file:
        for start in range(0, size, 64 << 20):
            file.write(random.bytes(min(64 << 20, size - start)))
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))


def experts(folder: Path, sizes: Sizes) -> tuple[list[Any], Callable[[int], list[Any]]]:
    import torch

    tensors = [mapped(folder, f"experts{width}", EXPERTS * width).view(EXPERTS, width) for width in sizes.experts]

    def read(number: int) -> list[Any]:
        chosen = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(number))[:HIT].sort().values
        for tensor in tensors:
            read_ahead.rows(tensor, chosen.tolist())
        return [expert_lookup.fetched(tensor, chosen, device="cpu") for tensor in tensors]

    return tensors, read


def table(folder: Path, sizes: Sizes, tokens: int) -> tuple[list[Any], Callable[[int], list[Any]]]:
    import torch

    count = sizes.table_rows
    weight = mapped(folder, f"table{tokens}", count * sizes.row * 2).view(torch.bfloat16).view(count, sizes.row)

    def read(number: int) -> list[Any]:
        chosen = torch.randint(count, (1, tokens), generator=torch.Generator().manual_seed(number))
        return [row_lookup.gather(weight, chosen, "cpu", mapped=True)[0]]

    return [weight], read


@contextlib.contextmanager
def announcing(way: str) -> Iterator[None]:
    """Inside, ranges are announced, or not."""
    with mock.patch.object(read_ahead, "_advise", return_value=None) if way == "plain" else contextlib.nullcontext():
        yield


def measured(tensors: list[Any], read: Callable[[int], list[Any]], rounds: int) -> Data:
    """Seconds by way of a cold read and of a warm one, in alternation."""
    import torch

    found: Data = {way: {"cold": [], "warm": []} for way in WAYS}
    stayed = 0.0
    nbytes, same = 0, True
    for number in range(rounds):
        values = []
        for way in WAYS if number % 2 else WAYS[::-1]:
            stayed = max(stayed, mapped_files.dropped(tensors))
            with announcing(way):
                for kind in ("cold", "warm"):
                    started = time.perf_counter()
                    read_now = read(number)
                    found[way][kind].append(time.perf_counter() - started)
                    values.append([value.view(torch.uint8) for value in read_now])  # random bits may be NaN
        nbytes = sum(value.nbytes for value in values[0])
        same &= all(torch.equal(*pair) for other in values[1:] for pair in zip(values[0], other, strict=True))
    found |= {"bytes": nbytes, "same_values": same, "stayed_in_memory": stayed}
    for kind in ("cold", "warm"):
        for way in WAYS:
            found[f"{kind}_{way}_ms"] = 1000 * statistics.median(found[way][kind])
        ratios = [plain / told for plain, told in zip(found["plain"][kind], found["announced"][kind], strict=True)]
        found[f"{kind}_times_as_fast"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return found


def disk(folder: Path) -> Data:
    """What the system says of the disk under ``folder``: bytes that it reads ahead, and of a request."""
    number = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    queue = Path(f"/sys/dev/block/{number}/queue")
    names = ("read_ahead_kb", "max_sectors_kb", "rotational")
    return {name: int((queue / name).read_text("ascii")) for name in names if (queue / name).is_file()}


CASES: dict[str, Callable[[Path, Sizes], tuple[list[Any], Callable[[int], list[Any]]]]] = {
    "experts": experts,
    "prompt": lambda folder, sizes: table(folder, sizes, PROMPT),
    "token": lambda folder, sizes: table(folder, sizes, 1),
}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(SHAPES), minutes=5.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args(argv)
    shape = arguments.shape or "real"
    result = common.header(Path(__file__), sys.modules[__name__], shape, common.shown(arguments), arguments.note)
    result["cases"] = {}
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        folder = Path(name)
        result |= {"machine": device.machine(), "disk": disk(folder), "read_gib_s": None}
        for case, make in CASES.items():
            tensors, read = make(folder, SHAPES[shape])
            found = result["cases"][case] = measured(tensors, read, arguments.rounds)
            if case == "prompt":
                mapped_files.dropped(tensors)
                result["read_gib_s"] = mapped_files.read_gib_s(tensors)
            if not found["same_values"] or found["stayed_in_memory"] > 0.05:
                result["problems"].append(f"{case}: {found['stayed_in_memory']}, {found['same_values']}")
            common.write(result, arguments.out)
            print(f"{case:8} {common.rounded({key: value for key, value in found.items() if key not in WAYS})}")
    print(common.rounded({"disk": result["disk"], "read_gib_s": result["read_gib_s"]}))
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
