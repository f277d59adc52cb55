"""F60, F116: microbatches of unequal lengths have the loss and the gradients of one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny_models
from gemma4_compat.patches.training import transformers_accumulation_weights
from gemma4_compat.patches.training.transformers_accumulation_weights import PATCH
from tests.helpers import without
from tests.patches.promise import Promise
from tests.patches.training.parts import only

#: Trained tokens of four sequences.
LENGTHS = (3, 20, 9, 14)
#: Of the norm: float32, summed in another order.
BOUND = 1e-5


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the loss of 2 sequences is [\d.]+ in one batch and [\d.]+ in 2 microbatches"
    exact = False


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_accumulation_weights, "_LENGTHS", LENGTHS)


def training(workspace: Any, model: Any, folder: Path, size: int, **options: Any) -> Any:
    """A trainer whose step is ``LENGTHS`` in microbatches of ``size``; its gradients are kept, not applied."""
    import torch
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": 1,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": len(LENGTHS) // size,
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
            "use_cpu": workspace.main == "cpu",
            **options,
        },
    )
    batch = transformers_accumulation_weights._batch(workspace)
    # With a rate of 1 the step of SGD is the gradient.
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    return Trainer(
        model,
        arguments,
        train_dataset=batch,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )


def step(workspace: Any, model: Any, folder: Path, size: int, **options: Any) -> tuple[float, dict[str, Any]]:
    """The loss, and what a step changed."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    loss = training(workspace, model, folder, size, **options).train().training_loss
    after = dict(model.named_parameters())
    return loss, {name: after[name].detach() - weight for name, weight in before.items()}


def load(workspace: Any, name: str) -> Any:
    """In float32, with the weights of two layers trained."""
    if name.startswith("unified"):
        try:
            model = tiny_models.unified_model() if name == "unified" else tiny_models.unified_text_model()
        except ImportError:
            pytest.skip("this transformers has no gemma4_unified")
    else:
        model = workspace.load() if name == "gemma4" else workspace.load_text()
    model = model.float()
    for path, weight in model.named_parameters():
        weight.requires_grad_("layers.1.mlp" in path and "tower" not in path)
    return model


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["gemma4", "unified", "text", "unified text"])
def test_microbatches_are_one_batch(workspace: Any, tmp_path: Path, name: str, chunked: bool) -> None:
    whole, right = step(workspace, load(workspace, name), tmp_path, len(LENGTHS))
    model = only(load(workspace, name), loss=chunked)
    loss, found = step(workspace, model, tmp_path, 1)
    assert loss == pytest.approx(whole, rel=1e-5)
    assert right.keys() == found.keys()
    norm = sum(change.norm() ** 2 for change in right.values()) ** 0.5
    assert norm > 0
    assert sum((right[name] - found[name]).norm() ** 2 for name in right) ** 0.5 <= BOUND * norm


def test_with_an_adapter(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    losses = []
    for size in (len(LENGTHS), 2):
        base = workspace.load().float()
        model = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True)
        losses.append(step(workspace, model, tmp_path, size)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_who_says_so_is_left_alone(workspace: Any, tmp_path: Path) -> None:
    model = load(workspace, "gemma4")
    model.accepts_loss_kwargs = False
    assert training(workspace, model, tmp_path, 1).model_accepts_loss_kwargs is False

    def forward(self: Any, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        return super(type(self), self).forward(**kwargs)

    for members in ({"accepts_loss_kwargs": False}, {"forward": forward}):
        other = load(workspace, "gemma4")
        other.__class__ = type("Own", (type(other),), members)
        assert training(workspace, other, tmp_path, 1).model_accepts_loss_kwargs is False


def test_other_models_are_left_alone(workspace: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for said in (False, True):
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256))
        model.accepts_loss_kwargs = said
        assert training(workspace, model, tmp_path, 1).model_accepts_loss_kwargs is said


def test_undone_it_is_upstreams_again(workspace: Any, tmp_path: Path) -> None:
    gemma4_compat.revert(PATCH.id)
    try:
        assert training(workspace, load(workspace, "gemma4"), tmp_path, 1).model_accepts_loss_kwargs is False
    finally:
        gemma4_compat.install()
    assert training(workspace, load(workspace, "gemma4"), tmp_path, 1).model_accepts_loss_kwargs is True


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "smoothed"])
def test_without_accumulation_and_in_evaluation_losses_are_upstreams(
    workspace: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    def losses(folder: str, steps: int) -> tuple[float, float]:
        given = {"gradient_accumulation_steps": steps, "per_device_eval_batch_size": 1, **options}
        trainer = training(workspace, workspace.load().float(), tmp_path / folder, 1, **given)
        for row in trainer.train_dataset:
            row["labels"] = row["input_ids"].clone()  # the first token has a label
        trainer.eval_dataset = trainer.train_dataset
        evaluated = trainer.evaluate()["eval_loss"]
        return evaluated, trainer.train().training_loss

    with without(PATCH.id):
        upstream = losses("off", 1)
    assert losses("on", 1) == pytest.approx(upstream, rel=1e-6)


@pytest.mark.parametrize("name", ["gemma4", "unified", "text", "unified text"])
def test_smoothed_losses(workspace: Any, tmp_path: Path, name: str) -> None:
    """F116: of any microbatches, as of one batch, whose loss is upstream's."""
    smoothed = {"label_smoothing_factor": 0.1}
    with without(PATCH.id):
        upstream = step(workspace, load(workspace, name), tmp_path, len(LENGTHS), **smoothed)
    for size in (len(LENGTHS), 2, 1):
        loss, found = step(workspace, load(workspace, name), tmp_path, size, **smoothed)
        assert loss == pytest.approx(upstream[0], rel=1e-5)
        off = sum((upstream[1][name] - found[name]).norm() ** 2 for name in found) ** 0.5
        assert off <= BOUND * sum(change.norm() ** 2 for change in upstream[1].values()) ** 0.5


def test_a_smoothed_step_of_fewer_microbatches_and_one_without_trained_tokens(workspace: Any, tmp_path: Path) -> None:
    import torch

    changes = []
    for size, steps in ((len(LENGTHS), 1), (1, 3 * len(LENGTHS))):  # an epoch ends before that many
        model = load(workspace, "gemma4")
        before = {path: weight.detach().clone() for path, weight in model.named_parameters()}
        options = {"gradient_accumulation_steps": steps, "max_steps": -1, "num_train_epochs": 1}
        trainer = training(workspace, model, tmp_path, size, label_smoothing_factor=0.1, **options)
        trainer.train_dataset[1]["labels"] = torch.full_like(trainer.train_dataset[1]["labels"], -100)
        trainer.train()
        changes.append({path: weight.detach() - before[path] for path, weight in model.named_parameters()})
    norm = sum(change.norm() ** 2 for change in changes[0].values()) ** 0.5
    assert norm > 0
    assert sum((changes[0][path] - changes[1][path]).norm() ** 2 for path in changes[0]) ** 0.5 <= BOUND * norm


def test_a_loss_of_the_callers_own(workspace: Any, tmp_path: Path) -> None:
    """Which wins over smoothing, and gets the count of transformers."""
    import torch

    def sums(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    losses = []
    for size in (len(LENGTHS), 1):
        trainer = training(workspace, load(workspace, "gemma4"), tmp_path, size, label_smoothing_factor=0.1)
        trainer.compute_loss_func = sums
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
