"""What a user sees and which patch repairs it: the README's table, and what both it and docs/PATCHES.md say."""

from __future__ import annotations

import re

from packaging.version import Version

import gemma4_compat
from gemma4_compat._doctor.explain import search
from gemma4_compat._engine import versions

#: In the README's table: what people see where a symptom begins with something else.
SAID = {
    "transformers-shared-kv": "`KeyError: 13` or `'sliding_attention'` in attention",
    "peft-keep-dispatch": "loading an adapter moves offloaded towers back to the GPU",
    "transformers-auto-map": '`device_map="auto"` on a small card raises an error or puts everything on the CPU',
    "peft-adapter-keys": "an adapter loads but changes nothing",
    "peft-quantized-merge": "merging into a 4-bit model loses part of the adapter",
    "transformers-text-only-checkpoint": "`Gemma4ForCausalLM` generates gibberish: no weights were loaded",
    "transformers-quantized-vision": "a quantized model sees grey shapes in every image",
    "transformers-reentrant-checkpointing": "a QLoRA loss looks right, but its gradients are wrong",
    "accelerate-paged-layers": "offloaded layers decode slowly",
}

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
#: Areas with two pages, of errors and of what is silent: one would be too long.
TWO_PAGES = ("adapters", "training", "generation")


def is_silent(patch: gemma4_compat.Patch) -> bool:
    """Whether it repairs what raises no error."""
    return patch.symptom.startswith("silent: ")


def entry(patch: gemma4_compat.Patch) -> str:
    """Where the entry of a patch is, seen from docs/."""
    part = "-silent" if patch.area in TWO_PAGES and is_silent(patch) else ""
    return f"patches/{patch.area}{part}.md#{patch.id}"


def seen(patch: gemma4_compat.Patch) -> str:
    """The error's text as code, or what is silently wrong."""
    symptom = patch.first_symptom.rstrip(".")
    if symptom.startswith("silent: "):
        return markdown(symptom.removeprefix("silent: "))
    code = re.match(r"``(.*?)`?``(?=[^`]|$)", symptom)
    return markdown(code.group() if code else symptom)


def releases(patch: gemma4_compat.Patch) -> str:
    """The releases that have the error, among the supported ones: "accelerate before 1.14.0", "any peft"."""
    low, _, high = patch.affected.removeprefix(">=").partition(",<")
    from_ = f" from {low}" if Version(low) > Version(versions.OLDEST[patch.distribution]) else ""
    before = f" before {high}" if high else ""
    both = f"{from_},{before}" if from_ and before else from_ + before
    return f"{patch.distribution}{both}" if both else f"any {patch.distribution}"


def markdown(text: str) -> str:
    """``text`` of a docstring in a cell of a table."""
    return text.replace("|", "\\|")


def common() -> str:
    """The README's table."""
    known = {patch.id: patch for patch in gemma4_compat.patches()}
    rows = ["| you see | with | repaired by |", "|---|---|---|"]
    for patch in (known[name] for name in search.MET_FIRST):
        said = SAID.get(patch.id) or seen(patch)
        rows.append(f"| {said} | {releases(patch)} | [`{patch.id}`](docs/{entry(patch)}) |")
    return "\n".join(rows)
