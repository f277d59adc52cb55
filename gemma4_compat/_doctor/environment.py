"""What a bug report must say about an environment. Imports nothing, starts no GPU, reads no secret."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.explain import imports
from gemma4_compat._engine import versions
from gemma4_compat._engine.io.text import wrapped
from gemma4_compat._engine.patch import PatchState, PatchStatus
from gemma4_compat._engine.reports import words
from gemma4_compat._engine.reports.words import Verdict
from gemma4_compat._errors import printable

#: Distributions that matter, in the order of the report.
DISTRIBUTIONS = (
    *("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "tokenizers", "huggingface_hub"),
    *("trl", "unsloth", "axolotl", "llamafactory", "ms-swift", "deepspeed", "triton", "kernels", "flash-attn"),
    *("xformers", "liger-kernel", "torchao", "vllm", "torchvision", "pillow", "numpy", "packaging", "typer"),
)
#: Variables that change what these libraries do. Only these are read; none holds a credential.
VARIABLES = (
    *("GEMMA4_COMPAT_DISABLE", "GEMMA4_COMPAT_ENABLE", "GEMMA4_COMPAT_STRICT", "GEMMA4_COMPAT_CACHE"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "ACCELERATE_USE_FSDP"),
    *("ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING", "BNB_CUDA_VERSION", "WORLD_SIZE", "LOCAL_RANK"),
)
#: Where NVIDIA's driver lists the GPUs; reading it does not start them.
DRIVER = Path("/proc/driver/nvidia")
_LONGEST = 500
#: Patches with these verdicts are named; the others are counted.
_NAMED = (Verdict.FAILED, Verdict.REVERTED, Verdict.OFF)


def collect(package: str, statuses: Mapping[str, PatchStatus]) -> dict[str, Any]:
    """The facts, as plain data.

    ``devices`` lists the names of GPUs that are known without starting one; None if they are unknown.

    Args:
        package: the release of this package.
        statuses: of every patch.
    """
    found = {name: versions.installed(name) for name in DISTRIBUTIONS}
    named = {item.id: item.reason for item in statuses.values() if words.of(item) in _NAMED}
    return {
        "gemma4_compat": package,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "versions": {name: version for name, version in found.items() if version is not None},
        "editable": _is_editable(),
        "torch": _torch(),
        "torchvision": imports.torchvision(),
        "devices": _devices(),
        "driver": _driver(),
        "settings": {name: os.environ[name][:_LONGEST] for name in VARIABLES if name in os.environ},
        "states": dict(Counter(words.of(item).word for item in statuses.values())),
        "off": named,
        "enabled": [item.id for item in statuses.values() if item.state in (PatchState.PENDING, PatchState.APPLIED)],
    }


def text(data: Mapping[str, Any], width: int | None = None) -> str:
    """The facts as a block for an issue, in Markdown that is readable as plain text. ``width``: of a line, if any."""
    libraries = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    states = ", ".join(f"{count} {word}" for word, count in data["states"].items())
    devices = "unknown: asking would start them" if data["devices"] is None else ", ".join(data["devices"])
    driver = f" (driver {data['driver']})" if data["driver"] else ""
    rows = [
        ("gemma4_compat", data["gemma4_compat"] + (" (editable)" if data["editable"] else "")),
        ("Python", f"{data['python']} ({data['implementation']})"),
        ("platform", f"{data['platform']}, {data['cores']} cores"),
        ("libraries", libraries or "none"),
        ("torch build", data["torch"] or "not installed"),
        *([("torchvision", data["torchvision"])] if data["torchvision"] else []),
        ("GPUs", (devices or "none") + driver),
        ("settings", " ".join(f"{name}={value}" for name, value in data["settings"].items()) or "none"),
        ("patches", states),
        ("enabled", ", ".join(data["enabled"]) or "none"),
        *((f"off: {name}", reason) for name, reason in data["off"].items()),
    ]
    lines = (f"- {name}: {printable(str(value))}" for name, value in rows)
    return "\n".join(wrapped(line, width).replace("\n", "\n  ") for line in lines)


def _is_editable() -> bool:
    """Whether this package is a checkout."""
    try:
        direct = metadata.distribution("gemma4-compat").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return '"editable": true' in (direct or "") or '"editable":true' in (direct or "")


def _torch() -> str | None:
    """What torch was built for, from its version ("2.9.1+cu130"), or from its module if that is imported."""
    release = versions.installed("torch")
    if release is None:
        return None
    built = getattr(sys.modules.get("torch"), "version", None)
    known = [(name, getattr(built, name, None)) for name in ("cuda", "hip", "xpu")]
    said = ", ".join(f"{name} {version}" for name, version in known if version)
    return f"{release}{f' ({said})' if said else ''}"


def _devices() -> list[str] | None:
    """Names of GPUs: from torch if this process already uses them, else from what the driver wrote to /proc."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return [cuda.get_device_name(index) for index in range(cuda.device_count())]
    if not DRIVER.is_dir():
        return None
    found = []
    for file in sorted(DRIVER.glob("gpus/*/information"))[:64]:
        match = re.search(r"^Model:\s*(.{1,100})$", _beginning(file), re.MULTILINE)
        found.append(match[1].strip() if match else "unknown")
    return found


def _driver() -> str | None:
    """Release of NVIDIA's kernel module."""
    match = re.search(r"Kernel Module[^\n]*?\s(\d[\d.]{2,20})\s", _beginning(DRIVER / "version"))
    return match[1] if match else None


def _beginning(file: Path) -> str:
    """The first characters of a file; "" if it cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(4000)
    except OSError:
        return ""
