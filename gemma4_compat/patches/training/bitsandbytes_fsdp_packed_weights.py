"""FSDP2 gathers sharded 4-bit weights bit for bit.

Symptom: silent: under FSDP2 on GPUs a 4-bit model with ``bnb_4bit_quant_storage`` of bfloat16 or float16 computes
outputs, loss and gradients from corrupted weights. A linear layer is off by 5 %.

Cause: FSDP2 gathers tensors of one dtype as that dtype, and copies them with ``torch._foreach_copy_``. On a GPU that
copies bfloat16 and float16 via float32, and every NaN becomes the same NaN. Packed 4-bit weights are not
numbers: one in a thousand pairs of their bytes reads as a NaN and is overwritten. In mixed precision with another
dtype than the storage's, FSDP2 casts the bytes as if they were numbers, even on CPUs. Groups of several dtypes are
gathered as bytes, which is right: bfloat16 storage with a float32 adapter works without mixed precision.

Fix: A group that has a packed weight is also gathered as bytes, by FSDP2's own code for several dtypes, and packed
weights are not cast. Other groups are gathered as before.

Remove when: torch copies all bits of a NaN in ``_foreach_copy_``, or FSDP2 no longer gathers with it, in all supported
releases.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F72",
    severity="wrong_result",
    affected=">=0.48.2",
    acts_on="every model",
    bug="issues/1945 https://github.com/pytorch/pytorch/issues/159333",
)


class _AsBytes(list[Any]):
    """The parameters that FSDP2 gathers in a group with a packed weight, passed on to the function that finds the
    dtype.
    """


def _is_packed(parameter: Any) -> bool:
    """Whether one of FSDP2's parameters is the 4-bit weight of a bitsandbytes layer."""
    info = parameter._module_info
    return info.param_name == "weight" and any("4bit" in kind.__name__ for kind in type(info.module).__mro__)


@PATCH.replaces(
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "_get_param_all_gather_inputs",
    codes={"d1ee5c56f62a": "torch 2.12 to 2.15", "c9cf8d36aaed": "torch 2.6 to 2.11"},
)
def all_gather_inputs(original: Original, fsdp_params: Any) -> Any:
    inputs = original(fsdp_params)
    for parameter, tensors in zip(fsdp_params, inputs):
        if tensors and _is_two_bytes(tensors[0].dtype) and _is_packed(parameter):
            return _AsBytes(inputs)
    return inputs


def _is_two_bytes(dtype: Any) -> bool:
    """Whether a GPU copies this dtype via another."""
    return bool(dtype.is_floating_point and dtype.itemsize == 2)


@PATCH.replaces(
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "_get_all_gather_input_metadatas",
    codes={"66ee33b1fed5": "torch 2.4 to 2.15"},
)
def all_gather_metadata(original: Original, param_all_gather_inputs: Any) -> Any:
    import torch

    dtypes, numels, dtype = original(param_all_gather_inputs)
    return dtypes, numels, torch.uint8 if isinstance(param_all_gather_inputs, _AsBytes) else dtype


@PATCH.replaces(
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "FSDPParam.init_dtype_attrs",
    group="casts",
    codes={
        "fe40a2505b02": "torch 2.15",
        "a62959eda894": "torch 2.12 to 2.14",
        "84429f3ae7f4": "torch 2.7 to 2.11",
        "aeb756bc2951": "torch 2.4 to 2.6",
    },
)
def dtype_attributes(original: Original, self: Any, mp_policy: Any) -> None:
    original(self, mp_policy)
    if _is_packed(self):
        self.param_dtype = None  # so that it is not cast, like integers


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import sharding

    if (missing := sharding.missing()) is not None:
        return Outcome(False, missing, applicable=False)
    with sharding.copies(workspace.main) as name, sharding.two_ranks(workspace.main) as mesh:
        changed, count = sharding.gathered(sharding.packed(workspace), mesh)
    return Outcome(changed > 0, f"{changed} of {count} packed bytes are others after FSDP2 gathered them ({name})")
