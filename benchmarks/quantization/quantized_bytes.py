"""How many bytes do quantized towers save, and what does it cost to keep the recommended modules in bf16?

python benchmarks/quantization/quantized_bytes.py [--json FILE]

Arithmetic over the parameters of each variant on meta, no weights: what bitsandbytes stores for a linear is known to
the byte (``gemma4_compat._gemma4.quantization.bytes.linear_tensors``; tests compare it with loaded models).
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    result = measured()
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def measured() -> dict[str, Any]:
    from gemma4_compat._gemma4.models import variants

    return {
        "transformers": version("transformers"),
        "variants": {name: variant(name) for name in variants.NAMES},
    }


def variant(name: str) -> dict[str, Any]:
    import gemma4_compat
    from gemma4_compat._gemma4.models import build
    from gemma4_compat._gemma4.quantization import config

    model, _, _ = build.on_meta(name)
    linears = config.linear_names(model, ["lm_head"])
    towers = {}
    for path in ("model.vision_tower", "model.audio_tower"):
        if any(linear.startswith(f"{path}.") for linear in linears):
            towers[path] = {"bf16": stored(model, path, frozenset(), "4bit")} | {
                quantization: stored(model, path, linears, quantization) for quantization in config.QUANTIZATIONS
            }
    keep = gemma4_compat.quantization_skip_modules(name)
    return {
        "towers": towers,
        "keep": {
            path: {"modules": module.modules, "parameters": module.parameters, "cost": module.cost}
            for path, module in keep.items()
        },
    }


def stored(model: Any, path: str, linears: frozenset[str], quantization: str) -> int:
    """Bytes of the parameters below ``path`` when these linears are quantized and the rest is bf16."""
    from gemma4_compat._gemma4.quantization.bytes import linear_tensors

    total = 0
    for name, module in model.get_submodule(path).named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if own == "weight" and f"{path}.{name}" in linears:
                total += sum(linear_tensors(*parameter.shape, quantization))
            else:
                total += 2 * parameter.numel()
    return total


if __name__ == "__main__":
    sys.exit(main())
