"""Import this before loading a Gemma 4 model; known defects of transformers, accelerate, peft and bitsandbytes are
repaired as those libraries are imported.

>>> import gemma4_compat
>>> gemma4_compat.status()["peft-keep-dispatch"].state
<PatchState.PENDING: 'pending'>

Importing it imports none of them. ``GEMMA4_COMPAT_DISABLE=id,id`` (or ``all``) leaves patches out,
``GEMMA4_COMPAT_ENABLE=id`` does for the whole process what :func:`quantize_offloaded` or :func:`quantize_experts` does
inside its ``with``, ``GEMMA4_COMPAT_STRICT=1`` turns a patch that cannot apply into an error. A project says the same
in ``[tool.gemma4_compat]`` of its pyproject.toml: ``disable``, ``enable`` and ``strict`` (docs/RUN.md).
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
    from gemma4_compat._export.result import ExportReport as ExportReport
    from gemma4_compat._merge.check import Parity as Parity
    from gemma4_compat._merge.repair import RepairReport as RepairReport
    from gemma4_compat._merge.result import MergeParityError as MergeParityError
    from gemma4_compat._merge.result import MergeReport as MergeReport
    from gemma4_compat._models.inspection import MetaTensor as MetaTensor
    from gemma4_compat._models.inspection import find_meta_tensors as find_meta_tensors
    from gemma4_compat._models.inspection import input_device as input_device
    from gemma4_compat._planner.plan import plan_device_map as plan_device_map
    from gemma4_compat._planner.result import Plan as Plan
    from gemma4_compat._planner.result import TrainingPlan as TrainingPlan
    from gemma4_compat._planner.training import plan_training as plan_training
    from gemma4_compat._quantization.skip_modules import SkipModule as SkipModule
    from gemma4_compat._scan.result import Problem as Problem
    from gemma4_compat._scan.result import Scan as Scan
    from gemma4_compat._training.loss import chunked_loss as chunked_loss

__version__ = "0.1.0"

__all__ = [
    "ExportReport",
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
    "RepairReport",
    "Scan",
    "Severity",
    "SkipModule",
    "TrainingPlan",
    "__version__",
    "chunked_loss",
    "decode_fast",
    "export_adapter",
    "find_meta_tensors",
    "input_device",
    "install",
    "merge_adapter",
    "patches",
    "plan_device_map",
    "plan_training",
    "quantization_skip_modules",
    "quantize_experts",
    "quantize_offloaded",
    "repair_checkpoint",
    "revert",
    "scan_adapter",
    "status",
]

_ON = (PatchState.APPLIED, PatchState.PENDING)

#: Names that are imported on first use, and where they are.
_LAZY = {
    "ExportReport": "gemma4_compat._export.result",
    "MergeParityError": "gemma4_compat._merge.result",
    "MergeReport": "gemma4_compat._merge.result",
    "MetaTensor": "gemma4_compat._models.inspection",
    "Parity": "gemma4_compat._merge.check",
    "Plan": "gemma4_compat._planner.result",
    "TrainingPlan": "gemma4_compat._planner.result",
    "Problem": "gemma4_compat._scan.result",
    "RepairReport": "gemma4_compat._merge.repair",
    "Scan": "gemma4_compat._scan.result",
    "SkipModule": "gemma4_compat._quantization.skip_modules",
    "chunked_loss": "gemma4_compat._training.loss",
    "decode_fast": "gemma4_compat._decoding.fast",
    "find_meta_tensors": "gemma4_compat._models.inspection",
    "input_device": "gemma4_compat._models.inspection",
    "plan_device_map": "gemma4_compat._planner.plan",
    "plan_training": "gemma4_compat._planner.training",
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
            what is imported later, the import fails. Also when the project's settings make no sense.
    """
    _engine.install()


def status() -> dict[str, PatchStatus]:
    """What happened to every patch, by id, with the reason; of those that wait, what the installed releases say.

    Imports no library, applies nothing, warns of nothing and raises nothing.
    """
    return _engine.status()


def revert(id: str | None = None) -> dict[str, PatchStatus]:
    """Undo the patch ``id``, or all of them, exactly; they stay off until :func:`install`.

    Returns what :func:`status` returns, with ``unreached`` 0: counting takes a search that only :func:`status` makes.

    torch.compile looks at some functions once, constructors among them: what was compiled before may keep the patch,
    until ``torch.compiler.reset()``.

    Raises:
        Gemma4CompatError: no patch has that id (the message names the nearest one).
    """
    return _engine.revert(id)


def quantization_skip_modules(model: Any, *, quantize: str = "4bit") -> dict[str, SkipModule]:
    """The modules worth keeping in bf16 when the rest of ``model`` is quantized, each with the reason and its cost.

    >>> keep = gemma4_compat.quantization_skip_modules("26B-A4B")
    >>> keep["router.proj"].modules
    30
    >>> options = {"bnb_4bit_compute_dtype": torch.bfloat16, "llm_int8_skip_modules": list(keep)}
    >>> config = BitsAndBytesConfig(load_in_4bit=True, **options)

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
    from gemma4_compat._quantization import skip_modules

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
    adapter: str | Path | Mapping[str | Path, float],
    out: str | Path,
    *,
    start: str = "original",
    quantize: Any = None,
    skip_modules: Sequence[str] | None = None,
    dtype: str | None = None,
    quantize_result: str | None = None,
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
        adapter: the folder of an adapter, or the id of a cached one; keys of another Gemma 4 class are understood. Or
            several LoRAs with weights, ``{"one": 1.0, "other": 0.5}``: the changes they make to a weight are
            multiplied and added, as PEFT's ``add_weighted_adapter`` with ``combination_type="cat"`` does.
        out: a folder that does not exist, or is empty.
        start: "original" (the weights as they are on disk) or "dequantized" (what the 4-bit or 8-bit base computes
            with, as the adapter saw it).
        quantize: for "dequantized": "4bit", "4bit-double", "8bit" or a ``BitsAndBytesConfig``; default: what the base
            says, else "4bit-double".
        skip_modules: for "dequantized" and ``quantize_result``: ``llm_int8_skip_modules``; default: those of
            ``quantize`` where it is a configuration, else what a quantized base says, else the head and the routers.
        dtype: "bf16", "fp16" or "fp32", or torch's name of it; default: the base's. A value that it cannot hold is an
            error.
        quantize_result: write the merged model in "4bit", "4bit-double" or "8bit" of bitsandbytes; default: in
            ``dtype``. Its outputs are compared once more, with a bound that is what this quantization changes in the
            base; needs room for both on the disk.
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
        quantize_result=quantize_result,
        device_map=device_map,
        max_shard_size=max_shard_size,
        check=check,
        tolerance=tolerance,
        allow_pickle=allow_pickle,
        progress=progress,
    )


def repair_checkpoint(
    checkpoint: str | Path,
    original: str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    progress: bool | None = None,
) -> RepairReport:
    """Give a checkpoint that ``save_pretrained`` wrote back what servers ask for, and transformers dropped.

    >>> gemma4_compat.repair_checkpoint("my-model", "gemma-4-E2B-it", "repaired").tensors[0]
    'model.language_model.layers.15.self_attn.k_norm.weight'

    That is ``k_proj``, ``v_proj`` and ``k_norm`` of KV-shared layers (E2B, E4B), from the original, in the dtype that
    the same layer's queries have in the checkpoint; and ``global_head_dim`` and ``num_global_key_value_heads`` in
    ``config.json``, from the checkpoint's own ``per_layer_config``. Outputs of transformers do not depend on them. All
    other tensors, and the files beside the weights, are copied as they are. In host memory is a piece of a tensor, of
    64 MiB. ``out`` appears when all is done. The inputs are only read.

    Args:
        checkpoint: the folder of a Gemma 4 checkpoint in safetensors that is not quantized, or the id of a cached one.
        original: the folder of the checkpoint it was made from, as it was downloaded, or the id of a cached one.
        out: a folder that does not exist, or is empty.
        max_shard_size: of a file with weights.
        progress: show a progress bar; default: on a terminal.

    Returns:
        What was added.

    Raises:
        Gemma4CompatError: it cannot be done, or nothing is missing; the message says why, and nothing is left behind.
    """
    from gemma4_compat._merge import repair

    return repair.repair_checkpoint(checkpoint, original, out, max_shard_size=max_shard_size, progress=progress)


def export_adapter(
    adapter: str | os.PathLike[str], out: str | os.PathLike[str], target: str, *, base: Any = None
) -> ExportReport:
    """Write a saved PEFT adapter in the keys and the configuration that another reader takes.

    >>> report = gemma4_compat.export_adapter("my-adapter", "for-vllm", "vllm", base="E4B")
    >>> report.command
    'vllm serve google/gemma-4-E4B-it --enable-lora --max-lora-rank 16 --lora-modules my-adapter=/home/me/for-vllm'

    The outputs there are the adapter's: modules of several ranks and scales get one, layers that a server joins get
    all their parts, and what a reader would leave out or compute differently is refused (docs/ADAPTERS.md). In memory
    is one tensor at a time, and for experts one layer's. ``out`` appears when all is written.

    Args:
        adapter: its folder, or the id of one in the cache of the hub; keys of any Gemma 4 class are understood.
        out: a folder that does not exist, or is empty.
        target: "vllm", "sglang", "mlx" (mlx-lm and mlx-vlm), "gguf" (llama.cpp), or "peft" (without this package).
        base: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), or a Gemma 4 configuration; default: the id that the adapter names. Adapters on experts take the
            folder with its weights for "gguf".

    Returns:
        What was written, what was changed for the reader, and the command that loads it.

    Raises:
        Gemma4CompatError: the reader cannot have it, or it cannot be read; the message says why and what to do
            instead, and nothing is left behind.
    """
    from gemma4_compat._export import job

    return job.export_adapter(adapter, out, target, base=base)


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


try:
    install()
except Gemma4CompatError as error:
    if not _startup.is_command_line():
        raise
    _startup.refusal = str(error)
