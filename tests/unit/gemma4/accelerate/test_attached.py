"""``statistics(model).attached`` names everything that this package has left on a model, and what takes it away."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import attached
from tests.patches.offload import looked_up_embeddings


def found(model: Any) -> dict[tuple[str, str], int]:
    """Patch and name of each entry -> in how many places it is."""
    return {(item.patch, item.name): len(item.paths) for item in gemma4_compat.statistics(model).attached}


ROTARY = {("transformers-rotary-cast", "_apply"): 2}
#: Of a split model: entries with one place for the model.
ONCE = {("accelerate-cast-offloaded", "to"): 1, ("accelerate-move-offloaded", "_apply"): 1}


def test_a_plain_model_has_its_rotary_embeddings(workspace: Any) -> None:
    assert found(workspace.load()) == ROTARY


def test_a_model_without_any() -> None:
    import torch

    empty = gemma4_compat.statistics(torch.nn.Linear(2, 2)).attached
    assert empty == ()
    assert str(empty) == "gemma4_compat has left nothing on this model"


def test_a_split_model_and_what_takes_it_away(workspace: Any) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = workspace.split()
    items = {(item.patch, item.name): item for item in gemma4_compat.statistics(model).attached}
    assert {key: len(item.paths) for key, item in items.items()}.items() >= (ROTARY | ONCE).items()
    streamed = items["accelerate-paged-layers", "streaming hooks"]
    assert streamed.kind == "hooks"
    assert "model.language_model.layers.0" in streamed.paths
    assert all(type(model.get_submodule(path)).__name__.endswith("Layer") for path in streamed.paths)
    assert {"bypass hooks", "_call_impl", "loading hooks"} <= {item.name for item in items.values()}
    remove_hook_from_submodules(model)
    left = {item.kind for item in gemma4_compat.statistics(model).attached if item.name != "_apply"}
    assert not left
    model.float()  # the next cast takes what guards casts and moves
    assert found(model) == ROTARY


def test_the_table_of_handles_has_what_the_model_has(workspace: Any) -> None:
    model = workspace.split()
    for kind, name in ((attached.STREAMING, "streaming hooks"), (attached.LOADING_HOOKS, "loading hooks")):
        paths = next(item.paths for item in gemma4_compat.statistics(model).attached if item.name == name)
        assert set(paths) == {path for path, module in model.named_modules() if module in kind}
        for module in model.modules():
            kind.remove(module)
        assert name not in {item.name for item in gemma4_compat.statistics(model).attached}


def test_a_copy_has_the_same(workspace: Any) -> None:
    model = workspace.split("4bit")
    assert found(copy.deepcopy(model)).keys() == found(model).keys()


def test_states_of_quantized_weights_and_the_quantizer(workspace: Any) -> None:
    items = {item.name: item for item in gemma4_compat.statistics(workspace.split("4bit")).attached}
    assert items[attached.PRISTINE].paths[0].endswith(".weight.quant_state")
    assert items[attached.IS_GEMMA4].paths == ("hf_quantizer",)
    scales = {item.name: item for item in gemma4_compat.statistics(workspace.split("8bit")).attached}
    assert scales[attached.PRISTINE].paths[0].endswith(".weight.SCB")


def test_an_embedding_that_is_looked_up(workspace: Any) -> None:
    model = looked_up_embeddings.split(workspace, looked_up_embeddings.PER_LAYER)
    model(**workspace.inputs(text_only=True))
    (lookup,) = (item for item in gemma4_compat.statistics(model).attached if item.name == attached.LOOKUP)
    assert [path.partition("._hf_hook")[0] for path in lookup.paths] == [looked_up_embeddings.PER_LAYER]


def test_a_merged_adapter_and_requests(workspace: Any) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(), workspace.adapter("language"))
    before = found(model)
    model.merge_adapter()
    gemma4_compat.train_fast(model, mlp=True)
    new = found(model).keys() - before.keys()
    assert new == {
        ("peft-merge-offloaded", "unmerge"),
        ("peft-merge-offloaded", "unmerging hook"),
        ("peft-merge-offloaded", attached.UNMERGES),
        ("transformers-chunked-loss", attached.CHUNKED_LOSS),
        ("transformers-chunked-mlp", attached.CHUNKED_MLP),
        ("transformers-chunked-mlp", "forward"),
        ("transformers-chunked-mlp", "_old_forward"),
        ("transformers-chunked-mlp", attached.CHUNKED_NORM),
        ("transformers-chunked-mlp", attached.PER_LAYER_TOKENS),
        ("transformers-chunked-mlp", "project_per_layer_inputs"),
        ("transformers-sliding-windows", attached.TRAINED_ATTENTION),
        ("", attached.TRAINING),
        ("", "forward"),
    }
    gemma4_compat.train_fast(model, enabled=False)
    model.unmerge_adapter()
    assert found(model).keys() - before.keys() <= {
        ("peft-merge-offloaded", "unmerging hook"),
        ("peft-merge-offloaded", attached.UNMERGES),
    }


# ----------------------------------------------------------------------------------------------------- any other model


@pytest.fixture
def layers() -> Any:
    import torch

    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3)))


def test_the_text(layers: Any) -> None:
    for layer in layers:
        vars(layer[0])[attached.DISPATCHED_IN] = None
    vars(layers)[attached.CHUNKED_LOSS] = "always"
    assert str(gemma4_compat.statistics(layers).attached).splitlines() == [
        "3 x _gemma4_compat_dispatched_in (accelerate-load-offloaded)",
        "    on *.*",
        "    A weak reference to the dispatched model, to find the weights tied to the module's.",
        "1 x _gemma4_compat_chunked_loss (transformers-chunked-loss)",
        "    on the model itself",
        "    When its loss is computed in chunks: 'training', 'always' or 'never'.",
    ]


def test_what_lasts_as_long_as_a_call(layers: Any) -> None:
    from gemma4_compat._gemma4.models import walk

    with walk.quick(layers):
        (item,) = gemma4_compat.statistics(layers).attached
    assert (item.kind, item.name, item.patch, item.paths) == ("method", "named_modules", "", ("",))
    assert "while a call of gemma4_compat._gemma4.models.walk runs" in str(item)
    assert gemma4_compat.statistics(layers).attached == ()


def test_a_mark_of_another_version(layers: Any) -> None:
    vars(layers[1])["_gemma4_compat_of_tomorrow"] = True
    (item,) = gemma4_compat.statistics(pickle.loads(pickle.dumps(layers))).attached
    assert (item.name, item.patch, item.paths) == ("_gemma4_compat_of_tomorrow", "", ("1",))


def test_somebody_elses_hooks_and_attributes_are_not_listed(layers: Any) -> None:
    layers.register_forward_hook(lambda *_: None)
    vars(layers)["forward"] = layers.forward
    vars(layers)["hooks"] = ("not", "hooks")
    assert gemma4_compat.statistics(layers).attached == ()


def test_the_input_is_checked() -> None:
    refused = r"statistics needs a model, a torch.nn.Module; got 'google/gemma-4-E2B-it'. Pass what"
    with pytest.raises(Gemma4CompatError, match=refused):
        gemma4_compat.statistics("google/gemma-4-E2B-it")


def test_handles_go_with_their_module(layers: Any) -> None:
    attached.IDLE.add(layers, layers.register_forward_hook(print))
    attached.IDLE.add(layers, layers.register_forward_pre_hook(print))
    assert len(attached.IDLE._handles[layers]) == 2
    attached.IDLE.remove(layers)
    assert not layers._forward_hooks
    assert not layers._forward_pre_hooks
    module = copy.deepcopy(layers)
    attached.IDLE.add(module, module.register_forward_hook(print))
    assert module in attached.IDLE
    before = len(attached.IDLE._handles)
    del module
    assert len(attached.IDLE._handles) == before - 1


# --------------------------------------------------------------------------------- two guards of one method, undone


@pytest.fixture
def guarded(workspace: Any) -> tuple[Any, dict[str, Any]]:
    """A split model whose ``_apply`` has both guards, as if its own weights were offloaded."""
    from gemma4_compat.patches.offload import accelerate_cast_offloaded as cast
    from gemma4_compat.patches.offload import accelerate_move_offloaded as move

    model = workspace.split()
    in_place.replace(model, "_apply", functools.partial(cast._apply, model))
    return model, {"cast": cast._apply, "move": move._guarded_apply}


@pytest.mark.parametrize("order", [("cast", "move"), ("move", "cast")])
def test_guards_of_casts_and_moves_end_in_both_orders(guarded: Any, order: tuple[str, str]) -> None:
    model, functions = guarded
    assert in_place.replacements(vars(model)["_apply"]) == [functions["move"], functions["cast"]]
    in_place.restore(model, "_apply", functions[order[0]])
    assert in_place.replacements(vars(model)["_apply"]) == [functions[order[1]]]
    in_place.restore(model, "_apply", functions[order[1]])
    assert "_apply" not in vars(model)
    assert model._apply.__func__ is type(model)._apply


def test_a_saved_model_has_no_trace(workspace: Any) -> None:
    import torch
    from accelerate.hooks import remove_hook_from_submodules

    model = workspace.split()
    remove_hook_from_submodules(model)
    model.float()
    kept = io.BytesIO()
    torch.save(model, kept)
    assert b"gemma4_compat" not in kept.getvalue()
