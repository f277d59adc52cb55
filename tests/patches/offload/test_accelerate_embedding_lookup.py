"""F12: an offloaded embedding is looked up where it lives, to the same bits, in every way it is used."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._models import placement as _placement
from gemma4_compat._offload import row_lookup
from gemma4_compat._reproduction import tiny, tiny_adapters, tiny_configs
from gemma4_compat._reproduction.workspace import difference
from gemma4_compat.patches.offload.accelerate_embedding_lookup import PATCH, largest_tensor
from tests.patches.promise import Promise

EMBEDDING, PER_LAYER = "model.language_model.embed_tokens", "model.language_model.embed_tokens_per_layer"
TABLES = {"per layer": (PER_LAYER,), "all": (PER_LAYER, EMBEDDING, "lm_head")}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "the whole table"


@pytest.fixture(params=["in place", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the CPU a table is looked up in place; *rows* is forced."""
    if request.param == "rows":
        monkeypatch.setattr(row_lookup.Lookup, "in_place", False)
    return str(request.param)


def split(workspace: Any, *offloaded: str, quantization: str | None = None) -> Any:
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded=workspace.offloaded)
    return workspace.dispatch_map(model, placement | dict.fromkeys(offloaded, workspace.offloaded))


def from_disk(workspace: Any, folder: Path, *offloaded: str, checkpoint: Path | None = None) -> Any:
    """Loaded with a map: the weights stay in the checkpoint's safetensors file."""
    placement = tiny.device_map(workspace.load(), "none", main=workspace.main, offloaded="disk")
    placement |= dict.fromkeys(offloaded, "disk")
    return tiny.load(checkpoint or workspace.checkpoint, device_map=placement, offload_folder=folder)


def lookups(model: Any) -> list[str]:
    """The embeddings that have been looked up where they live."""
    return [
        name
        for name, module in model.named_modules()
        if getattr(_placement.offload_hook(module), row_lookup._STATE, None) is not None
    ]


def table(model: Any, name: str = PER_LAYER) -> Any:
    return next(module for path, module in model.named_modules() if path.endswith(name))


@pytest.mark.parametrize("offloaded", TABLES)
@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double"])
def test_dispatched(
    workspace: Any, one_device: Callable[..., Any], way: str, offloaded: str, quantization: str | None
) -> None:
    model = split(workspace, *TABLES[offloaded], quantization=quantization)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert set(lookups(model)) == {name for name in TABLES[offloaded] if name != "lm_head"}
    assert all(table(model, name).weight.device.type == "meta" for name in TABLES[offloaded])


@pytest.mark.parametrize("offloaded", TABLES)
def test_loaded_with_a_map(
    workspace: Any, one_device: Callable[..., Any], way: str, offloaded: str, tmp_path: Path
) -> None:
    before = _digests(workspace.checkpoint)
    model = from_disk(workspace, tmp_path, *TABLES[offloaded])
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert set(lookups(model)) == {name for name in TABLES[offloaded] if name != "lm_head"}
    assert _digests(workspace.checkpoint) == before


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_loaded_in_another_dtype_than_the_checkpoints(workspace: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "float32"
    workspace.load().float().save_pretrained(checkpoint)
    reference = workspace.outputs(tiny.load(checkpoint, device=workspace.main))
    model = from_disk(workspace, tmp_path / "offload", *TABLES["all"], checkpoint=checkpoint)
    assert difference(reference, workspace.outputs(model)) == 0.0
    assert set(lookups(model)) == {PER_LAYER, EMBEDDING}


@pytest.mark.parametrize("adapter", ["language", "all"])
@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_with_an_adapter(
    workspace: Any, one_device: Callable[..., Any], way: str, quantization: str | None, adapter: str
) -> None:
    from peft import PeftModel

    model = split(workspace, *TABLES["all"], quantization=quantization)
    model = PeftModel.from_pretrained(model, workspace.adapter(adapter))
    assert difference(one_device(quantization, adapter), workspace.outputs(model)) == 0.0
    assert len(lookups(model)) == 2


@pytest.mark.parametrize("name", ["embed_tokens", "embed_tokens_per_layer"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_an_adapter_on_the_embedding_itself_merged_and_unmerged(
    workspace: Any, way: str, name: str, options: dict[str, Any]
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    seen = []
    for base in (workspace.load(), split(workspace, PER_LAYER, EMBEDDING)):
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=[name], init_lora_weights=False, **options)
        model = get_peft_model(base, config).eval()
        seen.append([workspace.outputs(model)])
        with model.disable_adapter():
            seen[-1].append(workspace.outputs(model))
        if name == "embed_tokens":  # a merge changes the head that is tied to it only where they share memory
            continue
        model.merge_adapter()
        seen[-1].append(workspace.outputs(model))
        model.unmerge_adapter()
        seen[-1].append(workspace.outputs(model))
    assert {difference(a, b) for a, b in zip(*seen)} == {0.0}
    assert difference(seen[0][0], seen[0][1]) > 0.0, "the adapter must do something to show anything"


def test_a_copy_of_an_embedding_is_trained(workspace: Any, way: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    found = []
    for base in (workspace.load(), split(workspace, PER_LAYER)):
        workspace.outputs(base)
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens_per_layer"])
        model = get_peft_model(base, config).train()
        batch = tiny.inputs(workspace.main, text_only=True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert_equal_gradients(*found)
    assert any("embed_tokens_per_layer" in name for name in found[0])


def assert_equal_gradients(whole: dict[str, Any], other: dict[str, Any]) -> None:
    import torch

    assert whole
    assert whole.keys() == other.keys()
    assert not [name for name, value in whole.items() if not torch.equal(value, other[name])]


def padded(main: Any) -> dict[str, Any]:
    import torch

    one = tiny.inputs(main, text_only=True)["input_ids"]
    ids = torch.zeros(3, 24, dtype=torch.long, device=main)
    mask = torch.zeros_like(ids)
    for row, (start, end) in enumerate([(0, 24), (5, 24), (20, 24)]):
        ids[row, start:], mask[row, start:] = one[0, start:end], 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("offloaded", TABLES)
def test_a_padded_batch(workspace: Any, way: str, offloaded: str) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, *TABLES[offloaded])):
        with torch.no_grad():
            batch = padded(workspace.main)
            tokens = model.generate(**batch, max_new_tokens=5, do_sample=False)
            seen.append([model(**batch).logits for _ in range(3)] + [tokens])
    assert all(torch.equal(a, b) for a, b in zip(*seen))


def test_prompts_of_one_token_and_of_embeddings(workspace: Any, way: str) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, *TABLES["all"])):
        ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
        with torch.no_grad():
            embeds = model.get_input_embeddings()(ids)
            seen.append([embeds, model(inputs_embeds=embeds).logits, model(input_ids=ids[:, :1]).logits])
            seen[-1] += [model(inputs_embeds=embeds).logits for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*seen))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_training_beside_frozen_tables(
    workspace: Any, way: str, quantization: str | None, checkpointing: bool
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    steps = []
    for base in (workspace.load(quantization), split(workspace, *TABLES["all"], quantization=quantization)):
        torch.manual_seed(3)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"])).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        batch = tiny.inputs(workspace.main)
        for _ in range(2):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        steps.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_equal_gradients(*steps)
    assert len(lookups(model)) == 2


def test_training_with_a_table_that_is_not_frozen_is_left_to_upstream(workspace: Any) -> None:
    found = []
    for base in (workspace.load(), split(workspace, PER_LAYER)):
        model = base.train()
        assert table(model).weight.requires_grad
        batch = tiny.inputs(workspace.main, text_only=True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        found.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None and PER_LAYER not in name}
        )
    assert_equal_gradients(*found)
    assert lookups(model) == []


def test_after_a_forward_in_eval_mode_the_training_of_the_table_is_left_to_upstream(workspace: Any) -> None:
    model = split(workspace, PER_LAYER)
    workspace.outputs(model, text_only=True)
    assert lookups(model) == [PER_LAYER]
    embedding = table(model).train()
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    assert largest_tensor(lambda: embedding(ids)) >= embedding.weight.numel()
    assert embedding(ids).requires_grad


@pytest.mark.parametrize("name", [PER_LAYER, EMBEDDING])
def test_nothing_larger_than_the_rows_is_made(workspace: Any, way: str, name: str, tmp_path: Path) -> None:
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    for model in (split(workspace, *TABLES["all"]), from_disk(workspace, tmp_path, *TABLES["all"])):
        embedding = table(model, name).requires_grad_(False)
        embedding(ids)
        rows = ids.numel() * embedding.embedding_dim
        assert largest_tensor(lambda embedding=embedding: embedding(ids)) == rows
        assert rows < embedding.weight.numel()


def test_a_forward_reads_no_offloaded_embedding_as_a_whole(
    workspace: Any, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the padding token included, which Gemma 4 reads outside the embedding."""
    from accelerate.utils import OffloadedWeightsLoader

    asked = []
    original = OffloadedWeightsLoader.__getitem__

    def get(self: Any, key: str) -> Any:
        asked.append(key)
        return original(self, key)

    model = from_disk(workspace, tmp_path, PER_LAYER, EMBEDDING, "lm_head")
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", get)
    workspace.outputs(model)
    assert not [key for key in asked if "embed_tokens" in key]


@pytest.mark.parametrize("offloaded", TABLES)
def test_compiled(workspace: Any, way: str, offloaded: str) -> None:
    import torch

    torch.compiler.reset()
    model = split(workspace, *TABLES[offloaded])
    batch = tiny.inputs(workspace.main, text_only=True)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        reference = model(**batch).logits
        for _ in range(3):
            assert torch.equal(compiled(**batch).logits, reference)
    assert table(model).weight.device.type == "meta"
    torch.compiler.reset()


def test_the_embedding_compiled_by_itself(workspace: Any, way: str) -> None:
    import torch

    torch.compiler.reset()
    embedding = table(split(workspace, PER_LAYER))
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    compiled = torch.compile(embedding, backend="eager")
    with torch.no_grad():
        for tokens in (ids, ids, ids[:, :3], ids[:, :1]):
            found = compiled(tokens)  # first: nothing has run as it is before
            assert torch.equal(found, embedding(tokens))
    assert embedding.weight.device.type == "meta"
    torch.compiler.reset()


@contextlib.contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        caplog.clear()
        yield messages
        messages += [record.getMessage() for record in caplog.records if record.name == "gemma4_compat"]


def llama(*, tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_a_tied_head_that_stays_on_the_device_is_told_once_and_its_copy_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The hook is that of ``dispatch_model`` with the embedding on the CPU and the head on the device."""
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    device = torch.device("cpu")
    embedding = torch.nn.Embedding(64, 32).eval()
    on_host, head = embedding.weight.data, torch.nn.Linear(32, 64, bias=False)
    head.weight = torch.nn.Parameter(on_host.clone())
    ids = torch.arange(3, 15).reshape(1, 12)
    hook = AlignDevicesHook(
        execution_device=device,
        offload=True,
        weights_map={"weight": on_host},
        tied_params_map={on_host.data_ptr(): {device: head.weight}},
    )
    reference = embedding(ids)
    add_hook_to_module(embedding, hook)
    forward, found = embedding._old_forward, []

    def watch(tokens: Any) -> Any:
        found.append(embedding.weight.data_ptr())
        return forward(tokens)

    embedding._old_forward = watch
    with heard(caplog) as messages:
        for _ in range(3):
            assert torch.equal(embedding(ids), reference)
    assert len([message for message in messages if "the head tied to it" in message]) == 1, messages
    assert set(found) == {head.weight.data_ptr()}, "the embedding made a copy of its own"
    assert embedding.weight.device.type == "meta"
    assert lookups(embedding) == []


def test_an_error_in_the_forward(workspace: Any, one_device: Callable[..., Any], way: str) -> None:
    import torch

    model = split(workspace, *TABLES["all"])
    batch = tiny.inputs(workspace.main, text_only=True)
    wrong = {**batch, "input_ids": batch["input_ids"].clone()}
    wrong["input_ids"][0, 3] = tiny_configs.VOCABULARY + 5
    for _ in range(2):
        if workspace.main == "cpu":  # on a GPU that is an error of the whole process
            with torch.no_grad(), pytest.raises(IndexError):
                model(**wrong)
        assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert table(model).weight.device.type == "meta"


def test_saved_and_loaded_again(workspace: Any, way: str, tmp_path: Path) -> None:
    import torch

    model = split(workspace, *TABLES["all"])
    reference = workspace.outputs(model)
    state = model.state_dict()
    assert state[f"{PER_LAYER}.weight"].device.type == "meta"
    model.save_pretrained(tmp_path)
    assert difference(reference, workspace.outputs(model)) == 0.0
    again = tiny.load(tmp_path, device=workspace.main)
    assert difference(reference, workspace.outputs(again)) == 0.0
    whole = workspace.load().state_dict()
    saved = again.state_dict()
    assert whole.keys() == saved.keys()
    assert not [name for name, value in whole.items() if not torch.equal(value, saved[name])]


def test_a_deep_copy(workspace: Any, way: str) -> None:
    model = split(workspace, *TABLES["all"])
    reference = workspace.outputs(model)
    copied = copy.deepcopy(model)
    assert difference(reference, workspace.outputs(copied)) == 0.0
    assert difference(reference, workspace.outputs(model)) == 0.0
    hooks = [_placement.offload_hook(table(each)) for each in (model, copied)]
    assert vars(hooks[0])[row_lookup._STATE] is not vars(hooks[1])[row_lookup._STATE]


def test_weights_that_were_changed_are_seen_in_the_next_forward(workspace: Any, way: str) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, *TABLES["all"])):
        seen.append([workspace.outputs(model)])
        for name in (PER_LAYER, EMBEDDING):
            embedding = table(model, name)
            with _placement.weights_brought_in(embedding), torch.no_grad():
                embedding.weight.data = embedding.weight.data * 1.5 if name == PER_LAYER else embedding.weight.data
            seen[-1].append(workspace.outputs(model))
    assert [difference(a, b) for a, b in zip(*seen)] == [0.0] * 3
    assert difference(seen[0][0], seen[0][1]) > 0.0


def test_hooks_removed(workspace: Any, one_device: Callable[..., Any]) -> None:
    from accelerate.hooks import remove_hook_from_module

    model = split(workspace, *TABLES["all"])
    workspace.outputs(model)
    remove_hook_from_module(model, recurse=True)
    assert not [name for name, value in model.named_parameters() if value.device.type == "meta"]
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


def test_undone_in_a_running_process_the_same_model_is_still_right(
    workspace: Any, one_device: Callable[..., Any], way: str
) -> None:
    model = split(workspace, *TABLES["all"])
    try:
        for _ in range(2):
            assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
            gemma4_compat.revert(PATCH.id)
            assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
            gemma4_compat.install()
    finally:
        gemma4_compat.install()
    assert gemma4_compat.status()[PATCH.id].state is gemma4_compat.PatchState.APPLIED


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_that_is_not_gemma_4(tmp_path: Path, way: str, tied: bool) -> None:
    import torch
    from accelerate import dispatch_model

    model = llama(tied=tied)
    ids = torch.arange(3, 15).reshape(1, 12)
    with torch.no_grad():
        reference = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        placement = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu"}
        placement |= {"model.rotary_emb": "cpu", "lm_head": "disk" if tied else "cpu"}
        model = dispatch_model(model, placement, offload_dir=str(tmp_path))
        for _ in range(3):
            assert torch.equal(model(ids).logits, reference)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), tokens)
    assert lookups(model) == ["model.embed_tokens"]
    assert largest_tensor(lambda: model.model.embed_tokens(ids)) < model.model.embed_tokens.weight.numel()


@pytest.mark.parametrize("quantized", ["Embedding4bit", "Embedding8bit"])
def test_quantized_embeddings_are_left_to_upstream(quantized: str) -> None:
    import bitsandbytes
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    module = getattr(bitsandbytes.nn, quantized)(256, 64).to("cpu").eval()
    hook = AlignDevicesHook(execution_device=torch.device("cpu"), offload=True)
    add_hook_to_module(module, hook)
    assert type(module.weight) is not torch.nn.Parameter
    assert row_lookup.lookup_for(hook, module) is None


def test_fifty_forwards_leave_no_tensor_behind(workspace: Any, way: str) -> None:
    import torch

    from tests.conftest import census

    model = split(workspace, *TABLES["all"])
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
        before = census()
        for _ in range(50):
            model(**batch)
    assert census() == before
