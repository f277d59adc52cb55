"""The checks of int8_table.py in one process: ``python -m tests.world.gpu.int8_checks FOLDER RESULT.json``.

Every check is on its own: an error is a result, kept as is.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemma4_compat  # first, as a user would
from gemma4_compat._lab import tiny, tiny_adapters
from gemma4_compat._lab.workspace import Workspace, difference
from tests.world.gpu.int8_table import short

Found = dict[str, Any]


class Models:
    """Tiny 8-bit models, on one device and offloaded, and what they hold."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.folder = folder
        self.workspace = Workspace(folder)
        self.main = self.workspace.main
        self.cuda = torch.cuda.is_available()
        self._references: dict[str | None, Any] = {}

    def load(self, device: Any = None) -> Any:
        return tiny.load(self.workspace.checkpoint, "8bit", device=self.main if device is None else device)

    def dispatch(self, model: Any, offloaded: str, device: Any = None) -> Any:
        for parameter in model.parameters():  # F1's crash on accelerate 1.12/1.13 is not the question here
            vars(parameter).pop("_is_hf_initialized", None)
        main = self.main if device is None else device
        placement = tiny.device_map(model, "both", main=main, offloaded=offloaded)
        return tiny.dispatch(model, placement, Path(tempfile.mkdtemp(dir=self.folder)))

    def split(self, offloaded: str) -> Any:
        return self.dispatch(self.load(), offloaded)

    def with_adapter(self, model: Any, adapter: str | None, **options: Any) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, self.workspace.adapter(adapter), **options) if adapter else model

    def reference(self, adapter: str | None) -> Any:
        if adapter not in self._references:
            self._references[adapter] = self.workspace.outputs(self.with_adapter(self.load(), adapter))
        return self._references[adapter]

    def allocated(self) -> int:
        import torch

        gc.collect()
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def census(self) -> tuple[int, int, int]:
        """Number of tensors, bytes of their storages, bytes allocated on the GPU."""
        import torch

        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        held = {
            (str(tensor.device), tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.device.type != "meta"
        }
        return len(tensors), sum(held.values()), self.allocated()


def eight_bit(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__module__.startswith("bitsandbytes")]  # PEFT has a Linear8bitLt too


def held_by_states(model: Any) -> int:
    """Bytes that states of layers whose weight is on meta keep on the main device."""
    import torch

    return sum(
        tensor.numel() * tensor.element_size()
        for module in eight_bit(model)
        if module.weight.device.type == "meta"
        for tensor in vars(module.state).values()
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
    )


def on_meta(model: Any) -> int:
    return sum(parameter.device.type == "meta" for parameter in model.parameters())


def per_forward(a: Any, b: Any) -> list[float]:
    import torch

    return [(x - y).abs().max().item() if torch.isfinite(y).all() else math.inf for x, y in zip(a.logits, b.logits)]


# Checks


def parity(models: Models, offloaded: str, adapter: str | None, before: bool) -> Found:
    expected = models.reference(adapter)
    model = models.load()
    loaded = models.allocated()
    if before:
        models.workspace.outputs(model)
    used = models.allocated()
    model = models.dispatch(model, offloaded)
    dispatched, kept = models.allocated(), held_by_states(model)
    model = models.with_adapter(model, adapter)
    meta = on_meta(model)
    found = models.workspace.outputs(model)
    after, kept_after = models.allocated(), held_by_states(model)
    worst = difference(expected, found)
    return {
        "parity": worst,
        "per_forward": per_forward(expected, found),
        "on_meta": meta,
        "bytes": {"loaded": loaded, "used": used, "dispatched": dispatched, "answered": after},
        "state_bytes_of_offloaded": {"dispatched": kept, "answered": kept_after},
        "weights_map_device": sorted(
            {
                str(module._hf_hook.weights_map["weight"].device)
                for module in eight_bit(model)
                if getattr(getattr(module, "_hf_hook", None), "offload", False)
            }
        ),
        "short": f"{worst} meta={meta} held={kept}/{kept_after}",
    }


def fifty(models: Models, offloaded: str, adapter: str | None) -> Found:
    import torch

    model = models.with_adapter(models.split(offloaded), adapter)
    batch = tiny.inputs(models.main)
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
        before = models.census()
        for _ in range(50):
            model(**batch)
        after = models.census()
    return {
        "before": before,
        "after": after,
        "state_bytes_of_offloaded": held_by_states(model),
        "short": f"delta={[b - a for a, b in zip(before, after)]} held={held_by_states(model)}",
    }


def training(models: Models, offloaded: str, checkpointing: bool) -> Found:
    import torch

    def step(base: Any) -> tuple[float, dict[str, Any], str]:
        model = models.with_adapter(base, "all", is_trainable=True).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        batch = tiny.inputs(models.main)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        gradients = {name: item.grad.cpu() for name, item in model.named_parameters() if item.grad is not None}
        return loss.item(), gradients, f"{on_meta(model)} held={held_by_states(model)}"

    (a, ga, _), (b, gb, meta) = step(models.load()), step(models.split(offloaded))
    wrong = [name for name in ga if name not in gb or not torch.equal(ga[name], gb[name])]
    return {
        "losses": [a, b],
        "gradients": len(ga),
        "different": wrong,
        "on_meta": meta,
        "short": f"loss {'equal' if a == b else 'DIFFERS'}, {len(wrong)}/{len(ga)} grads differ, meta={meta}",
    }


def base_gradient(models: Models, offloaded: str) -> Found:
    """Without PEFT: the gradient of a norm below offloaded layers."""
    import torch

    gradients = []
    for model in (models.load(), models.split(offloaded)):
        weight = model.model.language_model.layers[1].input_layernorm.weight.requires_grad_(True)
        model(**tiny.inputs(models.main)).logits.float().square().mean().backward()
        gradients.append(weight.grad.cpu())
    equal = bool(torch.equal(*gradients))
    return {"equal": equal, "short": f"equal={equal}"}


def both(models: Models, change: Callable[[Any], Any], offloaded: str) -> Found:
    """The same ``change`` to a model on one device and to an offloaded one."""
    outputs = models.workspace.outputs
    found = difference(outputs(change(models.load())), outputs(change(models.split(offloaded))))
    return {"parity": found, "short": str(found)}


def saved(models: Models, offloaded: str, used: bool) -> Found:
    model = models.split(offloaded)
    if used:
        models.workspace.outputs(model)
    with tempfile.TemporaryDirectory(dir=models.folder) as name:
        model.save_pretrained(name)
        again = type(model).from_pretrained(name, device_map={"": models.main}).eval()
        found = difference(models.reference(None), models.workspace.outputs(again))
    return {"parity": found, "short": str(found)}


def unhooked(models: Models, offloaded: str, used: bool) -> Found:
    from accelerate.hooks import remove_hook_from_submodules

    model = models.split(offloaded)
    if used:
        models.workspace.outputs(model)
    remove_hook_from_submodules(model)
    first = difference(models.reference(None), models.workspace.outputs(model))
    model.to(models.main)
    second = difference(models.reference(None), models.workspace.outputs(model))
    return {"parity": max(first, second), "short": f"{first} {second}"}


def dora(models: Models, model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["language"], use_dora=True))
    batch = tiny.inputs(models.main)
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.05)
    for _ in range(2):
        model.train()(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def threshold(model: Any) -> Any:
    for layer in eight_bit(model):
        layer.state.threshold = 0.5
    return model


def main_is_the_cpu(models: Models) -> Found:
    """A GPU is there, but the model computes on the CPU and offloads to disk: upstream goes through GPU 0."""
    import torch

    batch = tiny.inputs("cpu")
    whole = models.load("cpu")
    split = models.dispatch(models.load("cpu"), "disk", device="cpu")
    peak = 0
    if models.cuda:
        torch.cuda.reset_peak_memory_stats()
        peak = torch.cuda.max_memory_allocated()
    with torch.no_grad():
        pairs = [(whole(**batch).logits.float(), split(**batch).logits.float()) for _ in range(3)]
    found = max((a - b).abs().max().item() for a, b in pairs)
    grown = torch.cuda.max_memory_allocated() - peak if models.cuda else 0
    return {"parity": found, "gpu_bytes_touched": grown, "short": f"{found} gpu bytes touched={grown}"}


def there_and_back(models: Models, used: bool) -> Found:
    """Nothing offloaded: a quantized model moved to the CPU and back (is that upstream's own defect?)."""
    import torch

    model = models.load()
    if used:
        models.workspace.outputs(model)
    model = torch.nn.Module.to(torch.nn.Module.to(model, "cpu"), models.main)
    found = difference(models.reference(None), models.workspace.outputs(model))
    return {"parity": found, "short": str(found)}


def checks(models: Models) -> dict[str, Callable[[], Found]]:
    """Every check by name, in the order of the table."""
    offloads = ("cpu", "disk") if models.cuda else ("disk",)
    outputs, reference = models.workspace.outputs, models.reference
    table: dict[str, Callable[[], Found]] = {
        "one device twice": lambda: {"short": str(difference(reference(None), outputs(models.load())))}
    }
    for to, adapter, before in itertools.product(offloads, (None, "all"), (False, True)):
        name = f"parity {to} adapter={adapter} forward-before={before}"
        table[name] = lambda to=to, adapter=adapter, before=before: parity(models, to, adapter, before)
    for to in offloads:
        for adapter in (None, "all"):
            table[f"50 forwards {to} adapter={adapter}"] = lambda to=to, adapter=adapter: fifty(models, to, adapter)
        table[f"gradient through the base {to}"] = lambda to=to: base_gradient(models, to)
        for flag in (False, True):
            table[f"training step {to} checkpointing={flag}"] = lambda to=to, flag=flag: training(models, to, flag)
        for used in (False, True):
            table[f"save_pretrained and reload {to} used={used}"] = lambda to=to, used=used: saved(models, to, used)
            name = f"remove_hook_from_submodules, .to {to} used={used}"
            table[name] = lambda to=to, used=used: unhooked(models, to, used)
        for what, change in (
            ("deepcopy", copy.deepcopy),
            ("merge_and_unload", lambda model: models.with_adapter(model, "all").merge_and_unload()),
            ("DoRA, two steps", lambda model: dora(models, model)),
            ("threshold 0.5 (outliers)", threshold),
        ):
            table[f"{what} {to}"] = lambda to=to, change=change: both(models, change, to)
    table["main device cpu, disk"] = lambda: main_is_the_cpu(models)
    for used in (False, True):
        table[f"no offload: .to(cpu).to(main) used={used}"] = lambda used=used: there_and_back(models, used)
    return table


def outcome(check: Callable[[], Found]) -> Found:
    started = time.perf_counter()
    try:
        found = check()
    except Exception as error:  # noqa: BLE001  (the user's crash is the result)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found = {
            "error": f"{type(error).__name__}: {error}",
            "at": f"{frame.filename}:{frame.lineno}",
            "traceback": traceback.format_exc()[-3000:],
        }
    return {**found, "seconds": round(time.perf_counter() - started, 2)}


def main(folder: Path, out: Path) -> None:
    import accelerate
    import bitsandbytes
    import peft
    import torch
    import transformers

    models = Models(folder)
    results: dict[str, Any] = {
        "checks": {},
        "device": torch.cuda.get_device_name(0) if models.cuda else "cpu",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, accelerate, peft, bitsandbytes)},
    }
    for name, check in checks(models).items():
        found = results["checks"][name] = outcome(check)
        gc.collect()
        if models.cuda:
            torch.cuda.empty_cache()
        print(f"  {name}: {short(found)}", flush=True)
        out.write_text(json.dumps(results, indent=1))
    results["patches"] = {name: str(status.state) for name, status in gemma4_compat.status().items()}
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(Path(sys.argv[1]), Path(sys.argv[2]))
