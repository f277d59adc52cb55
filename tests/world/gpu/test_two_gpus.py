"""Two GPUs: a model split over both and the host, trainings by ``accelerate launch``, and decoding, against one GPU.

Bounds. A split model: none, both GPUs run the same kernels. A training in float32: what one GPU leaves open, which
computes the same batches in several ways (whole; in two halves; these again); two GPUs must be as near to one of these
ways as they are to each other. A training in bf16: ``tests.world.gpu.nearness``. How much the second half of a batch
matters is measured, too, so that no bound can hide a rank that is not heard.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab.workspace import difference
from tests.conftest import is_affected, patch
from tests.helpers import ROOT
from tests.patches.placement.test_transformers_shared_kv import FSDP_AFFECTED
from tests.unit.generation import calls
from tests.world.gpu import nearness
from tests.world.gpu.nearness import distance
from tests.world.gpu.trainings import TRAININGS, WAYS
from tests.world.gpu.two_gpus import ON_SECOND, QUANTIZATIONS, SPLITS

pytestmark = pytest.mark.xdist_group("two GPUs")  # the children are those of one worker

#: Seconds for one child; a rank that lost the other gives up after 60.
TIMEOUT = 200

_COMMON = """\
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
#: What ``accelerate config`` writes.
CONFIGS = {
    "ddp": f"{_COMMON}distributed_type: MULTI_GPU\n",
    "fsdp2": f"""{_COMMON}distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Gemma4TextDecoderLayer
  fsdp_version: 2
""",
}


@pytest.fixture(scope="module", autouse=True)
def _two_devices() -> None:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices: torch.cuda.device_count() is {count}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def module(name: str, config: Path | None, processes: int) -> list[str]:
    """The command that runs ``tests.world.gpu.two_gpus``, by accelerate's launcher where there is a configuration."""
    launch: list[str] = []
    if config is not None:
        launch = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", str(processes)]
        launch += ["--main_process_port", str(free_port()), "--module"]
    return [sys.executable, "-m", *launch, "tests.world.gpu.two_gpus", name]


@pytest.fixture(scope="module")
def children(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """``children[name, shim]``: what each rank left; ``{"died": ...}`` for one that left nothing.

    All of them run at once: most of their time is importing.
    """
    import torch

    folder = tmp_path_factory.mktemp("two-gpus")
    configs = {name: folder / f"{name}.yaml" for name in CONFIGS}
    for name, file in configs.items():
        file.write_text(CONFIGS[name], encoding="utf-8")
    jobs: dict[tuple[str, bool], tuple[list[str], int]] = {}
    for shim in (False, True):
        jobs["split", shim] = module("split", None, 1), 1
        jobs["one", shim] = module("one", None, 1), 1
        jobs["fsdp2 in one process", shim] = module("fsdp2", configs["fsdp2"], 1), 1
        for name, file in configs.items():
            jobs[name, shim] = module(name, file, 2), 2

    def run(key: tuple[str, bool]) -> list[dict[str, Any]]:
        (command, ranks), (name, shim) = jobs[key], key
        environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
        if not shim:
            environment["GEMMA4_COMPAT_DISABLE"] = "all"
        output = folder / f"{name}-{'with' if shim else 'without'}"
        try:
            done = subprocess.run(
                [*command, str(workspace.folder), str(output)],
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT,
            )
            ended = f"ended with {done.returncode}: {done.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            ended = f"still ran after {TIMEOUT} s: {(error.stderr or b'')[-2000:]!r}"
        files = [output.with_name(f"{output.name}.{rank}") for rank in range(ranks)]
        return [
            torch.load(file, weights_only=False) if file.is_file() else {"died": f"{command}\n{ended}"}
            for file in files
        ]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


def alive(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for found in ranks:
        assert "died" not in found, found["died"]
    return ranks


# ------------------------------------------------------------------------------------------------------ on two devices


def test_on_one_device_the_shim_changes_nothing(children: dict[tuple[str, bool], list[dict[str, Any]]]) -> None:
    (without,), (repaired,) = alive(children["split", False]), alive(children["split", True])
    names = [name for name in repaired if name.startswith("one device")]
    assert len(names) == 2 * len(QUANTIZATIONS)
    assert {name: difference(without[name], repaired[name]) for name in names} == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("quantization", [name or "bf16" for name in QUANTIZATIONS])
@pytest.mark.parametrize("case", SPLITS)
def test_a_model_on_two_gpus_and_the_host_answers_as_on_one(
    children: dict[tuple[str, bool], list[dict[str, Any]]],
    record: Callable[[str, Any], None],
    quantization: str,
    case: str,
) -> None:
    (without,), (repaired,) = (
        [found[f"{quantization}, {case}"] for found in alive(children["split", shim])] for shim in (False, True)
    )
    record(f"two gpus: {quantization}, {SPLITS[case]}", {"without": without, "with": repaired})
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0
    assert repaired["map_kept"], repaired
    assert repaired["moved"] == 0
    if case != "adapter auto":
        assert repaired["as_asked"]
        assert repaired["on"]["layers"] == [f"cuda:{int(index in ON_SECOND)}" for index in range(6)]
        assert repaired["on"]["towers"] == 2 * ["cuda:0" if case == "adapter GPUs only" else "meta"]
    if case not in ("base", "dispatched"):
        assert repaired["on"]["layers' adapters"] == repaired["on"]["layers"]
    if case in ("adapter", "adapter device_map"):
        assert repaired["on"]["towers' adapters"] == ["cuda:0", "cuda:0"]
    if case == "adapter device_map" and is_affected(patch("transformers-shared-kv")):
        assert without["error"] is not None, without
    if case == "adapter":
        error = without["error"] or ""
        if quantization != "bf16" and is_affected(patch("accelerate-hf-initialized")):
            assert error.startswith("TypeError: "), without
            assert "_is_hf_initialized" in error
        elif is_affected(patch("transformers-shared-kv")):
            assert re.match(r"KeyError: (\d+|'sliding_attention')$", error), without
        else:
            assert without["error"] is None, without
            assert without["parity"] == 0.0
            assert without["moved"] > 0


# ------------------------------------------------------------------------------------------------------------ training


def compared(found: dict[str, Any], ways: dict[str, dict[str, Any]], rank: int) -> dict[str, Any]:
    """JSON of one rank's training against the ways of one device with the same shim."""
    if found["error"] is not None:
        return {"error": found["error"]}
    return {
        "error": None,
        "losses": found["losses"],
        "from": {
            way: distance(found, reference)
            for way, reference in ways.items()
            if way != "alone" and reference["error"] is None
        },
        "rotary buffers": [name.rpartition(".")[2] for name in found["buffers"] if "attention" in name],
        "seconds": found["seconds"],
        **rounded_otherwise(found, ways, rank),
    }


def rounded_otherwise(found: dict[str, Any], ways: dict[str, dict[str, Any]], rank: int) -> dict[str, Any]:
    """Of a training in bf16: the first module that gave other bits than in one process, the weights farthest off."""
    if "truth" not in ways or ways["truth"]["error"] is not None:
        return {}
    seen: dict[str, Any] = {"farthest from the truth": nearness.farthest(found, ways["truth"])}
    if found["forwards"] and ways["halves"].get("forwards"):
        seen["first difference"] = nearness.first_difference(found["forwards"][0], ways["halves"]["forwards"][rank])
    return seen


@pytest.mark.parametrize(
    ("launch", "case"),
    [pytest.param(launch, case, id=f"{launch}-{case}") for launch, cases in TRAININGS.items() for case in cases],
)
def test_a_training_on_two_gpus_has_the_losses_and_gradients_of_one(
    children: dict[tuple[str, bool], list[dict[str, Any]]],
    record: Callable[[str, Any], None],
    launch: str,
    case: str,
) -> None:
    import torch
    from safetensors.torch import load_file

    precision, _ = TRAININGS[launch][case]
    unpatched, every = (
        {way: found.get(f"{launch}, {precision}, {way}", {"error": found.get("died")}) for way in WAYS[precision]}
        for shim in (False, True)
        for found in children["one" if precision == "no" else "fsdp2 in one process", shim]
    )
    assert {way: found["error"] for way, found in every.items()} == dict.fromkeys(every)
    ways = {way: found for way, found in every.items() if way != "alone"}
    noise = nearness.InBf16(ways) if precision == "bf16" else None
    limit = noise.limit if noise else nearness.among(ways)
    unheard = distance(every["alone"], every["truth" if noise else "whole"])

    repaired = alive(children[launch, True])
    without = children[launch, False]
    record(
        f"two gpus: {launch}, {case}",
        {
            "without": [
                {"error": rank["died"]} if "died" in rank else compared(rank[case], unpatched, index)
                for index, rank in enumerate(without)
            ],
            "with": [compared(rank[case], ways, index) for index, rank in enumerate(repaired)],
            "one device": {
                "losses": {way: found["losses"] for way, found in every.items()},
                "bound": limit,
                "half of the batch": unheard,
                **({"from the truth": noise.away} if noise else {}),
            },
        },
    )
    shown = nearness.TOLD if noise else 10
    assert unheard["gradients"][0] > shown * limit["gradients"][0], f"this bound shows nothing: {unheard}, {limit}"
    for index, rank in enumerate(repaired):
        found = rank[case]
        assert found["error"] is None, found
        assert (found["processes"], found["device"]) == (2, f"cuda:{index}")
        assert found["type"].startswith({"ddp": "DistributedDataParallel", "fsdp2": "FSDP"}[launch])
        assert len(found["gradients"][0]) == found["trainable"] > 100
        said = noise.beyond(found) if noise else nearness.beyond(found, ways, limit)
        assert not said, said
        for name, weight in found["adapter"].items():
            assert torch.equal(weight, repaired[0][case]["adapter"][name]), name
    kept = repaired[0][case]["saved"]
    assert kept["error"] is None, kept
    weights = load_file(Path(kept["to"]) / "adapter_model.safetensors")
    trained = {name.replace(".default.", "."): weight for name, weight in repaired[0][case]["adapter"].items()}
    assert weights.keys() == trained.keys()
    assert not [name for name, weight in trained.items() if not torch.equal(weights[name].float(), weight)]
    if launch == "fsdp2":
        affected = versions.admits(FSDP_AFFECTED, versions.installed("transformers") or "")
        for rank in without:
            assert "died" in rank or (rank[case]["error"] is not None) == affected, rank[case]
            assert not affected or "died" in rank or rank[case]["error"] == "KeyError: 3", rank[case]


# -------------------------------------------------------------------------------------------------- decoding by replay


@pytest.fixture(scope="module")
def models(workspace: Any) -> calls.Models:
    return calls.Models(workspace)


def test_a_model_on_each_of_two_gpus(models: calls.Models) -> None:
    """Each has graphs of its own, in turns and at once."""
    both = models.fresh("4bit"), models.fresh("4bit").to("cuda:1")

    def answer(model: Any) -> Any:
        return calls.generate(model, calls.text(model), {})

    found = [answer(model) for model in both * 2]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            found += pool.map(answer, both)
    expected = calls.generate(both[0], calls.text(both[0]), {"disable_compile": True})
    for answered in found:
        assert answered.sequences.tolist() == expected.sequences.tolist()
        assert all(mine.tolist() == theirs.tolist() for mine, theirs in zip(answered.logits, expected.logits))
    assert [calls.steps(model).captured for model in both] == [1, 1]


def test_a_model_split_over_two_gpus_says_why_it_is_not_replayed(models: calls.Models) -> None:
    from accelerate import dispatch_model

    whole, model = models.fresh("4bit"), models.fresh("4bit")
    count = len(calls.layers(model))
    split = {"": 0} | {f"model.language_model.layers.{number}": 1 for number in range(count // 2, count)}
    model = dispatch_model(model, split)
    found = calls.generate(model, calls.text(model), {})
    expected = calls.generate(whole, calls.text(whole), {"disable_compile": True})
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert calls.steps(model).replayed == 0
    assert len(calls.steps(model).reasons) == 1
