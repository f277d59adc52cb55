"""The engine of this process, with every patch, and the public functions that ask it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gemma4_compat import _startup
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.io import arguments
from gemma4_compat._engine.patch import Patch, PatchState
from gemma4_compat._engine.reports.report import Statuses
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.quantization import opt_in
from gemma4_compat.patches import registry

if TYPE_CHECKING:
    from gemma4_compat._adapter_tools.scan.result import Scan
    from gemma4_compat._needed.judge import Assessment

engine = Engine(registry.load())


def arm() -> None:
    """What ``import gemma4_compat`` does: :func:`install`. In a process of the command line, that reports an error."""
    try:
        install()
    except Gemma4CompatError as error:
        if not _startup.is_command_line():
            raise
        _startup.refusal = str(error)


def install() -> None:
    """Arm every patch; ``import gemma4_compat`` has done it already. Call it to re-apply after :func:`revert`.

    Idempotent and thread-safe. Libraries that are imported are patched at once, the others on import. A model that was
    built before is repaired as well: patches replace functions of its classes, not the model.

    Raises:
        Gemma4CompatError: with ``GEMMA4_COMPAT_STRICT=1``, patches for an imported library cannot apply. (If the
            library is imported later, that import fails.) Or the project's settings make no sense.
    """
    engine.install()


def status(*, unreached: bool = False) -> Statuses:
    """The state of every patch, by id, with the reason; of pending patches, what the installed releases decide.

    ``print`` shows it on one screen. Imports no library, applies nothing, warns of nothing and raises nothing.

    Args:
        unreached: also count the objects that had taken a function before it was replaced, and call the original. That
            may take a search of the heap: tenths of a second in a large process.
    """
    return Statuses(engine.status(count=unreached), registry.AREA_OF)


def revert(id: str | None = None) -> Statuses:
    """Undo the patch ``id``, or all of them, exactly; they stay off until :func:`install`.

    Returns what :func:`status` returns.

    torch.compile looks at some functions once, constructors among them: what was compiled before may keep the patch,
    until ``torch.compiler.reset()``.

    Raises:
        Gemma4CompatError: no patch has that id (the message names the nearest one).
    """
    return Statuses(engine.revert(id), registry.AREA_OF)


def patches() -> tuple[Patch, ...]:
    """Every patch the package knows, whether or not this environment needs it."""
    return engine.patches()


def is_on(patch_id: str) -> bool:
    """Whether a patch is applied, or will be when its library is imported."""
    return engine.state(patch_id).state in (PatchState.APPLIED, PatchState.PENDING)


def needed(file: str | os.PathLike[str] | None = None) -> Assessment:
    """Which patches a stack still needs, and the releases that make each unnecessary. Imports no library.

    >>> print(gemma4_compat.needed())
    >>> gemma4_compat.needed("requirements.txt").droppable

    Args:
        file: a requirements.txt, pyproject.toml, a lock file or a file of conda; default: what is installed.

    Raises:
        Gemma4CompatError: the file cannot be understood. The message names file, line and remedy.
    """
    from gemma4_compat._needed import judge

    return judge.assess(None if file is None else arguments.path(file, "file"), engine.patches())


def scan_adapter(adapter: str | os.PathLike[str], base: Any = None, *, quantize: str | None = None) -> Scan:
    """What a saved PEFT adapter is, and what it would do on ``base``: problems first.

    >>> scan = gemma4_compat.scan_adapter("my-adapter", "E2B")
    >>> scan.keys, [problem.message for problem in scan.problems]
    ({'text': 490, 'vision': 224, 'audio': 72}, [])

    Reads ``adapter_config.json``, the header of ``adapter_model.safetensors`` and the configuration of the base; no
    weights, and never a pickle. Without a base it needs no other library; with one torch, transformers and PEFT.

    Args:
        adapter: its folder, or the id of one in the cache of the hub.
        base: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), or a Gemma 4 configuration; of a model its configuration counts.
        quantize: how the base will be quantized ("4bit", "4bit-double", "8bit"), where its configuration does not
            say.

    Returns:
        Keys by tower, ranks, types, bytes, what the keys hit in the base, what this package redirects or renames, what
        has no use there, and the problems.

    Raises:
        Gemma4CompatError: there is no such adapter or base, a file is damaged or a pickle, or the PEFT type unknown.
    """
    from gemma4_compat._adapter_tools.scan import job

    return job.scan_adapter(adapter, base, quantize=quantize, renames=is_on("peft-adapter-keys"))


def quantize(*, offloaded: bool = False, experts: bool = False, packed: bool = False) -> AbstractContextManager[None]:
    """Models loaded inside keep more of their weights quantized than upstream would.

    >>> with gemma4_compat.quantize(offloaded=True):
    ...     model = AutoModelForImageTextToText.from_pretrained(..., device_map={...}, quantization_config=four_bit)

    For Gemma 4. It applies to this thread only; ``GEMMA4_COMPAT_ENABLE``, with the ids below, does the same for the
    whole process. A model saved that way loads that way anywhere.

    Args:
        offloaded: what a dict ``device_map`` puts on ``"cpu"`` or ``"disk"``, in 4 or 8 bits
            (``transformers-quantize-offloaded``). Upstream keeps it unquantized, wants
            ``llm_int8_enable_fp32_cpu_offload=True`` for that, and outputs differ accordingly; inside, outputs are
            those of the same quantization on one device, and the flag is not needed.
        experts: the experts of the 26B-A4B, in 4 bits (``transformers-quantized-experts``; docs/QUANTIZATION.md).
            Upstream keeps them in bf16, because they are parameters, not linear layers; inside, each expert's matrix
            is quantized by itself. ``llm_int8_skip_modules`` applies to them as well ("experts", or one layer's).
        packed: layers of a 4-bit compressed-tensors checkpoint stay packed (``transformers-packed-layers``), which the
            first forward unpacks to bf16 upstream. They do anyway where that would not fit, or a map offloads.

    Raises:
        Gemma4CompatError: a patch is off, so nothing could be done; or nothing is asked for.
    """
    named = {
        "offloaded": (offloaded, opt_in.OFFLOADED),
        "experts": (experts, opt_in.EXPERTS),
        "packed": (packed, opt_in.PACKED),
    }
    asked = {name: feature for name, (value, feature) in named.items() if value}
    if not asked:
        raise Gemma4CompatError("quantize() needs offloaded=True, experts=True or packed=True")
    call = f"quantize({', '.join(f'{name}=True' for name in asked)})"

    def check(feature: opt_in.OptIn) -> None:
        if not is_on(feature.id):
            found = engine.state(feature.id)
            raise Gemma4CompatError(f"{call} needs the patch {found.id}, which is {found.state}: {found.reason}.")

    return opt_in.Loading(tuple(asked.values()), call, check)
