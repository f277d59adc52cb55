"""Outcomes that are worse, planted where the package is on, for the test that the search finds them."""

from __future__ import annotations

import time
from typing import Any

from tests.generated.search.differential import verdict

#: Call -> the verdict, and what is in the outcome's words.
FOUND = {
    "states/load_own_state": (verdict.WORSE, "RuntimeError: planted"),
    "moves/to_dtype[float16]": (verdict.WORSE, "wrong: value off by"),
    "adapters/bad_model_load[folder]": (verdict.OTHER_ERROR, "KeyError"),
    "embedding/resize[more]": (verdict.HANG, "no answer in"),
}


def plant() -> None:
    """Replace four methods of transformers' models."""
    from transformers import PreTrainedModel

    def raises(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    def load_adapter(self: Any, *_: Any, **__: Any) -> Any:
        raise KeyError("planted")

    def hangs(self: Any, *_: Any, **__: Any) -> Any:
        time.sleep(1000)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        moved = original(self, *args, **kwargs)
        with torch.no_grad():
            moved.model.language_model.norm.weight.add_(1)
        return moved

    original = PreTrainedModel.to
    for name, function in {
        "load_state_dict": raises, "load_adapter": load_adapter, "resize_token_embeddings": hangs, "to": to
    }.items():  # fmt: skip
        setattr(PreTrainedModel, name, function)
