"""An adapter of a model with new tokens is saved with the embedding rows of those tokens.

Symptom: silent: after ``resize_token_embeddings`` an adapter that is saved and loaded again gives different outputs,
because the rows of the new tokens are random. With ``save_embedding_layers=True``, through ``Gemma4ForCausalLM`` and
with ``trainable_token_indices``, the rows of the per-layer embedding are still random in E2B and E4B.

Cause: ``save_embedding_layers="auto"`` compares ``model.config.vocab_size`` with that of the base's checkpoint. In
multimodal classes the setting is in ``text_config``, so nothing is compared. And PEFT knows an input and an output
embedding, but no third one.

Fix: On Gemma 4 models the sizes in the text configurations are compared. If they differ, the embeddings are saved,
each once: the input's, the per-layer one, and the output's unless it is tied. ``save_embedding_layers=True`` includes
the per-layer embedding, and ``False`` saves none.

Remove when: PEFT reads ``config.get_text_config().vocab_size``, and saves ``get_per_layer_input_embeddings()``.
"""

from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4.adapters import fitting
from gemma4_compat._gemma4.models import family, walk
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F89", severity="wrong_result", affected=">=0.18.0")


@PATCH.replaces("peft.utils.save_and_load", "get_peft_model_state_dict")
def get_peft_model_state_dict(
    original: Original,
    model: Any,
    state_dict: Any = None,
    adapter_name: str = "default",
    unwrap_compiled: bool = False,
    save_embedding_layers: Any = "auto",
) -> Any:
    found = original(model, state_dict, adapter_name, unwrap_compiled, save_embedding_layers)
    inner = getattr(model, "_orig_mod", model) if unwrap_compiled else model
    if not save_embedding_layers or not family.has_parts(inner):
        return found
    if save_embedding_layers == "auto" and not _is_resized(inner, inner.peft_config[adapter_name]):
        return found
    given = {} if state_dict is None else state_dict
    added = []
    for module in _embeddings(fitting.base_of(inner)):
        names = [f"{name}.weight" for name, other in inner.named_modules(remove_duplicate=False) if other is module]
        if not any(name in found for name in names):
            # Below trained tokens it has two names; transformers reads the last.
            found[names[-1]] = given.get(names[-1], module.weight.detach())
            added.append(names[-1])
    if added and save_embedding_layers == "auto":
        notice.warn_user(
            "the vocabulary was resized, so the adapter is saved with embeddings of the base model "
            f"({', '.join(added)}). To load it, give the base model as many tokens before: "
            f"resize_token_embeddings({inner.config.get_text_config().vocab_size}). save_embedding_layers=False saves "
            "none."
        )
    return found


def _is_resized(model: Any, config: Any) -> bool:
    """Whether the model's number of tokens differs from that of the checkpoint it was loaded from."""
    source = getattr(config, "base_model_name_or_path", None) or getattr(model.config, "_name_or_path", None)
    if not source:
        return False
    from transformers import AutoConfig

    try:
        before = AutoConfig.from_pretrained(source)  # not the model's class: it may be the text model's checkpoint
    except (OSError, ValueError):  # upstream has already said that there is no configuration
        return False
    return bool(before.get_text_config().vocab_size != model.config.get_text_config().vocab_size)


def _embeddings(base: Any) -> list[Any]:
    """The embeddings of a model, below PEFT's layers, without a head tied to one of them."""
    found = [base.get_input_embeddings()]
    if not getattr(base.config, "tie_word_embeddings", True):
        found.append(base.get_output_embeddings())
    text = base.config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", None) and hasattr(base, "get_per_layer_input_embeddings"):
        found.append(base.get_per_layer_input_embeddings())  # without this method, transformers does not resize it
    return [walk.innermost(module) for module in found if module is not None]


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from gemma4_compat._lab import tiny_adapters

    def resized(seed: int) -> Any:
        model = workspace.load()
        torch.manual_seed(seed)
        model.resize_token_embeddings(model.config.get_text_config().vocab_size + 8, mean_resizing=False)
        return model

    def logits(model: Any) -> Any:
        tokens = torch.arange(8, device=workspace.main)[None] + model.config.get_text_config().vocab_size - 8
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits.float()

    base = resized(0)
    per_layer = getattr(base.config.get_text_config(), "hidden_size_per_layer_input", None)
    if per_layer and not hasattr(base, "get_per_layer_input_embeddings"):
        return Outcome(False, "this release of transformers does not resize per-layer embeddings", applicable=False)
    model = get_peft_model(base, LoraConfig(target_modules=tiny_adapters.SOME_LINEARS))
    folder = workspace.new_folder()
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(resized(1), folder)
    found = float((logits(model) - logits(loaded)).abs().max())
    return Outcome.of_parity(found, "an adapter of a model with 8 new tokens, saved and loaded")
