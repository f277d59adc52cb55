"""Adapters saved by other Gemma 4 classes and tools load; an adapter in which no key fits is an error.

Symptom: silent: an adapter created with ``Gemma4ForCausalLM`` loads onto ``Gemma4ForConditionalGeneration`` and does
nothing; the only sign is a warning of many lines, ``UserWarning: Found missing adapter keys while loading the
checkpoint: [...]``. The other way round, the load raises ``ValueError: Target modules ... not found in the base
model``.

Cause: The decoder layers are ``model.layers`` in one class and ``model.language_model.layers`` in the other.
``set_peft_model_state_dict`` loads with ``strict=False``, which drops every key that has no place. Other tools write
still other prefixes.

Fix: The patch translates the keys of the file to the names of the model at hand; docs/ADAPTERS.md lists the supported
dialects. It also makes the config target the layers for which the file has weights, so the towers get no idle adapter
layers and the adapter loads again after it is saved.

Keys of k/v projections that a KV-shared layer does not have in this model are left out. Other keys without a place
give one warning. A load in which no key fits is an error, and the rollback of failed loads (a separate patch) leaves
the model as it was. If the keys of an adapter already fit, only upstream's code loads it.

Remove when: PEFT translates adapter keys between a model's classes and refuses an adapter in which nothing fits.
"""

from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.adapters import fitting
from gemma4_compat._gemma4.adapters.translation import PREFIX
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F22", severity="wrong_result", affected=">=0.18.0", needs="peft-failed-load peft-clippable-linear")

_NO_TARGETS = ("not found in the base model", "No modules were targeted", "All modules were excluded")


@PATCH.replaces("peft.peft_model", "PeftModel.from_pretrained")
@PATCH.replaces("peft.mixed_model", "PeftMixedModel.from_pretrained")
def from_pretrained(original: Original, cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    return _load(original, model, model_id, (cls, model, model_id, *args), kwargs)


@PATCH.replaces("peft.peft_model", "PeftModel.load_adapter")
def load_adapter(original: Original, self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    return _load(original, self, model_id, (self, model_id, *args), kwargs)


def _load(original: Original, model: Any, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = fitting.being_loaded()
    if not family.is_gemma4(model) or (known is not None and known.source == str(source)):
        return original(*args, **kwargs)
    shapes = _shapes(source, kwargs)
    keys = tuple(shapes)
    with fitting.loading(source, shapes):
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            nothing = not fitting.translate(keys, model).names
            if keys and nothing and any(text in str(error) for text in _NO_TARGETS):
                raise fitting.nothing_matched(source, model, keys) from error
            raise


def _shapes(source: Any, kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Keys and shapes in the adapter's file; empty if it has no config (upstream says so) or no weights there."""
    folder = Path(str(source), kwargs.get("subfolder") or "")
    if Path(str(source)).is_dir():
        files = [folder / f"adapter_model.{end}" for end in ("safetensors", "bin")]
        if not (folder / "adapter_config.json").is_file() or not any(file.is_file() for file in files):
            return {}

    def read() -> dict[str, Any]:
        from peft import PeftConfig, PeftModel
        from peft.utils import load_peft_weights

        hub, _ = PeftModel._split_kwargs(kwargs)
        PeftConfig._get_peft_type(source, **hub)  # upstream's own error for an invalid name
        weights: dict[str, Any] = load_peft_weights(source, device="cpu", **hub)
        return weights

    return fitting.shapes_in(source, read=read, subfolder=kwargs.get("subfolder"))


@PATCH.replaces("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers")
def maybe_include_all_linear_layers(original: Original, peft_config: Any, model: Any) -> Any:
    # The last step before the matching, for every tuner: "all-linear" and default targets are already resolved.
    peft_config = original(peft_config, model)
    adapter = fitting.being_loaded()
    if adapter is not None and family.is_gemma4(model):
        fitting.fit(peft_config, model, adapter.keys)
    return peft_config


@PATCH.replaces("peft.utils.save_and_load", "set_peft_model_state_dict")
def set_peft_model_state_dict(
    original: Original,
    model: Any,
    peft_model_state_dict: Any,
    adapter_name: str = "default",
    *args: Any,
    **kwargs: Any,
) -> Any:
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not family.is_gemma4(model) or config is None or not hasattr(config, "target_modules"):
        return original(model, peft_model_state_dict, adapter_name, *args, **kwargs)
    adapter = fitting.being_loaded()
    source = adapter.source if adapter is not None else "given as a state dict"
    keys = list(peft_model_state_dict)
    found = fitting.translate(keys, model)
    wrapped = any(name.startswith(PREFIX) for name, _ in model.named_parameters())
    unused = set(found.unused)
    weights = {
        (name if wrapped else name.removeprefix(PREFIX)): peft_model_state_dict[key]
        for key in keys
        if key not in unused
        for name in [found.names.get(key, key)]
    }
    if list(weights) == keys:
        weights = peft_model_state_dict
    if keys and not weights:  # nothing but unused keys
        raise fitting.nothing_matched(source, model, keys)
    written = {_plain(name, adapter_name): key for key, name in found.names.items()}
    result = original(model, weights, adapter_name, *args, **kwargs)
    lost = [name for name in result.unexpected_keys if _is_of_a_layer(name)]
    unmatched = [written.get(_plain(name, adapter_name), name) for name in lost]
    if keys and len(result.unexpected_keys) >= len(weights or keys):
        raise fitting.nothing_matched(source, model, keys)
    fitting.warn_of_unmatched(source, model, unmatched, len(keys))
    return result


def _plain(name: str, adapter_name: str) -> str:
    """A name as in a file, without the adapter's name that PEFT inserted."""
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part != adapter_name)


def _is_of_a_layer(name: str) -> bool:
    """Not weights that a tuner keeps once for the whole model and handles itself (``base_model.vera_A``)."""
    return len(name.removeprefix(PREFIX).split(".")) > 2


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel

    adapter = workspace.text_adapter()
    reference = workspace.outputs(PeftModel.from_pretrained(workspace.load_text(), adapter), text_only=True)
    model = PeftModel.from_pretrained(workspace.load(), adapter)
    found = workspace.difference(reference, model, text_only=True)
    return Outcome.of_parity(found, "an adapter of Gemma4ForCausalLM on Gemma4ForConditionalGeneration")
