"""F37: the line of every model card, ``processor(...).to(model.device)``, on split models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import Workspace, difference
from gemma4_compat.patches.offload.transformers_model_device import PATCH
from tests.one_device import modalities
from tests.patches.promise import Promise

EMBEDDING = ("model.language_model.embed_tokens", "lm_head")
TOWERS = ("model.vision_tower", "model.audio_tower")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"meta tensor"


@pytest.fixture
def reverted() -> Iterator[Callable[[], None]]:
    """Takes the patch off; it is back after the test."""
    yield lambda: (gemma4_compat.revert(PATCH.id), None)[1]
    gemma4_compat.install()


def main_device(workspace: Any) -> Any:
    import torch

    return torch.device("cuda", 0) if workspace.main == 0 else torch.device("cpu")


def without(workspace: Any, model: Any, names: tuple[str, ...], to: str) -> Any:
    """``model`` with these modules on disk, or in host memory ("ram", which needs no GPU)."""
    from accelerate import dispatch_model

    placement = tiny.device_map(model, "none", main=workspace.main, offloaded="disk")
    if to == "disk":
        return workspace.dispatch_map(model, placement | dict.fromkeys(names, "disk"))
    main = main_device(workspace)
    placement = dict.fromkeys(placement, main) | dict.fromkeys(names, "cpu")
    return dispatch_model(model, placement, main_device=main, skip_keys=model._skip_keys_device_placement)


def text_split(workspace: Any) -> Any:
    """The text-only model with its embedding, which holds its first parameter, and its head on disk."""
    model = workspace.load_text()
    placement = dict.fromkeys([f"model.{name}" for name, _ in model.model.named_children()], workspace.main)
    return workspace.dispatch_map(model, placement | {"model.embed_tokens": "disk", "lm_head": "disk"})


def inner_models(model: Any) -> list[Any]:
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@pytest.mark.parametrize("to", ["disk", "ram"])
@pytest.mark.parametrize("names", [TOWERS, EMBEDDING, TOWERS + EMBEDDING], ids=["towers", "embedding", "both"])
def test_every_part_says_where_it_takes_its_inputs_before_and_after_forwards(
    workspace: Any, one_device: Callable[..., Any], names: tuple[str, ...], to: str
) -> None:
    reference = workspace.load()
    model = without(workspace, workspace.load(), names, to)
    for _ in range(2):
        assert {part.device for part in inner_models(model)} == {main_device(workspace)}
        assert [part.dtype for part in inner_models(model)] == [part.dtype for part in inner_models(reference)]
        assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", ["4bit-double", "8bit"])
def test_quantized_and_under_adapters(workspace: Any, one_device: Callable[..., Any], quantization: str) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(quantization), workspace.adapter("all"))
    assert model.device == model.base_model.device == main_device(workspace)
    assert model.dtype == workspace.load(quantization).dtype
    assert difference(one_device(quantization, "all"), workspace.outputs(model)) == 0.0


def test_text_only_classes(workspace: Any) -> None:
    model = text_split(workspace)
    assert {part.device for part in inner_models(model)} == {main_device(workspace)}
    expected = workspace.outputs(workspace.load_text(), text_only=True)
    assert difference(expected, workspace.outputs(model, text_only=True)) == 0.0


def test_loaded_with_a_device_map(workspace: Any, one_device: Callable[..., Any], tmp_path: Path) -> None:
    placement = tiny.device_map(workspace.load(), "both", main=workspace.main, offloaded="disk")
    model = tiny.load(workspace.checkpoint, device_map=placement, offload_folder=tmp_path)
    assert model.device == main_device(workspace)
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


def test_offloaded_as_a_whole(workspace: Any, tmp_path: Path) -> None:
    import accelerate

    main = main_device(workspace)
    for model in (
        accelerate.cpu_offload(workspace.load(), execution_device=main),
        accelerate.disk_offload(workspace.load(), tmp_path, execution_device=main),
    ):
        assert {part.device for part in inner_models(model)} == {main}


def test_a_hook_above_the_first_parameter(workspace: Any) -> None:
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = workspace.load()
    weights = {name: value.detach().clone() for name, value in model.model.vision_tower.state_dict().items()}
    hook = AlignDevicesHook(
        execution_device=main_device(workspace), offload=True, weights_map=weights, place_submodules=True
    )
    add_hook_to_module(model.model.vision_tower, hook)
    assert next(model.parameters()).device == torch.device("meta")
    assert model.device == model.model.vision_tower.device == main_device(workspace)


def test_the_12b(workspace: Any) -> None:
    unified = workspace.unified()
    if unified is None:
        pytest.skip("the installed transformers has no Gemma4UnifiedConfig")
    model = without(unified, unified.load(), EMBEDDING, "disk")
    assert {part.device for part in inner_models(model)} == {main_device(workspace)}
    batch = {name: value.to(model.device) for name, value in unified.inputs().items()}
    expected = unified.load().generate(**batch, max_new_tokens=4, do_sample=False)
    assert model.generate(**batch, max_new_tokens=4, do_sample=False).equal(expected)


def test_the_line_of_the_model_cards(workspace: Any, tmp_path: Path, reverted: Callable[[], None]) -> None:
    import torch

    checkpoint = workspace.larger(positions=64)  # for images of real sizes
    whole, model = (tiny.load(checkpoint, device=workspace.main) for _ in range(2))
    model = without(workspace, model, TOWERS, "disk")
    processor, image = modalities.processor(), modalities.write_png(tmp_path / "image.png", 1)

    def answer(model: Any) -> Any:
        batch = modalities.chat(processor, "What is this?", image, device=model.device)
        return model.generate(**batch, max_new_tokens=6, do_sample=False)

    assert answer(model).equal(answer(whole))
    reverted()
    assert model.device == torch.device("meta")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"):
        answer(model)


def test_prompt_encoders_are_put_there(tmp_path: Path) -> None:
    import torch
    from peft import PromptTuningConfig, get_peft_model

    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    without_ple = Workspace.build(tmp_path, "31B")  # upstream refuses prompts in front of per-layer embeddings
    found = []
    for base in (without_ple.load(), without(without_ple, without_ple.load(), (*TOWERS[:1], *EMBEDDING), "disk")):
        torch.manual_seed(0)
        model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        assert model.prompt_encoder["default"].embedding.weight.device == main_device(without_ple)
        with torch.no_grad():
            found.append(model(**without_ple.inputs(text_only=True)).logits)
    assert found[0].equal(found[1])


def test_a_model_without_values_stays_on_meta(workspace: Any) -> None:
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForImageTextToText

    loaded = workspace.load()
    with init_empty_weights():
        empty = AutoModelForImageTextToText.from_config(loaded.config)
    assert {part.device for part in inner_models(empty)} == {torch.device("meta")}
    loaded.model.vision_tower.to("meta")  # by hand: no hook brings it back
    assert loaded.device == torch.device("meta")


def test_other_models_too_and_undone(workspace: Any, reverted: Callable[[], None]) -> None:
    import torch
    from accelerate import dispatch_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval().to(main_device(workspace))
    assert model.device == next(model.parameters()).device
    batch = {"input_ids": torch.arange(8)[None].to(model.device), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**batch, pad_token_id=0)
    placement = {"model.embed_tokens": "disk", "model.layers": workspace.main, "model.norm": workspace.main}
    placement |= {"model.rotary_emb": workspace.main, "lm_head": workspace.main}
    dispatch_model(model, placement, offload_dir=tempfile.mkdtemp(dir=workspace.folder))
    assert model.device == main_device(workspace)
    assert model.generate(**batch, pad_token_id=0).equal(expected)
    reverted()
    assert model.device == torch.device("meta")


def hooked_for(model: Any, **devices: str) -> Any:
    """``model`` with these modules offloaded and run on GPUs, which need not be there: it is not run."""
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, device in devices.items():
        module = model.get_submodule(name.replace("__", "."))
        add_hook_to_module(module, AlignDevicesHook(execution_device="meta"))  # moves it there
        module._hf_hook.offload, module._hf_hook.execution_device = True, torch.device(device)
    return model


def test_on_several_devices_it_is_that_of_the_embedding(workspace: Any) -> None:
    import torch

    load = workspace.load
    model = hooked_for(load(), model__vision_tower__patch_embedder="cuda:0", model__audio_tower="cuda:0")
    assert model.device == main_device(workspace)  # the embedding's, which is not offloaded
    assert model.model.vision_tower.device == torch.device("cuda", 0)
    both = {"model__vision_tower__patch_embedder": "cuda:0", "model__language_model__embed_tokens": "cuda:1"}
    model = hooked_for(load(), **both)
    assert model.device == model.model.device == model.model.language_model.device == torch.device("cuda", 1)
    assert model.model.vision_tower.device == torch.device("cuda", 0)


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_model_with_hooks_and_no_map_is_still_not_compiled(
    workspace: Any, on_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import GenerationConfig, StaticCache

    from gemma4_compat._gemma4.cache import cache_names
    from gemma4_compat._graphs import recording

    monkeypatch.delitem(recording.RECORDERS, "cuda")  # its step would be replayed in place of compiled
    model = workspace.load_text()
    cache = {cache_names.of(type(model).forward): StaticCache(config=model.config, max_cache_len=8)}
    if on_meta:
        hooked_for(model, model__embed_tokens="cuda:0")
        assert model.device == torch.device("cuda", 0)
    else:
        monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    assert model._valid_auto_compile_criteria(cache, GenerationConfig()) is not on_meta


def test_it_is_read_in_a_compiled_graph(workspace: Any) -> None:
    import torch

    model = workspace.split(offload="towers")
    compiled = torch.compile(lambda value: value.to(model.device) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).device == main_device(workspace)
