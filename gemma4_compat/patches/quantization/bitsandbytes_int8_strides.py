"""silent: on a GPU an 8-bit linear returns garbage for an input that is not contiguous, such as ``x.transpose(1, 2)``.

Gemma 4's audio tower has such inputs: the convolution in each of its layers ends in a transpose. An 8-bit audio tower
hears something else: its features are off by half of their size.

Why: the kernel that quantizes the input to 8 bits gets an address and the number of rows and columns, and takes the
elements to lie next to each other. ``Linear8bitLt`` reshapes and casts its input; both keep a transposed layout.
Here: the input is made contiguous first.

Goes when bitsandbytes does that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models.host import has_cuda

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def quantize(original: Callable[..., Any], A: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803  (upstream's name)
    return original(A.contiguous(), *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._reproduction.scenarios import transposed

    if not torch.cuda.is_available():
        return Outcome(False, "no CUDA device: its kernel does not run", applicable=False)
    return transposed(workspace.load("8bit").model.language_model.layers[0].mlp.up_proj)


PATCH = Patch(
    id="bitsandbytes-int8-strides",
    summary="8-bit linears on a GPU read inputs that are not contiguous as they are",
    symptom="silent: an 8-bit linear returns garbage for a transposed input on a GPU (audio tower)",
    severity=Severity.WRONG_RESULT,
    failure_points=("F10",),
    distribution="bitsandbytes",
    affected=">=0.48.2",
    measured="0.50.2",
    bug=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1690",),
    retire_when="bitsandbytes makes the input of int8_vectorwise_quant contiguous",
    detect=has_cuda,
    targets=(
        Target(
            module="bitsandbytes.functional",
            name="int8_vectorwise_quant",
            replacement=quantize,
            known={
                "d78380c6802b": "0.48.2 - 0.50.2",
            },
        ),
        Target(
            module="bitsandbytes.functional",
            name="int8_double_quant",
            replacement=quantize,
            known={
                "a5dc2870d23b": "0.48.2 - 0.50.2",
            },
        ),
    ),
    reproduce=reproduce,
)
