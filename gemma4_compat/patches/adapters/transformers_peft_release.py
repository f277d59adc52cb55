"""Adapters of a transformers model work with the released PEFT versions.

Symptom: ``ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0``, raised by
transformers 5.24.0 from ``add_adapter``, ``set_adapter``, ``disable_adapters``, ``enable_adapters`` and
``active_adapters`` of a model, and from ``delete_adapter``, with any released PEFT.

Cause: ``transformers.integrations.peft`` requires PEFT 0.22.0, which is not released. In 5.23.0 it required 0.20.0,
and that number is the only change in the module since.

Fix: A check for 0.22.0 is answered as a check for 0.20.0; an older PEFT is still refused.

Remove when: transformers 5.24.0 with a PEFT before 0.22.0 is no longer supported.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F74", severity="crash", affected=">=5.24.0", acts_on="every model", requires="peft>=0.20,<0.22")

#: The release that transformers requires, and the one that the same code required before.
_ASKED, _BEFORE = "0.22.0", "0.20.0"


@PATCH.replaces("transformers.utils.peft_utils", "check_peft_version")
def check_peft_version(original: Original, min_version: Any) -> None:
    original(_BEFORE if min_version == _ASKED else min_version)


def reproduce(workspace: Workspace) -> Outcome:
    import peft
    from packaging.version import Version

    if Version(peft.__version__) < Version(_BEFORE):
        return Outcome(False, f"PEFT is older than the {_BEFORE} that transformers 5.23.0 asks for", applicable=False)
    model = workspace.load()
    model.load_adapter(str(workspace.adapter("language")), adapter_name="first")
    expected = workspace.outputs(model)
    model.disable_adapters()
    off = workspace.difference(workspace.reference(), model)
    model.enable_adapters()
    model.set_adapter("first")
    on = workspace.difference(expected, model)
    return Outcome.of_parity(max(off, on), "an adapter of a transformers model, off and on")
