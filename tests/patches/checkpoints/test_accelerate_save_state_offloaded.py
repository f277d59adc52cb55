"""accelerate-save-state-offloaded: ``save_state`` and ``load_state`` of split models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.checkpoints.accelerate_save_state_offloaded import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, PER_LAYER, split
from tests.patches.promise import Promise

OFFLOADED = (PER_LAYER, "model.language_model.layers.0", "model.language_model.layers.5", "model.vision_tower")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Cannot copy out of meta tensor"


class Run:
    """A training of an adapter, on one device or split."""

    def __init__(
        self, workspace: Any, kind: str, folder: Path, quantization: str | None = None, offloaded: Any = OFFLOADED
    ) -> None:
        import torch
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from peft import LoraConfig, get_peft_model

        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        base = workspace.load(quantization)
        if kind != "one":
            base = split(workspace, kind, offloaded, folder, quantization, model=base)
        model = get_peft_model(base, LoraConfig(target_modules=tiny_adapters.SOME_LINEARS, lora_dropout=0.1)).train()
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        self.accelerator = Accelerator(cpu=workspace.main == "cpu")
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.batch = workspace.inputs(text_only=True)

    def losses(self, steps: int = 3) -> list[float]:
        found = []
        for _ in range(steps):
            loss = self.model(**self.batch, labels=self.batch["input_ids"]).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
@pytest.mark.parametrize("kind", ["one", "ram", "disk"])
def test_resumed_losses_are_those_of_a_training_that_went_on(
    workspace: Any, tmp_path: Path, kind: str, quantization: str | None, safe: bool
) -> None:
    run = Run(workspace, kind, tmp_path / "a", quantization)
    run.losses()
    run.accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    right = run.losses()
    assert len(set(right)) == 3
    run.accelerator.load_state(tmp_path / "state")
    assert run.losses() == right
    again = Run(workspace, kind, tmp_path / "b", quantization)
    again.accelerator.load_state(tmp_path / "state")
    assert again.losses() == right


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
@pytest.mark.parametrize("offloaded", [OFFLOADED, (HEAD,), (EMBEDDING,), (EMBEDDING, HEAD)], ids=str)
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_the_files_are_those_of_one_device_and_each_resumes_from_the_other(
    workspace: Any, tmp_path: Path, kind: str, offloaded: tuple[str, ...], quantization: str | None
) -> None:
    import torch
    from safetensors.torch import load_file

    files, right = {}, {}
    for each in ("one", kind):
        run = Run(workspace, each, tmp_path / f"a-{each}", quantization, offloaded)
        run.losses()
        run.accelerator.save_state(tmp_path / each)
        right[each] = run.losses()
        files[each] = load_file(tmp_path / each / "model.safetensors")
    assert list(files[kind]) == list(files["one"])
    assert all(torch.equal(value, files[kind][name]) for name, value in files["one"].items())
    assert right[kind] == right["one"]
    for each, other in (("one", kind), (kind, "one")):
        run = Run(workspace, each, tmp_path / f"b-{each}", quantization, offloaded)
        run.accelerator.load_state(tmp_path / other)
        assert run.losses() == right[each]


def test_get_state_dict_has_the_values_and_no_copies(workspace: Any, tmp_path: Path) -> None:
    import torch

    run = Run(workspace, "ram", tmp_path)
    found, expected = run.accelerator.get_state_dict(run.model), Run(workspace, "one", tmp_path).model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    again = run.accelerator.get_state_dict(run.model)
    assert all(value.data_ptr() == again[name].data_ptr() for name, value in found.items())
    assert any(value.is_meta for value in run.model.state_dict().values()), "and torch's is as it was"


def test_scales_that_are_not_those_of_the_layer_are_loaded(workspace: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    run = Run(workspace, "ram", tmp_path, "4bit")
    run.accelerator.save_state(tmp_path / "state")
    file = tmp_path / "state" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith(".absmax"))
    changed = {**state, name: state[name] + 1}
    save_file(changed, file)
    run.accelerator.load_state(tmp_path / "state")
    found = run.accelerator.get_state_dict(run.model)
    assert all(torch.equal(value, changed[name]) for name, value in found.items() if name in changed)
    save_file({key: value for key, value in state.items() if key != name}, file)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict"):
        run.accelerator.load_state(tmp_path / "state")
    assert "state_dict" not in vars(run.model)


def test_a_weight_of_another_shape_is_an_error_as_before(workspace: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = Run(workspace, "ram", tmp_path)
    run.accelerator.save_state(tmp_path / "state")
    file = tmp_path / "state" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("layers.0.mlp.down_proj.weight"))
    save_file({**state, name: state[name][:1].clone()}, file)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.accelerator.load_state(tmp_path / "state")
