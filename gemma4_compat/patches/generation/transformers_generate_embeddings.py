"""``generate`` accepts ``inputs_embeds``.

Symptom: ``ValueError: You passed `inputs_embeds` to `.generate()`, but the model class Gemma4ForConditionalGeneration
doesn't have its forwarding implemented`` (or ``Gemma4UnifiedForConditionalGeneration``), from transformers 5.15.0 on.

Cause: ``GenerationMixin._prepare_model_inputs`` looks for an argument of that name in the signature of
``prepare_inputs_for_generation``. Since 5.15.0 the multimodal models' method passes it on among its other keyword
arguments.

Fix: The check gets a signature that names the argument.

Remove when: transformers looks at what the method passes on, or the method names the argument, in all supported
releases.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F94", severity="crash", affected=">=5.15.0")


class _Named(Proxy):
    """A view of a model whose ``prepare_inputs_for_generation`` names the argument."""

    def prepare_inputs_for_generation(self, *, inputs_embeds: Any = None) -> None:
        """Only its signature is read."""


@functools.cache
def _takes_embeddings(function: Callable[..., Any]) -> bool:
    """Whether it names them among its parameters."""
    return "inputs_embeds" in inspect.signature(function).parameters


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prepare_model_inputs")
def prepare_model_inputs(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    model = self
    # Not for a PEFT model with virtual tokens, whose method replaces it and passes nothing on.
    if is_gemma4_config(self.config) and "prepare_inputs_for_generation" not in vars(self):
        model = self if _takes_embeddings(type(self).prepare_inputs_for_generation) else _Named(self)
    return original(model, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    batch = workspace.inputs(text_only=True)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "attention_mask": batch["attention_mask"]}
    found, unified = 0.0, workspace.unified() if workspace.variant is None else None
    for model in [workspace.load(), *([] if unified is None else [unified.load()])]:
        expected = model.generate(input_ids=batch["input_ids"], **options)
        other = model.generate(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), **options)
        pairs = zip(expected.logits, other.logits)
        found = max(found, *((one - another).abs().max().item() for one, another in pairs))
        if not expected.sequences[:, -6:].equal(other.sequences):
            return Outcome(True, "generate of inputs_embeds gives other tokens than of input_ids")
    if found:
        return Outcome(True, f"the logits of inputs_embeds are {found:.2g} off those of input_ids", found)
    return Outcome(False, "generate of inputs_embeds gives the logits of input_ids, bit for bit", 0.0)
