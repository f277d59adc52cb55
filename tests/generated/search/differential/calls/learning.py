"""Training, further: optimizers, label smoothing over microbatches, weights that are unfrozen after a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.generated.search.differential.calls.training import _lora_only, area
from tests.generated.search.differential.table import Expect
from tests.generated.search.differential.world import World

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"foreach": False}),
    "adamw_fused": ("AdamW", {"fused": True}),
    "adamw_foreach": ("AdamW", {"foreach": True}),
    "adamw_8bit": ("bitsandbytes AdamW8bit", {}),
    "adam_fused": ("Adam", {"fused": True}),
    "sgd_fused": ("SGD", {"fused": True}),
    "adagrad_fused": ("Adagrad", {"fused": True}),
    "adamax_foreach": ("Adamax", {"foreach": True}),
    "lion_8bit": ("bitsandbytes Lion8bit", {}),
}


def _optimizer(world: World, name: str, weights: list[Any]) -> Any:
    import torch

    kind, options = OPTIMIZERS[name]
    if kind.startswith("bitsandbytes"):
        from bitsandbytes import optim

        world.needs(hasattr(optim, kind.split()[1]), "bitsandbytes has no such optimizer")
        return getattr(optim, kind.split()[1])(weights, lr=0.01)
    return getattr(torch.optim, kind)(weights, lr=0.01, **options)


@area.call(variants=list(OPTIMIZERS), kinds=("E2B-lora", "E2B-4bit-lora", "12B-lora"))
def optimizer(world: World, name: str) -> Any:
    """Two steps of an optimizer: losses, and the model answers with the new weights"""
    _lora_only(world)
    stepped = _optimizer(world, name, [value for value in world.model.parameters() if value.requires_grad])
    batch = world.inputs(media=False)
    losses = []
    for _ in range(2):
        loss = world.model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        stepped.step()
        stepped.zero_grad()
        losses.append(loss)
    return [losses, world.logits(world.model.eval(), media=False)]


@area.call(variants=["adamw", "adamw_fused", "adamw_foreach"], kinds=("E2B", "12B"), places=("one",))
def generated_between_steps(world: World, name: str) -> Any:
    """A ``generate`` before a step and the same after it: nothing of the old weights is left"""
    import torch

    norms = [value for key, value in world.model.named_parameters() if "norm" in key]
    before = world.tokens(media=False)
    for value in norms:
        value.grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value)
    _optimizer(world, name, norms).step()
    return [before, world.tokens(media=False), world.logits(media=False)]


@area.call(variants=["smoothed", "plain"], kinds=("E2B-lora", "E2B-4bit-lora"), tolerance=0.02)
def microbatches(world: World, how: str) -> Any:
    """``Trainer`` with accumulation over texts of several lengths: the gradient norm of one batch"""
    from transformers import Trainer, TrainingArguments

    _lora_only(world)
    ids = world.inputs(media=False)["input_ids"][0]
    rows = [{"input_ids": ids, "labels": ids.clone()} for _ in range(4)]
    for number, row in enumerate(rows):  # few labels in the first, all in the last
        row["labels"][: len(ids) - 2 - 6 * number] = -100

    def norm(size: int) -> float:
        arguments = TrainingArguments(
            output_dir=world.new_folder("trainer"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
            label_smoothing_factor=0.1 if how == "smoothed" else 0.0,
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model=world.model, args=arguments, train_dataset=rows)
        trainer.train()
        return float(next(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row))

    whole = norm(4)
    return Expect(norm(1) / whole, 1.0)


@area.call(variants=["layer", "norms", "frozen"], kinds=("E2B-lora", "E2B-4bit-lora", "12B-lora"), places=("one",))
def unfrozen(world: World, what: str) -> Any:
    """Weights that are unfrozen, or frozen, after a few steps: which have a gradient, and how large"""
    _lora_only(world)
    batch = world.inputs(media=False)
    model = world.model
    if world.on:
        import gemma4_compat

        with contextlib.suppress(gemma4_compat.Gemma4CompatError):  # no such layers: as without the package
            model = gemma4_compat.train_fast(model)

    def gradients() -> dict[str, Any]:
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        return {n: p.grad.float().norm() for n, p in model.named_parameters() if p.grad is not None}

    with _replayed(world):
        for _ in range(4):
            gradients()
        layer = world.text.layers[1]
        if what == "layer":
            for value in layer.parameters():
                value.requires_grad_(value.is_floating_point())
        elif what == "norms":
            for name, value in world.model.named_parameters():
                value.requires_grad_(value.requires_grad or "layernorm" in name)
        else:
            layer.requires_grad_(False)
        return [gradients(), gradients()]


@contextlib.contextmanager
def _replayed(world: World) -> Iterator[None]:
    """With the package, steps on the CPU are recorded on tapes."""
    if not world.on:
        yield
        return
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins.tape import standing_in

    with standing_in(RECORDERS):
        yield
