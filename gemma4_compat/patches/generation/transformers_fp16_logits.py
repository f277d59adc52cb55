"""``generate`` of a float16 model whose logits are NaN says so, and what to do.

Symptom: silent: in float16 (T4, RTX 20) ``generate`` writes the same token again and again, often ``<pad>``. With
``do_sample=True`` it is ``RuntimeError: probability tensor contains either `inf`, `nan` or element < 0``, on a GPU a
device-side assertion with that text. The same model works in bfloat16 and in float32.

Cause: An activation exceeds 65504, the largest float16, and all logits are NaN. ``argmax`` of NaN is a token all the
same, and ``torch.multinomial`` does not know why it got NaN.

Fix: One warning for each model, if the logits after the prompt are NaN or infinite, names the dtype and what to do.
Nothing is computed differently. It is given after ``generate``, or before the first token is drawn. Models in 8 bits,
which always compute in float16, in 4 bits with ``bnb_4bit_compute_dtype=torch.float16``, and float16 autocast are
looked at as well. Tokens after the prompt are not: one that overflows by itself is not reported.

Remove when: ``generate`` says that the logits are not finite.
"""

from typing import Any

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._generation.prompts import overflow
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F113", kind="notice", severity="wrong_result", affected=">=5.5")

#: The product of gate and up is multiplied by it. Tiny models overflow from 2 ** 14 on.
_FACTOR = 2.0**16
_NEW_TOKENS = 4


@PATCH.replaces("transformers.generation.utils", "GenerationMixin.generate")
def generate(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    reasons = overflow.reasons(self)
    if not reasons:
        return original(self, *args, **kwargs)
    with overflow.watching(self, reasons) as watch:
        output = original(self, *args, **kwargs)
    watch.say()
    return output


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill")
def prefill(original: Original, self: Any, input_ids: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(self, input_ids, generation_config, *args, **kwargs)
    overflow.check(self, outputs, generation_config)
    return outputs


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._assisted_decoding")
def assisted_decoding(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    config = kwargs.get("generation_config")
    if config is not None and overflow.is_wanted(self):
        self = _Called(self, config)
    return original(self, *args, **kwargs)


class _Called(Proxy):
    """A view of a model whose first call is looked at: it reads the prompt, and drafts after it."""

    def __init__(self, model: Any, generation_config: Any) -> None:
        super().__init__(model)
        self._self_config = generation_config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.__wrapped__(*args, **kwargs)
        overflow.check(self.__wrapped__, outputs, self._self_config, at=0)
        return outputs


def build_overflowing(model: Any) -> Any:
    """A tiny model of the same function in float32, in which the product of gate and up is too large for float16."""
    for layer in model.float().model.language_model.layers:
        layer.mlp.up_proj.weight.data.mul_(_FACTOR)
        layer.mlp.down_proj.weight.data.div_(_FACTOR)
    return model


def reproduce(workspace: Workspace) -> Outcome:
    import warnings

    from gemma4_compat._errors import Gemma4CompatWarning
    from gemma4_compat._lab import tiny

    model = build_overflowing(workspace.load()).half()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": _NEW_TOKENS, "do_sample": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    said = [str(one.message) for one in caught if one.category is Gemma4CompatWarning]
    if said or found.logits[0].isfinite().all():
        return Outcome(False, said[0] if said else "the logits in float16 are finite")
    tokens = found.sequences[0, -_NEW_TOKENS:].tolist()
    return Outcome(True, f"the logits are NaN in float16, the tokens are {tokens}, and nothing is said")
