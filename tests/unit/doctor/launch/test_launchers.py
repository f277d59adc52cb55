"""What people start training with, unmodified: the shim is in it and in the processes that it starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.doctor.launch.conftest import REPORT

Script = Callable[..., str]
Run = Callable[..., tuple[int, str, str]]

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
pytestmark = [needs_torch, pytest.mark.xdist_group("launchers")]

RANK = f"""
import os, sys
{REPORT.strip().replace("print(", "state = (").replace(", flush=True", "")}
sys.stdout.write(f"rank {{os.environ['RANK']}} of {{os.environ['WORLD_SIZE']}}: {{state}}, {{sys.argv[1:]}}\\n")
sys.exit(int(sys.argv[1]))
"""

LOADER = f"""
import torch, sys
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 2
    def __getitem__(self, index):
        {REPORT.strip().replace(chr(10), chr(10) + "        ")}
        return index
if __name__ == "__main__":
    list(DataLoader(Rows(), num_workers=1, batch_size=2, multiprocessing_context=sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.full)])
def test_torchrun_of_two(code: int, with_run: Run, script: Script) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script(RANK), str(code), "--x"]
    found, out, error = with_run(*words, environment={"OMP_NUM_THREADS": "1"})
    expected = [f"rank {rank} of 2: armed, ['{code}', '--x']" for rank in range(2)]
    if code == 0:
        assert (found, sorted(out.splitlines())) == (0, expected), error
    else:  # one that fails has the others ended
        assert found == 1
        assert set(out.splitlines()) & set(expected)
        assert "exitcode  : 3" in error


@pytest.mark.full
def test_accelerate_launch(with_run: Run, script: Script, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    text = RANK.replace("['RANK']", ".get('RANK', '0')").replace("['WORLD_SIZE']", ".get('WORLD_SIZE', '1')")
    environment = {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = ["accelerate", "launch", "--cpu", "--num_processes", "1", script(text), "0"]
    found, out, error = with_run(*words, environment=environment)
    assert (found, out) == (0, "rank 0 of 1: armed, ['0']\n"), error
    assert with_run(*words[:-1], "5", environment=environment)[0] == 1  # accelerate's own code for a script that fails


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_data_loader(method: str, with_run: Run, script: Script) -> None:
    code, out, error = with_run(script(LOADER), method)
    assert (code, out.splitlines()[0]) == (0, "armed"), error


def test_pytest(with_run: Run, script: Script, tmp_path: Path) -> None:
    text = f"def test_it(capsys):\n    {REPORT.strip().replace(chr(10), chr(10) + '    ')}\n"
    script(text + "    assert capsys.readouterr().out == 'armed\\n'\n    assert 0\n", "test_it.py")
    code, out, _ = with_run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_it.py")
    assert (code, "assert 0" in out) == (1, True), out
