"""Import this before loading a Gemma 4 model; known defects of transformers, accelerate, peft and bitsandbytes are
repaired as those libraries are imported.

>>> import gemma4_compat
>>> gemma4_compat.status()["peft-keep-dispatch"].state
<PatchState.PENDING: 'pending'>

Importing it imports none of them. ``GEMMA4_COMPAT_DISABLE=id,id`` (or ``all``) leaves patches out,
``GEMMA4_COMPAT_ENABLE=id`` does for the whole process what :func:`quantize_offloaded` or :func:`quantize_experts` does
inside its ``with``, ``GEMMA4_COMPAT_STRICT=1`` turns a patch that cannot apply into an error.
"""

from __future__ import annotations

from gemma4_compat import _startup as _startup  # isort: skip - it decides where the imports below are searched

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Patch, PatchState, PatchStatus, Severity
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._quantization import opt_in
from gemma4_compat._shim import engine as _engine

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gemma4_compat._decoding.fast import decode_fast as decode_fast
    from gemma4_compat._merge.check import Parity as Parity
    from gemma4_compat._merge.result import MergeParityError as MergeParityError
    from gemma4_compat._merge.result import MergeReport as MergeReport
    from gemma4_compat._models.inspection import MetaTensor as MetaTensor
    from gemma4_compat._models.inspection import find_meta_tensors as find_meta_tensors
    from gemma4_compat._models.inspection import input_device as input_device
    from gemma4_compat._planner.result import Plan as Plan
    from gemma4_compat._planner.skip_modules import SkipModule as SkipModule
    from gemma4_compat._scan.result import Problem as Problem
    from gemma4_compat._scan.result import Scan as Scan

__version__ = "0.1.0"

__all__ = [
    "Gemma4CompatError",
    "Gemma4CompatWarning",
    "MergeParityError",
    "MergeReport",
    "MetaTensor",
    "Parity",
    "Patch",
    "PatchState",
    "PatchStatus",
    "Plan",
    "Problem",
    "Scan",
    "Severity",
    "SkipModule",
    "__version__",
    "decode_fast",
    "find_meta_tensors",
    "input_device",
    "install",
    "merge_adapter",
    "patches",
    "plan_device_map",
    "quantization_skip_modules",
    "quantize_experts",
    "quantize_offloaded",
    "revert",
    "scan_adapter",
    "status",
]

_ON = (PatchState.APPLIED, PatchState.PENDING)

#: What functions return or raise, and where it is: imported on first use, as the functions import their rooms.
_LAZY = {
    "MergeParityError": "gemma4_compat._merge.result",
    "MergeReport": "gemma4_compat._merge.result",
    "MetaTensor": "gemma4_compat._models.inspection",
    "Parity": "gemma4_compat._merge.check",
    "Plan": "gemma4_compat._planner.result",
    "Problem": "gemma4_compat._scan.result",
    "Scan": "gemma4_compat._scan.result",
    "SkipModule": "gemma4_compat._planner.skip_modules",
    "decode_fast": "gemma4_compat._decoding.fast",
    "find_meta_tensors": "gemma4_compat._models.inspection",
    "input_device": "gemma4_compat._models.inspection",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def install() -> None:
    """Arm every patch; ``import gemma4_compat`` has done it already. Call it to re-apply after :func:`revert`.

    Idempotent and thread-safe. Libraries imported before are patched at once, the others when they are imported. A
    model that was built before is repaired too: patches replace functions of its classes, not the model.

    Raises:
        Gemma4CompatError: with ``GEMMA4_COMPAT_STRICT=1``, when patches for what is imported already cannot apply. Of
            what is imported later, the import fails.
    """
    _engine.install()


def status() -> dict[str, PatchStatus]:
    """What happened to every patch, by id, with the reason; of those that wait, what the installed releases say.

    Imports no library, applies nothing, warns of nothing and raises nothing.
    """
    return _engine.status()


def revert(id: str | None = None) -> dict[str, PatchStatus]:
    """Undo the patch ``id``, or all of them, exactly; they stay off until :func:`install`. Returns :func:`status`.

    (But for ``unreached``, which :func:`status` alone counts.)

    torch.compile looks at some functions once, constructors among them: what was compiled before may keep the patch,
    until ``torch.compiler.reset()``.

    Raises:
        Gemma4CompatError: no patch has that id (the message names the nearest one).
    """
    return _engine.revert(id)


def plan_device_map(
    model: Any,
    vram: float | str | Sequence[float | str] | Mapping[int | str, float | str],
    *,
    context: int = 8192,
    batch: int = 1,
    prompt: int | None = None,
    quantize: str | None = "4bit",
    quantize_experts: bool = False,
    adapter: str | Path | None = None,
    vision: bool = False,
    audio: bool = False,
    cpu: float | str | None = None,
    disk: float | str | None = None,
    attention: str = "sdpa",
    balanced: bool = False,
    fast: bool = True,
) -> Plan:
    """A device map for ``model`` that stays inside ``vram`` while loading, in the prefill and while decoding.

    >>> plan = gemma4_compat.plan_device_map("E4B", "4GiB", context=2048)
    >>> plan.device_map["model.language_model.embed_tokens_per_layer"]
    'cpu'

    Needs torch and transformers, no weights and no accelerator. What leaves the accelerator first costs the
    least: the per-layer embeddings, the towers, then as many decoder layers as must, which are streamed.

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), a Gemma 4 configuration, or a model (on meta is enough).
        vram: what PyTorch may allocate on the accelerator: bytes or a size ("8GiB"); one for each of several; or a
            mapping of the map's values to sizes. Leave out what the CUDA context and the display take.
        context: tokens of a sequence, prompt and answer together.
        batch: sequences at a time.
        prompt: tokens of the prompt; default: all of the context, the worst case.
        quantize: "4bit" (nf4), "4bit-double" (nested), "8bit" or None.
        quantize_experts: experts are quantized to 4 bits, too; otherwise they stay in bf16, as upstream keeps them.
        adapter: the folder of a PEFT adapter that will be loaded onto the model.
        vision: inputs contain images, one a sequence.
        audio: inputs contain audio, 30 s a sequence.
        cpu: host memory for what is offloaded; default: as much as it takes.
        disk: disk space for what is offloaded; default: as much as it takes.
        attention: "sdpa" or "eager".
        balanced: over several accelerators, about the same on each; otherwise the first are filled.
        fast: decode with :func:`decode_fast` where it applies, and leave room for its static cache and graphs;
            otherwise ``slow_because`` says why not.

    Returns:
        The map, what is expected to be used where, the longest context that fits, and the code that loads the model.

    Raises:
        Gemma4CompatError: it cannot fit (the message says what would), or an argument cannot be understood.
    """
    from gemma4_compat._planner import plan

    return plan.plan_device_map(
        model,
        vram,
        context=context,
        batch=batch,
        prompt=prompt,
        quantize=quantize,
        quantize_experts=quantize_experts,
        adapter=adapter,
        vision=vision,
        audio=audio,
        cpu=cpu,
        disk=disk,
        attention=attention,
        balanced=balanced,
        fast=fast,
    )


def quantization_skip_modules(model: Any, *, quantize: str = "4bit") -> dict[str, SkipModule]:
    """The modules worth keeping in bf16 when the rest of ``model`` is quantized, each with the reason and its cost.

    >>> keep = gemma4_compat.quantization_skip_modules("26B-A4B")
    >>> keep["router.proj"].modules
    30
    >>> config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=list(keep))

    Names are those of this model only, as ``llm_int8_skip_modules`` takes them on every supported transformers. That
    list replaces upstream's own, so the head is among them. Needs torch and transformers, no weights.

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), a Gemma 4 configuration, or a model (on meta is enough).
        quantize: "4bit" (nf4), "4bit-double" (nested) or "8bit"; the costs are against it.

    Returns:
        By name: the reason, how many such modules and weights there are, and the bytes that bf16 takes more.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model, or the quantization is unknown.
    """
    from gemma4_compat._planner import skip_modules

    return skip_modules.quantization_skip_modules(model, quantize=quantize)


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
    from gemma4_compat._scan import job

    renames = _engine.status()["peft-adapter-keys"].state in _ON
    return job.scan_adapter(adapter, base, quantize=quantize, renames=renames)


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    start: str = "original",
    quantize: Any = None,
    skip_modules: Sequence[str] | None = None,
    dtype: str | None = None,
    device_map: Any = None,
    max_shard_size: int | str = "5GB",
    check: int = 4,
    tolerance: float | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
) -> MergeReport:
    """Merge a LoRA, or what else PEFT can merge, into its base, and compare outputs with those of the adapter.

    >>> report = gemma4_compat.merge_adapter("gemma-4-E4B-it", "my-adapter", "merged")
    >>> report.parity.ok
    True

    One module at a time, in float32, by PEFT's own code, rounded once. In host memory are the adapter and three times
    the largest adapted module in float32, whatever the size of the model; the check then loads the model, twice, one
    after the other. ``out`` appears when all is done: the model, all that lies beside the base's weights,
    ``merge_report.json`` and ``merge_report.txt``. The base and the adapter are only read.

    Args:
        base: the folder of a Gemma 4 checkpoint in safetensors, or the id of a cached one.
        adapter: the folder of an adapter, or the id of a cached one; keys of another Gemma 4 class are understood.
        out: a folder that does not exist, or is empty.
        start: "original" (the weights as they are on disk) or "dequantized" (what the 4-bit or 8-bit base computes
            with, as the adapter saw it).
        quantize: for "dequantized": "4bit", "4bit-double", "8bit" or a ``BitsAndBytesConfig``; default: what the base
            says, else "4bit-double".
        skip_modules: for "dequantized": ``llm_int8_skip_modules``; default: those of ``quantize`` where it is a
            configuration, else the head and the routers.
        dtype: "bf16", "fp16" or "fp32"; default: the base's.
        device_map: where the check runs; default: the first GPU, else the CPU.
        max_shard_size: of a file with weights.
        check: how many prompts to compare outputs on; 0: no check.
        tolerance: the largest difference of logits; default: a bound measured on this model.
        allow_pickle: read an ``adapter_model.bin`` (tensors and nothing else).
        progress: show a progress bar; default: on a terminal.

    Returns:
        What was merged, and the measured parity: logits, KL divergence, greedy tokens.

    Raises:
        MergeParityError: parity is out of bounds; its ``report`` has what was measured, and nothing is left behind.
        Gemma4CompatError: it cannot be done; the message says why, and nothing is left behind.
    """
    from gemma4_compat._merge import job

    return job.merge_adapter(
        base,
        adapter,
        out,
        start=start,
        quantize=quantize,
        skip_modules=skip_modules,
        dtype=dtype,
        device_map=device_map,
        max_shard_size=max_shard_size,
        check=check,
        tolerance=tolerance,
        allow_pickle=allow_pickle,
        progress=progress,
    )


def patches() -> tuple[Patch, ...]:
    """Every patch the package knows, whether or not this environment needs it."""
    return _engine.patches()


@contextlib.contextmanager
def quantize_offloaded() -> Iterator[None]:
    """Models loaded inside are quantized everywhere, also where their device map offloads them.

    >>> with gemma4_compat.quantize_offloaded():
    ...     model = AutoModelForImageTextToText.from_pretrained(..., device_map={...}, quantization_config=four_bit)

    For Gemma 4 and bitsandbytes, 4-bit and 8-bit. Upstream keeps what a dict ``device_map`` puts on ``"cpu"`` or
    ``"disk"`` unquantized, wants ``llm_int8_enable_fp32_cpu_offload=True`` for that, and outputs differ accordingly;
    inside, outputs are those of the same quantization on one device, and the flag is not needed. It applies to this
    thread alone; ``GEMMA4_COMPAT_ENABLE=transformers-quantize-offloaded`` does the same for the whole process.

    Raises:
        Gemma4CompatError: the patch ``transformers-quantize-offloaded`` is off, so nothing could be done.
    """
    _check_is_on(opt_in.OFFLOADED.id, "quantize_offloaded()")
    with opt_in.OFFLOADED.enabled():
        yield


@contextlib.contextmanager
def quantize_experts() -> Iterator[None]:
    """Models loaded inside in 4 bits are loaded with their experts in 4 bits; 26B-A4B: see docs/QUANTIZATION.md.

    >>> with gemma4_compat.quantize_experts():
    ...     model = AutoModelForImageTextToText.from_pretrained(..., quantization_config=four_bit)

    For Gemma 4 and bitsandbytes. Upstream keeps experts in bf16, for they are parameters, not linear layers; inside,
    each expert's matrix is quantized by itself. ``llm_int8_skip_modules`` applies to them, too ("experts", or one
    layer's). A model saved that way loads that way anywhere. It applies to this thread alone;
    ``GEMMA4_COMPAT_ENABLE=transformers-quantized-experts`` does the same for the whole process. Goes together with
    :func:`quantize_offloaded`: ``with quantize_experts(), quantize_offloaded(): ...``.

    Raises:
        Gemma4CompatError: the patch ``transformers-quantized-experts`` is off, so nothing could be done.
    """
    _check_is_on(opt_in.EXPERTS.id, "quantize_experts()")
    with opt_in.EXPERTS.enabled():
        yield


def _check_is_on(patch_id: str, needed_by: str) -> None:
    found = _engine.status()[patch_id]
    if found.state not in _ON:
        raise Gemma4CompatError(f"{needed_by} needs the patch {found.id}, which is {found.state}: {found.reason}.")


install()
