"""Operations on the model's tensors: saving, reading back, state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.generated.search.sequences_bench import World


def save(world: World) -> dict[str, Any]:
    folder = world.new_folder("saved")
    world.model.save_pretrained(folder)
    return _tensors(folder)


def reload(world: World) -> dict[str, Any]:
    """Saved, and loaded again in the way the sequence loads models."""
    from peft import PeftModel

    folder = world.new_folder("saved")
    world.model.save_pretrained(folder)
    if world.is_peft:
        base = world.bench.load(world.case, world.new_folder("offload"), split=world.split)
        if (folder / "adapter_config.json").exists():
            world.model = PeftModel.from_pretrained(base, folder).eval()
        else:  # PEFT puts adapters of other names into folders of theirs
            names = sorted(path.name for path in folder.iterdir() if (path / "adapter_config.json").exists())
            world.model = PeftModel.from_pretrained(base, folder / names[0], adapter_name=names[0]).eval()
            for name in names[1:]:
                world.model.load_adapter(str(folder / name), adapter_name=name)
    elif (folder / "adapter_config.json").exists():
        world.model = world.bench.load(world.case, world.new_folder("offload"), split=world.split)
        world.model.load_adapter(str(folder), adapter_name="a")
    else:
        world.model = world.bench.load(world.case, world.new_folder("offload"), split=world.split, checkpoint=folder)
    world.placement = world.case.placement
    return _tensors(folder)


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    assert files, "nothing was saved"
    # transformers 5.6, once the adapter of model.load_adapter is deleted: "base_model.", or "base_base_model."
    names = [name for file in folder.glob("model*.safetensors") for name in load_file(file)]
    assert not any("base_model" in name.split(".")[0] for name in names), "saved under an adapter's names"
    return {f"{file.parent.name if file.parent != folder else ''} {name}".strip(): tensor
            for file in files for name, tensor in load_file(file).items()}  # fmt: skip


def state_dict(world: World, saved: bool) -> dict[str, Any]:
    """What is not offloaded; a split model's other tensors are on meta, upstream too."""
    import torch

    state = world.model.state_dict()
    if saved:
        file = world.new_folder("state") / "state.pt"
        torch.save(state, file)
        state = torch.load(file, weights_only=False)
    return {f"state {name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}


def load_state_dict(world: World, what: str, assign: bool) -> dict[str, Any]:
    """Other weights, by the names that ``state_dict`` has, of another checkpoint as it were."""
    import torch

    ends = {"all": ("",), "embedding": ("embed_tokens.weight", "lm_head.weight"), "layers": ("layernorm.weight",)}[
        what
    ]
    new = {}
    for name, value in world.model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and name.endswith(ends):
            number = 0 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else sum(map(ord, name))
            generator = torch.Generator().manual_seed(number)
            new[name] = (0.1 * torch.randn(value.shape, generator=generator)).to(torch.bfloat16)
    if not new:
        return {}
    found = world.model.load_state_dict(new, strict=False, assign=assign)
    return {"unexpected": sorted(found.unexpected_keys)}
