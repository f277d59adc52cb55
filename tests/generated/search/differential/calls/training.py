"""Training, by hand and with Trainer, and its evaluation."""

from __future__ import annotations

from typing import Any

from tests.generated.search.differential.table import EVERYWHERE, Area, Expect
from tests.generated.search.differential.world import World

area = Area("training")
TRAINED = ("E2B-lora", "E2B-4bit-lora", "E2B-8bit-lora", "12B-lora", "E2B-text-lora")


def _lora_only(world: World) -> None:
    for name, parameter in world.model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    world.model.train()


class _Rows(list[Any]):
    """A data set."""


def _rows(world: World, count: int = 2) -> Any:
    return _Rows(
        {name: value[0] for name, value in world.inputs().items()} | {"labels": world.inputs()["input_ids"][0]}
        for _ in range(count)
    )


def _trainer(world: World, rows: Any = None, **options: Any) -> Any:
    import transformers

    own = {name: options.pop(name) for name in ("compute_metrics", "callbacks", "optimizers") if name in options}
    cls = getattr(transformers, options.pop("cls", "Trainer"))
    arguments = {"TrainingArguments": transformers.TrainingArguments}
    if cls is transformers.Seq2SeqTrainer:
        arguments = {"TrainingArguments": transformers.Seq2SeqTrainingArguments}
    given = {
        "output_dir": world.new_folder("trainer"),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "max_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "seed": 1,
        "dataloader_pin_memory": False,
    } | options
    rows = _rows(world) if rows is None else rows
    return cls(
        model=world.model,
        args=arguments["TrainingArguments"](**given),
        train_dataset=rows,
        eval_dataset=rows,
        **own,
    )


def _losses(trainer: Any) -> list[Any]:
    keys = ("loss", "grad_norm", "eval_loss")
    return [{key: row[key] for key in keys if key in row} for row in trainer.state.log_history]


@area.call(
    variants={"": {}, "checkpointed": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}},
    kinds=TRAINED,
    places=EVERYWHERE,
)
def step(world: World, use_reentrant: bool | None = None) -> Any:
    """A step by hand: loss, gradients, loss after it; checkpointing changes none of them"""
    import torch

    _lora_only(world)
    if use_reentrant is None:
        return world.train_step()
    trained = {name: value.detach().clone() for name, value in world.model.named_parameters() if value.requires_grad}
    right = world.train_step()
    with torch.no_grad():
        for name, value in world.model.named_parameters():
            if name in trained:
                value.copy_(trained[name])
    world.base.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    world.base.enable_input_require_grads()
    return Expect(world.train_step(), right)


@area.call(kinds=("E2B", "E2B-text", "12B", "31B"))
def whole_step(world: World) -> Any:
    """A step of all weights by hand"""
    world.model.train()
    return world.train_step(learning_rate=0.001)


@area.call(kinds=("E2B-lora", "E2B"))
def gradients_of_gradients(world: World) -> Any:
    """``create_graph=True``"""
    import torch

    if world.adapter_kind:
        _lora_only(world)
    world.model.set_attn_implementation("eager")
    trained = [value for value in world.model.parameters() if value.requires_grad and value.device.type != "meta"][:4]
    batch = world.inputs(media=False)
    loss = world.model(**batch, labels=batch["input_ids"]).loss
    first = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    norm = sum((value.float() ** 2).sum() for value in first if value is not None)
    return torch.autograd.grad(norm, trained, allow_unused=True)[0]


TRAINERS: dict[str, dict[str, Any]] = {
    "": {},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd"},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "best": {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True,
    },
    "saved": {"save_strategy": "steps", "save_steps": 1},
    "auto_batch": {"auto_find_batch_size": True},
    "grouped": {"group_by_length": True},
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
    "average_tokens": {"average_tokens_across_devices": False},
    "columns": {"remove_unused_columns": False},
    "smoothed_accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "accumulated_in_batches": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
}  # fmt: skip


@area.call(variants={name: {"options": options} for name, options in TRAINERS.items()}, kinds=("E2B-lora",))
def trainer(world: World, options: dict[str, Any]) -> Any:
    """``Trainer.train()`` with an option"""
    import transformers

    known = set(transformers.TrainingArguments.__dataclass_fields__)
    world.needs(options.keys() <= known, "TrainingArguments has no such option")
    _lora_only(world)
    trained = _trainer(world, **options)
    trained.train()
    return [_losses(trained), world.logits(world.model.eval())]


@area.call(kinds=("E2B-4bit-lora", "E2B-8bit-lora", "12B-lora", "E2B-text-lora", "31B-lora", "26B-lora"))
def trainer_on(world: World) -> Any:
    """``Trainer.train()`` on other kinds"""
    _lora_only(world)
    trained = _trainer(world)
    trained.train()
    return [_losses(trained), world.logits(world.model.eval())]


@area.call(kinds=("E2B", "12B", "E2B-4bit"))
def trainer_whole(world: World) -> Any:
    """``Trainer.train()`` of all weights"""
    trained = _trainer(world, learning_rate=0.0001)
    trained.train()
    return _losses(trained)


EVALUATIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16_full_eval": {"bf16_full_eval": True},
    "fp16_full_eval": {"fp16_full_eval": True},
    "loss_only": {"prediction_loss_only": True},
    "accumulated": {"eval_accumulation_steps": 1},
    "metrics": {"compute_metrics": lambda found: {"mean": float(abs(found.predictions[0]).mean())}},
    "no_training": {"max_steps": 0},
    "batch_eval_metrics": {"eval_on_start": True},
}


@area.call(
    variants={name: {"options": options} for name, options in EVALUATIONS.items()},
    kinds=("E2B", "E2B-lora", "E2B-4bit", "12B"),
)
def evaluate(world: World, options: dict[str, Any]) -> Any:
    """``Trainer.evaluate()`` with an option"""
    return _trainer(world, **options).evaluate()["eval_loss"]


@area.call(kinds=("E2B", "12B"))
def full_eval_and_after(world: World) -> Any:
    """``Trainer(bf16_full_eval=True).evaluate()``: the model answers as before"""
    import torch

    ids = torch.randint(3, 240, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = world.model(input_ids=ids).logits
        _trainer(world, bf16_full_eval=True).evaluate()
        return Expect(world.model(input_ids=ids).logits, before)


@area.call(kinds=("E2B", "E2B-lora", "E2B-4bit", "12B"))
def predict(world: World) -> Any:
    """``Trainer.predict()``"""
    import torch

    found = _trainer(world).predict(_rows(world)).predictions
    found = found[0] if isinstance(found, tuple) else found
    return torch.from_numpy(found)


@area.call(kinds=("E2B-lora", "E2B-4bit-lora"))
def resume(world: World) -> Any:
    """``Trainer.train(resume_from_checkpoint=...)``"""
    _lora_only(world)
    first = _trainer(world, save_strategy="steps", save_steps=1, max_steps=1)
    first.train()
    world.__dict__.pop("model")
    _lora_only(world)
    second = _trainer(world, max_steps=2)
    second.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-1")
    return [_losses(second), world.logits(world.model.eval())]


@area.call(kinds=("E2B", "E2B-lora", "12B"))
def trainer_save(world: World) -> Any:
    """``Trainer.save_model``"""
    folder = world.new_folder()
    _trainer(world).save_model(folder)
    if world.adapter_kind:
        return world.logits(world.with_adapter(world.dispatch(world.fresh()), folder))
    return world.logits(world.cls.from_pretrained(folder, dtype="auto").eval())


@area.call(kinds=("E2B", "E2B-lora"))
def seq2seq(world: World) -> Any:
    """``Seq2SeqTrainer(predict_with_generate=True).predict``"""
    import torch

    rows = _Rows(
        {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "labels": row["labels"]}
        for row in _rows(world, 1)
    )
    found = _trainer(world, rows, cls="Seq2SeqTrainer", predict_with_generate=True, generation_max_length=28)
    return torch.from_numpy(found.predict(rows, max_new_tokens=3).predictions)


@area.call(variants=["one", "none_in_one", "none"], kinds=("E2B", "E2B-lora"))
def labels(world: World, how: str) -> Any:
    """Steps whose batches have few labels, or none: loss and gradients"""
    if world.adapter_kind:
        _lora_only(world)
    batch = world.inputs(media=False, batch=2)
    labels = batch["input_ids"].clone()
    if how == "one":
        labels[:, :-1] = -100
    else:
        labels[slice(0, 1) if how == "none_in_one" else slice(None)] = -100
    loss = world.model(**batch, labels=labels).loss
    loss.backward()
    grads = {n: p.grad.float().norm() for n, p in world.model.named_parameters() if p.grad is not None}
    return [loss, dict(list(grads.items())[:8])]


@area.call(variants=["plain", "unused"], kinds=("E2B-lora", "E2B-towers"))
def distributed(world: World, how: str) -> Any:
    """``DistributedDataParallel`` of one process: two steps"""
    import torch
    import torch.distributed as dist

    _lora_only(world)
    dist.init_process_group("gloo", store=dist.FileStore(f"{world.new_folder()}/store", 1), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(world.model, find_unused_parameters=how == "unused")
    batch = world.inputs(media=False)
    losses = []
    for _ in range(2):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        losses.append(loss)
    return losses


@area.call(variants=["clip", "norm", "hook", "detect_anomaly"], kinds=("E2B-lora",))
def around_a_step(world: World, what: str) -> Any:
    """Gradient clipping, hooks on gradients, ``detect_anomaly``"""
    import torch

    _lora_only(world)
    trained = [value for value in world.model.parameters() if value.requires_grad]
    if what == "hook":
        for value in trained:
            value.register_hook(lambda gradient: gradient * 2)
    batch = world.inputs()
    if what == "detect_anomaly":
        with torch.autograd.detect_anomaly():
            world.model(**batch, labels=batch["input_ids"]).loss.backward()
    else:
        world.model(**batch, labels=batch["input_ids"]).loss.backward()
    if what == "norm":
        return torch.nn.utils.get_total_norm([value.grad for value in trained if value.grad is not None])
    return torch.nn.utils.clip_grad_norm_(trained, 0.1)
