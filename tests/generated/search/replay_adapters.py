"""What changes the adapters of a model between two calls of ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.generated.search import replay_tuners
from tests.generated.search.replay_world import ReplayWorld


def new_adapter(world: ReplayWorld, adapter: str, tuner: str, seed: int) -> None:
    import torch
    from peft import get_peft_model

    config = replay_tuners.config(tuner)
    torch.manual_seed(seed)
    if world.is_peft:
        world.model.add_adapter(adapter, config)
        world.model.set_adapter(adapter)
    else:
        world.model = get_peft_model(world.model, config, adapter_name=adapter)
    replay_tuners.drawn(world.model, seed)


def transformers_adapter(world: ReplayWorld, adapter: str, seed: int) -> None:
    """By transformers' own ``add_adapter``."""
    world.base.add_adapter(replay_tuners.config("lora"), adapter_name=adapter)
    replay_tuners.drawn(world.base, seed)


def set_adapter(world: ReplayWorld, adapters: tuple[str, ...]) -> None:
    if len(adapters) == 1:
        world.model.set_adapter(adapters[0])
    else:
        world.model.base_model.set_adapter(list(adapters))


def disable_layers(world: ReplayWorld) -> None:
    world.model.base_model.disable_adapter_layers() if world.is_peft else world.base.disable_adapters()


def enable_layers(world: ReplayWorld) -> None:
    world.model.base_model.enable_adapter_layers() if world.is_peft else world.base.enable_adapters()


def disable_one(world: ReplayWorld, number: int, enabled: bool) -> None:
    """Of one layer of PEFT's only."""
    found = _adapted(world)
    found[number % len(found)].enable_adapters(enabled)


def merge_adapter(world: ReplayWorld, safe: bool) -> None:
    world.model.merge_adapter(safe_merge=safe)


def unmerge_adapter(world: ReplayWorld) -> None:
    world.model.unmerge_adapter()


def merge_one(world: ReplayWorld, number: int) -> None:
    """One layer of PEFT's only; or take it out again."""
    found = _adapted(world)
    layer = found[number % len(found)]
    layer.unmerge() if layer.merged else layer.merge()


def add_weighted_adapter(world: ReplayWorld, adapters: tuple[str, ...], combination: str) -> None:
    world.model.add_weighted_adapter(list(adapters), [0.7, 0.6], "sum", combination_type=combination)
    world.model.set_adapter("sum")


def delete_adapter(world: ReplayWorld, adapter: str) -> None:
    world.model.delete_adapter(adapter)


def set_scale(world: ReplayWorld, adapter: str, by: str) -> None:
    for layer in _adapted(world):
        if by == "set":
            layer.set_scale(adapter, 2.5)
        elif by == "scale":
            layer.scale_layer(0.5)
        elif by == "unscale":
            layer.unscale_layer()
        else:
            layer.scaling[adapter] = 3.0


def change_adapter(world: ReplayWorld, seed: int, by: str) -> None:
    """Its weights: in place, or others in their place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for module in _adapted(world):
        for parameter in (parameter for name, parameter in module.named_parameters() if "base_layer" not in name):
            noise = (0.2 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
            if by == "in place":
                parameter.data.add_(noise)
            else:
                parameter.data = parameter.data + noise


def save_adapter(world: ReplayWorld) -> None:
    folder = world.new_folder("adapter")
    world.model.save_pretrained(folder)
    names = [path.parent for path in folder.rglob("adapter_config.json")]
    world.saved += [str(path) for path in sorted(names)]


def load_adapter(world: ReplayWorld, adapter: str, number: int) -> None:
    world.model.load_adapter(world.saved[number % len(world.saved)], adapter_name=adapter)
    world.model.set_adapter(adapter)
    world.model.eval()


def hotswap(world: ReplayWorld, adapter: str, number: int) -> None:
    from peft.utils.hotswap import hotswap_adapter

    hotswap_adapter(world.model, world.saved[number % len(world.saved)], adapter_name=adapter)


def merge_and_unload(world: ReplayWorld) -> None:
    world.model = world.model.merge_and_unload()


def unload(world: ReplayWorld) -> None:
    world.model = world.model.unload()


def train(world: ReplayWorld, seed: int, optimizer: str = "sgd") -> None:
    """A step of training. Fused steps leave the versions of weights as they were."""
    import torch

    ids = torch.randint(3, 120, (1, 6), generator=torch.Generator().manual_seed(seed))
    weights = [parameter for parameter in world.model.parameters() if parameter.requires_grad]
    world.model.train()
    try:
        world.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        optimizers: dict[str, Callable[[], Any]] = {
            "sgd": lambda: torch.optim.SGD(weights, lr=0.5),
            "sgd fused": lambda: torch.optim.SGD(weights, lr=0.5, fused=True),
            "adamw fused": lambda: torch.optim.AdamW(weights, lr=0.1, fused=True),
            "adamw foreach": lambda: torch.optim.AdamW(weights, lr=0.1, foreach=True),
        }
        optimizers[optimizer]().step()
    finally:
        world.model.eval()
        world.model.zero_grad()


def _adapted(world: ReplayWorld) -> list[Any]:
    """The layers of PEFT's."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = [module for module in world.base.modules() if isinstance(module, BaseTunerLayer)]
    if not found:
        raise ValueError("no layer has an adapter")
    return found
