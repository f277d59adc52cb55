"""One kernel reads and dequantizes the experts that a token hits, with bitsandbytes' bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.quantization import expert_storage, experts
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.specs import expert_rows
from gemma4_compat._lab import tiny_models
from tests.unit.generation import calls
from tests.unit.kernels.host_kernels import HostCompiler
from tests.unit.offload.test_expert_lookup import loaded, placed

CPU = torch.device("cpu")
BATCHED = {"experts_implementation": "batched_mm"}
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setattr(fused_steps.Progress, "after", 2)


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which weights of experts a kernel has written, in their order, in captures that launched all kernels."""
    names: list[str] = []
    kernel = fused_steps._Launches.kernel

    def noted(self: Any, one: Any, signatures: Any) -> None:
        signatures = list(signatures)
        if self._kernels.is_prepared(one.text) and signatures[0][0] == expert_rows.OPERATION:
            names.append(str(tuple(one.tensors[-1].shape)))
        kernel(self, one, signatures)

    monkeypatch.setattr(fused_steps._Launches, "kernel", noted)
    return names


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "nested", "dtype"),
    [
        ("nf4", 64, 256, torch.bfloat16),
        ("nf4", 64, 0, torch.float16),
        ("nf4", 32, 256, torch.float32),
        ("nf4", 512, 0, torch.bfloat16),
        ("fp4", 64, 256, torch.float16),
        ("fp4", 128, 0, torch.float32),
    ],
)
def test_bits(quant_type: str, blocksize: int, nested: int, dtype: Any) -> None:
    found = kernels.of(CPU)
    signature = expert_rows.OPERATION, (quant_type, blocksize, nested), dtype
    assert found.prepare([], [signature])
    kernel, values, expected = expert_rows.trial(signature, CPU)
    values.zero_()
    found.launch(kernel)
    assert same_bits(values, expected)
    assert values.unique().numel() > 16


@pytest.mark.parametrize("negative", [True, False])
def test_the_second_zero_of_fp4_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, negative: bool) -> None:
    """Negative on CUDA and on CPUs without AVX-512, positive with it: each host tries both."""
    from bitsandbytes import functional

    original = functional.dequantize_4bit

    def dequantize(*args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        packed = args[0].view(torch.uint8).reshape(-1)
        numbers = torch.stack([packed >> 4, packed & 15], dim=1).reshape(values.shape)
        return torch.where(numbers == 8, torch.full_like(values, -0.0 if negative else 0.0), values)

    monkeypatch.setattr(functional, "dequantize_4bit", dequantize)
    monkeypatch.setattr(expert_rows, "_codes", {})
    monkeypatch.setattr(kernels, "_kernels", {})
    signature = expert_rows.OPERATION, ("fp4", 64, 0), torch.bfloat16  # a nested scale may be negative
    assert kernels.of(CPU).prepare([], [signature])
    zeros = expert_rows.trial(signature, CPU)[2] == 0
    assert expert_rows.code_of("fp4", CPU)[8].signbit() == negative
    assert zeros.any()


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_a_parameter_of_a_model(workspace: Any, checkpoint: Path, quantization: str) -> None:
    model = loaded(workspace, checkpoint, quantization)
    module = next(iter(experts.all_experts(model).values()))
    for name, chosen in (("gate_up_proj", [31, 0, 5]), ("down_proj", [2])):
        parameter = experts.quantized_parameter(module, name)
        chosen = torch.tensor(chosen)
        found = expert_rows.kernel_of(parameter, chosen)
        assert found is not None
        kernel, signature, values = found
        assert kernels.of(CPU).prepare([kernel.text], [signature])
        kernels.of(CPU).launch(kernel)
        assert same_bits(values, expert_storage.dequantized(parameter, chosen))


def test_what_no_kernel_reads(workspace: Any, checkpoint: Path) -> None:
    model = loaded(workspace, checkpoint, "4bit-double")
    module = next(iter(experts.all_experts(model).values()))
    parameter = experts.quantized_parameter(module, "down_proj")
    chosen = torch.tensor([1, 2])
    parameter.quant_state.blocksize = 96
    assert expert_rows.kernel_of(parameter, chosen) is None
    parameter.quant_state.blocksize, parameter.quant_state.dtype = 64, torch.float64
    assert expert_rows.kernel_of(parameter, chosen) is None
    parameter.quant_state.dtype = torch.bfloat16
    assert expert_rows.kernel_of(parameter, chosen) is not None
    assert expert_rows.kernel_of(parameter, chosen.int()) is None
    parameter.quant_state.offset = parameter.quant_state.offset.half()
    assert expert_rows.kernel_of(parameter, chosen) is None


@pytest.mark.parametrize(
    ("quantization", "where"),
    [
        ("4bit-double", "nested"),
        ("4bit", "device"),
        pytest.param("4bit", "layers", marks=pytest.mark.full),
        pytest.param("4bit-double", "device", marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("tapes")
def test_the_same_answers(
    workspace: Any, checkpoint: Path, launched: list[str], quantization: str, where: str
) -> None:
    model = loaded(workspace, checkpoint, quantization, **BATCHED)
    if where != "device":
        model = placed(workspace, model, where, "memory")
    plain = loaded(workspace, checkpoint, quantization, **BATCHED)
    (found,) = calls.compared(model, calls.ask(model, new=8))
    said = calls.steps(model)
    assert (said.fused, said.not_fused, said.reasons) == (1, (), ())
    expected = calls.generate(plain, calls.text(plain), {"disable_compile": True}, new=8)
    calls.assert_equal(found, expected)
    ones = ["(2, 128, 64)", "(2, 64, 64)"] * len(experts.all_experts(model))
    assert launched[-len(ones) :] == ones
    again = calls.text(model, seed=3)
    (other,) = calls.compared(model, lambda way: [calls.generate(model, again, way, new=8)])
    calls.assert_equal(other, calls.generate(plain, again, {"disable_compile": True}, new=8))


@pytest.mark.full
@pytest.mark.usefixtures("tapes")
def test_unquantized_experts_are_not_copied_twice(workspace: Any, checkpoint: Path) -> None:
    model = placed(workspace, loaded(workspace, checkpoint, None, **BATCHED), "experts", "memory")
    calls.compared(model, calls.ask(model, new=8))
    said = calls.steps(model)
    assert (said.fused, said.not_fused) == (1, ())


@pytest.mark.full
@pytest.mark.usefixtures("tapes")
def test_a_batch(workspace: Any, checkpoint: Path, launched: list[str]) -> None:
    model = placed(workspace, loaded(workspace, checkpoint, "4bit-double", **BATCHED), "nested", "memory")
    calls.compared(model, lambda way: [calls.generate(model, calls.text(model, batch=3), way, new=8)])
    said = calls.steps(model)
    assert (said.fused, said.not_fused) == (1, ())
    assert set(launched) == {"(6, 128, 64)", "(6, 64, 64)"}


@pytest.mark.usefixtures("tapes")
def test_an_adapter_on_the_experts(workspace: Any, checkpoint: Path, launched: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=targets)
    model = get_peft_model(loaded(workspace, checkpoint, "4bit-double", **BATCHED), config).eval()
    calls.compared(model, calls.ask(model, new=8))
    said = calls.steps(model)
    assert (said.fused, said.not_fused) == (1, ())
    assert launched


@pytest.mark.usefixtures("tapes")
def test_other_bits_leave_bitsandbytes_at_it(
    workspace: Any,
    checkpoint: Path,
    launched: list[str],
    change_file: Callable[[str, str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})  # what was tried before would be known
    change_file("experts.cuh", "code[byte >> 4], scale", "code[byte >> 3], scale")
    model = placed(workspace, loaded(workspace, checkpoint, "4bit-double", **BATCHED), "nested", "memory")
    calls.compared(model, calls.ask(model, new=8))
    said = calls.steps(model)
    assert (said.fused, said.not_fused) == (1, ())  # the rest of the step is
    assert launched == []
    assert "4-bit experts of torch.bfloat16" in kernels.of(CPU).inexact()
