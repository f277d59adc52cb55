"""Graphs without the private functions of torch that clean up after a failed capture, or with their older names."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat._graphs import recording
from tests.unit.generation.calls import Models, ask, compared, steps

torch = pytest.importorskip("torch", reason="needs torch")

#: By releases of torch. 2.4.1 and 2.13.0 were looked at; the name changed in 2.8.
NAMES = {
    "2.4": ("_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"),
    "2.8": ("_cuda_endAllocateToPool", "_cuda_releasePool"),
}


def has(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Any]:
    """Have ``torch._C`` know these functions only; returns their calls."""
    calls: list[Any] = []
    for name in {name for names in NAMES.values() for name in names}:
        monkeypatch.delattr(torch._C, name, raising=False)
    for name in names:
        monkeypatch.setattr(
            torch._C, name, lambda device, pool, name=name: calls.append((name, device, pool)), raising=False
        )
    return calls


def failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon a capture that CUDA has ended: its end raises once, and a second graph clears up."""

    class Graph:
        ends = 0

        def capture_begin(self, **_: Any) -> None: ...

        def capture_end(self) -> None:
            Graph.ends += 1
            if Graph.ends == 1:
                raise RuntimeError("operation failed due to a previous error during capture")

    stand_in = SimpleNamespace(CUDAGraph=Graph, graph_pool_handle=lambda: (0, 2))
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    graph = recording.CudaRecording(SimpleNamespace(index=1), recording.CudaRecording.new_pool())
    graph._abandon((0, 1))
    assert Graph.ends == 2


@pytest.mark.parametrize("release", NAMES)
def test_a_failed_capture_is_cleaned_up_after(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    calls = has(monkeypatch, *NAMES[release])
    assert recording.CudaRecording.unsupported_reason() is None
    failed_capture(monkeypatch)
    assert calls == [(name, 1, (0, 1)) for name in NAMES[release]]


@pytest.mark.skipif(not hasattr(torch._C, "_CudaStreamBase"), reason="a build of torch with CUDA")
def test_the_installed_torch_has_what_graphs_need() -> None:
    assert recording.CudaRecording.unsupported_reason() is None


def test_a_pool_outlives_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocators refuse an id whose graphs are all gone, as after a step that could not be fused at once."""
    held: dict[Any, int] = {}

    class Graph:
        def capture_begin(self, *, pool: Any, **_: Any) -> None:
            assert held.get(pool) != 0, "INTERNAL ASSERT FAILED"
            held[pool], self.pool = held.get(pool, 0) + 1, pool

        def capture_end(self) -> None: ...

        def __del__(self) -> None:
            if hasattr(self, "pool"):
                held[self.pool] -= 1

    calls = SimpleNamespace(CUDAGraph=Graph, graph_pool_handle=lambda: (0, len(held) + 1), Stream=lambda _: None)
    for name in ("device", "stream"):
        setattr(calls, name, contextlib.nullcontext)
    for name in ("synchronize", "empty_cache"):
        setattr(calls, name, lambda *_: None)
    monkeypatch.setattr(torch, "cuda", calls)
    monkeypatch.setattr(recording, "_streams", {})
    pool = recording.CudaRecording.new_pool()

    def captured() -> Any:
        made = recording.CudaRecording(torch.device("cuda", 1), pool)
        made.capture(lambda: None)
        return made

    captured()
    kept = [captured(), captured()]
    assert held == {(0, 1): 0, (0, 2): 2}
    del kept[0]
    kept.append(captured())
    kept.clear()
    kept.append(captured())
    assert held == {(0, 1): 0, (0, 2): 0, (0, 3): 1}


def test_without_them_decoding_is_as_ever_and_says_why(
    models: Models, tapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch)
    monkeypatch.setattr(tapes, "unsupported_reason", staticmethod(recording.CudaRecording.unsupported_reason))
    model = models.fresh(None)
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert f"torch {torch.__version__} lacks torch._C._cuda_endAllocateToPool and torch._C._cuda_releasePool" in reason
