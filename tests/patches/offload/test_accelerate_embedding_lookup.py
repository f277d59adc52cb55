"""F12: an offloaded embedding is looked up where it is stored, to the same bits, in every way it is used."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._lab import tiny, tiny_configs
from gemma4_compat._lab.workspace import difference
from gemma4_compat._offload.transfer import row_lookup
from gemma4_compat.patches.offload.accelerate_embedding_lookup import PATCH, largest_tensor
from tests.patches.offload.looked_up_embeddings import (
    EMBEDDING,
    PER_LAYER,
    WEIGHTS,
    embedding_of,
    from_disk,
    lookups,
    split,
)
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "the whole weight"


@pytest.mark.parametrize("offloaded", WEIGHTS)
@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double"])
def test_dispatched(
    workspace: Any, one_device: Callable[..., Any], way: str, offloaded: str, quantization: str | None
) -> None:
    model = split(workspace, *WEIGHTS[offloaded], quantization=quantization)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert set(lookups(model)) == {name for name in WEIGHTS[offloaded] if name != "lm_head"}
    assert all(embedding_of(model, name).weight.device.type == "meta" for name in WEIGHTS[offloaded])


@pytest.mark.parametrize("offloaded", WEIGHTS)
def test_loaded_with_a_map(
    workspace: Any, one_device: Callable[..., Any], way: str, offloaded: str, tmp_path: Path
) -> None:
    before = _digests(workspace.checkpoint)
    model = from_disk(workspace, tmp_path, *WEIGHTS[offloaded])
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert set(lookups(model)) == {name for name in WEIGHTS[offloaded] if name != "lm_head"}
    assert _digests(workspace.checkpoint) == before


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_loaded_in_another_dtype_than_the_checkpoints(workspace: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "float32"
    workspace.load().float().save_pretrained(checkpoint)
    reference = workspace.outputs(tiny.load(checkpoint, device=workspace.main))
    model = from_disk(workspace, tmp_path / "offload", *WEIGHTS["all"], checkpoint=checkpoint)
    assert difference(reference, workspace.outputs(model)) == 0.0
    assert set(lookups(model)) == {PER_LAYER, EMBEDDING}


@pytest.mark.parametrize("adapter", ["language", "all"])
@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_with_an_adapter(
    workspace: Any, one_device: Callable[..., Any], way: str, quantization: str | None, adapter: str
) -> None:
    from peft import PeftModel

    model = split(workspace, *WEIGHTS["all"], quantization=quantization)
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


def padded(main: Any) -> dict[str, Any]:
    import torch

    one = tiny.inputs(main, text_only=True)["input_ids"]
    ids = torch.zeros(3, 24, dtype=torch.long, device=main)
    mask = torch.zeros_like(ids)
    for row, (start, end) in enumerate([(0, 24), (5, 24), (20, 24)]):
        ids[row, start:], mask[row, start:] = one[0, start:end], 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("offloaded", WEIGHTS)
def test_a_padded_batch(workspace: Any, way: str, offloaded: str) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, *WEIGHTS[offloaded])):
        with torch.no_grad():
            batch = padded(workspace.main)
            tokens = model.generate(**batch, max_new_tokens=5, do_sample=False)
            seen.append([model(**batch).logits for _ in range(3)] + [tokens])
    assert all(torch.equal(a, b) for a, b in zip(*seen))


def test_prompts_of_one_token_and_of_embeddings(workspace: Any, way: str) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, *WEIGHTS["all"])):
        ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
        with torch.no_grad():
            embeds = model.get_input_embeddings()(ids)
            seen.append([embeds, model(inputs_embeds=embeds).logits, model(input_ids=ids[:, :1]).logits])
            seen[-1] += [model(inputs_embeds=embeds).logits for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*seen))


@pytest.mark.parametrize("name", [PER_LAYER, EMBEDDING])
def test_nothing_larger_than_the_rows_is_created(workspace: Any, way: str, name: str, tmp_path: Path) -> None:
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    for model in (split(workspace, *WEIGHTS["all"]), from_disk(workspace, tmp_path, *WEIGHTS["all"])):
        embedding = embedding_of(model, name).requires_grad_(False)
        embedding(ids)
        rows = ids.numel() * embedding.embedding_dim
        assert largest_tensor(lambda embedding=embedding: embedding(ids)) == rows
        assert rows < embedding.weight.numel()


def test_a_forward_reads_no_offloaded_embedding_as_a_whole(
    workspace: Any, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the padding token included, which Gemma 4 reads outside the embedding."""
    from accelerate.utils import OffloadedWeightsLoader

    read = []
    original = OffloadedWeightsLoader.__getitem__

    def get(self: Any, key: str) -> Any:
        read.append(key)
        return original(self, key)

    model = from_disk(workspace, tmp_path, PER_LAYER, EMBEDDING, "lm_head")
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", get)
    workspace.outputs(model)
    assert not [key for key in read if "embed_tokens" in key]


@pytest.mark.parametrize("adapter", [False, True])
def test_the_tied_head_reads_few_positions_in_place(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    """Also with a LoRA on it. All positions of a prompt, and gradients, have it brought as before."""
    import torch
    from accelerate import dispatch_model
    from accelerate.utils import OffloadedWeightsLoader
    from peft import LoraConfig, get_peft_model

    read: list[str] = []
    original = OffloadedWeightsLoader.__getitem__

    def get(self: Any, key: str) -> Any:
        read.append(key)
        return original(self, key)

    models, main = [workspace.load(), workspace.load()], torch.device(workspace.main)
    placement = tiny.device_map(models[1], "none", main=main, offloaded="cpu") | dict.fromkeys(WEIGHTS["all"], "cpu")
    dispatch_model(models[1], placement, main_device=main, skip_keys=tiny.skip_keys(models[1]))
    if adapter:
        config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        for index, model in enumerate(models):
            torch.manual_seed(3)
            models[index] = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", get)
    batch = tiny.inputs(workspace.main, text_only=True)
    for keep, gradients, brought in ((1, False, 0), (8, False, 0), (9, False, 1), (0, False, 1), (1, True, 1)):
        read.clear()
        with torch.set_grad_enabled(gradients):
            whole, found = (model(**batch, logits_to_keep=keep).logits for model in models)
        assert torch.equal(whole, found)
        assert read.count("lm_head.weight") == brought


def test_compiled(workspace: Any, way: str) -> None:
    import torch

    torch.compiler.reset()
    model = split(workspace, *WEIGHTS["all"])
    batch = tiny.inputs(workspace.main, text_only=True)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        reference = model(**batch).logits
        for _ in range(3):
            assert torch.equal(compiled(**batch).logits, reference)
    assert embedding_of(model).weight.device.type == "meta"
    torch.compiler.reset()


def test_the_embedding_compiled_by_itself(workspace: Any, way: str) -> None:
    import torch

    torch.compiler.reset()
    embedding = embedding_of(split(workspace, PER_LAYER))
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    compiled = torch.compile(embedding, backend="eager")
    with torch.no_grad():
        for tokens in (ids, ids, ids[:, :3], ids[:, :1]):
            found = compiled(tokens)  # first: nothing has run as it is before
            assert torch.equal(found, embedding(tokens))
    assert embedding.weight.device.type == "meta"
    torch.compiler.reset()


def test_an_error_in_the_forward(workspace: Any, one_device: Callable[..., Any], way: str) -> None:
    import torch

    model = split(workspace, *WEIGHTS["all"])
    batch = tiny.inputs(workspace.main, text_only=True)
    wrong = {**batch, "input_ids": batch["input_ids"].clone()}
    wrong["input_ids"][0, 3] = tiny_configs.VOCABULARY + 5
    for _ in range(2):
        if workspace.main == "cpu":  # on a GPU that is an error of the whole process
            with torch.no_grad(), pytest.raises(IndexError):
                model(**wrong)
        assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert embedding_of(model).weight.device.type == "meta"


def test_saved_and_loaded_again(workspace: Any, way: str, tmp_path: Path) -> None:
    import torch

    model = split(workspace, *WEIGHTS["all"])
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
    model = split(workspace, *WEIGHTS["all"])
    reference = workspace.outputs(model)
    copied = copy.deepcopy(model)
    assert difference(reference, workspace.outputs(copied)) == 0.0
    assert difference(reference, workspace.outputs(model)) == 0.0
    hooks = [_placement.offload_hook(embedding_of(each)) for each in (model, copied)]
    assert vars(hooks[0])[row_lookup._STATE] is not vars(hooks[1])[row_lookup._STATE]


def test_the_next_forward_has_changed_weights(workspace: Any, way: str) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, *WEIGHTS["all"])):
        seen.append([workspace.outputs(model)])
        for name in (PER_LAYER, EMBEDDING):
            embedding = embedding_of(model, name)
            with _placement.weights_brought_in(embedding), torch.no_grad():
                embedding.weight.data = embedding.weight.data * 1.5 if name == PER_LAYER else embedding.weight.data
            seen[-1].append(workspace.outputs(model))
    assert [difference(a, b) for a, b in zip(*seen)] == [0.0] * 3
    assert difference(seen[0][0], seen[0][1]) > 0.0


def test_hooks_removed(workspace: Any, one_device: Callable[..., Any]) -> None:
    from accelerate.hooks import remove_hook_from_module

    model = split(workspace, *WEIGHTS["all"])
    workspace.outputs(model)
    remove_hook_from_module(model, recurse=True)
    assert not [name for name, value in model.named_parameters() if value.device.type == "meta"]
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


def test_reverted_in_a_running_process_the_same_model_is_still_right(
    workspace: Any, one_device: Callable[..., Any], way: str
) -> None:
    model = split(workspace, *WEIGHTS["all"])
    try:
        for _ in range(2):
            assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
            gemma4_compat.revert(PATCH.id)
            assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
            gemma4_compat.install()
    finally:
        gemma4_compat.install()
    assert gemma4_compat.status()[PATCH.id].state is gemma4_compat.PatchState.APPLIED


def test_fifty_forwards_leave_no_tensor_behind(workspace: Any, way: str) -> None:
    import torch

    from tests.conftest import census

    model = split(workspace, *WEIGHTS["all"])
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
        before = census()
        for _ in range(50):
            model(**batch)
    assert census() == before
