"""Gradient accumulation weights all tokens equally, not all microbatches.

Symptom: silent: with ``gradient_accumulation_steps`` above 1, loss and gradients of a multimodal Gemma 4 depend on how
a batch is cut into microbatches. A token in a short microbatch counts more than one in a long microbatch; with one of
20 and one of 200 trained tokens, ten times more. With ``label_smoothing_factor``, before transformers 5.15, the
language model by itself has that fault as well, and its gradient is as many times too large as there are microbatches.

Cause: ``Gemma4ForConditionalGeneration`` and ``Gemma4UnifiedForConditionalGeneration`` have ``accepts_loss_kwargs =
False``, from the time when their loss did not take ``num_items_in_batch``. So the Trainer does not count tokens, and
averages the means of the microbatches. From 5.6 on the loss takes that argument. Before, ``forward`` computes its own
loss, which ignores it.

Fix: A Trainer (including TRL's) of such a model counts tokens, as it does for ``Gemma4ForCausalLM``. Before 5.6 the
loss of ``forward`` is multiplied by the number of tokens in its mean. Before 5.10 a Trainer also counts the first
label of each sequence, which is never trained on; with this patch it does not. Smoothed losses are weighted by the
tokens of their microbatch. Models whose class or instance sets
``accepts_loss_kwargs`` itself, or that have another ``forward``, are not changed. Neither is sequence parallelism,
where the Trainer counts by itself. Without accumulation, losses stay the same.

Remove when: transformers drops ``accepts_loss_kwargs = False`` from both classes.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F60 F116", severity="wrong_result", affected=">=5.5")

_NAME = "accepts_loss_kwargs"
_ITEMS = "num_items_in_batch"
#: Trained tokens in the reproduction's two microbatches.
_LENGTHS = (4, 20)
_IGNORED = -100


@PATCH.replaces("transformers.trainer", "Trainer.__init__", group="trainer")
def trainer(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    model: Any = getattr(self, "model", None)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not family.is_gemma4(model) or _is_sequence_parallel(self):
        return
    smooths = self.label_smoother is not None and self.compute_loss_func is None
    if _is_stale(model):
        self.model_accepts_loss_kwargs = True
    elif not (smooths and self.model_accepts_loss_kwargs) and not _has_own_loss(type(model).forward):
        return
    if not hasattr(self, "_loss_shifts_labels") and self.compute_loss_func is None:
        _leave_first_labels_out(self)
    if smooths and self.model_accepts_loss_kwargs and _ITEMS not in inspect.signature(self.label_smoother).parameters:
        _weight_smoothed_losses(self)


def _weight_smoothed_losses(trainer: Any) -> None:
    """Before 5.15 a smoothed loss is the mean over its microbatch: multiply it by the microbatch's share of tokens."""
    compute, smoother = trainer.compute_loss, trainer.label_smoother

    @functools.wraps(compute)
    def computed(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        if num_items_in_batch is None or trainer.label_smoother is not smoother:
            return compute(model, inputs, return_outputs, num_items_in_batch, **more)
        with in_place.assigned(trainer, "label_smoother", functools.partial(_weighted, smoother, num_items_in_batch)):
            return compute(model, inputs, return_outputs, num_items_in_batch, **more)

    trainer.compute_loss = computed


def _weighted(smoother: Any, items: Any, outputs: Any, labels: Any, shift_labels: bool = False) -> Any:
    """The smoothed loss of a microbatch, as its part of the mean over all ``items``."""
    counted = ((labels[..., 1:] if shift_labels else labels) != smoother.ignore_index).sum()
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if not counted:
        return 0.0 * logits.sum()  # the mean over no tokens is NaN
    loss = smoother(outputs, labels, shift_labels=shift_labels)
    return loss * counted.to(loss.device) / (items.to(loss.device) if hasattr(items, "to") else items)


def _has_own_loss(forward: Callable[..., Any]) -> bool:
    """Before 5.6: the forward ignores ``num_items_in_batch``, so its loss is weighted here."""
    return "loss_function" not in inspect.unwrap(forward).__code__.co_names


def _leave_first_labels_out(trainer: Any) -> None:
    """Before 5.10 a Trainer also counts the first label of a sequence, for which there are no logits."""
    count = trainer._get_num_items_in_batch

    def counted(batch_samples: list[Any], device: Any) -> Any:
        shifted = [
            {**batch, "labels": batch["labels"][..., 1:]} if hasattr(batch, "keys") and "labels" in batch else batch
            for batch in batch_samples
        ]
        return count(shifted, device)

    trainer._get_num_items_in_batch = counted


def _is_stale(model: Any) -> bool:
    """Whether ``accepts_loss_kwargs`` is upstream's, and the forward it describes as well."""
    if not family.is_gemma4(model) or getattr(model, _NAME, None) is not False or _NAME in vars(model):
        return False
    owner = next(kind for kind in type(model).__mro__ if _NAME in vars(kind))
    forward = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    return owner is forward and owner.__module__.startswith("transformers.models.gemma4")


def _is_sequence_parallel(trainer: Any) -> bool:
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return bool(getattr(parallelism, "sp_enabled", False))


@PATCH.replaces(
    MODELING_GEMMA4,
    "Gemma4ForConditionalGeneration.forward",
    dormant=lambda _late: versions.admits(">=5.6", versions.current("transformers") or ""),
    group="gemma4",
)
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before 5.6: the mean over a microbatch, weighted by its share of all items."""
    items = kwargs.get(_ITEMS)
    if items is None or not _has_own_loss(original):
        return original(self, *args, **kwargs)
    outputs = original(self, *args, **kwargs)
    given = {**dict(zip(tuple(inspect.signature(original).parameters)[1:], args, strict=False)), **kwargs}
    loss = outputs[0]
    if given.get("labels") is None:
        return outputs
    counted = _counted(given["labels"], given.get("attention_mask")).to(loss.device)
    share = counted / (items.to(loss.device) if hasattr(items, "to") else items)
    loss = loss.nan_to_num(0.0) * share if not counted else loss * share
    if isinstance(outputs, tuple):
        return (loss, *outputs[1:])
    outputs.loss = loss
    return outputs


def _counted(labels: Any, mask: Any) -> Any:
    """How many tokens the loss averages."""
    wanted = labels[..., 1:] != _IGNORED
    if mask is not None:
        wanted = wanted & (mask[:, -wanted.shape[1] :].to(wanted.device) != 0)
    return wanted.sum()


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    batch = _batch(workspace)
    losses = []
    for size, steps in ((len(_LENGTHS), 1), (1, len(_LENGTHS))):
        model = workspace.load().to(torch.float32)
        losses.append(_loss(workspace, model, batch, size, steps))
    whole, parts = losses
    off = abs(parts - whole) / whole
    return Outcome(
        off > 1e-4,
        f"the loss of {len(_LENGTHS)} sequences is {whole:.4g} in one batch and {parts:.4g} in {len(_LENGTHS)} "
        "microbatches",
    )


def _batch(workspace: Workspace) -> list[dict[str, Any]]:
    """Sequences whose first tokens are not trained."""
    import torch

    found = []
    for number, length in enumerate(_LENGTHS):
        one = {name: value[0].cpu() for name, value in workspace.inputs(text_only=True).items()}
        one["input_ids"] = (one["input_ids"] * (number + 3)) % 240 + 3
        one["mm_token_type_ids"] = torch.zeros_like(one["input_ids"])
        one["labels"] = one["input_ids"].clone()
        one["labels"][:-length] = _IGNORED
        found.append(one)
    return found


def _loss(workspace: Workspace, model: Any, batch: list[dict[str, Any]], size: int, steps: int) -> float:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(workspace.folder / "trainer"),
        max_steps=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
        disable_tqdm=True,
        optim="sgd",
        use_cpu=workspace.main == "cpu",
    )
    training = Trainer(model, arguments, train_dataset=batch)
    training.args._n_gpu = min(1, training.args._n_gpu)
    return float(training.train().training_loss)
