"""The bound of the trainings in bf16, on CPUs: two processes that FSDP2 shards a model over keep it, a wrong one not.

With gloo two processes run the kernels of one, so here FSDP2 itself is held to more: the bits of one process that adds
the gradients of two halves in bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import child
from tests.world.gpu import nearness
from tests.world.gpu.trainings import SILENT

pytestmark = pytest.mark.full

#: What accelerate's launcher sets for the configuration of ``tests/world/gpu/test_two_gpus.py``.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Gemma4TextDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def trained(
    workspace: Any,
    folder: Path,
    processes: int,
    *cases: str,
    module: str = "tests.world.gpu.two_gpus",
    without: str = "",
) -> list[dict[str, Any]]:
    """What each process left; ``without`` is a patch that is off in them."""
    import torch

    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    output = folder / f"of-{processes}"
    command = [*launcher, "-m", module, "fsdp2", str(workspace.folder), str(output), *cases]
    done = child(*command, environment=ENVIRONMENT | {"GEMMA4_COMPAT_DISABLE": without})
    files = [output.with_name(f"{output.name}.{rank}") for rank in range(processes)]
    assert all(file.is_file() for file in files), done.stderr[-2000:]
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def one(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The ways of one process."""
    (found,) = trained(workspace, tmp_path_factory.mktemp("one"), 1)
    ways = {name.removeprefix("fsdp2, bf16, "): way for name, way in found.items() if name.startswith("fsdp2")}
    assert {way: training["error"] for way, training in ways.items()} == dict.fromkeys(ways)
    return ways


@pytest.fixture(scope="module")
def two(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks left, of a right training and a wrong one."""
    found = trained(workspace, tmp_path_factory.mktemp("two"), 2, "bf16", SILENT)
    for rank in found:
        assert [rank[case]["error"] for case in ("bf16", SILENT)] == [None, None]
        assert {rank[case]["type"] for case in ("bf16", SILENT)} == {"FSDPPeftModel"}
    return found


@pytest.fixture(scope="module")
def noise(one: dict[str, Any]) -> nearness.InBf16:
    return nearness.InBf16(one)


def test_two_ranks_are_within_the_bound_and_bits_of_one_process(
    one: dict[str, Any], two: list[dict[str, Any]], noise: nearness.InBf16
) -> None:
    import torch

    for index, rank in enumerate(two):
        assert not noise.beyond(rank["bf16"])
        for own, right in zip(rank["bf16"]["gradients"], one["rounded"]["gradients"], strict=True):
            assert len(own) > 100
            assert not [name for name in right if not torch.equal(own[name], right[name])]
        assert nearness.first_difference(rank["bf16"]["forwards"][0], one["halves"]["forwards"][index]) is None


def test_copies_of_a_gpu_change_nothing_with_the_repair_alone(
    workspace: Any, one: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    def wrong(without: str) -> list[str]:
        """The weights whose first gradient is not, to the last bit, that of one process."""
        ranks = trained(workspace, tmp_path, 2, "bf16", module="tests.unit.training.lossy_copies", without=without)
        right = one["rounded"]["gradients"][0]
        return [name for name in right if not torch.equal(ranks[0]["bf16"]["gradients"][0][name], right[name])]

    assert not wrong("")
    assert len(wrong("bitsandbytes-fsdp-packed-weights")) > 100


def test_another_kernel_is_within_the_bound(one: dict[str, Any], noise: nearness.InBf16) -> None:
    assert nearness.distance(one["eager"], one["whole"])["gradients"][0] > 0.001
    assert not noise.beyond(one["eager"])


def test_a_rank_that_is_not_heard_is_beyond_the_bound(
    one: dict[str, Any], two: list[dict[str, Any]], noise: nearness.InBf16
) -> None:
    away = nearness.distance(one["alone"], one["truth"])
    assert away["gradients"][0] > nearness.TOLD * noise.limit["gradients"][0]
    for wrong in (one["alone"], two[0][SILENT]):
        said = noise.beyond(wrong)
        assert any(part.startswith("step 0: gradients") for part in said), said


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
def test_gradients_of_another_scale_are_beyond_the_bound(
    one: dict[str, Any], noise: nearness.InBf16, factor: float
) -> None:
    steps = [{name: factor * value for name, value in step.items()} for step in one["rounded"]["gradients"]]
    assert noise.beyond({**one["rounded"], "gradients": steps})


def test_one_weight_without_the_other_rank_is_beyond_the_bound(one: dict[str, Any], noise: nearness.InBf16) -> None:
    """Of nearly every weight: a few are all noise."""
    unseen = []
    for name in one["alone"]["gradients"][0]:
        steps = [
            {**right, name: wrong[name]}
            for right, wrong in zip(one["rounded"]["gradients"], one["alone"]["gradients"], strict=True)
        ]
        said = noise.beyond({**one["rounded"], "gradients": steps})
        assert all(name in part or "gradients" in part for part in said)
        unseen += [] if said else [name]
    assert len(unseen) < len(one["alone"]["gradients"][0]) / 10, unseen


def test_the_first_module_that_rounds_otherwise_is_named(one: dict[str, Any]) -> None:
    forward = one["halves"]["forwards"][0]
    other = [dict(call) for call in forward]
    other[5]["output"] = 1.01 * other[5]["output"]
    found = nearness.first_difference(other, forward)
    assert found is not None
    assert (found["module"], found["same input"], found["same weights"]) == (forward[5]["module"], True, True)
