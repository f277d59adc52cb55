"""Whether something may compute in place of PyTorch is tried here, once, and remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class SelfTests:
    """What was tried.

    Args:
        limit: so many results are remembered; None for all.

    Attributes:
        passed: by key, whether it passed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.passed: dict[Any, bool] = {}
        self._limit = limit
        self._lock, self._here = threading.Lock(), threading.local()

    def passes(self, key: Any, device: Any, trial: Callable[[], bool]) -> bool:
        """Whether it passed. False, without a trial, inside a capture, and inside a trial of this thread.

        Args:
            key: of the trial.
            device: of the trial.
            trial: what it raises is raised, and tried again the next time.
        """
        known = self.passed.get(key)
        if known is not None or getattr(self._here, "trying", False) or _is_capturing(device):
            return bool(known)
        with self._lock:
            known = self.passed.get(key)
            if known is None:
                self._here.trying = True
                try:
                    known = trial()
                finally:
                    self._here.trying = False
                if len(self.passed) == self._limit:
                    self.passed.clear()
                self.passed[key] = known
            return known


def _is_capturing(device: Any) -> bool:
    import torch

    return bool(device.type == "cuda" and torch.cuda.is_current_stream_capturing())
