"""What a user does with an offloaded model after loading it: saves, moves, removes hooks, changes adapters, gives it
bad input. Each time compared with the same done on one device.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, find_meta_tensors
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from tests.patches.adapters.test_peft_keep_dispatch import placement

pytestmark = pytest.mark.full

QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]


def weights_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name].dtype != expected[name].dtype] == []
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def from_disk(workspace: Any, folder: Path, checkpoint: Path | None = None) -> Any:
    """The model as ``from_pretrained`` gives it with disk entries: those weights were never anywhere else."""
    asked = tiny.device_map(workspace.load(), "both", main=workspace.main, offloaded="disk")
    return tiny.load(checkpoint or workspace.checkpoint, device_map=asked, offload_folder=folder)


def lost(model: Any) -> list[str]:
    return [tensor.path for tensor in find_meta_tensors(model) if not tensor.offloaded]


# ------------------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after forwards"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_saved_model_holds_the_weights_of_one_device_and_reloads(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str | None, used: bool
) -> None:
    workspace.load(quantization).save_pretrained(tmp_path / "whole")
    model = workspace.split(quantization)
    if used:
        workspace.outputs(model)
    model.save_pretrained(tmp_path / "split", max_shard_size="200KB" if used else "50GB")
    assert (len(list((tmp_path / "split").glob("*.safetensors"))) > 1) == used
    assert_same_weights(weights_in(tmp_path / "split"), weights_in(tmp_path / "whole"))
    again = tiny.load(tmp_path / "split", device=workspace.main)
    assert difference(one_device(quantization, None), workspace.outputs(again)) == 0.0
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0


def test_a_model_can_be_saved_over_the_checkpoint_it_is_offloaded_from(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(workspace.checkpoint, tmp_path / "model")
    model = from_disk(workspace, tmp_path / "offload", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert_same_weights(weights_in(tmp_path / "model"), weights_in(workspace.checkpoint))


@pytest.mark.parametrize("by", ["peft", "peft trained", "transformers"])
@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_a_saved_adapter_holds_the_weights_of_one_device_and_reloads(
    workspace: Any, tmp_path: Path, quantization: str | None, by: str
) -> None:
    import torch
    from peft import PeftModel

    outputs = []
    for name, base in (("whole", workspace.load(quantization)), ("split", workspace.split(quantization))):
        if by == "transformers":
            model = base
            try:
                model.load_adapter(str(workspace.adapter("all")))
            except (ImportError, ValueError) as error:
                pytest.skip(f"these releases of transformers and PEFT do not go together: {error}")
        else:
            model = PeftModel.from_pretrained(base, workspace.adapter("all"), is_trainable=by == "peft trained")
        if by == "peft trained":
            batch = tiny.inputs(workspace.main)
            model.train()(**batch, labels=batch["input_ids"]).loss.backward()
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
            model.eval()
        outputs.append(workspace.outputs(model))
        model.save_pretrained(tmp_path / name)
    assert difference(*outputs) == 0.0
    assert_same_weights(weights_in(tmp_path / "split"), weights_in(tmp_path / "whole"))
    fresh = workspace.load(quantization)
    if by == "transformers":
        fresh.load_adapter(str(tmp_path / "split"))
    else:
        fresh = PeftModel.from_pretrained(fresh, tmp_path / "split")
    assert difference(outputs[0], workspace.outputs(fresh)) == 0.0


# ------------------------------------------------------------------------------------------------------------ moving


@pytest.mark.parametrize("adapter", [None, "language"])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_move_is_refused_before_anything_is_moved(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, adapter: str | None
) -> None:
    from peft import PeftModel

    model: Any = workspace.split(quantization)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, workspace.adapter(adapter))
    before = placement(model)
    storages = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    moves = [lambda: model.to_empty(device="cpu")] + ([lambda: model.to("cpu")] if adapter is None else [])
    for move in moves:
        with pytest.raises(RuntimeError, match="You can't move a model that has some modules offloaded"):
            move()
        assert placement(model) == before
    assert {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()} == storages
    assert difference(one_device(quantization, adapter), workspace.outputs(model)) == 0.0


CASTS: dict[str, Callable[[Any], Any]] = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "to": lambda model: model.to(__import__("torch").float32),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["base", "PeftModel"])
def test_a_change_of_dtype_means_what_it_means_on_one_device(workspace: Any, wrapped: bool, cast: str) -> None:
    from peft import PeftModel

    outputs = []
    for base in (workspace.load(), workspace.split()):
        model = PeftModel.from_pretrained(base, workspace.adapter("language")) if wrapped else base
        CASTS[cast](model)
        outputs.append(workspace.outputs(model))
    assert difference(*outputs) == 0.0


@pytest.mark.parametrize("cast", CASTS)
def test_a_quantized_model_refuses_a_change_of_dtype_and_is_as_it_was(
    workspace: Any, one_device: Callable[..., Any], cast: str
) -> None:
    model = workspace.split("4bit")
    with pytest.raises((ValueError, RuntimeError), match=r"not supported for quantized|You can't move|cannot cast"):
        CASTS[cast](model)
    assert difference(one_device("4bit", None), workspace.outputs(model)) == 0.0


# ---------------------------------------------------------------------------------------------------- hooks removed


@pytest.mark.parametrize("adapter, used", [(None, False), ("all", True)], ids=["fresh", "adapter, after forwards"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_hooks_removed_everything_is_back_and_another_dispatch_is_exact(
    workspace: Any,
    one_device: Callable[..., Any],
    tmp_path: Path,
    quantization: str | None,
    adapter: str | None,
    used: bool,
) -> None:
    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel

    expected = one_device(quantization, adapter)
    base = workspace.split(quantization)
    model = base if adapter is None else PeftModel.from_pretrained(base, workspace.adapter(adapter))
    if used:
        workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert find_meta_tensors(model) == ()
    assert not [name for name, module in model.named_modules() if {"_hf_hook", "_old_forward"} & vars(module).keys()]
    model.to(workspace.main)
    assert difference(expected, workspace.outputs(model)) == 0.0
    if used:
        asked = tiny.device_map(base, "layers", main=workspace.main, offloaded=workspace.offloaded)
        tiny.dispatch(base, asked, tmp_path)
        assert find_meta_tensors(model)
        assert difference(expected, workspace.outputs(model)) == 0.0


def test_hooks_removed_from_a_model_that_was_loaded_from_disk(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = from_disk(workspace, tmp_path / "offload")
    workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert find_meta_tensors(model) == ()
    model.to(workspace.main)
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    asked = tiny.device_map(model, "layers", main=workspace.main, offloaded=workspace.offloaded)
    tiny.dispatch(model, asked, tmp_path / "other")
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("by", ["peft", "transformers"])
def test_an_adapter_on_a_model_whose_hooks_were_removed(workspace: Any, by: str) -> None:
    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel

    outputs = []
    for base in (workspace.load(), workspace.split()):
        remove_hook_from_submodules(base)  # leaves hf_device_map behind
        base.to(workspace.main)
        if by == "peft":
            model = PeftModel.from_pretrained(base, workspace.adapter("all"))
        else:
            model = base
            try:
                model.load_adapter(str(workspace.adapter("all")))
            except (ImportError, ValueError) as error:
                pytest.skip(f"these releases of transformers and PEFT do not go together: {error}")
        assert lost(model) == []
        outputs.append(workspace.outputs(model))
    assert difference(*outputs) == 0.0


# ---------------------------------------------------------------------------------------------------------- adapters


def deleted_and_loaded_again(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, workspace.adapter("language"))
    model.load_adapter(str(workspace.adapter("towers")), "second")
    seen = [workspace.outputs(model)]
    model.base_model.set_adapter(["default", "second"])
    seen.append(workspace.outputs(model))
    model.delete_adapter("second")
    seen.append(workspace.outputs(model))
    model.load_adapter(str(workspace.adapter("all")), "second")
    model.set_adapter("second")
    return model, [*seen, workspace.outputs(model.eval())]


def unloaded_and_loaded_again(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
    from peft import PeftModel

    seen = []
    for adapter in ("language", "all"):
        model = PeftModel.from_pretrained(base, workspace.adapter(adapter))
        seen.append(workspace.outputs(model))
        base = model.unload()
    return base, [*seen, workspace.outputs(base)]


def switched_off_and_on(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    with model.disable_adapter():
        seen = [workspace.outputs(model)]
    model.base_model.disable_adapter_layers()
    seen.append(workspace.outputs(model))
    model.base_model.enable_adapter_layers()
    return model, [*seen, workspace.outputs(model)]


def weighted(kind: str, **options: Any) -> Callable[[Any, Any], tuple[Any, list[Any]]]:
    def run(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
        import torch
        from peft import PeftModel

        model = PeftModel.from_pretrained(base, workspace.adapter("language"))
        model.load_adapter(str(workspace.adapter("all")), "second")
        torch.manual_seed(3)
        model.add_weighted_adapter(["default", "second"], [0.7, 0.6], "sum", combination_type=kind, **options)
        model.set_adapter("sum")
        return model, [workspace.outputs(model.eval())]

    return run


def merged_and_unmerged(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    model.merge_adapter()
    seen = [workspace.outputs(model)]
    model.unmerge_adapter()
    return model, [*seen, workspace.outputs(model)]


def merged_for_good(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    seen = [workspace.outputs(model)]
    base = model.merge_and_unload()
    seen.append(workspace.outputs(base))
    model = PeftModel.from_pretrained(base, workspace.adapter("language"))
    return model, [*seen, workspace.outputs(model)]


def by_transformers(workspace: Any, base: Any) -> tuple[Any, list[Any]]:
    try:
        base.load_adapter(str(workspace.adapter("all")), "first")
    except (ImportError, ValueError) as error:
        pytest.skip(f"these releases of transformers and PEFT do not go together: {error}")
    seen = [workspace.outputs(base)]
    base.disable_adapters()
    seen.append(workspace.outputs(base))
    base.enable_adapters()
    base.load_adapter(str(workspace.adapter("language")), "second")
    base.set_adapter("second")
    seen.append(workspace.outputs(base))
    base.delete_adapter("second")
    base.set_adapter("first")
    return base, [*seen, workspace.outputs(base)]


SEQUENCES: dict[str, Callable[[Any, Any], tuple[Any, list[Any]]]] = {
    "deleted and loaded again": deleted_and_loaded_again,
    "unloaded and loaded again": unloaded_and_loaded_again,
    "switched off and on": switched_off_and_on,
    "weighted, cat": weighted("cat"),
    "weighted, svd": weighted("svd", svd_rank=4),
    "merged and unmerged": merged_and_unmerged,
    "merged for good": merged_for_good,
    "by transformers": by_transformers,
}
#: What only reads adapter weights is shown on one kind of base; what touches base weights on all.
ON_EVERY_BASE = ("deleted and loaded again", "merged and unmerged", "merged for good")


@pytest.mark.parametrize(
    "sequence, quantization",
    [
        (sequence, quantization)
        for sequence in SEQUENCES
        for quantization in (QUANTIZATIONS if sequence in ON_EVERY_BASE else ["4bit-double"])
    ],
)
def test_adapters_come_and_go_as_on_one_device(workspace: Any, sequence: str, quantization: str | None) -> None:
    _, expected = SEQUENCES[sequence](workspace, workspace.load(quantization))
    base = workspace.split(quantization)
    before = placement(base)
    model, seen = SEQUENCES[sequence](workspace, base)
    assert [difference(whole, split) for whole, split in zip(expected, seen)] == [0.0] * len(expected)
    assert placement(model) == before
    assert lost(model) == []


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("by", ["peft", "transformers"])
@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_an_adapter_that_does_not_fit_leaves_the_base_as_it_was(
    workspace: Any, one_device: Callable[..., Any], split: bool, by: str
) -> None:
    from peft import PeftModel

    base, adapter = workspace.split() if split else workspace.load(), workspace.mismatched_adapter()
    before, names = placement(base), [name for name, _ in base.named_modules()]
    grads = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    with pytest.raises(Gemma4CompatError, match=r"does not fit .*: 2 of its tensors .*layers\.\d\.mlp\.up_proj"):
        _ = PeftModel.from_pretrained(base, adapter) if by == "peft" else base.load_adapter(str(adapter))
    assert placement(base) == before
    assert [name for name, _ in base.named_modules()] == names
    assert {name: parameter.requires_grad for name, parameter in base.named_parameters()} == grads
    assert "peft_config" not in vars(base)
    assert difference(one_device(None, None), workspace.outputs(base)) == 0.0
    model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    assert difference(one_device(None, "all"), workspace.outputs(model)) == 0.0


def test_a_second_adapter_that_does_not_fit_leaves_the_first_at_work(
    workspace: Any, one_device: Callable[..., Any]
) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(), workspace.adapter("language"))
    names = [name for name, _ in model.named_modules()]
    for name in ("second", "default"):  # a new one, and in place of the one that is there
        with pytest.raises(Gemma4CompatError, match="does not fit"):
            model.load_adapter(str(workspace.mismatched_adapter()), name)
        assert list(model.peft_config) == ["default"]
        assert [name for name, _ in model.named_modules()] == names
        assert difference(one_device(None, "language"), workspace.outputs(model)) == 0.0


@contextlib.contextmanager
def gone(folder: Path) -> Any:
    away = folder.rename(folder.with_name("away"))
    yield
    away.rename(folder)


@pytest.mark.parametrize("written_by", ["dispatch_model", "from_pretrained"])
def test_an_offload_folder_that_is_gone_is_named_and_when_it_is_back_so_is_the_model(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, written_by: str
) -> None:
    folder = tmp_path / "weights"
    if written_by == "dispatch_model":
        model = workspace.load()
        asked = tiny.device_map(model, "both", main=workspace.main, offloaded="disk")
        model = tiny.dispatch(model, asked, folder)
    else:  # it reads the checkpoint itself
        shutil.copytree(workspace.checkpoint, folder)
        model = from_disk(workspace, tmp_path / "unused", folder)
    with gone(folder):
        with pytest.raises(Gemma4CompatError, match=rf"'model\.\S+' cannot be read from the folder '{folder}'"):
            workspace.outputs(model)
        assert lost(model) == []
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
