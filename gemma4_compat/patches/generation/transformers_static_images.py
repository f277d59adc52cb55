"""silent: with a static cache the 12B, the 26B-A4B and the 31B see images differently: their image tokens do not see
each other, and the logits are off by as much as between any two prompts.

Why: in these models the tokens of one image attend to each other in both directions. For a cache that can be compiled
``generate`` makes the masks itself, at a moment when it has not yet taken up ``mm_token_type_ids``, which say where
the images are.

From 5.23.0 on it has, but the masks that it makes for the 12B are not the ones that the 12B makes for itself.

Here: for the prompt, the model gets its mask as it does with any other cache, and makes these masks itself. Decoding,
the part that is compiled, is as it was.

Goes when every supported release makes the masks of the 12B the same way for every cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models.family import is_gemma4_config

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def prepare_inputs(original: Callable[..., Any], self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = original(self, input_ids, *args, **kwargs)
    if (
        kwargs.get("is_first_iteration")
        and kwargs.get("mm_token_type_ids") is not None
        and isinstance(inputs.get("attention_mask"), dict)
        and is_gemma4_config(self.config)
        and getattr(self.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    ):
        inputs["attention_mask"] = kwargs.get("attention_mask")
    return inputs


def reproduce(workspace: Workspace) -> Outcome:
    import contextlib

    from gemma4_compat._models import variants
    from gemma4_compat._reproduction import tiny

    batch, off = workspace.inputs(), {}
    if workspace.variant is None:
        large = tiny.load(workspace.made(tiny.build_checkpoint, text_variant="31B"), device=workspace.main).float()
        off["the 31B"] = _off(large, batch)
    elif workspace.variant != variants.UNIFIED:
        off[f"the {workspace.variant}"] = _off(workspace.load().float(), batch)
    if workspace.variant in (None, variants.UNIFIED):
        # One with a full layer before its last: of the last one's image tokens nothing is read.
        with contextlib.suppress(ImportError):  # there is no 12B before 5.10.1
            text = {name: batch[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
            off["the 12B"] = _off(tiny.unified_model().to(workspace.main), text)
    said = ", ".join(f"{value:.2g} on {name}" for name, value in off.items())
    return Outcome(
        max(off.values()) > 1e-4, f"the first logits after an image, with a static cache, are off by {said}"
    )


def _off(model: Any, batch: dict[str, Any]) -> float:
    """How far the first token's logits with a static cache are from those with the default one."""
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, found = (model.generate(**batch, **options, **kind) for kind in ({}, {"cache_implementation": "static"}))
    return float((expected.logits[0] - found.logits[0]).abs().max())


PATCH = Patch(
    id="transformers-static-images",
    summary="images with a static cache (12B, 26B-A4B, 31B)",
    symptom="silent: with a static cache image tokens do not see each other",
    severity=Severity.WRONG_RESULT,
    failure_points=("F24", "F30"),
    distribution="transformers",
    affected=">=5.5.0",
    measured="5.23.0",
    retire_when="every supported release makes the masks of the 12B the same way for every cache",
    targets=(
        Target(
            module="transformers.generation.utils",
            name="GenerationMixin.prepare_inputs_for_generation",
            replacement=prepare_inputs,
            known={
                "7e7a07c5a505": "5.5.0 - 5.8.1",
                "5c2befa63e40": "5.9.0 - 5.12.1",
                "10f65fc6bf4a": "5.13.0 - 5.14.1",
                "805fed6a86fd": "5.15.0 - 5.17.0",
                "78a3ce421893": "5.18.0 - 5.19.0",
                "2ea18346946a": "5.20.0 - 5.22.2",
                "3793ae8458cc": "5.23.0",
            },
        ),
    ),
    reproduce=reproduce,
)
