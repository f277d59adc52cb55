"""The load_adapter of transformers accepts adapters saved by other Gemma 4 classes and tools.

Symptom: silent: ``model.load_adapter`` does nothing for an adapter that another Gemma 4 class created, such as an
adapter of ``Gemma4ForCausalLM`` on ``Gemma4ForConditionalGeneration``. The load report lists its keys as UNEXPECTED
and the new layers as MISSING.

Cause: ``PeftAdapterMixin.load_adapter`` strips PEFT's prefix and matches names, and ``model.layers`` is not
``model.language_model.layers``. PEFT's own loaders have the same defect.

Fix: If the keys need translating, the patch reads the weights and passes them on under the names of the model at hand.
The patch for PEFT's own loaders fits the config while the layers are created. A load in which nothing fits is an error
before anything is changed; if only some keys do not fit, there is one warning.

Remove when: ``PeftAdapterMixin.load_adapter`` translates adapter keys between a model's classes.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.adapters import fitting
from gemma4_compat._gemma4.models import family, walk
from gemma4_compat._offload.weights import tied_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F22", severity="wrong_result", affected=">=5.5", requires="peft", needs="peft-adapter-keys")

_HUB = ("revision", "token", "subfolder", "cache_dir", "force_download", "local_files_only", "proxies")


@PATCH.replaces("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")
def load_adapter(
    original: Original,
    self: Any,
    peft_model_id: Any = None,
    adapter_name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    arguments = (self, peft_model_id, adapter_name, *args)
    # positional beyond the name: peft_config, then adapter_state_dict
    given = args[1] if len(args) > 1 else kwargs.get("adapter_state_dict")
    if not family.is_gemma4(self) or (given is None and peft_model_id is None):
        return original(*arguments, **kwargs)
    source = peft_model_id if given is None else "given as a state dict"
    read = _reader(peft_model_id, given, kwargs)
    if given is not None:
        shapes = fitting.shapes_of(given)
    else:
        hub = _hub(kwargs)
        folder = Path(str(peft_model_id))
        if folder.is_dir() and not (folder / (hub.get("subfolder") or "") / "adapter_config.json").is_file():
            return original(*arguments, **kwargs)  # upstream says so
        import pickle

        try:
            shapes = fitting.shapes_in(peft_model_id, read=read, subfolder=hub.get("subfolder"))
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
            return original(*arguments, **kwargs)  # unreadable files raise upstream's own error
    keys = tuple(shapes)
    brings = any(key.endswith(".weight") and "embed_tokens" in key for key in keys)  # weights of the base
    tied = tied_weights.kept(self) if brings else contextlib.nullcontext()
    with tied, fitting.loading(source, shapes), walk.quick(self):  # caches lookups inside
        found = fitting.translate(keys, self)
        if keys and not found.names:
            raise fitting.nothing_matched(source, self, keys)
        if found.is_identity or len(args) > 1:
            return original(*arguments, **kwargs)
        weights = read()
        kwargs["adapter_state_dict"] = {name: weights[key] for key, name in found.names.items()}
        result = original(*arguments, **kwargs)
    fitting.warn_of_unmatched(source, self, found.unmatched, len(keys))
    return result


def _reader(source: Any, given: Any, kwargs: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        if given is not None:
            return dict(given)
        from peft.utils import load_peft_weights

        weights: dict[str, Any] = load_peft_weights(str(source), device="cpu", **_hub(kwargs))
        return weights

    return read


def _hub(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The file's location on the hub."""
    named = {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
    return {name: named[name] for name in _HUB if named.get(name) is not None}


def reproduce(workspace: Workspace) -> Outcome:
    adapter = str(workspace.text_adapter())
    text = workspace.load_text()
    try:
        text.load_adapter(adapter)
    except (ImportError, ValueError) as error:  # incompatible releases of transformers and PEFT
        return Outcome(False, f"load_adapter does not run here: {error}", applicable=False)
    reference = workspace.outputs(text, text_only=True)
    model = workspace.load()
    model.load_adapter(adapter)
    found = workspace.difference(reference, model, text_only=True)
    return Outcome.of_parity(found, "model.load_adapter of a Gemma4ForCausalLM's adapter")
