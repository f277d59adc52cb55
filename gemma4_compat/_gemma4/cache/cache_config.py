"""What a cache reads from a configuration, for the patches that correct it."""

from __future__ import annotations

from typing import Any

from gemma4_compat._engine.runtime.views import PlainView

_SHARED = "num_kv_shared_layers"


def shares_nothing(config: Any) -> bool:
    """Whether the text model's configuration explicitly says that no layer is KV-shared."""
    return getattr(config.get_text_config(decoder=True), _SHARED, None) == 0


class Unshared(PlainView):
    """The text model's part of ``config`` for a cache, as if KV-shared layers did not exist."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.get_text_config(decoder=True))

    def get_text_config(self, decoder: bool | None = None) -> Unshared:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == _SHARED:
            raise AttributeError(name)
        return super().__getattr__(name)
