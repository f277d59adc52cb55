"""The child that merges the adapter and compares the merged model with the loaded adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.merge.job import merge_adapter
from gemma4_compat._adapter_tools.merge.result import MergeParityError


def run(order: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Merge ``adapter`` into ``folder``, written to ``out``; say the measured parity.

    Raises:
        Gemma4CompatError: the adapter cannot be merged into this base.
    """
    import torch

    say({"step": "merge"})
    try:
        done = merge_adapter(
            order["folder"],
            order["adapter"],
            Path(order["out"]),
            start="dequantized" if order["stored_quantized"] else "original",
            device_map="auto" if torch.cuda.is_available() else None,
            check=1 if order["quick"] else 2,
            progress=False,
        )
    except MergeParityError as error:
        done = error.report
    parity = done.parity
    assert parity is not None
    names = ("ok", "difference", "bound", "kl_max", "greedy_tokens")
    found = {name: getattr(parity, name) for name in names} | {"greedy_equal": list(parity.greedy_equal)}
    say({"merged": found, "written": Path(order["out"]).is_dir()})
