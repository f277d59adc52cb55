"""A load under DeepSpeed's ZeRO-3 in one process, without DeepSpeed: nothing is partitioned."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any


class _Config:
    """The parts of a DeepSpeed configuration that transformers keeps."""

    def __init__(self) -> None:
        self.config = {"zero_optimization": {"stage": 3}}

    def is_zero3(self) -> bool:
        return True


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _modules() -> dict[str, Any]:
    names = ("deepspeed", "deepspeed.accelerator", "deepspeed.runtime", "deepspeed.runtime.zero")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in (*names, f"{names[-1]}.partition_parameters")}
    modules["deepspeed"].zero = types.SimpleNamespace(Init=_nothing, GatheredParameters=_nothing)
    modules["deepspeed.accelerator"].get_accelerator = lambda: types.SimpleNamespace(current_device_name=lambda: "cpu")
    partition = modules[f"{names[-1]}.partition_parameters"]
    partition.zero_wrapper_for_fp_tensor_constructor = lambda function, *_, **__: function
    modules["deepspeed.runtime.zero"].partition_parameters = partition
    return modules


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Inside, ``from_pretrained`` loads as under ZeRO-3, by transformers' own code.

    The module ``deepspeed`` provides the functions that this code calls to gather and partition parameters; they do
    nothing here, and the process is its own group.
    """
    import torch
    from transformers.integrations import deepspeed as integration

    modules, config = _modules(), _Config()
    kept = {name: sys.modules.get(name) for name in modules}
    kept_config = integration._hf_deepspeed_config_weak_ref
    begun = not torch.distributed.is_initialized()
    if begun:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    sys.modules.update(modules)
    integration._hf_deepspeed_config_weak_ref = weakref.ref(config)
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = kept_config
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        if begun:
            torch.distributed.destroy_process_group()
