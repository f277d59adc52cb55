"""The package's own calls: what worked before them still does. Without the package they do nothing."""

from __future__ import annotations

from typing import Any

from tests.generated.search.differential.calls import adapters, training
from tests.generated.search.differential.table import Area, Expect
from tests.generated.search.differential.world import World

area = Area("package")


def _decode_fast(world: World, model: Any) -> Any:
    import gemma4_compat

    return gemma4_compat.decode_fast(model) if world.on else model


def _chunked_loss(world: World, model: Any, loss: bool | str = True) -> Any:
    if not world.on:
        return model
    from tests.patches.training.parts import only

    return only(model, loss=loss)


def _standing_in(world: World) -> Any:
    """A tape in place of a CUDA graph, where there is a package that replays."""
    import contextlib

    if not world.on:
        return contextlib.nullcontext()
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape

    return tape.standing_in(RECORDERS)


@area.call(
    variants=["greedy", "sample", "beams", "returned"],
    kinds=("E2B", "E2B-lora", "E2B-4bit", "12B", "E2B-text"),
    places=("one", "ram"),
)
def decode_fast(world: World, mode: str) -> Any:
    """``decode_fast``, then ``generate`` twice"""
    options = {
        "greedy": {},
        "sample": {"do_sample": True, "top_k": 50},
        "beams": {"num_beams": 2},
        "returned": {"do_sample": True, "num_return_sequences": 2},
    }[mode]
    with _standing_in(world):
        model = _decode_fast(world, world.model)
        return [world.tokens(model, **options), world.tokens(model, **options)]


@area.call(
    variants=["prefix", "cartridge", "prompt", "p_tuning", "lora", "ln"],
    kinds=("E2B", "E2B-text"),
    places=("one", "ram"),
)
def decode_fast_tuner(world: World, tuner: str) -> Any:
    """``decode_fast`` of a model with a tuner: the tokens of whole forwards"""
    model = adapters.tuned(world, tuner).eval()
    right = adapters.greedy(world, model)
    with _standing_in(world):
        return Expect(world.tokens(_decode_fast(world, model), media=False), right)


_SWITCHED = [
    "lora",
    "dora",
    "ln",
    "ia3",
    "loha",
    "oft",
    "vera",
    "hra",
    "road",
    "boft",
    "fourier",
    "adalora",
    "norm_saved",
    "head_saved",
    "tokens",
]


@area.call(variants=_SWITCHED, kinds=("E2B",), places=("one", "ram"))
def replayed_and_switched(world: World, tuner: str) -> Any:
    """Steps with a tuner, then inside ``disable_adapter()``, then with it"""
    import torch

    model = adapters.tuned(world, tuner).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad and "ranknum" not in name:
                value.add_(0.05)
    given = {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": "static", "media": False}

    def steps() -> Any:
        eager = {} if world.on else {"disable_compile": True}
        return world.tokens(model, **given, **eager).logits[-1]

    with _standing_in(world):
        model = _decode_fast(world, model)
        shown = [steps(), steps()]
        with model.disable_adapter():
            shown += [steps(), steps()]
        return [*shown, steps()]


@area.call(variants=["one", "none_in_one", "none", "padding"], kinds=("E2B", "E2B-lora"), places=("one", "ram"))
def chunked_loss(world: World, labels: str) -> Any:
    """``chunked_loss`` with a head that trains: is a gradient NaN?"""
    _chunked_loss(world, world.model)
    world.model.train()
    world.base.lm_head.requires_grad_(True)
    batch = world.inputs(media=False, batch=2)
    given = batch["input_ids"].clone()
    if labels == "one":
        given[:, :-1] = -100
    else:
        given[slice(0, 1) if labels == "none_in_one" else slice(None)] = -100
    loss = world.model(**batch, labels=given).loss
    loss.backward()
    grads = [value.grad for value in world.model.parameters() if value.grad is not None]
    return [len(grads) > 0, any(bool(grad.isnan().any()) for grad in grads)]


@area.call(kinds=("E2B-lora",), places=("one", "ram"))
def chunked_trainer(world: World) -> Any:
    """``chunked_loss``, ``Trainer.train()`` and ``evaluate()``: the number of losses"""
    _chunked_loss(world, world.model)
    if world.adapter_kind:
        training._lora_only(world)
    trainer = training._trainer(world)
    trainer.train()
    return [len(training._losses(trainer)), trainer.evaluate().keys() >= {"eval_loss"}]


@area.call(variants=["root", "head"], kinds=("E2B", "E2B-text"), places=("one",))
def chunked_sharded(world: World, units: str) -> Any:
    """``chunked_loss`` under FSDP2 of one process: does the head get a gradient?"""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(f"{world.new_folder()}/store", 1), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = world.model
    _chunked_loss(world, model)
    inner = world.text
    if units == "head":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        fully_shard(model.lm_head, mesh=mesh)
    for layer in inner.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.train()
    batch = world.inputs(media=False)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    grad = model.lm_head.weight.grad
    return Expect(grad is not None and float(grad.full_tensor().float().norm()) > 0, True)
