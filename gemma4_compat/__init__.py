"""Import this before loading a Gemma 4 model; known defects of transformers, accelerate, peft and bitsandbytes are
repaired as those libraries are imported.

>>> import gemma4_compat
>>> gemma4_compat.status()["peft-keep-dispatch"].state
<PatchState.PENDING: 'pending'>

Importing it imports none of them. ``GEMMA4_COMPAT_DISABLE=id,id`` (a kind, or ``all``) leaves patches out,
``GEMMA4_COMPAT_ENABLE=id`` does for the whole process what :func:`quantize` does inside its ``with``,
``GEMMA4_COMPAT_STRICT=1`` turns a patch that cannot apply into an error. A project says the same in
``[tool.gemma4_compat]`` of its pyproject.toml: ``disable``, ``enable`` and ``strict`` (docs/RUN.md).
"""

from __future__ import annotations

from gemma4_compat import _startup as _startup  # isort: skip - it decides where the imports below are searched

import importlib
from typing import TYPE_CHECKING, Any

from gemma4_compat import _shim
from gemma4_compat._engine.patch import ActsOn, Kind, Patch, PatchState, PatchStatus, Reason, Severity
from gemma4_compat._engine.reports.report import Statuses
from gemma4_compat._engine.reports.words import Verdict
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._shim import (
    install,
    needed,
    patches,
    quantize,
    revert,
    scan_adapter,
    status,
)

if TYPE_CHECKING:
    from gemma4_compat._adapter_tools.export.job import export_adapter as export_adapter
    from gemma4_compat._adapter_tools.export.result import ExportReport as ExportReport
    from gemma4_compat._adapter_tools.merge.check import Parity as Parity
    from gemma4_compat._adapter_tools.merge.job import merge_adapter as merge_adapter
    from gemma4_compat._adapter_tools.merge.result import MergeParityError as MergeParityError
    from gemma4_compat._adapter_tools.merge.result import MergeReport as MergeReport
    from gemma4_compat._adapter_tools.repair import RepairReport as RepairReport
    from gemma4_compat._adapter_tools.repair import repair_checkpoint as repair_checkpoint
    from gemma4_compat._adapter_tools.scan.result import Problem as Problem
    from gemma4_compat._adapter_tools.scan.result import Scan as Scan
    from gemma4_compat._doctor.explain.explanation import Explanation as Explanation
    from gemma4_compat._doctor.explain.explanation import explain as explain
    from gemma4_compat._doctor.reproductions.diagnosis import Diagnosis as Diagnosis
    from gemma4_compat._doctor.reproductions.diagnosis import doctor as doctor
    from gemma4_compat._doctor.reproductions.findings import Finding as Finding
    from gemma4_compat._doctor.statistics import Statistics as Statistics
    from gemma4_compat._doctor.statistics import statistics as statistics
    from gemma4_compat._gemma4.accelerate.listing import Attached as Attached
    from gemma4_compat._gemma4.accelerate.listing import Attachment as Attachment
    from gemma4_compat._gemma4.models.inspection import MetaTensor as MetaTensor
    from gemma4_compat._gemma4.models.inspection import find_meta_tensors as find_meta_tensors
    from gemma4_compat._gemma4.models.inspection import input_device as input_device
    from gemma4_compat._gemma4.quantization.skip_modules import SkipModule as SkipModule
    from gemma4_compat._gemma4.quantization.skip_modules import quantization_skip_modules as quantization_skip_modules
    from gemma4_compat._generation.fast import decode_fast as decode_fast
    from gemma4_compat._graphs.statistics import DecodingStatistics as DecodingStatistics
    from gemma4_compat._graphs.statistics import Recapture as Recapture
    from gemma4_compat._graphs.statistics import TrainingStatistics as TrainingStatistics
    from gemma4_compat._needed.judge import Assessment as Assessment
    from gemma4_compat._needed.judge import Need as Need
    from gemma4_compat._plan.plan import plan_device_map as plan_device_map
    from gemma4_compat._plan.result import Plan as Plan
    from gemma4_compat._plan.result import TrainingPlan as TrainingPlan
    from gemma4_compat._plan.training import plan_training as plan_training
    from gemma4_compat._training.fast import train_fast as train_fast

__version__ = "0.1.0"

__all__ = [
    "ActsOn",
    "Assessment",
    "Attached",
    "Attachment",
    "DecodingStatistics",
    "Diagnosis",
    "Explanation",
    "ExportReport",
    "Finding",
    "Gemma4CompatError",
    "Gemma4CompatWarning",
    "Kind",
    "MergeParityError",
    "MergeReport",
    "MetaTensor",
    "Need",
    "Parity",
    "Patch",
    "PatchState",
    "PatchStatus",
    "Plan",
    "Problem",
    "Reason",
    "Recapture",
    "RepairReport",
    "Scan",
    "Severity",
    "SkipModule",
    "Statistics",
    "Statuses",
    "TrainingPlan",
    "TrainingStatistics",
    "Verdict",
    "__version__",
    "decode_fast",
    "doctor",
    "explain",
    "export_adapter",
    "find_meta_tensors",
    "input_device",
    "install",
    "merge_adapter",
    "needed",
    "patches",
    "plan_device_map",
    "plan_training",
    "quantization_skip_modules",
    "quantize",
    "repair_checkpoint",
    "revert",
    "scan_adapter",
    "statistics",
    "status",
    "train_fast",
]

#: Names that are imported on first use, and where they are.
_LAZY = {
    "Assessment": "gemma4_compat._needed.judge",
    "Attached": "gemma4_compat._gemma4.accelerate.listing",
    "Attachment": "gemma4_compat._gemma4.accelerate.listing",
    "DecodingStatistics": "gemma4_compat._graphs.statistics",
    "Diagnosis": "gemma4_compat._doctor.reproductions.diagnosis",
    "Explanation": "gemma4_compat._doctor.explain.explanation",
    "ExportReport": "gemma4_compat._adapter_tools.export.result",
    "Finding": "gemma4_compat._doctor.reproductions.findings",
    "MergeParityError": "gemma4_compat._adapter_tools.merge.result",
    "MergeReport": "gemma4_compat._adapter_tools.merge.result",
    "MetaTensor": "gemma4_compat._gemma4.models.inspection",
    "Need": "gemma4_compat._needed.judge",
    "Parity": "gemma4_compat._adapter_tools.merge.check",
    "Plan": "gemma4_compat._plan.result",
    "Problem": "gemma4_compat._adapter_tools.scan.result",
    "Recapture": "gemma4_compat._graphs.statistics",
    "RepairReport": "gemma4_compat._adapter_tools.repair",
    "Scan": "gemma4_compat._adapter_tools.scan.result",
    "SkipModule": "gemma4_compat._gemma4.quantization.skip_modules",
    "Statistics": "gemma4_compat._doctor.statistics",
    "TrainingPlan": "gemma4_compat._plan.result",
    "TrainingStatistics": "gemma4_compat._graphs.statistics",
    "decode_fast": "gemma4_compat._generation.fast",
    "doctor": "gemma4_compat._doctor.reproductions.diagnosis",
    "explain": "gemma4_compat._doctor.explain.explanation",
    "export_adapter": "gemma4_compat._adapter_tools.export.job",
    "find_meta_tensors": "gemma4_compat._gemma4.models.inspection",
    "input_device": "gemma4_compat._gemma4.models.inspection",
    "merge_adapter": "gemma4_compat._adapter_tools.merge.job",
    "plan_device_map": "gemma4_compat._plan.plan",
    "plan_training": "gemma4_compat._plan.training",
    "quantization_skip_modules": "gemma4_compat._gemma4.quantization.skip_modules",
    "repair_checkpoint": "gemma4_compat._adapter_tools.repair",
    "statistics": "gemma4_compat._doctor.statistics",
    "train_fast": "gemma4_compat._training.fast",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


_shim.arm()
