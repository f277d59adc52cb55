"""Operations on adapters."""

from __future__ import annotations

from typing import Any

from tests.generated.search.sequences_bench import World


def load_adapter(world: World, adapter: str, kind: str, number: int, way: str, trainable: bool) -> None:
    from peft import PeftModel

    folder = str(world.bench.adapter_of(world.case, kind, number))
    if way == "transformers":
        world.base.load_adapter(folder, adapter_name=adapter, is_trainable=trainable)
    elif world.is_peft:
        world.model.load_adapter(folder, adapter_name=adapter, is_trainable=trainable)
    else:
        world.model = PeftModel.from_pretrained(world.model, folder, adapter_name=adapter, is_trainable=trainable)
        if not trainable:
            world.model.eval()


def new_adapter(world: World, adapter: str, kind: str) -> None:
    """One that is yet to be trained."""
    from peft import get_peft_model

    config = world.bench.adapter_config(world.case, kind)
    if world.is_peft:
        world.model.add_adapter(adapter, config)
        world.model.set_adapter(adapter)
    else:
        world.model = get_peft_model(world.model, config, adapter_name=adapter)


def set_adapter(world: World, adapter: str) -> None:
    world.model.set_adapter(adapter)


def delete_adapter(world: World, adapter: str) -> None:
    world.model.delete_adapter(adapter)


def disable_adapter(world: World, prompt: str) -> dict[str, Any]:
    import torch

    with torch.no_grad():
        if world.is_peft:
            with world.model.disable_adapter():
                off = world.model(**world.inputs(prompt)).logits
        else:
            world.model.disable_adapters()
            off = world.model(**world.inputs(prompt)).logits
            world.model.enable_adapters()
        return {"disabled": off, "enabled": world.model(**world.inputs(prompt)).logits}


def merge_adapter(world: World) -> None:
    world.model.merge_adapter()


def unmerge_adapter(world: World) -> None:
    world.model.unmerge_adapter()


def merge_and_unload(world: World) -> None:
    world.model = world.model.merge_and_unload()


def unload(world: World) -> None:
    world.model = world.model.unload()


def add_weighted_adapter(world: World, adapters: tuple[str, ...], adapter: str, combination: str) -> None:
    world.model.add_weighted_adapter(list(adapters), [0.7, 0.3], adapter, combination_type=combination)
    world.model.set_adapter(adapter)


def hotswap(world: World, adapter: str, kind: str, number: int) -> None:
    from peft.utils.hotswap import hotswap_adapter

    hotswap_adapter(world.model, str(world.bench.adapter_of(world.case, kind, number)), adapter_name=adapter)


def mixed_batch(world: World, adapters: tuple[str, ...]) -> dict[str, Any]:
    import torch

    world.model.eval()
    with torch.no_grad():
        return {"logits": world.model(**world.inputs("text", "two"), adapter_names=list(adapters)).logits}


def train(
    world: World, prompt: str, accumulate: int, mode: str, checkpointing: str = "none", autocast: str = "none"
) -> dict[str, Any]:
    """A step of SGD on whatever the adapters have to train."""
    import torch

    if not _trainable(world):
        return {}
    model = world.model.train(mode == "train")
    if checkpointing != "none":
        world.base.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        world.base.enable_input_require_grads()
    try:
        shown = _losses(world, prompt, accumulate, autocast)
    finally:
        if checkpointing != "none":
            world.base.gradient_checkpointing_disable()
            world.base.disable_input_require_grads()
        model.eval()
    trained = dict(_trainable(world))
    shown |= {f"gradient of {name}": p.grad.clone() for name, p in trained.items() if p.grad is not None}
    torch.optim.SGD(trained.values(), lr=0.05).step()
    for parameter in world.model.parameters():
        parameter.grad = None
    return shown


def _losses(world: World, prompt: str, accumulate: int, autocast: str) -> dict[str, Any]:
    shown = {}
    for index in range(accumulate):
        batch = world.inputs(prompt, "two" if index else None)
        with world.autocast(autocast):
            loss = world.model(**batch, labels=batch["input_ids"]).loss / accumulate
        loss.backward()
        shown[f"loss {index}"] = loss.detach()
    return shown


def _trainable(world: World) -> list[tuple[str, Any]]:
    own = ("lora_", "modules_to_save", "trainable_tokens")
    return [
        (name, parameter)
        for name, parameter in world.model.named_parameters()
        if parameter.requires_grad and any(part in name for part in own)
    ]


def double_backward(world: World) -> dict[str, Any]:
    """The gradient of a gradient's norm."""
    import torch

    trained = _trainable(world)[:4]
    if not trained:
        return {}
    batch = world.inputs("text")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second derivative
        loss = world.model(**batch, labels=batch["input_ids"]).loss
    gradients = torch.autograd.grad(
        loss, [parameter for _, parameter in trained], create_graph=True, allow_unused=True
    )
    norm = sum((gradient.float() ** 2).sum() for gradient in gradients if gradient is not None)
    norm.backward()
    shown = {"loss": loss.detach(), "norm": norm.detach()}
    shown |= {
        f"gradient of {name}": parameter.grad.clone() for name, parameter in trained if parameter.grad is not None
    }
    for parameter in world.model.parameters():
        parameter.grad = None
    return shown
