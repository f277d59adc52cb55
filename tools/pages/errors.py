"""What a user sees and which patch repairs it: the README's table, and what both it and docs/PATCHES.md say."""

from __future__ import annotations

import re

import gemma4_compat

#: In the README: what people meet first, in this order, and what they see where a symptom begins with something else.
COMMON = (
    ("accelerate-hf-initialized", None),
    ("peft-clippable-linear", None),
    ("transformers-shared-kv", "`KeyError: 13` or `'sliding_attention'` in attention"),
    ("bitsandbytes-meta-quant-state", None),
    ("transformers-model-device", None),
    ("accelerate-train-offloaded", None),
    ("peft-keep-dispatch", "loading an adapter moves offloaded towers back to the GPU"),
    ("transformers-auto-map", '`device_map="auto"` on a small card raises an error or puts everything on the CPU'),
    ("peft-adapter-keys", "an adapter loads but changes nothing"),
    ("peft-quantized-merge", "merging into a 4-bit model loses part of the adapter"),
    ("transformers-text-only-checkpoint", "`Gemma4ForCausalLM` generates gibberish: no weights were loaded"),
    ("transformers-quantized-vision", "a quantized model sees grey shapes in every image"),
    ("transformers-reentrant-checkpointing", "a QLoRA loss looks right, but its gradients are wrong"),
    ("accelerate-paged-layers", "offloaded layers decode slowly"),
)

#: Areas in the order of the page, and what their heading says.
AREAS = {
    "placement": "Device maps",
    "offload": "Modules on the CPU or on disk",
    "quantization": "4-bit and 8-bit weights",
    "adapters": "Adapters",
    "training": "Training",
    "generation": "Generation and caches",
    "multimodal": "Images and audio",
    "checkpoints": "Loading and saving checkpoints",
}


def seen(patch: gemma4_compat.Patch) -> str:
    """The error's text as code, or what is silently wrong."""
    symptom = patch.first_symptom.rstrip(".")
    if symptom.startswith("silent: "):
        return markdown(symptom.removeprefix("silent: "))
    code = re.match(r"``(.*?)`?``(?=[^`]|$)", symptom)
    return markdown(code.group() if code else symptom)


def markdown(text: str) -> str:
    """``text`` of a docstring in a cell of a table."""
    return text.replace("|", "\\|")


def common() -> str:
    """The README's table."""
    known = {patch.id: patch for patch in gemma4_compat.patches()}
    rows = ["| you see | repaired by |", "|---|---|"]
    for name, said in COMMON:
        rows.append(f"| {said or seen(known[name])} | [`{name}`](docs/patches/{known[name].area}.md#{name}) |")
    return "\n".join(rows)
