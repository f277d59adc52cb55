"""silent: with a tied embedding and head on disk, modules compute with each other's weights; where the shapes differ,
``RuntimeError: mat1 and mat2 shapes cannot be multiplied``.

Why: accelerate recognizes tied weights by the address of their data. A weight that transformers has left on disk is on
meta, and the address of every meta tensor is 0: registered once, it makes all offloaded weights tied to each other.

Here: address 0 is not registered.

Goes when accelerate 1.15 is the oldest supported release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._patch import Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._repro import Outcome, Workspace


def attach_align_device_hook_on_blocks(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    tied = inspect.signature(original).bind(*args, **kwargs).arguments.get("tied_params_map")
    if tied:
        tied.pop(0, None)
    original(*args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile

    import torch
    from transformers import Gemma4ForCausalLM

    from gemma4_compat import _tiny
    from gemma4_compat._repro import Outcome, difference

    checkpoint = workspace.folder / "text"
    if not checkpoint.exists():
        _tiny.build_text_checkpoint(checkpoint)

    def answers(placement: dict[str, Any]) -> Any:
        folder = tempfile.mkdtemp(dir=workspace.folder)
        model = Gemma4ForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, device_map=placement, offload_folder=folder
        )
        return workspace.answers(model.eval(), text_only=True)

    on_disk = dict.fromkeys(["model.embed_tokens", "model.embed_tokens_per_layer", "lm_head"], "disk")
    rest = ["model.layers", "model.norm", "model.rotary_emb"]
    rest += ["model.per_layer_model_projection", "model.per_layer_projection_norm"]
    found = difference(answers({"": workspace.main}), answers({**on_disk, **dict.fromkeys(rest, workspace.main)}))
    return Outcome.of_parity(found, "embeddings and tied head on disk")


PATCH = Patch(
    id="accelerate-tied-on-disk",
    summary="weights on disk are not taken for each other when the embedding and its tied head are among them",
    symptom="silent: a module computes with another one's weight, or RuntimeError: mat1 and mat2 shapes cannot be "
    "multiplied",
    severity=Severity.WRONG_RESULT,
    failure_points=("F15",),
    distribution="accelerate",
    affected=">=1.12,<1.15.0",
    measured="1.14.0",
    fixed="1.15.0",
    after=("accelerate-nested-map",),
    retire_when="the oldest supported accelerate is 1.15.0",
    targets=(
        Target(
            module="accelerate.hooks",
            name="attach_align_device_hook_on_blocks",
            replacement=attach_align_device_hook_on_blocks,
            known={"f9677dca2b1b": "1.12.0 - 1.14.0"},
        ),
    ),
    reproduce=reproduce,
)
