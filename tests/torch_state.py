"""What a process has once, of torch and of its stand-ins: a test that leaves it changed changes the tests after it."""

from __future__ import annotations

import sys
from typing import Any

#: Precisions of float32 products. "none" takes the one above, and `set_float32_matmul_precision` writes several, so
#: that "highest" is not what a process begins with.
_PRECISIONS = ("", "mkldnn.", "mkldnn.matmul.", "cuda.matmul.")
_MIXED = "set for one backend"


def now() -> dict[str, Any]:
    """The state; empty while torch is not imported."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_default_dtype"):  # absent, blocked by a test, or about to be imported
        return {}
    return {
        "float32 products": _of_products(torch),
        **{
            f"backends.{name}fp32_precision": owner.fp32_precision
            for name in _PRECISIONS
            if hasattr(owner := _backend(torch, name), "fp32_precision")
        },
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic, warnings only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "recorders of graphs": tuple(_recorders()),
    }


def put(state: dict[str, Any]) -> None:
    """Back to what :func:`now` returned."""
    if not state:
        return
    import torch

    if state["float32 products"] != _MIXED:
        torch.set_float32_matmul_precision(state["float32 products"])
    for name in _PRECISIONS:
        if f"backends.{name}fp32_precision" in state:
            _backend(torch, name).fp32_precision = state[f"backends.{name}fp32_precision"]
    torch.set_default_dtype(state["default dtype"])
    torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["deterministic, warnings only"])
    torch.set_grad_enabled(state["gradients"])
    torch.set_autocast_enabled("cpu", state["autocast"])
    if torch.get_num_threads() != state["threads"]:
        torch.set_num_threads(state["threads"])
    for device in set(_recorders()) - set(state["recorders of graphs"]):
        del _recorders()[device]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not as it was, in words. Without ``before``, torch is compared with what it begins with."""
    found = []
    for name, value in (before or _at_first(after)).items():
        left = after.get(name, value)
        if left != value:
            found.append(f"{name}: {value} became {left}")
    return found


def _at_first(after: dict[str, Any]) -> dict[str, Any]:
    if not after:
        return {}
    import torch

    return {name: "none" for name in after if name.endswith("fp32_precision")} | {
        "float32 products": "highest",
        "default dtype": torch.float32,
        "deterministic": False,
        "deterministic, warnings only": False,
        "gradients": True,
        "inference": False,
        "autocast": False,
        "recorders of graphs": ("cuda",),
    }


def _recorders() -> dict[str, Any]:
    """Who records graphs, by type of device: on a CPU only a stand-in does."""
    module = sys.modules.get("gemma4_compat._graphs.recording")
    return {"cuda": None} if module is None else module.RECORDERS


def _of_products(torch: Any) -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # that of one backend was set
        return _MIXED


def _backend(torch: Any, name: str) -> Any:
    owner = torch.backends
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    return owner
