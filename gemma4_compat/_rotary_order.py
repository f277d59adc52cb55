"""The order of the rotary frequencies' buffers, the same in every process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemma4_compat._repro import Outcome, Workspace


def order_buffers(module: Any) -> None:
    """Put a module's buffers in the order of their names."""
    for name in sorted(module._buffers):
        module._buffers[name] = module._buffers.pop(name)


def in_another_process(module: str, build: Callable[[], Any], *, reverse: bool) -> Any:
    """What ``build`` builds where a set of names in the code of ``module`` has that order, sorted or ``reverse``.

    A process has one or the other: Python salts the hashes of strings with a number of its own.
    """
    code = importlib.import_module(module)

    def ordered(names: Iterable[str]) -> dict[str, None]:
        return dict.fromkeys(sorted(names, reverse=reverse))

    code.set = ordered  # type: ignore[attr-defined]
    try:
        return build()
    finally:
        del code.set


def outcome(module: str, workspace: Workspace) -> Outcome:
    """The answers of a second rank of DDP, whose set of names has the other order, against those of the first."""
    from gemma4_compat._repro import Outcome, difference

    first, second = (in_another_process(module, workspace.load, reverse=reverse) for reverse in (False, True))
    reference = workspace.answers(first)
    broadcast_buffers(first, second)
    return Outcome.of_parity(difference(reference, workspace.answers(second)), "a second rank of DDP")


def broadcast_buffers(source: Any, target: Any) -> None:
    """What ``DistributedDataParallel`` does from one process to another: buffers of a dtype go in one piece, without
    their names.
    """
    import torch

    with torch.no_grad():
        for dtype in {buffer.dtype for buffer in target.buffers()}:
            own = [buffer for buffer in target.buffers() if buffer.dtype == dtype]
            sent = torch.cat([buffer.flatten() for buffer in source.buffers() if buffer.dtype == dtype])
            for buffer, piece in zip(own, sent.split([buffer.numel() for buffer in own]), strict=True):
                buffer.copy_(piece.view_as(buffer))
