"""Every tuner of PEFT on a GPU and the host, and on two GPUs, against one GPU: the same kernels, so the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import is_affected, patch
from tests.unit.gemma4.adapters.test_tuners_on_split_models import (
    APART,
    OUTSIDE_LAYERS,
    PREFIXES,
    SUMMED,
    TUNERS,
    assert_prefixed_as_on_one_device,
    assert_tuned_as_on_one_device,
)
from tests.world.gpu.two_gpus import ON_SECOND

PLACEMENTS = ("host", "two GPUs")


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients of an embedding and of a gather are sums in any order otherwise: other bits in each run."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=PLACEMENTS)
def split(request: pytest.FixtureRequest, workspace: Any) -> Callable[[], Any]:
    """Makes the workspace's model with half of its layers elsewhere."""
    if request.param == "host":
        return lambda: workspace.split(offload="both")
    return on_second(workspace, [f"model.language_model.layers.{index}" for index in ON_SECOND])


def on_second(workspace: Any, names: list[str]) -> Callable[[], Any]:
    """Makes the workspace's model with these modules on the second GPU; skips the test where there is one GPU."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices: torch.cuda.device_count() is {torch.cuda.device_count()}")
    return lambda: workspace.dispatch_map(workspace.load(), {"": 0} | dict.fromkeys(names, 1))


@contextlib.contextmanager
def recorded(record: Callable[[str, Any], None], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        record(name, {"error": f"{type(error).__name__}: {error}"[:300]})
        raise
    record(name, {"error": None})


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_split_model_is_tuned_as_one_gpu(
    workspace: Any,
    tmp_path: Path,
    record: Callable[[str, Any], None],
    request: pytest.FixtureRequest,
    split: Callable[[], Any],
    tuner: str,
) -> None:
    with recorded(record, f"tuners: {request.node.callspec.params['split']}, {tuner}"):
        assert_tuned_as_on_one_device(workspace, tmp_path, tuner, split, gradients_within=SUMMED.get(tuner, 0.0))


@pytest.mark.parametrize("apart", APART, ids=lambda names: names[0].rpartition(".")[2])
@pytest.mark.parametrize("case", OUTSIDE_LAYERS)
def test_an_adapter_outside_of_layers_is_tuned_as_on_one_gpu(
    workspace: Any, tmp_path: Path, record: Callable[[str, Any], None], case: str, apart: list[str]
) -> None:
    split = on_second(workspace, apart)
    with recorded(record, f"tuners: {apart[0]} on the second GPU, {case}"):
        assert_tuned_as_on_one_device(workspace, tmp_path, case, split)


@pytest.mark.skipif(
    not is_affected(patch("peft-prefix-placement")), reason="this PEFT has no prefix for layers of several widths"
)
@pytest.mark.parametrize("kind", PREFIXES)
def test_a_prefix_is_on_the_device_of_its_layer(
    workspace: Any, record: Callable[[str, Any], None], request: pytest.FixtureRequest, split: Any, kind: str
) -> None:
    with recorded(record, f"tuners: {request.node.callspec.params['split']}, {kind}"):
        assert_prefixed_as_on_one_device(workspace, kind, split, workspace.main)
