"""The address of this package, and how it is installed, in this place only. The build reads it as well
(hatch_build.py).
"""

from __future__ import annotations

#: Address of the repository, without a final slash. None: it has no address yet, and neither messages nor the
#: package's metadata name one.
REPOSITORY: str | None = None
#: Whether ``pip install gemma4-compat`` finds this package: True from the day of the first release on.
ON_INDEX = False
#: What pyproject.toml calls an extra, and what pip installs for it; "package" is this one without any.
EXTRAS = {
    "stack": ("accelerate", "bitsandbytes", "peft", "torch", "transformers"),
    "images": ("pillow", "torchvision"),
    "package": ("PATH-OF-A-CHECKOUT",),
}


def install(extra: str) -> str:
    """The command that installs an extra of :data:`EXTRAS`, as it works today."""
    name = "gemma4-compat" if extra == "package" else f"'gemma4-compat[{extra}]'"
    return f"pip install {name}" if ON_INDEX else f"pip install {' '.join(EXTRAS[extra])}"


def report_request() -> str:
    """Where to report something, as the end of a sentence that begins with "please"."""
    return f"report it at {REPOSITORY}/issues" if REPOSITORY else "report it to the maintainers of gemma4_compat"
