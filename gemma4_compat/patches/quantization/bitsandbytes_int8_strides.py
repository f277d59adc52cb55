"""Linear layers in 8-bit on a GPU give correct outputs for inputs that are not contiguous.

Symptom: silent: on a GPU, an 8-bit linear returns garbage for an input that is not contiguous, such as
``x.transpose(1, 2)``. Gemma 4's audio tower has such inputs, because the convolution in each of its layers ends in a
transpose. The features of an 8-bit audio tower are off by half of their size.

Cause: The kernel that quantizes the input to 8 bits (``int8_vectorwise_quant``) receives an address and the number
of rows and columns, and assumes that the elements are adjacent. ``Linear8bitLt`` reshapes and casts its input; both
keep a transposed layout.

Fix: The input is made contiguous first, also for ``int8_double_quant``. A contiguous input is not copied.

Remove when: bitsandbytes makes the input of ``int8_vectorwise_quant`` contiguous.
"""

from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F10", severity="wrong_result", affected=">=0.48.2", acts_on="every model", bug="issues/1690")
detect = host.has_cuda


@PATCH.replaces("bitsandbytes.functional", "int8_vectorwise_quant")
@PATCH.replaces("bitsandbytes.functional", "int8_double_quant")
def quantize(original: Original, A: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803  (upstream's name)
    return original(A.contiguous(), *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab.scenarios import transposed

    if not torch.cuda.is_available():
        return Outcome(False, "no CUDA device: its kernel does not run", applicable=False)
    return transposed(workspace.load("8bit").model.language_model.layers[0].mlp.up_proj)
