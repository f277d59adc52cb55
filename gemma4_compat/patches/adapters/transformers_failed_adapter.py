"""An adapter that transformers cannot load leaves the model as it was.

Symptom: silent: after ``model.load_adapter`` raised (``RuntimeError: You set `ignore_mismatched_sizes` to `False```)
the model gives different outputs. The layers of the adapter that failed to load are still in it.

Cause: ``PeftAdapterMixin.load_adapter`` injects the adapter's layers first and reads its weights afterwards. When
reading fails, it removes nothing.

Fix: A load that raises, for any reason, leaves the model as it was. An adapter of the wrong shape raises an error that
names the first module with a mismatch.

Remove when: ``PeftAdapterMixin.load_adapter`` removes what it injected when a load fails.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.adapters import rollback
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F3", severity="wrong_result", affected=">=5.5", acts_on="every model", requires="peft")

_PREFIX = "base_model.model."


@PATCH.replaces("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")
def load_adapter(
    original: Original,
    self: Any,
    peft_model_id: Any = None,
    adapter_name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    name = adapter_name or "default"
    found: list[tuple[str, Any, Any]] = []
    try:
        with rollback.undone_if_it_fails(self, name):
            try:
                return original(self, peft_model_id, adapter_name, *args, **kwargs)
            except RuntimeError:
                found += _mismatches(self, peft_model_id, name)  # while its layers still exist
                raise
    except RuntimeError as error:
        if not found:
            raise
        raise rollback.describe(peft_model_id, self, found) from error


def _mismatches(model: Any, folder: Any, adapter_name: str) -> Iterator[tuple[str, Any, Any]]:
    """Tensors of a local adapter whose shape differs from that of their layer."""
    from safetensors import safe_open

    file = Path(folder or "", "adapter_model.safetensors")
    if not file.is_file():
        return
    here = {
        ".".join(part for part in name.split(".") if part != adapter_name): list(parameter.shape)
        for name, parameter in model.named_parameters()
        if adapter_name in name.split(".")
    }
    with safe_open(file, framework="pt") as saved:
        for key in saved.keys():  # noqa: SIM118  (not a mapping)
            shape, name = list(saved.get_slice(key).get_shape()), key.removeprefix(_PREFIX)
            if here.get(name, shape) != shape:
                yield name, shape, here[name]


def reproduce(workspace: Workspace) -> Outcome:
    found = []
    for base in (workspace.load(), workspace.split()):
        reference = workspace.reference()
        try:
            base.load_adapter(str(workspace.mismatched_adapter()))
        except (ImportError, ValueError) as error:  # incompatible releases of transformers and PEFT
            return Outcome(False, f"load_adapter does not run here: {error}", applicable=False)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        left = [name for name, _ in base.named_modules() if "lora_" in name]
        if left:
            return Outcome(True, f"{message} {len(left)} modules of it stay in the model, {left[0]} among them")
        found.append(workspace.difference(reference, base))
    return Outcome.of_parity(max(found), "the model after an adapter that does not fit")
