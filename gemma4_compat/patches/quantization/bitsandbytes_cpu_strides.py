"""Linear layers in 4-bit on the CPU give correct outputs for inputs that are not contiguous.

Symptom: silent: on a CPU with AVX512-BF16, a 4-bit linear returns garbage for an input whose last dimension is not
contiguous, such as ``x.transpose(1, 2)``. Gemma 4's audio tower has such inputs, because the convolution in each of
its layers ends in a transpose, so 4-bit audio input does not work on the CPU. For an input without rows the process
dies (SIGFPE).

Cause: The fused kernel behind ``gemv_4bit`` receives the stride of a row and assumes that the elements of a row are
adjacent. It divides by the number of rows.

Fix: Such an input is made contiguous first. For an input without rows nothing is computed. Each call has this look at
its input, and gains more than it costs: the kernel is called without a detour through ``Params4bit``'s
``__torch_function__``, which does nothing for it.

Remove when: bitsandbytes makes the input of its CPU kernel contiguous, or passes the other stride to the kernel; no
release since 0.49.0, which introduced the kernel, does.
"""

from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F10 F18", severity="wrong_result", affected=">=0.49.0", acts_on="every model")
detect = host.packs_for_cpu


@PATCH.replaces("bitsandbytes.functional", "gemv_4bit")
def gemv_4bit(
    original: Original,
    A: Any,  # noqa: N803  (upstream's name; callers may use it as a keyword)
    B: Any,  # noqa: N803
    out: Any = None,
    transposed_A: bool = False,  # noqa: N803
    transposed_B: bool = False,  # noqa: N803
    state: Any = None,
) -> Any:
    import torch

    if A.device.type == "cpu":
        if 0 in A.shape and state is not None:
            return A.new_empty((*A.shape[:-1], state.shape[0])) if out is None else out
        if A.stride(-1) != 1:
            A = A.contiguous()  # noqa: N806
        if out is None and type(A) is torch.Tensor and type(B).__module__ == "bitsandbytes.nn.modules":
            with torch._C.DisableTorchFunctionSubclass():
                return original(A, B, out, transposed_A, transposed_B, state)
    return original(A, B, out, transposed_A, transposed_B, state)


def reproduce(workspace: Workspace) -> Outcome:
    from bitsandbytes import functional

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import transposed

    if not hasattr(functional, "has_avx512bf16"):
        return Outcome(False, "this bitsandbytes has no fused kernel for the CPU", applicable=False)
    if not functional.has_avx512bf16():
        return Outcome(False, "this CPU has no AVX512-BF16: the fused kernel does not run", applicable=False)
    return transposed(tiny.load(workspace.checkpoint, "4bit").model.language_model.layers[0].mlp.up_proj)
