"""What users write, for mypy --strict and pyright: it is checked, never run.

An ignored line is one that must be an error: both checkers report an ignore that is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import assert_type

import gemma4_compat
from gemma4_compat import (
    ActsOn,
    Attached,
    Attachment,
    ExportReport,
    Finding,
    Gemma4CompatError,
    Gemma4CompatWarning,
    Kind,
    MergeParityError,
    MergeReport,
    MetaTensor,
    Need,
    Parity,
    Patch,
    PatchState,
    PatchStatus,
    Plan,
    Problem,
    Reason,
    RepairReport,
    Scan,
    Severity,
    SkipModule,
    Statuses,
    Verdict,
    testing,
)


def engine() -> None:
    assert_type(gemma4_compat.__version__, str)
    assert_type(gemma4_compat.status(), Statuses)
    failed(gemma4_compat.status())
    assert_type(gemma4_compat.status(unreached=True)["peft-keep-dispatch"].unreached, int | None)
    assert_type(gemma4_compat.revert("peft-keep-dispatch"), Statuses)
    assert_type(gemma4_compat.patches(), tuple[Patch, ...])
    gemma4_compat.revert(id=None)
    gemma4_compat.install()


def explained(error: Exception) -> None:
    assert_type(gemma4_compat.explain(error).patches, tuple[Patch, ...])
    assert_type(str(gemma4_compat.explain("KeyError: 13")), str)
    gemma4_compat.explain(13)  # type: ignore[arg-type]


def judged() -> None:
    assert_type(gemma4_compat.doctor("peft-keep-dispatch", progress=False).findings, tuple[Finding, ...])
    assert_type(gemma4_compat.needed(Path("requirements.txt")).needs, tuple[Need, ...])
    assert_type(gemma4_compat.needed().droppable, bool)
    gemma4_compat.doctor(["peft-keep-dispatch"])  # type: ignore[arg-type]


def tiny(folder: Path) -> None:
    checkpoint = testing.tiny_checkpoint(folder / "model", "E2B")
    assert_type(testing.tiny_adapter(checkpoint, str(folder)), str)
    testing.tiny_inputs("cuda:0", text_only=True)


def failed(statuses: dict[str, PatchStatus]) -> list[str]:
    return [f"{item.id}: {item.reason}" for item in statuses.values() if item.state is PatchState.FAILED]


def disabled(statuses: dict[str, PatchStatus]) -> list[str]:
    return [item.id for item in statuses.values() if item.reason_code is Reason.DISABLED]


def optional(patches: tuple[Patch, ...]) -> list[str]:
    assert_type(Verdict.REPAIRED.word, str)
    return [patch.id for patch in patches if patch.kind is Kind.SPEED and patch.acts_on is ActsOn.GEMMA4]


def silent(patches: tuple[Patch, ...]) -> list[str]:
    return [patch.summary for patch in patches if patch.severity is Severity.WRONG_RESULT]


def plan() -> dict[str, int | str]:
    made = gemma4_compat.plan_device_map(
        "E4B",
        "4GiB",
        context=2048,
        batch=1,
        prompt=None,
        quantize="4bit",
        quantize_experts=False,
        adapter=Path("adapter"),
        vision=True,
        audio=False,
        cpu="16GiB",
        disk=1 << 40,
        attention="sdpa",
        balanced=False,
        fast=False,
        assistant=False,
    )
    assert_type(made, Plan)
    assert_type(made.longest_context, int)
    assert_type(made.use[0].peak, int)
    gemma4_compat.plan_device_map("31B", 8 << 30, quantize=None)
    gemma4_compat.plan_device_map("31B", ["8GiB", 6 << 30], balanced=True)
    gemma4_compat.plan_device_map("31B", 0.9 * 2**33)
    gemma4_compat.plan_device_map("31B", {0: "8GiB", "cuda:1": 6 << 30})
    return made.device_map


def training_plan() -> int:
    made = gemma4_compat.plan_training("E4B", "12GiB", max_length=2048, r=16, optim="adamw_8bit")
    shown: gemma4_compat.TrainingPlan = made
    return shown.peak


def bad_plans() -> None:
    gemma4_compat.plan_training("E2B", "8GiB", context=2048)  # type: ignore[call-arg]
    gemma4_compat.plan_device_map("E2B", object())  # type: ignore[arg-type]
    gemma4_compat.plan_device_map("E2B", "8GiB", 2048)  # type: ignore[call-arg]
    gemma4_compat.plan_device_map("E2B", "8GiB", contxt=2048)  # type: ignore[call-arg]
    gemma4_compat.plan_device_map("E2B", "8GiB", context="2048")  # type: ignore[arg-type]
    gemma4_compat.plan_device_map("E2B", "8GiB", quantize=4)  # type: ignore[arg-type]


def skipped() -> list[str]:
    keep = gemma4_compat.quantization_skip_modules("26B-A4B", quantize="8bit")
    assert_type(keep, dict[str, SkipModule])
    return [name for name, module in keep.items() if module.cost < 1 << 20]


def scan(folder: Path) -> list[Problem]:
    found = gemma4_compat.scan_adapter(folder, "E2B", quantize="4bit")
    assert_type(found, Scan)
    assert_type(found.ok, bool)
    return [problem for problem in found.problems if problem.id != "renamed"]


def bad_scans() -> None:
    gemma4_compat.scan_adapter()  # type: ignore[call-arg]
    gemma4_compat.scan_adapter("adapter", renames=False)  # type: ignore[call-arg]


def export(folder: Path) -> tuple[str, ...]:
    report = gemma4_compat.export_adapter(folder, "out", "vllm", base="E2B")
    assert_type(report, ExportReport)
    return report.added if report.rank is None else report.files


def bad_exports() -> None:
    gemma4_compat.export_adapter("adapter", "out")  # type: ignore[call-arg]
    gemma4_compat.export_adapter("adapter", "out", "mlx", "E2B")  # type: ignore[call-arg]


def merge() -> MergeReport:
    try:
        return gemma4_compat.merge_adapter(
            "base",
            Path("adapter"),
            "out",
            start="dequantized",
            quantize="4bit",
            skip_modules=["lm_head"],
            dtype="bf16",
            device_map={"": 0},
            max_shard_size="5GB",
            check=2,
            tolerance=0.5,
            allow_pickle=False,
            progress=False,
        )
    except gemma4_compat.MergeParityError as error:
        assert_type(error.report, MergeReport)
        return error.report


def difference(report: MergeReport) -> float | None:
    measured: Parity | None = report.parity
    return None if measured is None else measured.difference


def bad_merges() -> None:
    gemma4_compat.merge_adapter("base", "adapter")  # type: ignore[call-arg]
    gemma4_compat.merge_adapter("base", "adapter", "out", "original")  # type: ignore[call-arg]
    gemma4_compat.merge_adapter("base", "adapter", "out", shard_size="5GB")  # type: ignore[call-arg]
    gemma4_compat.merge_adapter("base", "adapter", "out", check="all")  # type: ignore[arg-type]


def repair() -> dict[str, int | None]:
    report = gemma4_compat.repair_checkpoint("saved", Path("original"), "out", max_shard_size="5GB", progress=False)
    assert_type(report, RepairReport)
    assert_type(report.tensors, tuple[str, ...])
    return report.settings


def bad_repairs() -> None:
    gemma4_compat.repair_checkpoint("saved", "out")  # type: ignore[call-arg]
    gemma4_compat.repair_checkpoint("saved", "original", "out", "5GB")  # type: ignore[call-arg]


def load(model_class: Any) -> Any:
    with gemma4_compat.quantize(offloaded=True, experts=True):
        model = model_class.from_pretrained("checkpoint")
    lost = [tensor.path for tensor in gemma4_compat.find_meta_tensors(model) if not tensor.offloaded]
    if lost:
        raise Gemma4CompatError(f"no values: {lost}")
    return model, gemma4_compat.input_device(model)


def described(tensor: MetaTensor) -> str:
    return f"{tensor.path}: {tensor.kind}, {tensor.shape}"


def left(model: Any) -> list[str]:
    found = gemma4_compat.statistics(model).attached
    assert_type(found, Attached)
    first: Attachment = found[0]
    assert_type(first.paths, tuple[str, ...])
    return [f"{item.patch}: {item.kind} {item.name}, {item.purpose}" for item in found]


def errors() -> None:
    kinds: tuple[type[Gemma4CompatError], ...] = (Gemma4CompatError, MergeParityError)
    warning: type[Warning] = Gemma4CompatWarning
    print(kinds, warning)


def bad_names() -> None:
    print(gemma4_compat.merge_adapters)  # type: ignore[attr-defined]
    print(gemma4_compat.PatchState.BROKEN)  # type: ignore[attr-defined]
    gemma4_compat.patches()[0].id = "other"  # type: ignore[misc]


def training(model: Any) -> None:
    assert_type(gemma4_compat.train_fast(Path("any")), Path)  # a model, of any type, is given back
    gemma4_compat.train_fast(model, max_tokens=8192, loss="always", mlp=4096, windows=False, products="auto")
    gemma4_compat.train_fast(model, loss=False, mlp="auto", graphs=False)
    gemma4_compat.train_fast(model, loss="never")  # type: ignore[arg-type]
    gemma4_compat.train_fast(model, mlp="4096")  # type: ignore[arg-type]
    gemma4_compat.train_fast(model, False)  # type: ignore[call-arg]
    gemma4_compat.train_fast(model, enabled=False)
    assert_type(gemma4_compat.statistics(model).training.replayed, int)
