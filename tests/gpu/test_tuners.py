"""Every tuner of PEFT on a GPU and the host, and on two GPUs, against one GPU: the same kernels, so the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._reproduction import tiny
from gemma4_compat._reproduction.workspace import difference
from tests.adapters.test_tuners_on_split_models import SUMMED, TUNERS, assert_tuned_as_on_one_device
from tests.conftest import is_affected, patch
from tests.gpu.two_gpus import ON_SECOND

PLACEMENTS = ("host", "two GPUs")
VIRTUAL_TOKENS = 3


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
    import torch

    if request.param == "host":
        return lambda: workspace.split(offload="both")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices: torch.cuda.device_count() is {torch.cuda.device_count()}")
    placement = {"": 0} | {f"model.language_model.layers.{index}": 1 for index in ON_SECOND}
    return lambda: workspace.dispatch_map(workspace.load(), placement)


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


@pytest.mark.skipif(
    not is_affected(patch("peft-prefix-placement")), reason="this PEFT has no prefix for layers of several widths"
)
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "CartridgeConfig"])
def test_a_prefix_is_on_the_device_of_its_layer(
    workspace: Any, record: Callable[[str, Any], None], request: pytest.FixtureRequest, split: Any, kind: str
) -> None:
    import peft
    import torch

    found = []
    batch = tiny.inputs(workspace.main, text_only=True)
    with recorded(record, f"tuners: {request.node.callspec.params['split']}, {kind}"):
        for model in (workspace.load(), split()):
            torch.manual_seed(0)
            tuned = peft.get_peft_model(
                model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL_TOKENS)
            ).eval()
            outputs = workspace.outputs(tuned, text_only=True)
            tuned(**batch, labels=batch["input_ids"]).loss.backward()
            gradients = [value.grad.cpu() for value in tuned.parameters() if value.requires_grad]
            assert gradients
            assert all(gradient.any() for gradient in gradients)
            found.append((outputs, gradients))
        (expected, gradients), (outputs, others) = found
        assert difference(expected, outputs) == 0.0
        assert all(map(torch.equal, gradients, others))
