"""Why libraries cannot be imported: what is not installed, and a torchvision that was built for another torch.

transformers imports an installed torchvision wherever it touches images. If that fails, nearly every class of
transformers cannot be imported, and the error names the class. Imports nothing upstream.
"""

from __future__ import annotations

import re
import traceback
from importlib import metadata

from gemma4_compat._doctor.explain import common_errors, messages
from gemma4_compat._engine import versions
from gemma4_compat._engine.io import address

_TORCH = re.compile(r"torch\s*\(?\s*(==[^);,\s]+)\)?\s*$")

#: Builds that have an index of their own.
_BUILD = re.compile(r"cpu|xpu|cu\d+|rocm[\d.]+")


def torchvision() -> str | None:
    """Whether the installed torchvision was built for another torch, by its metadata: what, and what to do.

    None if it was not, if there is no torchvision or no torch, or if nobody knows.
    """
    release, torch = versions.installed("torchvision"), versions.installed("torch")
    if release is None or torch is None:
        return None
    found = (_TORCH.match(text) for text in metadata.requires("torchvision") or ())
    wanted = next((match[1] for match in found if match), None)
    if wanted is not None and not versions.admits(wanted, torch):
        built = f"torch {wanted.removeprefix('==')}"
    elif torch.endswith("+cpu") != release.endswith("+cpu"):
        built = "a torch for CPUs" if release.endswith("+cpu") else "a torch for GPUs"
    else:
        return None
    public, _, build = torch.partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if _BUILD.fullmatch(build) else ""
    return (
        f"torchvision {release} was built for {built}, and torch {torch} is installed: transformers cannot be "
        f"imported. Install the one that belongs to it: `pip install torch=={public} torchvision{index}`; or, if "
        "you only need text, `pip uninstall torchvision`."
    )


def advice(text: str) -> str:
    """What to do about the failed import in a text, as a sentence to append; "" if there is none."""
    known = common_errors.advice(messages.read(text)) if text else None
    if known is None or not known.of_an_import:
        return ""
    return f" {torchvision() or f'{known.what} {known.to_do}'}"


def failed(error: BaseException, needs: str) -> str | None:
    """One line about an import that failed; None for any other error. ``needs`` says what needed it."""
    said = messages.read("".join(traceback.format_exception(error)), pasted=False)
    known = common_errors.advice(said) if isinstance(error, ImportError) or "torchvision" in str(error) else None
    of_an_import = known is not None and known.of_an_import
    if isinstance(error, ModuleNotFoundError) and error.name and not of_an_import:
        return f"{error.name} is not installed; {needs} needs it: {address.install('stack')}"
    if not isinstance(error, ImportError) and not of_an_import:
        return None
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    what = f"{needs} needs an import that failed with {type(first).__name__}: {first}".rstrip(".")
    return f"{what}.{advice(f'{type(first).__name__}: {first}')}"
