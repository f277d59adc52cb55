"""The forum thread's matrix, case by case, in E2B's shape: ``python -m tests.world.gpu.thread_cases FOLDER KIND``.

All cases of a kind of quantization run in one process, and an error ends its own case only. Prints one line of JSON:
what each gave. Answers that shall be the same with the shim and without (GEMMA4_COMPAT_DISABLE=all) are kept in
FOLDER, see :func:`kept`. What is done so far stands in FOLDER, too, for runs that are cut off.

The names are the thread's: R05 is everything on the GPU, R03 the towers on the CPU.
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (first, as a user would)

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._lab.scenarios import relative
from gemma4_compat._lab.workspace import Outputs, difference
from tests.world.gpu.scenarios import GIB, TOWERS, all_on_the_host, base, collect, outputs

SPLIT = {**dict.fromkeys(TOWERS, "cpu"), "": 0}
QUANTIZATIONS = {"single": False, "double": True}
#: GiB that a ballast tensor leaves free on the card when the adapter is loaded.
FREE = {"single": (12, 6, 3), "double": (8, 4)}
BUDGET = "4.5GiB"


#: Before transformers 5.13 it has full attention computed by another kernel, as 5.13 does: outputs differ by rounding.
WIDE_HEADS = "transformers-wide-heads"


def by_upstreams_kernel(model: Any) -> Outputs:
    """What it says where attention is computed as without the shim."""
    if gemma4_compat.status()[WIDE_HEADS].state != "applied":
        return outputs(model)
    gemma4_compat.revert(WIDE_HEADS)
    try:
        return outputs(model)
    finally:
        gemma4_compat.install()


def rounding(seen: Outputs, other: Outputs) -> float:
    """The largest difference of two kernels' logits, of the largest logit."""
    largest = max(one.abs().max().item() for one in seen.logits[:1])
    return max((a - b).abs().max().item() for a, b in zip(seen.logits, other.logits, strict=True)) / largest


def side() -> str:
    """Which of the two processes this is."""
    return "without" if os.environ.get("GEMMA4_COMPAT_DISABLE") == "all" else "with"


def kept(folder: Path, name: str, which: str) -> Path:
    """Where the answers of a case are, of the process ``which`` (:func:`side`)."""
    return folder / f"{name}, {which}.pt"


class Cases:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[str, Outputs] = {}

    def all(self, kind: str) -> dict[str, Callable[[], dict[str, Any]]]:
        found: dict[str, Callable[[], dict[str, Any]]] = {}
        found[f"R05 all on the GPU, {kind}"] = functools.partial(self.all_gpu, kind)
        for free in FREE[kind]:
            found[f"R03 split, {kind}, {free} GiB free"] = functools.partial(self.split, kind, free=free)
        found[f"R03 split, {kind}, device_map passed to PEFT"] = functools.partial(self.split, kind, again=True)
        found[f"max_memory={BUDGET}, {kind}"] = functools.partial(self.max_memory, kind)
        if kind == "double":
            found["towers quantized, two images"] = self.towers_quantized
            found["dequantize, then merge"] = self.dequantize_and_merge
            found["direct merge"] = self.direct_merge
        return found

    def load(self, kind: str, placement: Any, **kwargs: Any) -> Any:
        return base(self.folder, placement, quantization={"bnb_4bit_use_double_quant": QUANTIZATIONS[kind]}, **kwargs)

    def adapted(self, model: Any, **kwargs: Any) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, self.folder / "adapter", **kwargs)

    def all_gpu(self, kind: str) -> dict[str, Any]:
        """The reference of all others; the shim must not change it."""
        import torch

        model = self.adapted(self.load(kind, {"": 0}))
        self._references[kind] = seen = outputs(model)
        gib = torch.cuda.memory_allocated() / GIB
        same = by_upstreams_kernel(model)
        torch.save(same, kept(self.folder, f"R05 all on the GPU, {kind}", side()))
        return {"gib": gib, "kernel": rounding(seen, same)}

    def split(self, kind: str, *, free: float | None = None, again: bool = False) -> dict[str, Any]:
        import torch

        model = self.load(kind, SPLIT)
        result: dict[str, Any] = {"base_gib": torch.cuda.memory_allocated() / GIB}
        with ballast(free) as held:
            started = time.perf_counter()
            adapted = self.adapted(model, **({"device_map": SPLIT} if again else {}))
            torch.cuda.synchronize()
            result["adapter_load_s"] = time.perf_counter() - started
            result["adapter_gib"] = torch.cuda.memory_allocated() / GIB - held
            result["towers_on"] = towers_on(adapted)
            seen = outputs(adapted)
            result["resident_gib"] = torch.cuda.memory_allocated() / GIB - held
            result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB - held
        return result | {"parity": difference(self._references[kind], seen)}

    def max_memory(self, kind: str) -> dict[str, Any]:
        """Less than the model needs; the largest tensor of the unpatched stack's layout would fit."""
        import torch

        model = self.load(kind, "auto", max_memory={0: BUDGET, "cpu": "60GiB"})
        if all_on_the_host(model):
            return {"all_on_the_host": True}
        offloaded = sorted(name for name, device in model.hf_device_map.items() if device == "cpu")
        seen = outputs(self.adapted(model))
        peak = torch.cuda.max_memory_allocated() / GIB
        return {"offloaded": offloaded, "peak_gib": peak, "parity": difference(self._references[kind], seen)}

    def towers_quantized(self) -> dict[str, Any]:
        import torch

        whole = self.load("double", {"": 0})
        separate = torch.cuda.memory_allocated() / GIB
        plain = [features(whole, image) for image in (0, 1)]
        del whole
        collect()
        model = base(self.folder, {"": 0}, quantization={"llm_int8_skip_modules": ["lm_head"]})
        found = [features(model, image) for image in (0, 1)]
        return {
            "towers_in_bf16_gib": separate,
            "gib": torch.cuda.memory_allocated() / GIB,
            "off_bf16_by": relative(found[0], plain[0]),
            "images_differ_by": relative(found[1], found[0]),
            "images_differ_by_in_bf16": relative(plain[1], plain[0]),
        }

    def dequantize_and_merge(self) -> dict[str, Any]:
        """Against the adapter loaded onto, and merged into, a base that was dequantized first."""
        model = self.load("double", {"": 0})
        model.dequantize()
        reference = outputs(self.adapted(model).merge_and_unload())
        del model
        collect()
        adapted = self.adapted(self.load("double", {"": 0}))
        adapted.dequantize()
        return {"parity": difference(reference, outputs(adapted.merge_and_unload()))}

    def direct_merge(self) -> dict[str, Any]:
        """Upstream's bits, and what they cost: `distance` from the adapter, whose effect is `effect`."""
        import torch

        plain = outputs(self.load("double", {"": 0}))
        collect()
        adapted = self.adapted(self.load("double", {"": 0}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            merged = adapted.merge_and_unload()
        seen = outputs(merged)
        torch.save(by_upstreams_kernel(merged), kept(self.folder, "direct merge", side()))
        said = [str(item.message) for item in caught if "merge" in str(item.message).lower()]
        loaded = self._references["double"]
        return {
            "effect": (loaded.logits[0] - plain.logits[0]).abs().max().item(),
            "distance": (loaded.logits[0] - seen.logits[0]).abs().max().item(),
            "warnings": len(said),
            "last_warning": said[-1] if said else None,
        }


class ballast:  # noqa: N801  (used like a function)
    """Inside, a tensor leaves ``free`` GiB of the card; gives its size in GiB."""

    def __init__(self, free: float | None) -> None:
        self.free, self.tensor = free, None

    def __enter__(self) -> float:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if self.free is None:
            return 0.0
        size = max(0, int(torch.cuda.mem_get_info()[0] - self.free * GIB))
        self.tensor = torch.empty(size, dtype=torch.uint8, device=0)
        return size / GIB

    def __exit__(self, *_: object) -> None:
        self.tensor = None


def towers_on(model: Any) -> list[str]:
    """Where the towers' own weights are between forwards: "meta" for on the host, brought in for a forward."""
    towers = [tower.split(".")[1] for tower in TOWERS]
    return sorted(
        {
            parameter.device.type
            for name, parameter in model.named_parameters()
            if any(tower in name for tower in towers) and "lora_" not in name
        }
    )


def features(model: Any, image: int) -> Any:
    """What the language model gets of one of two random images, float32."""
    import torch

    side = torch.arange(12)
    positions = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, 144, 2).to(0)
    pixels = torch.rand(1, 144, 3 * 16 * 16, generator=torch.Generator().manual_seed(image)).to(0)
    with torch.no_grad():
        found = model.get_image_features(pixels, positions).pooler_output
    return (found[0] if isinstance(found, (list, tuple)) else found).float().cpu()


def main(folder: Path, kind: str) -> int:
    results: dict[str, Any] = {}
    for name, case in Cases(folder).all(kind).items():
        try:
            results[name] = {"error": None, **case()}
        except Exception as error:  # noqa: BLE001  (the user's crash is the result)
            results[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        collect()
        (folder / f"cases, {kind}, {side()}.json").write_text(json.dumps(results), encoding="utf-8")
    patches = {patch_id: str(status.state) for patch_id, status in gemma4_compat.status().items()}
    print("\n" + json.dumps({"cases": results, "patches": patches}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
