"""peft-offloaded-inits and peft-keep-dispatch: what an initialization changes in an offloaded weight stays changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._lab import tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_offloaded_inits import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, split
from tests.patches.promise import Promise

LAYERS = ("model.language_model.layers.0", "model.language_model.layers.2")
LAYER = f"{LAYERS[0]}.mlp.gate_proj"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"'NoneType' object has no attribute 'detach'|Tensor on device meta is not on the expected device"


def olora(_model: Any, _batch: Any, _cache: Path) -> dict[str, Any]:
    return {"init_lora_weights": "olora"}


def pissa(_model: Any, _batch: Any, _cache: Path) -> dict[str, Any]:
    return {"init_lora_weights": "pissa"}


def corda(model: Any, batch: Any, cache: Path) -> dict[str, Any]:
    from peft import LoraConfig
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    options = {"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method="ipm", cache_file=str(cache))}
    config = LoraConfig(r=2, target_modules=tiny_adapters.SOME_LINEARS, **options)
    for _ in range(2):  # the second one reads the file
        preprocess_corda(model, config, run_model=lambda: model(**batch))
    return options


def lora_ga(model: Any, batch: Any, cache: Path) -> dict[str, Any]:
    from peft import LoraConfig

    config = pytest.importorskip("peft.tuners.lora.config")
    loraga = pytest.importorskip("peft.tuners.lora.loraga")
    options = {"init_lora_weights": "lora_ga", "lora_ga_config": config.LoraGAConfig()}
    given = LoraConfig(r=2, target_modules=tiny_adapters.SOME_LINEARS, **options)
    for _ in range(2):
        loraga.preprocess_loraga(
            *(model, given, lambda: model(**batch, labels=batch["input_ids"]).loss.backward()), str(cache)
        )
    assert all(weight.grad is None for name, weight in model.named_parameters() if "gate_proj" in name)
    model.zero_grad()
    return options


def kasa(_model: Any, _batch: Any, _cache: Path) -> dict[str, Any]:
    config = pytest.importorskip("peft.tuners.lora.config")
    if not hasattr(config, "KasaConfig"):
        pytest.skip("this PEFT has no KaSA")
    return {"kasa_config": config.KasaConfig()}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["disk", pytest.param("ram", marks=pytest.mark.full)])
@pytest.mark.parametrize("init", [olora, pissa, corda, lora_ga, kasa], ids=lambda init: str(init.__name__))
def test_as_on_one_device(
    workspace: Any, tmp_path: Path, init: Callable[..., dict[str, Any]], kind: str, dtype: str
) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    batch, found = workspace.inputs(text_only=True), []
    for place in ("one device", kind):
        model = workspace.load().to(getattr(torch, dtype))
        if place != "one device":
            model = split(workspace, kind, (*LAYERS, EMBEDDING), tmp_path / "offloaded", model=model)
        torch.manual_seed(0)
        options = init(model, batch, tmp_path / place / "cache.bin")
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=tiny_adapters.SOME_LINEARS, **options)).eval()
        outputs = [workspace.outputs(model, text_only=True) for _ in range(2)]
        with model.disable_adapter():
            outputs.append(workspace.outputs(model, text_only=True))
        model.save_pretrained(tmp_path / place / "adapter")
        base = model.unload()
        outputs.append(workspace.outputs(base, text_only=True))
        if init is not corda:  # PEFT asks for its preparation again
            model = PeftModel.from_pretrained(base, tmp_path / place / "adapter").eval()
            outputs.append(workspace.outputs(model, text_only=True))
        found.append(outputs)
    assert {difference(one, other) for one, other in zip(*found, strict=True)} == {0.0}


@pytest.mark.parametrize("init", [olora, pissa], ids=lambda init: str(init.__name__))
@pytest.mark.parametrize("offloaded", [(HEAD,), (EMBEDDING,), (EMBEDDING, HEAD)], ids=str)
@pytest.mark.parametrize("kind", ["disk", pytest.param("ram", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_changed_head_changes_the_embedding(
    workspace: Any, tmp_path: Path, kind: str, offloaded: tuple[str, ...], init: Callable[..., dict[str, Any]]
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    def outputs(model: Any) -> Any:
        torch.manual_seed(1)
        options = init(model, None, tmp_path)
        return workspace.outputs(get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], **options)).eval())

    whole = outputs(workspace.load())
    assert difference(whole, outputs(split(workspace, kind, offloaded, tmp_path))) == 0.0


def test_kasa_that_truncates_in_the_first_forward(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    options = kasa(None, None, tmp_path)
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=tiny_adapters.SOME_LINEARS, **options)
    get_peft_model(workspace.load(), config).save_pretrained(tmp_path / "adapter")
    found = []
    for base in (workspace.load(), split(workspace, "disk", LAYERS, tmp_path / "offloaded")):
        model = PeftModel.from_pretrained(base, tmp_path / "adapter", low_cpu_mem_usage=True).eval()
        found.append([workspace.outputs(model, text_only=True) for _ in range(3)])
    assert [difference(one, other) for one, other in zip(*found, strict=True)] == [0.0] * 3


def test_loftq_reads_an_offloaded_weight(workspace: Any, tmp_path: Path) -> None:
    """Its own arithmetic needs a GPU: here it is a function that reads the weight."""
    import torch
    from bitsandbytes import functional

    from gemma4_compat.patches.adapters import peft_offloaded_inits as inits

    def values(weight: Any, _tensor: Any) -> Any:
        return functional.dequantize_4bit(weight.data, weight.quant_state)

    def replaced(model: Any) -> Any:
        return inits.loftq_init(values, model.get_submodule(LAYER).weight, None)

    whole, model = workspace.load("4bit"), split(workspace, "disk", LAYERS, tmp_path, "4bit")
    assert model.get_submodule(LAYER).weight.is_meta
    found = inits.replace_lora_weights_loftq(replaced, model)
    assert torch.equal(inits.replace_lora_weights_loftq(replaced, whole), found)
    assert model.get_submodule(LAYER).weight.is_meta


def through_numpy(layer: Any) -> None:
    import torch

    layer.weight.detach().view(torch.uint8).numpy()[:2] ^= 1


def subtracted(layer: Any) -> None:
    layer.weight.data -= 1


def fused(layer: Any) -> None:
    import torch

    torch._foreach_mul_([layer.weight.data], 3)


def scaled(layer: Any) -> None:
    """In place, and the reference to the scales stays as it is."""
    scales = layer.weight.quant_state.absmax if hasattr(layer.weight, "quant_state") else layer.weight.SCB
    scales[:2] += 1


@pytest.mark.parametrize(
    ("quantization", "write"),
    [
        *((None, write) for write in (through_numpy, subtracted, fused)),
        *(("4bit", write) for write in (through_numpy, scaled)),
        *(("8bit", write) for write in (through_numpy, scaled)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("kind", ["disk", pytest.param("ram", marks=pytest.mark.full)])
def test_no_way_of_writing_is_missed(
    workspace: Any, tmp_path: Path, kind: str, quantization: str | None, write: Callable[[Any], None]
) -> None:
    whole, model = workspace.load(quantization), split(workspace, kind, LAYERS, tmp_path, quantization)
    if quantization != "8bit":  # its first forward takes the weight apart
        assert difference(workspace.outputs(whole), workspace.outputs(model)) == 0.0
        before = workspace.outputs(model)
    layer = model.get_submodule(LAYER)
    maps = layer._hf_hook.weights_map
    with module_hooks.weights_brought_in(layer):
        pass
    assert layer._hf_hook.weights_map is maps, "nothing was written"
    written = whole.get_submodule(LAYER)
    written.state_dict()  # unpacks: a CPU with AVX512-BF16 packs a 4-bit weight in its first forward
    write(written)
    with module_hooks.weights_brought_in(layer):
        write(layer)
    expected = workspace.outputs(whole)
    for _ in range(2):
        assert difference(expected, workspace.outputs(model)) == 0.0
    if quantization != "8bit":
        assert difference(before, expected) > 0.0
