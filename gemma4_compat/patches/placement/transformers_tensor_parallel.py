"""A Gemma 4 with per-layer embeddings runs under tensor parallelism.

Symptom: ``RuntimeError: aten.where.self got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to
DTensor before calling distributed operators!`` from the first forward of an E2B or E4B whose token embedding is split
between processes, as by ``tp_plan="auto"`` or torch's ``parallelize_module``.

Cause: ``Gemma4Model.forward`` reads the row of the padding token from the embedding's weight, which is then a
``DTensor``, and puts it between embeddings, which are plain tensors.

Fix: While the model runs, the embedding's weight appears, outside the embedding's own forward, as that row: a plain
tensor, gathered from the processes. Outputs are those of one process up to the rounding of sums that are split.

Remove when: ``Gemma4Model.forward`` calls the embedding instead of reading its weight.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.models import padding_row, walk
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F64", severity="crash", affected=">=5.5")

_WHOLE = ("Parameter", "Params4bit", "Int8Params")  # what most weights are: no further look


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward")
def model_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    # For each token: past torch's `__getattr__` where that finds nothing else.
    text = self._modules["language_model"] if "language_model" in self._modules else self.language_model  # noqa: SIM401
    embedding = text._modules["embed_tokens"] if "embed_tokens" in text._modules else text.embed_tokens  # noqa: SIM401
    if embedding._modules:
        embedding = walk.in_use(embedding)
    weight = embedding._parameters["weight"] if "weight" in embedding._parameters else None  # noqa: SIM401
    if weight is None or type(weight).__name__ in _WHOLE or not hasattr(weight, "full_tensor"):
        return original(self, *args, **kwargs)
    config = self.config.text_config
    if not config.hidden_size_per_layer_input:
        return original(self, *args, **kwargs)
    row = weight.detach()[config.pad_token_id].full_tensor()
    with padding_row.between_forwards(self.language_model.embed_tokens, embedding, row):
        return original(self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    from gemma4_compat._lab import tiny

    workspace.needs("per_layer_embeddings")
    if not torch.distributed.is_available():
        return Outcome(False, "this torch has no distributed package", applicable=False)
    reference = workspace.reference()
    with _one_process():
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda" if workspace.main != "cpu" else "cpu", (1,))
        model = tiny.load(workspace.checkpoint, device=workspace.main)
        model.lm_head.weight = torch.nn.Parameter(
            model.lm_head.weight.detach().clone()
        )  # so that it stays a plain tensor
        split = {"model.language_model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model, mesh, split)
        return Outcome.of_parity(workspace.difference(reference, model), "a split embedding")


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """A group of one process, if there is no group."""
    import torch

    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group(
        "gloo" if not torch.cuda.is_available() else "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
