"""Which families of transformers have Gemma 4's parts, which patches act on them, and what quantizing them gives.

python -m tools.relatives            print it, from the installed transformers
python -m tools.relatives --write    into docs/evidence/relatives.json, for docs/RELATIVES.md

The parts are looked up in the families' source. Sizes are those of models without weights, on meta.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "evidence" / "relatives.json"
#: Part -> what is in the source of a family that has it.
PARTS = {
    "wide heads": r"global_head_dim",
    "shared keys": r"num_kv_shared_layers",
    "per-layer inputs": r"hidden_size_per_layer_input",
    "Gemma 4's towers": r"model_type=\"gemma4_(vision|audio)\"",
    "clipped linears": r"class \w*ClippableLinear\b",
    "tied layers": r"_tied_weights_keys(?: = \{[^}]*layers\\?\.|\.update\(\{prefix)",
    "packed experts": r"self\.gate_up_proj = nn\.Parameter\(",
}
#: A part that many families have, which alone makes no row.
COMMON = "packed experts"
#: Families that are older, for comparison.
OLDER = ("gemma3", "gemma3n")
GATES = ("every model", "Gemma 4's parts", "Gemma 4")


def survey() -> dict[str, dict[str, Any]]:
    """Every family with one of the parts: which, and whether the gate takes its configuration."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    found = {}
    for folder in sorted((Path(spec.origin).parent / "models").iterdir()):
        files = [*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")]
        source = "\n".join(file.read_text(encoding="utf-8") for file in files)
        parts = [part for part, pattern in PARTS.items() if re.search(pattern, source)]
        found[folder.name] = {"parts": parts}
    rows = {name: row for name, row in found.items() if {*row["parts"]} - {COMMON} or name in OLDER}
    for name, row in rows.items():
        row["gate"] = gate(name)
    return rows | {"": {"experts": sum(COMMON in row["parts"] for row in found.values())}}


def gate(name: str) -> str:
    """Which of :data:`GATES` takes a family's configuration."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from gemma4_compat._gemma4.models import family

    if name not in CONFIG_MAPPING:
        return "every model"
    try:
        config = CONFIG_MAPPING[name]()
    except (StrictDataclassError, TypeError, ValueError):  # it has no defaults
        return "Gemma 4" if name.startswith("gemma4") else "every model"
    if family.is_gemma4_config(config):
        return "Gemma 4"
    return "Gemma 4's parts" if family.has_parts_config(config) else "every model"


def gates() -> dict[str, list[str]]:
    """The patches by what they act on, by the text of their files."""
    from gemma4_compat.patches import registry

    found: dict[str, list[str]] = {kind: [] for kind in GATES}
    for file in sorted((ROOT / "gemma4_compat" / "patches").glob("*/[!_]*.py")):
        text = file.read_text(encoding="utf-8")
        patch = registry.complete(f"{file.parent.name}.{file.stem}")
        kind = "every model" if patch.acts_on.value == "every model" else "Gemma 4"
        if re.search(r"\bhas_parts|MODELING_DIFFUSION", text):
            kind = "Gemma 4's parts"
        found[kind].append(patch.id)
    return found


def diffusion_config() -> Any:
    """A DiffusionGemma with the shape of the 26B-A4B, which its checkpoint is named after."""
    import transformers

    from gemma4_compat._gemma4.models import variants

    shape = variants.shape("26B-A4B")
    fields = transformers.DiffusionGemmaTextConfig().to_dict().keys() | {
        "global_head_dim",
        "num_global_key_value_heads",
    }
    text = {name: value for name, value in shape["text"].items() if name in fields} | {
        "layer_types": shape["layer_types"],
        "num_hidden_layers": len(shape["layer_types"]),
    }
    return transformers.DiffusionGemmaConfig(
        text_config=transformers.DiffusionGemmaTextConfig(**text),
        vision_config=transformers.Gemma4VisionConfig(**shape["vision"]),
    )


def embedding_config() -> Any:
    """An EmbeddingGemma 2 as transformers' defaults have it."""
    import transformers

    return transformers.EmbeddingGemma2Config(
        text_config=transformers.EmbeddingGemma2TextConfig(),
        vision_config=transformers.Gemma4VisionConfig(),
        audio_config=transformers.Gemma4AudioConfig(),
    )


def sizes() -> dict[str, dict[str, Any]]:
    """Bytes of each model in bf16 and in 4 bits (nf4), and its linears: by upstream's list, and by ours."""
    import torch
    import transformers
    from transformers.quantizers.base import HfQuantizer

    from gemma4_compat._gemma4.quantization import config

    found = {}
    for name, build in (
        ("DiffusionGemmaForBlockDiffusion", diffusion_config),
        ("EmbeddingGemma2Model", embedding_config),
        ("ZambaForCausalLM", transformers.ZambaConfig),
        ("Zamba2ForCausalLM", transformers.Zamba2Config),
    ):
        with torch.device("meta"):
            model = getattr(transformers, name)._from_config(build(), dtype=torch.bfloat16)
        upstream = HfQuantizer.get_modules_to_not_convert(model)
        tied = {key.removesuffix(".weight") for pair in config.tied_layers(model).items() for key in pair}
        ours = {*upstream} - tied | {"router.proj"}
        every = config.linear_names(model, ())
        found[name] = {
            "bf16": stored(model, frozenset()),
            "upstream": stored(model, config.linear_names(model, upstream)),
            "ours": stored(model, config.linear_names(model, ours)),
            "experts": stored(model, config.linear_names(model, ours), experts=True),
            "text linears": counted(every),
            "text linears upstream": counted(config.linear_names(model, upstream)),
            "text linears ours": counted(config.linear_names(model, ours)),
        }
    return found


def counted(names: frozenset[str]) -> int:
    return sum("layers." in name and "tower" not in name for name in names)


def stored(model: Any, names: frozenset[str], *, experts: bool = False) -> int:
    """Bytes of a model on meta with these linears, and its experts, in 4 bits; shared weights count once."""
    from gemma4_compat._gemma4.quantization.bytes import linear_tensors
    from gemma4_compat._gemma4.quantization.experts import NAMES, is_experts

    total, seen = 0, set()
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is None or id(weight) in seen:
                continue
            seen.add(id(weight))
            if path in names and name == "weight":
                total += sum(linear_tensors(*weight.shape, "4bit"))
            elif experts and is_experts(module) and name in NAMES:
                total += weight.shape[0] * sum(linear_tensors(*weight.shape[1:], "4bit")[:2])
            else:
                total += weight.numel() * weight.element_size()
    return total


def measured() -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "torch", "bitsandbytes")},
        "families": survey(),
        "sizes": sizes(),
    }


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def families_section() -> str:
    """The table of families."""
    found = read()
    parts = [part for part in PARTS if part != COMMON] + [COMMON]
    lines = [f"| | {' | '.join(parts)} | takes the patches for |", f"|---|{'---|' * len(parts)}---|"]
    for name, row in found["families"].items():
        if name:
            marks = " | ".join("yes" if part in row["parts"] else "" for part in parts)
            lines.append(f"| `{name}` | {marks} | {row['gate']} |")
    release, others = found["versions"]["transformers"], found["families"][""]["experts"]
    return "\n".join(
        [*lines, "", f"transformers {release} (`python -m tools.relatives`); {others} families pack experts."]
    )


def sizes_section() -> str:
    """The table of sizes."""
    lines = [
        "| | bf16 | `load_in_4bit` by upstream | with the shim | and `quantize(experts=True)` |",
        "|---|---|---|---|---|",
    ]
    for name, row in read()["sizes"].items():
        sizes = [
            f"{row[key] / 1e9:.{1 if row['bf16'] > 1e10 else 2}f} GB"
            for key in ("bf16", "upstream", "ours", "experts")
        ]
        if row["experts"] == row["ours"]:
            sizes[-1] = "no experts"
        lines.append(f"| `{name}` | {' | '.join(sizes)} |")
    row = read()["sizes"]["DiffusionGemmaForBlockDiffusion"]
    said = (
        f"The layers of the DiffusionGemma's encoder and decoder have {row['text linears']} linears. Upstream "
        f"quantizes {row['text linears upstream']} of them, the shim {row['text linears ours']}: all but routers."
    )
    return "\n".join([*lines, "", said])


def gates_section() -> str:
    """How many patches act on what, and those for Gemma 4's parts by name."""
    found = gates()
    said = ", ".join(f"{kind} {len(found[kind])}" for kind in GATES)
    names = ", ".join(f"`{name}`" for name in found[GATES[1]])
    return f"How many patches act on what: {said}. Those for Gemma 4's parts: {names}."


SECTIONS: dict[str, Callable[[], str]] = {
    "families": families_section,
    "sizes": sizes_section,
    "gates": gates_section,
}


def main() -> int:
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(measured() | {"gates": gates()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
