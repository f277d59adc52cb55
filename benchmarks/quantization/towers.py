"""How far are the features of quantized vision and audio towers from bf16, and what does quantizing them save?

python benchmarks/quantization/towers.py [--variant E2B|E4B|26B-A4B|31B] [--json FILE]

Towers in the real shape with random weights (the language model is cut down: features do not pass through it). Each
quantization is compared with bf16, and with its own weights dequantized: the first is what quantization costs, the
second what the kernels add. Two images and two sounds show that they are told apart. With the shim, and without it in
a process of its own. Figures are relative differences of features (2-norms), and bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


LIBRARIES = ("torch", "transformers", "bitsandbytes")
VARIANTS = ("E2B", "E4B", "26B-A4B", "31B", "tiny")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="E2B")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("\n" + json.dumps(measure(arguments.child)))
        return 0
    with tempfile.TemporaryDirectory(prefix="towers-") as folder:
        build(arguments.variant, Path(folder))
        result = {
            "variant": arguments.variant,
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in LIBRARIES},
            "with": child(Path(folder), ""),
            "without": child(Path(folder), "all"),
        }
    show(result)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if good(result) else 1


def build(variant: str, folder: Path) -> None:
    import torch
    from transformers import Gemma4ForConditionalGeneration

    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_configs

    if variant == "tiny":
        config = tiny_configs.config(positions=64)
    else:
        config = variants.config(variant)
        text = {**tiny_configs.text_shape(3), "hidden_size": config.text_config.hidden_size, "num_kv_shared_layers": 0}
        config.text_config = type(config.text_config)(**text, hidden_size_per_layer_input=0)
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Gemma4ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def child(folder: Path, disabled: str) -> dict[str, Any]:
    environment = dict(os.environ, GEMMA4_COMPAT_DISABLE=disabled, HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0 or not last.startswith("{"):
        raise SystemExit(f"the child ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(last)
    return found


def measure(folder: Path) -> dict[str, Any]:
    import gemma4_compat  # noqa: F401  before the libraries; the environment decides what it does
    from gemma4_compat._gemma4.quantization.bytes import stored_bytes_of
    from gemma4_compat._gemma4.quantization.config import QUANTIZATIONS
    from gemma4_compat._lab import tiny

    plain = tiny.load(folder)
    vision = plain.config.vision_config
    inputs = {"vision": images(vision)}
    if plain.config.audio_config is not None:
        inputs["audio"] = sounds()
    reference = {
        modality: [features(plain, batch, modality) for batch in batches] for modality, batches in inputs.items()
    }
    found: dict[str, Any] = {"bf16": {}}
    for modality, (first, second) in reference.items():
        found["bf16"][modality] = {
            "contrast": relative(second, first),
            "bytes": stored_bytes_of(tower(plain, modality)),
        }
    del plain
    for quantization in QUANTIZATIONS:
        found[quantization] = {}
        model = tiny.load(folder, quantization, towers=True)
        nbytes = {modality: stored_bytes_of(tower(model, modality)) for modality in inputs}
        own = {modality: outcome(model, batches, modality) for modality, batches in inputs.items()}
        del model
        model = tiny.dequantize(tiny.load(folder, quantization, towers=True))
        for modality, batches in inputs.items():
            if isinstance(own[modality], str):
                found[quantization][modality] = {"error": own[modality], "bytes": nbytes[modality]}
                continue
            same = [features(model, batch, modality) for batch in batches]
            pairs = list(zip(own[modality], reference[modality], same))
            found[quantization][modality] = {
                "against_bf16": max(relative(mine, best) for mine, best, _ in pairs),
                "dequantized_against_bf16": max(relative(other, best) for _, best, other in pairs),
                "against_dequantized": max(relative(mine, other) for mine, _, other in pairs),
                "contrast": relative(own[modality][1], own[modality][0]),
                "bytes": nbytes[modality],
            }
        del model
    return found


def outcome(model: Any, batches: list[Any], modality: str) -> Any:
    """Features of each batch, or the exception: unpatched upstream raises for some."""
    try:
        return [features(model, batch, modality) for batch in batches]
    except (TypeError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def images(vision: Any) -> list[dict[str, Any]]:
    """Two pictures of smooth noise, each as 42 x 60 patches (12 x 18 for the tiny shape): 280 soft tokens."""
    import torch

    rows, columns = (42, 60) if vision.patch_size == 16 else (12, 18)
    batches = []
    for seed in (1, 2):
        coarse = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        size = (rows * vision.patch_size, columns * vision.patch_size)
        picture = torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1)
        patches = torch.nn.functional.unfold(picture, vision.patch_size, stride=vision.patch_size).transpose(1, 2)
        grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        positions = torch.stack(grid, dim=-1).reshape(1, rows * columns, 2)
        batches.append({"pixel_values": patches, "image_position_ids": positions})
    return batches


def sounds() -> list[dict[str, Any]]:
    """Two random spectrograms of 5 s."""
    import torch

    return [
        {
            "input_features": torch.randn(1, 499, 128, generator=torch.Generator().manual_seed(seed)),
            "input_features_mask": torch.ones(1, 499, dtype=torch.bool),
        }
        for seed in (1, 2)
    ]


def features(model: Any, batch: dict[str, Any], modality: str) -> Any:
    from gemma4_compat._lab import scenarios

    return scenarios.features(model, batch, modality)


def relative(found: Any, reference: Any) -> float:
    from gemma4_compat._lab import scenarios

    return round(scenarios.relative(found, reference), 6)


def tower(model: Any, modality: str) -> Any:
    return getattr(model.model, f"{modality}_tower")


def good(result: dict[str, Any]) -> bool:
    """With the shim nothing raises, and the kernels add less than the quantization does."""
    return all(
        "error" not in entry and entry["against_bf16"] <= 1.5 * entry["dequantized_against_bf16"] + 0.01
        for quantization, entries in result["with"].items()
        if quantization != "bf16"
        for entry in entries.values()
    )


def show(result: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items())
    print(f"{result['variant']}, random weights, CPU; {versions}")
    row = "{:<8} {:<12} {:<8} {:>10} {:>12} {:>10} {:>10} {:>10}"
    print(row.format("modality", "stored", "shim", "to bf16", "weights'", "kernels'", "two files", "MiB"))
    for shim in ("with", "without"):
        for quantization, entries in result[shim].items():
            for modality, entry in entries.items():
                if "error" in entry:
                    print(f"{modality:<8} {quantization:<12} {shim:<8} {entry['error']}")
                    continue
                keys = ("against_bf16", "dequantized_against_bf16", "against_dequantized", "contrast")
                numbers = [f"{entry[key]:.3f}" if key in entry else "" for key in keys]
                print(row.format(modality, quantization, shim, *numbers, f"{entry['bytes'] / 2**20:.0f}"))


if __name__ == "__main__":
    started = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    sys.exit(code)
