"""Prompt tuning, P-tuning and CPT work on E2B and E4B, and with images on the larger models.

Symptom: ``RuntimeError: It seems like you tried to call `forward` from `inputs_embeds` without providing `input_ids`
`` from a forward or a ``generate`` with virtual tokens, or an out-of-memory error that asks for 1,690 GiB. Silent:
with images, tokens other than those of the image attend to each other on the 12B, the 26B-A4B and the 31B.

Cause: ``PeftModelForCausalLM`` has the tokens, but passes the model only their embeddings, after those of the virtual
tokens. E2B and E4B search for the tokens of embeddings, to look up per-layer embeddings; a virtual token has no such
token. ``mm_token_type_ids``, which mark the tokens of images, are passed on unchanged, too far to the left, also after
the keys and values of prefix tuning.

Fix: The model also gets the per-layer embeddings, found by token. A virtual token gets those of the padding token, as
image tokens do; a virtual token of CPT, which starts from a real token, gets that token's. The types of virtual tokens
(text) are put in front of the others.

Remove when: PEFT passes ``per_layer_inputs``, and types of virtual tokens, together with ``inputs_embeds`` in all
supported releases.
"""

import inspect
from typing import Any

from gemma4_compat._gemma4.models import family, per_layer
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F93",
    severity="crash",
    affected=">=0.18.0",
    after="peft-cache-name",
    needs="peft-cache-name transformers-given-per-layer",
)

_TYPES = "mm_token_type_ids"
#: Kinds of adapters whose virtual tokens are keys and values.
_IN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")


@PATCH.replaces("peft.peft_model", "PeftModelForCausalLM.forward")
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _inserts_tokens(self):
        return original(self, *args, **kwargs | _types_after_prefix(self, kwargs))
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    tokens, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    return original(self, *args, **kwargs | _beside(self, kwargs, tokens, embeds))


@PATCH.replaces("peft.peft_model", "PeftModelForCausalLM.prepare_inputs_for_generation")
def prepare_inputs_for_generation(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = original(self, *args, **kwargs)
    if _inserts_tokens(self) and inputs.get("inputs_embeds") is not None:
        # PEFT has replaced the tokens that the base model prepared by embeddings.
        embeds = inputs["inputs_embeds"][:, self.active_peft_config.num_virtual_tokens :]
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        inputs |= _beside(self, inputs, tokens[:, -embeds.shape[1] :], None)
    inputs |= _types_after_prefix(self, inputs)
    return inputs


def _inserts_tokens(model: Any) -> bool:
    config = model.active_peft_config
    return config.is_prompt_learning and config.peft_type not in _IN_CACHE and family.is_gemma4(model)


def _types_after_prefix(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The types of tokens after those that PEFT puts into the cache."""
    if given.get(_TYPES) is None or model.active_peft_config.peft_type not in _IN_CACHE or not family.is_gemma4(model):
        return {}
    return {_TYPES: _after_virtual(model, given[_TYPES])}


def _after_virtual(model: Any, types: Any) -> Any:
    import torch

    return torch.nn.functional.pad(types, (model.active_peft_config.num_virtual_tokens, 0))


def _beside(model: Any, given: dict[str, Any], tokens: Any, embeds: Any) -> dict[str, Any]:
    """The arguments that the base model gets beside the embeddings of virtual tokens and ``tokens`` (or
    ``embeds``).
    """
    import torch

    config, base = model.active_peft_config, model.get_base_model()
    found: dict[str, Any] = {}
    if (types := given.get(_TYPES)) is not None:
        found[_TYPES] = _after_virtual(model, types)
    text = per_layer.text_model(base)
    if text is None:
        return found
    inputs = given.get("per_layer_inputs")  # the caller's, without virtual tokens
    if inputs is None:
        inputs = per_layer.inputs_of(base, tokens) if embeds is None else text.get_per_layer_inputs(None, embeds)
    virtual = getattr(config, "cpt_token_ids", None) or [text.config.pad_token_id] * config.num_virtual_tokens
    before = per_layer.inputs_of(base, torch.tensor([virtual], device=inputs.device))
    found["per_layer_inputs"] = torch.cat([before.expand(len(inputs), -1, -1, -1), inputs], dim=1)
    return found


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import PromptTuningConfig, get_peft_model

    workspace.needs("per_layer_embeddings")
    ids = workspace.inputs(text_only=True)["input_ids"]
    tokens = torch.arange(240, 244, device=ids.device)  # not in the prompt

    def logits(model: Any, ids: Any) -> Any:
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "suppress_tokens": tokens.tolist()}
        options |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "output_logits": True}
        with torch.no_grad():
            generated = model.generate(input_ids=ids, **options).logits
            found = torch.cat([model(input_ids=ids).logits, torch.stack(generated, dim=1)], dim=1).float()
        return found.index_fill(-1, tokens, 0.0)

    tuned = get_peft_model(workspace.load(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    rows = tuned.prompt_encoder["default"].embedding.weight.data
    # The same with real tokens: a model in which their embeddings are the virtual ones.
    other = workspace.load()
    text = other.model.language_model
    text.embed_tokens.weight.data[tokens] = 2 * text.embed_tokens.weight.data[tokens]
    table = text.embed_tokens_per_layer.weight.data
    table[tokens] = table[text.config.pad_token_id].clone()
    rows.copy_(other.get_input_embeddings()(tokens).detach())
    expected = logits(other, torch.cat([tokens[None], ids], dim=1))
    found = (logits(tuned, ids) - expected).abs().max().item()
    if found:
        return Outcome(True, f"the logits after virtual tokens are off by {found:.2g}", found)
    return Outcome(False, "virtual tokens count as tokens with the per-layer embeddings of padding, bit for bit", 0.0)
