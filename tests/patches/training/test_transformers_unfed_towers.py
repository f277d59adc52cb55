"""F99: adapters in towers that get no input are named before DDP waits for them, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatWarning
from gemma4_compat.patches.training.transformers_unfed_towers import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected to have finished reduction in the prior iteration"
    exact = False


PLAIN = ["q_proj", "v_proj"]
LANGUAGE = r".*language_model.*\.(q_proj|v_proj)"


@pytest.fixture
def group() -> Iterator[None]:
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def adapted(workspace: Any, targets: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(workspace.load().float(), LoraConfig(r=4, target_modules=targets)).train()


def steps(workspace: Any, model: Any, count: int = 2, *, text_only: bool = True) -> list[str]:
    """What is said in so many steps."""
    batch = workspace.inputs(text_only=text_only)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            model(**batch, labels=batch["input_ids"]).loss.backward()
    return [str(one.message) for one in caught if one.category is Gemma4CompatWarning]


@pytest.mark.usefixtures("group")
def test_the_first_step_names_the_towers_and_both_remedies(workspace: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ranks = DistributedDataParallel(adapted(workspace, PLAIN))
    (said,) = steps(workspace, ranks, 1)
    assert "does not feed vision_tower and audio_tower" in said
    assert "find_unused_parameters=True" in said
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        steps(workspace, ranks, 1)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("remedy", ["targets", "unused"])
def test_either_remedy_trains_as_one_process(workspace: Any, remedy: str) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    targets = LANGUAGE if remedy == "targets" else PLAIN
    torch.manual_seed(0)
    alone = adapted(workspace, targets)
    torch.manual_seed(0)
    model = adapted(workspace, targets)
    assert steps(workspace, DistributedDataParallel(model, find_unused_parameters=remedy == "unused")) == []
    assert steps(workspace, alone) == []
    for right, found in zip(alone.parameters(), model.parameters(), strict=True):
        assert (right.grad is None) == (found.grad is None)
        assert right.grad is None or torch.equal(right.grad, found.grad)


@pytest.mark.usefixtures("group")
def test_nothing_is_said_where_nothing_waits(workspace: Any) -> None:
    """Batches that feed the towers, microbatches that are not reduced, evaluation, and no DDP at all."""
    from torch.nn.parallel import DistributedDataParallel

    model = adapted(workspace, PLAIN)
    assert steps(workspace, model) == []
    ranks = DistributedDataParallel(model)
    assert steps(workspace, ranks, text_only=False) == []
    with ranks.no_sync():
        assert steps(workspace, ranks) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        workspace.outputs(ranks.module.eval(), text_only=True)
