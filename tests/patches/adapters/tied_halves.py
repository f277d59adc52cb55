"""Split models with one half of the tied pair of embedding and head, or both, offloaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny

EMBEDDING, HEAD = "model.language_model.embed_tokens", "lm_head"
HALVES = {"embedding": (EMBEDDING,), "head": (HEAD,), "both": (EMBEDDING, HEAD)}
PLACES = ("disk", "ram", "loaded to disk")
LAYERS = r".*language_model\.layers\.[01]\.(self_attn\.q_proj|mlp\.up_proj)"


def split(workspace: Any, place: str, names: tuple[str, ...], quantization: str | None = None) -> Any:
    """The base model with the modules ``names`` offloaded; "ram" is what a GPU's ``"cpu"`` entries are."""
    import torch
    from accelerate import dispatch_model

    folder = tempfile.mkdtemp(prefix="offload-", dir=workspace.folder)
    main, offloaded = (torch.device("cpu"), "cpu") if place == "ram" else ("cpu", "disk")
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "none", main=main, offloaded=offloaded) | dict.fromkeys(names, offloaded)
    if place == "loaded to disk":
        return tiny.load(workspace.checkpoint, quantization, device_map=placement, offload_folder=folder)
    if place == "disk":
        return tiny.dispatch(model, placement, Path(folder))
    skip = tiny.skip_keys(model)
    return dispatch_model(model, placement, main_device=main, skip_keys=skip)


def logits(workspace: Any, model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**workspace.inputs(text_only=True)).logits.clone()


def perturbed(model: Any, seed: int = 1) -> Any:
    """``model``, a PEFT one, with other values in its adapter."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def trained(workspace: Any, model: Any, steps: int = 2) -> list[Any]:
    """The losses of ``steps`` steps of training ``model``, which is in eval mode afterwards."""
    import torch

    batch = workspace.inputs(text_only=True)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    return losses


def saved(workspace: Any, model: Any) -> dict[str, Any]:
    """What ``save_pretrained`` writes, by name."""
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(prefix="saved-", dir=workspace.folder))
    model.save_pretrained(folder)
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(first: Any, second: Any) -> bool:
    """Whether two results (tensors, or lists and dicts of them) are equal, bit by bit."""
    import torch

    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second)
