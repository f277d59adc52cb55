"""An adapter that PEFT cannot load leaves the model as it was.

Symptom: silent: after an adapter failed to load (``RuntimeError: Error(s) in loading state_dict for PeftModel: size
mismatch for ...``), the base model gives different outputs: the layers of that adapter are still in it, half filled.

Cause: ``PeftModel.from_pretrained`` and ``PeftModel.load_adapter`` inject the adapter's layers first and read its
weights afterwards. When that fails, they remove nothing.

Fix: A load that raises, for whatever reason, leaves the model as it was. An adapter of the wrong shape raises an error
that names the first module, instead of one line per tensor.

Remove when: PEFT removes what it injected when a load fails.
"""

from typing import Any

from gemma4_compat._gemma4.adapters import rollback
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F3", severity="wrong_result", affected=">=0.18.0", acts_on="every model")


@PATCH.replaces("peft.peft_model", "PeftModel.from_pretrained")
@PATCH.replaces("peft.mixed_model", "PeftMixedModel.from_pretrained")
def from_pretrained(
    original: Original,
    cls: Any,
    model: Any,
    model_id: Any,
    adapter_name: str = "default",
    *args: Any,
    **kw: Any,
) -> Any:
    return _load(original, model, model_id, adapter_name, (cls, model, model_id, adapter_name, *args), kw)


@PATCH.replaces("peft.peft_model", "PeftModel.load_adapter")
def load_adapter(original: Original, self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    return _load(original, self, model_id, adapter_name, (self, model_id, adapter_name, *args), kwargs)


def _load(
    original: Original, model: Any, adapter: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        with rollback.undone_if_it_fails(model, name):
            return original(*args, **kwargs)
    except RuntimeError as error:
        clear = rollback.mismatch(error, adapter, model)
        if clear is None:
            raise
        raise clear from error


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel

    found = []
    for base in (workspace.load(), workspace.split()):
        reference = workspace.reference()
        try:
            PeftModel.from_pretrained(base, workspace.mismatched_adapter())
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        left = [name for name, _ in base.named_modules() if "lora_" in name]
        if left:
            return Outcome(True, f"{message} {len(left)} modules of it stay in the base model, {left[0]} among them")
        found.append(workspace.difference(reference, base))
    return Outcome.of_parity(max(found), "the base model after an adapter that does not fit")
