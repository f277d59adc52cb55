"""FSDP2 over two ranks in one process, and a GPU's copy of 16-bit floats, or a stand-in for it.

In torch's ``fake`` process group only one rank runs, and a collective gives every rank this rank's data. So what the
group gathers is only right in this rank's own part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemma4_compat._lab.workspace import Workspace

RANKS = 2


def missing() -> str | None:
    """Why FSDP2 cannot be tried here; None if it can."""
    import torch

    if not torch.distributed.is_available():
        return "this torch is built without torch.distributed"
    if torch.distributed.is_initialized():
        return "this process has a process group of its own"
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError:
        return "this torch has no FSDP2"
    return None


@contextlib.contextmanager
def two_ranks(device: Any) -> Iterator[Any]:
    """Inside, this process is the first of two ranks. Yields a mesh of both."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield torch.distributed.init_device_mesh(torch.device(device).type, (RANKS,))
    finally:
        torch.distributed.destroy_process_group()


def packed(workspace: Workspace) -> Any:
    """A frozen 4-bit language model whose packed bytes are stored as bf16, which FSDP2 can shard."""
    import torch
    import transformers

    from gemma4_compat._lab import tiny, tiny_models

    name = tiny_models.class_name(workspace.checkpoint)
    config = tiny.quantization_config("4bit", unified=name.startswith("Gemma4Unified"))
    config.bnb_4bit_quant_storage = torch.bfloat16
    model = getattr(transformers, name).from_pretrained(
        workspace.checkpoint, dtype=torch.bfloat16, device_map={"": workspace.main}, quantization_config=config
    )
    return model.get_decoder().requires_grad_(False)


def gathered(model: Any, mesh: Any, dtype: Any = None) -> tuple[int, int]:
    """How many of this rank's packed bytes FSDP2 changes in mixed precision, and how many it has.

    ``dtype`` is the dtype that FSDP2 casts to; bf16 if None.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    before = [own_bytes(layer.weight) for layer in layers]
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype or torch.bfloat16))
    model.unshard()
    after = [own_bytes(layer.weight) for layer in layers]
    changed = sum(
        int((one != other).sum()) if one.shape == other.shape else len(one) for one, other in zip(before, after)
    )
    return changed, sum(map(len, before))


def own_bytes(weight: Any) -> Any:
    """The bytes of the first rank's shard."""
    import torch

    return weight.detach().chunk(RANKS)[0].contiguous().clone().flatten().view(torch.uint8)


def loses_bits(device: Any) -> bool:
    """Whether ``torch._foreach_copy_`` changes the bits of a NaN on ``device``."""
    import torch

    values = torch.tensor([0x7FC1], dtype=torch.int16, device=device).view(torch.bfloat16)
    copy = torch.zeros_like(values)
    torch._foreach_copy_([copy], [values])
    return not torch.equal(copy.view(torch.int16), values.view(torch.int16))


@contextlib.contextmanager
def copies(device: Any) -> Iterator[str]:
    """Inside, 16-bit floats are copied on ``device`` via float32, natively or by the stand-in. Yields its name."""
    import torch

    if loses_bits(device):
        yield "the kernel of the GPU"
        return
    kept = torch._foreach_copy_

    def copy(targets: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        kept(targets, sources, *arguments, **options)
        for target in targets:
            if target.dtype in (torch.bfloat16, torch.float16) and target.numel():
                bits = target.view(torch.int16)
                bits[target.isnan()] = 0x7FFF

    torch._foreach_copy_ = copy
    try:
        yield "a stand-in for that of a GPU"
    finally:
        torch._foreach_copy_ = kept
