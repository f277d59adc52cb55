"""How a library that patches Gemma 4 is imported and turned on: as its documentation, or its own trainer, does it.

Nothing here may import ``gemma4_compat``: in one of the orders it comes last.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any


def _liger() -> None:
    _interpret_triton()
    from liger_kernel.transformers import apply_liger_kernel_to_gemma4

    apply_liger_kernel_to_gemma4()


def _trl() -> None:
    import trl

    trl.SFTTrainer  # noqa: B018  # its modules are imported on first use


def _patcher() -> None:
    """The documented use: a class of one's own in the place of one of the model's, registered before loading."""
    import torch
    from transformers import monkey_patching
    from transformers.models.gemma4 import modeling_gemma4

    class Other(modeling_gemma4.Gemma4TextMLP):  # type: ignore[misc]  # untyped
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))

    monkey_patching.register_patch_mapping({"Gemma4TextMLP": Other})


def _axolotl() -> None:
    """What its ``PatchManager`` does for a Gemma 4 with fused attention and checkpointing, and what its loss needs."""
    _interpret_triton()
    from axolotl.monkeypatch.gemma4_loss_kwargs import patch_gemma4_accepts_loss_kwargs
    from axolotl.monkeypatch.models.gemma4.fused_attn import patch_gemma4_fused_attn

    patch_gemma4_fused_attn(install_shared_kv_workaround=True)
    patch_gemma4_accepts_loss_kwargs()


def _axolotl_hybrid() -> None:
    """Its masks for attention that is flash in sliding layers only."""
    from axolotl.monkeypatch.gemma4_hybrid_mask import patch_gemma4_hybrid_mask

    patch_gemma4_hybrid_mask()


def _llama_factory() -> None:
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    _stand_in("torchaudio")  # PyPI has it for CUDA only; nothing here reads sound from a file
    import llamafactory.model.loader
    import llamafactory.train.tuner  # noqa: F401


def _swift() -> None:
    import swift

    swift.SftArguments  # noqa: B018  # its modules are imported on first use


def _unsloth() -> None:
    """Its own mode for a host without a driver: what it patches is patched, its kernels do not run."""
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"
    import unsloth  # noqa: F401


TURN_ON: dict[str, Callable[[], None]] = {
    "liger-kernel": _liger,
    "trl": _trl,
    "transformers-patcher": _patcher,
    "axolotl": _axolotl,
    "axolotl-hybrid": _axolotl_hybrid,
    "llama-factory": _llama_factory,
    "ms-swift": _swift,
    "unsloth": _unsloth,
}
#: Those whose kernels run in Triton's interpreter, which is slow.
INTERPRETED = ("liger-kernel", "axolotl")


def _interpret_triton() -> None:
    """Have Triton run its kernels in its interpreter: there is no GPU.

    Its interpreter passes a float as it is, where a compiled kernel gets a scalar of the language with methods, and
    it has none of CUDA's functions. It computes with the bits of a bfloat16 as if they were an integer, and rounds to
    one toward zero. A backward pass asks a GPU how many multiprocessors it has: one. Nothing is timed: of several
    configurations of a kernel the first is taken.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy
    import torch
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as of_cuda
    from triton.runtime import autotuner, interpreter

    autotuner.Autotuner._bench = lambda *_, **__: (0.0, 0.0, 0.0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=1)
    for module in (libdevice, of_cuda):
        module.rsqrt = lambda x: 1.0 / tl.sqrt(x)
        module.tanh = lambda x: 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0

    converted = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if type(argument) is not float:
            return converted(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats

    def wide(handle: Any) -> Any:
        return interpreter.TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    def narrow(handle: Any) -> Any:
        rounded = torch.from_numpy(numpy.array(handle.data)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def in_float32(name: str) -> None:
        original = getattr(interpreter.InterpreterBuilder, name)

        def replacement(self: Any, *arguments: Any) -> Any:
            *handles, operation = arguments
            if handles[0].dtype.scalar is not tl.bfloat16:
                return original(self, *arguments)
            found = original(self, *map(wide, handles), operation)
            return found if found.data.dtype == bool else narrow(found)

        setattr(interpreter.InterpreterBuilder, name, replacement)

    for name in ("unary_op", "binary_op"):
        in_float32(name)
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding(self: Any, source: Any, target: Any) -> Any:
        of, to = source.dtype.scalar, target.scalar
        if to is tl.bfloat16 and of is not tl.bfloat16:
            return narrow(source if of is tl.float32 else cast(self, source, tl.float32))
        return cast(self, wide(source) if of is tl.bfloat16 and to is not of else source, target)

    interpreter.InterpreterBuilder.cast_impl = rounding


def _stand_in(name: str) -> None:
    """An empty module, where there is none of that name."""
    if importlib.util.find_spec(name) is None:
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
