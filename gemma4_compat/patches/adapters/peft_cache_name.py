"""Prompt tuning, P-tuning and prefix tuning generate with their virtual tokens.

Symptom: silent: with transformers 5.24.0, ``generate`` of a ``PeftModel`` with prompt tuning or P-tuning inserts the
virtual tokens anew before every token, and one with prefix tuning generates without its prefix. A forward is right.

Cause: transformers 5.24.0 renamed the cache of ``generate`` from ``past_key_values`` to ``cache``.
``PeftModelForCausalLM.prepare_inputs_for_generation`` looks for it under the old name, to tell the first step from the
others, and stores a prefix under that name.

Fix: The wrapped call uses the old name; its result uses the new one.

Remove when: transformers 5.24.0 with a PEFT that knows only the old name is no longer supported.
"""

from typing import Any

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F75", severity="wrong_result", affected=">=0.18.0", acts_on="every model", requires="transformers>=5.24"
)

#: Allowed difference between step-by-step generation and one forward, relative to the largest logit, in float32.
BOUND = 1e-4


class _ByTheOldName(Proxy):
    """A ``PeftModel`` whose base passes the cache under its old name. Everything else is the model's."""

    def base_model_prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = self.__wrapped__.base_model_prepare_inputs_for_generation(*args, **kwargs)
        return cache_names.renamed(found, cache_names.OLD)


@PATCH.replaces("peft.peft_model", "PeftModelForCausalLM.prepare_inputs_for_generation")
def prepare_inputs_for_generation(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.active_peft_config.is_prompt_learning:
        return original(self, *args, **kwargs)
    return cache_names.renamed(original(_ByTheOldName(self), *args, **kwargs), cache_names.NEW)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    from gemma4_compat._lab import tiny

    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"][:1]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": torch.ones_like(ids)}

    def tuned(kind: Any) -> Any:
        torch.manual_seed(0)
        # Prompt tuning with per-layer embeddings is covered by another patch.
        base = workspace.load_31b() if workspace.variant is None else workspace.load()
        return get_peft_model(base.float(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()

    with torch.no_grad():
        model, seen = tuned(PromptTuningConfig), "all tokens"
        try:
            model(input_ids=ids)
        except RuntimeError:  # E2B and E4B without that patch
            model, seen = tuned(PrefixTuningConfig), "the first token"
            try:
                model(input_ids=ids)
            except RuntimeError as error:
                return Outcome(False, f"this release of PEFT has no prefix for such layers: {error}", applicable=False)
        found = model.generate(input_ids=ids, **options)
        whole = model(input_ids=found.sequences).logits[:, -5:-1]
        generated = torch.stack(found.logits, dim=1)
        if seen == "the first token":  # in older releases the others also differ from a forward
            whole, generated = model(input_ids=ids).logits[:, -1:], generated[:, :1]
    off = (generated.float() - whole.float()).abs().max().item()
    bound = BOUND * whole.abs().max().item()
    said = f"of {seen} that a generate gives the logits are {off:.2g} off those of a forward"
    return Outcome(off > bound, said, off)
