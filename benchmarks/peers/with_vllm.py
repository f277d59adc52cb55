"""vLLM's Gemma 4 on a CPU, without its kernels: what a process of trained.py does that runs vLLM.

vLLM's package is built for CUDA: its kernels are not loaded here. Model, configuration, loader of weights, loader and
layers of LoRA are vLLM's own, with the PyTorch code that each of its operations has beside the kernel. Not vLLM's:

* attention, whose kernels have no such code: PyTorch's own, in each layer, over all tokens; so there is no cache
* the loop that picks the likeliest token

vLLM's package asks for its own torch, built for CUDA. Its Python files run with another, if what they import is there:

pip download --no-deps vllm==0.33.0 && unzip -d SITE vllm-0.33.0-*.whl "*.py" "*METADATA"
pip install --no-deps --target SITE aiohappyeyeballs aiohttp aiosignal anyio apache-tvm-ffi==0.1.11 attrs \\
    cachetools cbor2 certifi charset-normalizer cloudpickle compressed-tensors==0.17.0 einops fastapi==0.136.3 \\
    frozenlist h11 idna llguidance loguru msgspec multidict openai openai-harmony opencv-python-headless orjson \\
    partial-json-parser prometheus_client propcache py-cpuinfo pybase64 pyzmq regex requests sniffio starlette \\
    tiktoken urllib3 uvloop xgrammar==0.2.8 yarl
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Order

#: At least as many as the longest prompt with its answer.
TOKENS = 512


class Vllm:
    """A checkpoint in vLLM, with an adapter as `export --for vllm` writes it."""

    def __init__(self, order: Order) -> None:
        import torch

        torch.accelerator.empty_cache = lambda: None  # vLLM calls it after loading, and there is no accelerator
        import vllm
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()  # the package calls itself one for CUDA
        from vllm import config
        from vllm.model_executor import model_loader
        from vllm.model_executor.models import gemma4

        gemma4.Attention = _attention()
        self.release = vllm.__version__
        model = config.ModelConfig(
            model=order["checkpoint"],
            skip_tokenizer_init=True,
            dtype=order["dtype"],
            enforce_eager=True,
            max_model_len=TOKENS,
        )
        lora = config.LoRAConfig(max_lora_rank=8) if order["adapter"] else None
        self.settings = config.VllmConfig(
            model_config=model,
            lora_config=lora,
            device_config=config.DeviceConfig("cpu"),
            compilation_config=config.CompilationConfig(mode=0, custom_ops=["none"]),
        )
        with config.set_current_vllm_config(self.settings):
            _one_process()
            self.model = model_loader.get_model(vllm_config=self.settings)
            self.manager = self._adapted(order["adapter"]) if order["adapter"] else None

    def _adapted(self, folder: str) -> Any:
        import torch
        from vllm.lora.request import LoRARequest
        from vllm.lora.worker_manager import WorkerLoRAManager

        manager = WorkerLoRAManager(self.settings, torch.device("cpu"), {})
        self.model = manager.create_lora_manager(self.model, self.settings)
        self.request = LoRARequest("adapter", 1, folder)
        manager.add_adapter(self.request)
        return manager

    def logits(self, tokens: list[int]) -> Any:
        """Float32 of shape (tokens, vocabulary)."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        ids = torch.tensor(tokens)
        with torch.no_grad(), set_current_vllm_config(self.settings), set_forward_context(None, self.settings):
            if self.manager is not None:
                from vllm.lora.layers import LoRAMapping

                mapped = LoRAMapping((1,) * len(tokens), (1,) * len(tokens), is_prefill=True)
                self.manager.set_active_adapters({self.request}, mapped)
            found = self.model.compute_logits(self.model(ids, torch.arange(len(tokens))))
        return found.float().numpy()

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See ``readers.Reader``."""
        answer: list[int] = []
        while len(answer) < count and (not answer or answer[-1] not in ends):
            answer.append(int(self.logits([*prompt, *answer])[-1].argmax()))
        return answer


def _one_process() -> None:
    from vllm import distributed

    if not distributed.model_parallel_is_initialized():
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        distributed.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)


def _attention() -> type:
    """A class in place of vLLM's ``Attention``: same arguments; PyTorch's attention over all tokens of one text."""
    import torch

    latest: dict[str, Any] = {}  # name of a layer -> its keys and values, for those that share them

    class Attention(torch.nn.Module):
        def __init__(self, heads: int, size: int, scale: float, num_kv_heads: int, **more: Any) -> None:
            super().__init__()
            self.heads, self.size, self.scale, self.kv_heads = heads, size, scale, num_kv_heads
            self.window, self.prefix = more["per_layer_sliding_window"], more["prefix"]
            self.shared = more["kv_sharing_target_layer_name"]

        def forward(self, queries: Any, keys: Any, values: Any) -> Any:
            count = queries.shape[0]
            if self.shared is None:
                latest[self.prefix] = [one.view(count, self.kv_heads, self.size) for one in (keys, values)]
            keys, values = latest[self.shared or self.prefix]
            behind = torch.arange(count)[:, None] - torch.arange(count)
            seen = (behind >= 0) & (behind < (self.window or count))
            parts = [one.transpose(0, 1)[None] for one in (queries.view(count, self.heads, self.size), keys, values)]
            found = torch.nn.functional.scaled_dot_product_attention(
                *parts, attn_mask=seen, scale=self.scale, enable_gqa=True
            )
            return found[0].transpose(0, 1).reshape(count, -1)

    return Attention
