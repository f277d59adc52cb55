"""Tables in host memory that a GPU reads in place, and what happens where that memory cannot be pinned."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import row_lookup

ROWS, WIDTH = 100_000, 64


@pytest.fixture(autouse=True)
def _first_warning() -> Iterator[None]:
    host_memory._warn_once.cache_clear()
    yield
    host_memory._warn_once.cache_clear()


def on_host(dtype: str = "bfloat16") -> Any:
    import torch

    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))


def offloaded(weight: Any) -> tuple[Any, Any]:
    """An embedding that computes on the GPU, its table on the host, and its hook."""
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    module = torch.nn.Embedding(*weight.shape, dtype=weight.dtype, device="meta").eval().requires_grad_(False)
    hook = AlignDevicesHook(execution_device=0, offload=True, weights_map={"weight": weight})
    return add_hook_to_module(module, hook), hook


class Refusing:
    """A CUDA runtime that pins nothing."""

    runtime: Any = None

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        return 2

    def __getattr__(self, name: str) -> Any:  # tables of earlier tests are unpinned whenever they are collected
        return getattr(self.runtime, name)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(Refusing, "runtime", torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("count", [1, 512])
def test_a_view_reads_the_table_and_takes_no_memory_of_the_gpu(dtype: str, count: int) -> None:
    import torch

    table = on_host(dtype)
    tokens = torch.randint(ROWS, (count,), generator=torch.Generator().manual_seed(1))
    index = tokens.cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    memory = host_memory.pin(table, "cuda:0")
    assert memory is not None
    seen = memory.view_on("cuda:0")
    assert seen is not None
    assert seen.device == torch.device("cuda:0")
    assert seen.data_ptr() == table.data_ptr()
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(seen.index_select(0, index).cpu(), table[tokens])
    table[tokens[0]] += 1
    assert torch.equal(seen.index_select(0, index).cpu(), table[tokens]), "it is a copy"


def test_it_is_unpinned_when_the_last_view_is_gone() -> None:
    table = on_host()
    memory = host_memory.pin(table, "cuda:0")
    assert memory is not None
    seen = memory.view_on("cuda:0")
    assert table.is_pinned()
    del memory
    gc.collect()
    assert table.is_pinned(), "a view still reads it"
    del seen
    gc.collect()
    assert not table.is_pinned()


def test_the_same_memory_is_pinned_once_for_all_who_ask() -> None:
    table = on_host()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = host_memory.pin(table, "cuda:0"), host_memory.pin(table.view(-1), "cuda:0")
    assert first is not None
    assert second is not None
    del first
    gc.collect()
    assert table.is_pinned()
    del second
    gc.collect()
    assert not table.is_pinned()


def test_an_embedding_is_looked_up_in_place() -> None:
    import torch

    table = on_host()
    module, hook = offloaded(table)
    tokens = torch.randint(ROWS, (2, 256), generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(module(tokens).cpu(), torch.nn.functional.embedding(tokens.cpu(), table))
    lookup = row_lookup.lookup_for(hook, module)
    assert lookup is not None
    assert lookup.in_place
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module(tokens)
    assert torch.cuda.max_memory_allocated() - before < 4 * tokens.numel() * WIDTH * table.element_size()
    assert module.weight.device.type == "meta"
    hook.weights_map = {"weight": table + 1}
    assert torch.equal(module(tokens).cpu(), torch.nn.functional.embedding(tokens.cpu(), table + 1))


def test_brought_to_the_cpu_and_back() -> None:
    """What ``save_pretrained`` does."""
    import torch
    from accelerate.utils import align_module_device

    table = on_host()
    module, _ = offloaded(table)
    tokens = torch.tensor([[5, ROWS - 1]])
    for _ in range(2):
        assert torch.equal(module(tokens.cuda()).cpu(), torch.nn.functional.embedding(tokens, table))
        with align_module_device(module, "cpu"):
            assert module.weight.device.type == "cpu"
            assert torch.equal(module.weight, table)


def test_changed_while_brought_in() -> None:
    import torch

    table = on_host()
    module, _ = offloaded(table)
    tokens = torch.tensor([[5, ROWS - 1]])
    module(tokens.cuda())
    with module_hooks.weights_brought_in(module):
        assert module.weight.device.type == "cuda"
        module.weight.data = module.weight.data * 2
    assert torch.equal(module(tokens.cuda()).cpu(), torch.nn.functional.embedding(tokens, table * 2))


@pytest.mark.parametrize("learns", [False, True])
def test_what_cannot_be_pinned_goes_by_rows_with_one_warning(monkeypatch: pytest.MonkeyPatch, learns: bool) -> None:
    import torch

    refuse(monkeypatch)
    table = on_host().requires_grad_(learns)
    tokens = torch.randint(ROWS, (2, 256), generator=torch.Generator().manual_seed(1)).cuda()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            module, hook = offloaded(table)
            module.weight.requires_grad_(learns)
            for _ in range(3):
                found = module(tokens)
                assert found.requires_grad == learns
                assert torch.equal(found.detach().cpu(), torch.nn.functional.embedding(tokens.cpu(), table.detach()))
            lookup = row_lookup.lookup_for(hook, module)
            assert lookup is not None
            assert not lookup.in_place
    assert ["cannot be pinned" in str(item.message) for item in warned] == [True]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module(tokens)
    assert torch.cuda.max_memory_allocated() - before < table.numel() * table.element_size() // 4


def test_after_a_pin_that_failed_the_next_kernel_is_not_blamed() -> None:
    import torch

    table = on_host()
    runtime = torch.cuda.cudart()
    address, size = table.data_ptr(), table.numel() * table.element_size()
    assert int(runtime.cudaHostRegister(address, size, 0)) == 0  # somebody else's
    try:
        with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="cannot be pinned"):
            assert host_memory.pin(table, "cuda:0") is None
        assert float(torch.ones(3, device="cuda").sum()) == 3.0
    finally:
        runtime.cudaHostUnregister(address)


def test_a_table_on_disk_is_not_pinned(tmp_path: Any) -> None:
    import torch
    from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

    table = on_host()
    offload_state_dict(tmp_path, {"weight": table})
    module, hook = offloaded(table)
    hook.weights_map = OffloadedWeightsLoader(save_folder=tmp_path)
    tokens = torch.tensor([[5, ROWS - 1, 5]])
    for _ in range(3):
        assert torch.equal(module(tokens.cuda()).cpu(), torch.nn.functional.embedding(tokens, table))
    lookup = row_lookup.lookup_for(hook, module)
    assert lookup is not None
    assert not lookup.in_place
