"""Finding an offloaded weight where it is stored, without loading it."""

from __future__ import annotations

import collections
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._offload import host_memory

pytest.importorskip("accelerate", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

DTYPES = ["bfloat16", "float32", "float16", "int8", "uint8", "float8_e4m3fn", "bool"]


def values(dtype: str, *shape: int) -> Any:
    import torch

    numbers = torch.arange(torch.Size(shape).numel()) % 13
    return numbers.reshape(shape).to(getattr(torch, dtype))


def same(a: Any, b: Any) -> bool:
    import torch

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


def dat_files(folder: Path, **weights: Any) -> Any:
    from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

    try:
        offload_state_dict(folder, weights)
    except TypeError as error:  # from numpy, by way of accelerate before 1.15
        if "Float8" not in str(error):
            raise
        pytest.skip(f"this accelerate does not write it to a file: {error}")
    return OffloadedWeightsLoader(save_folder=folder)


def safetensors_index(folder: Path, dtype: str | None = None, **weights: Any) -> Any:
    from accelerate.utils import OffloadedWeightsLoader
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    save_file({f"in_file.{name}": value for name, value in weights.items()}, file)
    entries = {
        name: {"safetensors_file": str(file), "weight_name": f"in_file.{name}"} | ({"dtype": dtype} if dtype else {})
        for name in weights
    }
    return OffloadedWeightsLoader(index=entries)


def test_in_a_dict_it_is_the_tensor_itself() -> None:
    weight = values("float32", 4, 3)
    held = {"weight": weight}
    found = host_memory.stored(held, "weight")
    assert found.raw is weight
    assert found.tensor is weight
    assert (found.on_disk, found.holder, found.key) == (False, held, "weight")


def test_behind_a_prefix_it_is_the_tensor_of_the_host() -> None:
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    weight = values("float32", 4, 3)
    loader = OffloadedWeightsLoader(state_dict={"a.b.weight": weight})
    found = host_memory.stored(PrefixedDataset(PrefixedDataset(loader, "a."), "b."), "weight")
    assert found.raw is weight
    assert (found.on_disk, found.holder, found.key) == (False, loader.state_dict, "a.b.weight")


@pytest.mark.parametrize("shape", [(6, 5), (3,), (), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_file_of_accelerate(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    weight = values(dtype, *shape)
    loader = dat_files(tmp_path, weight=weight)
    found = host_memory.stored(loader, "weight")
    assert found.on_disk
    assert found.holder is None
    assert same(found.tensor, weight)
    assert same(found.tensor, loader["weight"])


@pytest.mark.parametrize("shape", [(6, 5), (), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_safetensors_file(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    weight = values(dtype, *shape)
    loader = safetensors_index(tmp_path, weight=weight)
    found = host_memory.stored(loader, "weight")
    assert found.on_disk
    assert same(found.tensor, weight)
    assert same(found.tensor, loader["weight"])


def test_a_safetensors_file_that_is_read_in_another_dtype(tmp_path: Path) -> None:
    import torch

    weight = torch.randn(6, 5)
    loader = safetensors_index(tmp_path, "bfloat16", weight=weight)
    found = host_memory.stored(loader, "weight")
    assert found.raw.dtype == torch.float32
    assert found.dtype == torch.bfloat16
    assert same(found.tensor, loader["weight"])


def test_a_loader_that_would_read_to_a_device_is_read_on_the_host(tmp_path: Path) -> None:
    from accelerate.utils import OffloadedWeightsLoader

    loader = safetensors_index(tmp_path, weight=values("float32", 6, 5))
    found = host_memory.stored(OffloadedWeightsLoader(index=loader.index, device="meta"), "weight")
    assert found.raw.device.type == "cpu"


def overwrite(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert data.count(old) == 1
    with file.open("r+b") as stream:
        stream.seek(data.index(old))
        stream.write(new)


@pytest.mark.parametrize("kind", ["dat", "safetensors"])
def test_files_are_mapped_not_copied_and_never_written(tmp_path: Path, kind: str) -> None:
    import torch

    weight = torch.arange(1000, 5000, dtype=torch.int32).reshape(40, 100)
    make = dat_files if kind == "dat" else safetensors_index
    found = host_memory.stored(make(tmp_path, weight=weight), "weight").raw
    (file,) = [path for path in tmp_path.iterdir() if path.suffix in (".dat", ".safetensors")]
    overwrite(file, (1234).to_bytes(4, "little"), (77).to_bytes(4, "little"))
    assert int(found[2, 34]) == 77, "the tensor is a copy: it does not show what the file says now"
    before = file.read_bytes()
    found.add_(1)
    assert file.read_bytes() == before


def test_of_a_chain_the_first_that_has_it_and_nothing_is_loaded_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    loader = dat_files(tmp_path, **{"m.weight": values("float32", 4, 3), "m.bias": values("float32", 4)})

    def load(*_: Any) -> Any:
        raise AssertionError("the weight was loaded")

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", load)
    changed = {"weight": values("float32", 2, 2)}
    chain = collections.ChainMap(changed, PrefixedDataset(loader, "m."))
    assert host_memory.stored(chain, "weight").raw is changed["weight"]
    assert host_memory.stored(chain, "bias").on_disk
    again = collections.ChainMap({"weight": values("float32", 1)}, chain)
    assert host_memory.stored(again, "weight").raw.shape == (1,)
    assert host_memory.stored(again, "bias").on_disk


def test_a_mapping_of_another_class_is_read() -> None:
    import types

    weight = values("float32", 4, 3)
    found = host_memory.stored(types.MappingProxyType({"weight": weight}), "weight")
    assert found.raw is weight
    assert not found.on_disk
    assert found.holder is None


@pytest.mark.parametrize("kind", ["dict", "prefixed", "dat", "safetensors", "chain"])
def test_what_is_not_there_is_a_key_error(tmp_path: Path, kind: str) -> None:
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    weights = {"weight": values("float32", 2, 2)}
    maps: dict[str, Any] = {
        "dict": lambda: weights,
        "prefixed": lambda: PrefixedDataset(OffloadedWeightsLoader(state_dict=weights), "other."),
        "dat": lambda: dat_files(tmp_path, **weights),
        "safetensors": lambda: safetensors_index(tmp_path, **weights),
        "chain": lambda: collections.ChainMap(weights, PrefixedDataset(dat_files(tmp_path, **weights), "")),
    }
    with pytest.raises(KeyError, match="bias"):
        host_memory.stored(maps[kind](), "bias")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_file_of_accelerate_names_a_dtype_as_torch_does(tmp_path: Path, dtype: str) -> None:
    import torch

    dat_files(tmp_path, weight=values(dtype, 2, 2))
    index = json.loads((tmp_path / "index.json").read_text())
    assert getattr(torch, index["weight"]["dtype"]) is getattr(torch, dtype)


def test_nothing_is_pinned_for_the_cpu_and_nothing_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host_memory.pin(values("float32", 4, 3), "cpu") is None
        assert host_memory.pin(values("float32", 4, 3), "meta") is None


def test_what_cannot_be_one_range_of_memory_is_not_pinned() -> None:
    import torch

    assert host_memory.pin(torch.empty(0, 4), "cuda") is None
    assert host_memory.pin(values("float32", 4, 3).t(), "cuda") is None


def test_where_nothing_can_be_pinned_copies_start_from_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    empty = torch.empty

    def without_pinned(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pinned)
    host_memory._warn_once.cache_clear()
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="out of memory.*slower"):
        found = host_memory.staging((3, 2), torch.bfloat16)
    assert (found.shape, found.dtype, found.device.type) == ((3, 2), torch.bfloat16, "cpu")
    host_memory._warn_once.cache_clear()
