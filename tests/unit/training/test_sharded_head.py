"""The loss in chunks where FSDP shards the head as a unit of its own: two processes, gradients of the plain loss.

Before this repair the head's gradient was zero in one process, and two with unlike numbers of chunks waited for each
other for ever.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers import child
from tests.unit.training.sharded_head import LABELS, WAYS

pytest.importorskip("torch.distributed.fsdp", reason="needs torch with torch.distributed")
pytestmark = pytest.mark.full

CASES = [f"{way}/{kind}/float32" for way in WAYS for kind in ("full", "lora", "saved")]
HALF = [f"{way}/full/bfloat16" for way in WAYS]


@pytest.fixture(scope="module")
def found(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank measured."""
    output = tmp_path_factory.mktemp("sharded") / "found"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = ["-m", "tests.unit.training.sharded_head", str(workspace.checkpoint), str(output), *CASES, *HALF]
    done = child(*launcher, *arguments, environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, timeout=600)
    files = [output.with_name(f"{output.name}.{rank}") for rank in range(2)]
    assert all(file.is_file() for file in files), done.stderr[-2000:]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_plain_loss(found: list[dict[str, Any]], case: str, labels: str) -> None:
    """However many tokens, and so chunks, each rank has."""
    for rank in found:
        assert rank[case][labels]["all"] < 1e-5
        assert rank[case][labels]["head"] < 1e-5


@pytest.mark.parametrize("case", HALF)
def test_in_mixed_precision_they_are_off_by_rounding(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert 1e-4 < rank[case]["as many"]["head"] < 0.1
