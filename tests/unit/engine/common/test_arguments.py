"""What is not a model, a path, an id or an error gets one line that names it, from every public function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from tests.collecting import collect_failures

#: Functions of a model, of a path (or a name of a base), of an id and of an error.
OF_A_MODEL: dict[str, Callable[[Any], Any]] = {
    name: getattr(gemma4_compat, name)
    for name in (
        "decode_fast",
        "find_meta_tensors",
        "input_device",
        "statistics",
        "train_fast",
    )
}
OF_A_PATH: dict[str, Callable[[Any], Any]] = {
    "scan_adapter": gemma4_compat.scan_adapter,
    "scan_adapter's base": lambda given: gemma4_compat.scan_adapter(given, given),
    "merge_adapter": lambda given: gemma4_compat.merge_adapter(given, "adapter", "out"),
    "merge_adapter's adapter": lambda given: gemma4_compat.merge_adapter("base", given, "out"),
    "repair_checkpoint": lambda given: gemma4_compat.repair_checkpoint(given, "original", "out"),
    "export_adapter": lambda given: gemma4_compat.export_adapter(given, "out", "vllm"),
    "quantization_skip_modules": gemma4_compat.quantization_skip_modules,
    "plan_device_map": lambda given: gemma4_compat.plan_device_map(given, "8GiB"),
    "plan_training": lambda given: gemma4_compat.plan_training(given, "8GiB"),
}
OF_AN_ID: dict[str, Callable[[Any], Any]] = {"doctor": gemma4_compat.doctor, "explain": gemma4_compat.explain}
OPTIONAL: dict[str, Callable[[Any], Any]] = {"needed": gemma4_compat.needed, "revert": gemma4_compat.revert}
VALUES = {
    "None": None,
    "3": 3,
    "nan": float("nan"),
    "b'x'": b"x",
    "list": [],
    "object": object(),
    "the class Linear": torch.nn.Linear,
    "Tensor": torch.zeros(2),
}


@collect_failures(case=[(name, given) for name in OF_A_MODEL for given in (*VALUES, "''")])
def test_what_is_no_model(case: tuple[str, str]) -> None:
    function, given = case
    with pytest.raises(Gemma4CompatError, match=None if function == "input_device" else re.escape(given)) as raised:
        OF_A_MODEL[function]((VALUES | {"''": ""})[given])
    assert len(str(raised.value).splitlines()) == 1


@collect_failures(case=[(name, given) for name in (*OF_A_PATH, *OF_AN_ID, *OPTIONAL) for given in (*VALUES, "Linear")])
def test_what_is_no_path_and_no_id(case: tuple[str, str]) -> None:
    function, given = case
    if given == "None" and function in OPTIONAL:
        return  # what is installed, and all patches
    call = (OF_A_PATH | OF_AN_ID | OPTIONAL)[function]
    with pytest.raises(Gemma4CompatError, match=re.escape(given)) as raised:
        call((VALUES | {"Linear": torch.nn.Linear(1, 1)})[given])
    assert len(str(raised.value).splitlines()) == 1


def test_a_long_value_is_not_repeated() -> None:
    with pytest.raises(Gemma4CompatError) as raised:
        gemma4_compat.statistics("x" * 10**6)
    assert len(str(raised.value)) < 400


def others() -> list[Any]:
    """Tiny models of other families."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaConfig(**sizes, intermediate_size=32, num_hidden_layers=1)
    gpt2 = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    return [LlamaForCausalLM(llama), GPT2LMHeadModel(gpt2), torch.nn.Linear(2, 2)]


def test_reading_leaves_nothing_on_a_model() -> None:
    for model in others():
        before = [sorted(vars(module)) for module in model.modules()]
        counted = gemma4_compat.statistics(model).decoding
        assert (counted.replayed, gemma4_compat.statistics(model).training.replayed) == (0, 0)
        assert gemma4_compat.statistics(model).decoding is counted
        assert not gemma4_compat.find_meta_tensors(model)
        assert not gemma4_compat.statistics(model).attached
        assert [sorted(vars(module)) for module in model.modules()] == before
