"""vLLM's own Gemma 4 module tree and weight loading, executed from its source without its kernels.

vLLM computes with its kernels, and its package installs with its own torch. Its text model's file and its
loader's helpers are plain Python. They are imported here; every other module of vLLM is a stand-in: parallel layers
hold a weight of the right shape, and load into it with a check of shapes. So what the file builds and asks for is
vLLM's, and the strict check is that of its ``DefaultModelLoader``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  # a tool of its own process, where torch is all there is

_REAL = ("vllm.model_executor.models.gemma4", "vllm.model_executor.models.utils")


class _Anything:
    """A class that nothing here calls for what it does."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Module(torch.nn.Module):
    """A layer without weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _weight(module: torch.nn.Module, *shape: int, name: str = "weight") -> Any:
    parameter = torch.nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)
    module.register_parameter(name, parameter)
    return parameter


def _load(parameter: Any, value: Any, *_: Any, **__: Any) -> None:
    if parameter.shape != value.shape:
        raise ValueError(f"Attempted to load weight ({tuple(value.shape)}) into parameter ({tuple(parameter.shape)})")


class _Norm(_Module):
    def __init__(self, size: int, *_: Any, has_weight: bool = True, **__: Any) -> None:
        super().__init__()
        if has_weight:
            _weight(self, size)


class _Linear(_Module):
    def __init__(self, inputs: int, outputs: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        sizes = dict(enumerate(outputs)) if isinstance(outputs, list) else {None: outputs}
        self.keep(inputs, sizes)

    def keep(self, inputs: int, sizes: dict[Any, int]) -> None:
        parameter = _weight(self, sum(sizes.values()), inputs)

        def load(_: Any, value: Any, shard: Any = None) -> None:
            if tuple(value.shape) != (sizes[shard], inputs):
                raise ValueError(f"shard {shard} is {(sizes[shard], inputs)}, the weight {tuple(value.shape)}")

        parameter.weight_loader = load


class _QKV(_Linear):
    def __init__(self, inputs: int, head: int, heads: int, kv_heads: int, *_: Any, **__: Any) -> None:
        _Module.__init__(self)
        self.keep(inputs, {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head})


class _Embedding(_Module):
    def __init__(self, rows: int, size: int, *_: Any, **__: Any) -> None:
        super().__init__()
        _weight(self, rows, size)

    def tie_weights(self, embedding: Any) -> Any:
        return embedding


class _Experts(_Module):
    def __init__(self, *, num_experts: int, hidden_size: int, intermediate_size: int, **_: Any) -> None:
        super().__init__()
        first = _weight(self, num_experts, 2 * intermediate_size, hidden_size, name="w13_weight")
        second = _weight(self, num_experts, hidden_size, intermediate_size, name="w2_weight")
        for parameter in (first, second):
            parameter.weight_loader = lambda *_, **__: None


def _layers(count: int, make: Any, prefix: str) -> Any:
    return 0, count, torch.nn.ModuleList(make(prefix=f"{prefix}.{index}") for index in range(count))


_KNOWN: dict[str, Any] = {
    "RMSNorm": _Norm,
    "QKVParallelLinear": _QKV,
    **dict.fromkeys(("MergedColumnParallelLinear", "ColumnParallelLinear", "RowParallelLinear"), _Linear),
    **dict.fromkeys(("ReplicatedLinear", "GateLinear"), _Linear),
    **dict.fromkeys(("VocabParallelEmbedding", "ParallelLMHead"), _Embedding),
    **dict.fromkeys(("Attention", "GeluAndMul", "LogitsProcessor"), _Module),
    "FusedMoE": _Experts,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "get_tensor_model_parallel_rank": lambda: 0,
    "get_pp_group": lambda: types.SimpleNamespace(
        is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1
    ),
    "get_rope": lambda *_, **__: None,
    "support_torch_compile": lambda *given, **_: given[0] if given else (lambda cls: cls),
    "support_quantized_model_reload_from_hp_weights": lambda function: function,
    "default_weight_loader": _load,
    "maybe_remap_kv_scale_name": lambda name, _: name,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the two real files under ``folder``; makes stand-ins for the rest of vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # the signature
        if name in _REAL:
            return importlib.util.spec_from_file_location(
                name, self.folder.joinpath(*name.split(".")).with_suffix(".py")
            )
        if name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _KNOWN.get(name) or type(name, (_Anything,), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


#: What transformers' class had for a setting that a file does not name, when this vLLM was released.
_DEFAULTS = {"global_head_dim": 512, "num_global_key_value_heads": None, "attention_bias": False}


def load(folder: Path, text: dict[str, Any], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load the language model of a checkpoint.

    Args:
        folder: of vLLM's source.
        text: the text model's settings.
        weights: name -> value.

    Raises:
        ValueError: a weight has another shape, or some were not initialized, as vLLM says it.
        KeyError: there is no parameter of that name.
    """
    sys.meta_path.insert(0, _Finder(folder))
    sys.modules.setdefault("regex", __import__("re"))
    source: Any = importlib.import_module("vllm.model_executor.models.gemma4")
    source.make_layers = _layers
    config = types.SimpleNamespace(**(_DEFAULTS | text))
    parts = types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=config), quant_config=None, cache_config=None
    )
    model = source.Gemma4ForCausalLM(vllm_config=parts)
    loaded = model.load_weights(weights)
    if left := {name for name, _ in model.named_parameters()} - loaded:
        raise ValueError(f"Following weights were not initialized from checkpoint: {{{', '.join(sorted(left))}}}")
