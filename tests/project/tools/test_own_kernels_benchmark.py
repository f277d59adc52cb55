"""benchmarks/decoding/own_kernels.py, with kernels that the host compiles."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from benchmarks.decoding import graph_times, own_architectures, own_kernels, own_products
from gemma4_compat._kernels import kernels
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    yield
    kernels._kernels.pop(CPU, None)


def test_attention_errs_less_than_pytorchs() -> None:
    found = own_kernels.attention(CPU, few=True)["errors"]
    assert [(one["width"], one["keys"]) for one in found] == [(256, 1), (256, 64), (512, 1), (512, 64)] * 2
    assert own_kernels.wrong(found) == []
    assert own_kernels.wrong([{**found[1], "same_bits": False}])
    assert own_kernels.wrong([{**found[1], "largest": [1.0, 0.5]}])


def test_every_shape_of_the_variants_is_tried() -> None:
    tried = list(own_kernels.signatures(few=False))
    assert len(set(tried)) == len(tried) > 300
    assert {name for name, _, _ in tried} == {"mean", "4-bit product", "shift of a sliding cache", "4-bit weight"}


def test_trials_say_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kernels, "signatures", lambda few: [("mean", (1, 32), torch.float32)])
    monkeypatch.setattr(torch.Tensor, "mean", lambda self, *_, **__: torch.zeros((*self.shape[:-1], 1)))
    assert own_kernels.trials(CPU, few=True) == {
        "mean": {"tried": 1, "differ": ["((1, 32), torch.float32)"], "errors": {}}
    }


def test_products_err_less_than_bitsandbytes_kernel() -> None:
    found = own_products.products(CPU, few=True)["errors"]
    assert [one["dtype"] for one in found] == ["torch.bfloat16", "torch.float16"]
    assert own_kernels.wrong(found) == []
    assert all(0 < share < 1 for one in found for share in one["share_of_theirs"].values())


@pytest.mark.skipif(not hasattr(torch.ops.bitsandbytes, "gemm_4bit"), reason="bitsandbytes before 0.50")
@pytest.mark.parametrize("more", [{}, {"nested": False, "bias": True}], ids=str)
def test_bitsandbytes_operator_takes_what_is_asked(more: dict[str, Any]) -> None:
    wanted = own_products.asked(torch.bfloat16, 256, 32, rows=3, **more)
    found, right = own_products._by_bitsandbytes(wanted), own_products.exact(wanted)
    assert (found.double() - right).abs().max() < 0.03 * right.abs().max()


def test_errors_are_those_of_each() -> None:
    right = torch.tensor([1.0, 2.0]).double()
    found = own_products.compared(right, torch.tensor([1.0, 2.5]), torch.tensor([2.0, 2.0]))
    assert found == {"mean": [0.25, 0.5], "largest": [0.5, 1.0], "share_of_theirs": {"mean": 0.5, "largest": 0.5}}
    assert own_products.compared(right, right, right)["share_of_theirs"] == {"mean": 1.0, "largest": 1.0}


def test_the_products_of_the_variants() -> None:
    found = {variant: list(own_products.groups(variant)) for variant in own_products.VARIANTS}
    assert ("q_proj+k_proj+v_proj", (2048, 256, 256), 1536) in found["E2B"]
    assert ("q_proj", (2048,), 1536) in found["E2B"]  # of a KV-shared layer
    assert ("gate_proj+up_proj", (15360, 15360), 3840) in found["12B"]
    assert ("down_proj", (5376,), 21504) in found["31B"]
    kinds = {name for variant in found.values() for name, _, _ in variant}
    assert {"o_proj", "per_layer_input_gate", "per_layer_projection"} <= kinds


def test_microseconds_of_kernels_that_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU goes: each call runs, whatever its number."""

    def in_turns(calls: Any) -> Any:
        for number in (0, graph_times.CALLS - 1):
            for call in calls.values():
                call(number)
        return {"ours": {"median": 2.0}, "bits": {"median": 4.0}}

    monkeypatch.setattr(graph_times, "CACHE", 0)
    monkeypatch.setattr(graph_times, "in_turns", in_turns)
    found = own_products.Products(CPU).microseconds((32, 16), 256, 100.0)
    assert found["bytes"] == 48 * 256 // 2 + 48 * 4 + (1 + 1) * 4
    assert found["share_of_memory"] == {"ours": found["bytes"] / 200, "bits": found["bytes"] / 400}
    assert (graph_times.copies(1), graph_times.copies(1 << 40)) == (2, 2)


def test_kernels_of_older_gpus_come_from_a_compiler_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's compiler in its place, bits are the same, and nothing of it stays."""
    used: list[tuple[int, int]] = []

    def compiler(capability: tuple[int, int]) -> Any:
        used.append(capability)
        return type("Other", (HostCompiler,), {})

    monkeypatch.setattr(own_architectures, "PRODUCTS", ((32, 256),))
    monkeypatch.setattr(own_architectures, "ATTENTION", ((32, 20),))
    monkeypatch.setattr(own_kernels, "signatures", lambda few: iter(()))
    assert len(set(own_architectures.signatures())) == len(list(own_architectures.signatures())) > 30
    cast = "cast", (torch.bfloat16,), torch.float32
    monkeypatch.setattr(own_architectures, "signatures", lambda: iter([cast]))
    before = kernels.of(CPU)
    options = {"trials": own_kernels.trials, "attention": own_kernels.Attention, "compiler": compiler}
    found = own_architectures.architectures(CPU, True, **options)
    assert used == list(own_architectures.OLDER)
    assert kernels.of(CPU) is before
    assert list(found) == ["7.5", "8.0"]
    for of in found.values():
        assert (of["others"], of["compared"], len(of["errors"])) == ([], 4, 4)
        assert own_kernels.wrong(of["errors"]) == []
        assert of["trials"] == {"cast": {"tried": 1, "differ": [], "errors": {}}}
    assert own_kernels.failing({"older": found}) == []
    found["8.0"]["others"].append("product")
    assert [one["capability"] for one in own_kernels.failing({"older": found})] == ["8.0"]


def test_an_older_gpus_compiler_makes_ptx_and_starts_no_kernel_early() -> None:
    class Nvrtc:
        def architecture(self, capability: tuple[int, int]) -> str:
            return f"sm_{capability[0]}{capability[1]}"

    made = own_architectures.compiler_for((7, 5))(CPU)
    made._nvrtc = Nvrtc()
    assert made._options == ("--gpu-architecture=compute_75",)
    assert made._capability == (7, 5)
