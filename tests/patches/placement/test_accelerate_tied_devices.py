"""accelerate-tied-devices: a head on another device than the embedding tied to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat.patches.placement.accelerate_tied_devices import PATCH
from tests.helpers import Finished
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected all tensors to be on the same device"


#: For each of the two: on the second device, with or without adapters, answers and gradients are those of one device,
#: and the weight is one, on the main device.
_TWO_DEVICES = """
import gemma4_compat
import sys
from pathlib import Path
import peft, torch
from gemma4_compat._lab import tiny
from gemma4_compat._lab.stand_ins import second_device
from gemma4_compat._lab.workspace import Workspace, difference

workspace = Workspace(Path(sys.argv[1]))
batch = tiny.inputs("cpu")
LORA = {"default": None, "head": ["lm_head"], "embedding": ["embed_tokens"]}[sys.argv[2]]

def load():
    model = workspace.load()
    if LORA is None:
        return model.requires_grad_(True)
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=LORA, init_lora_weights=False)).eval()

def gradients(model):
    model(**batch, labels=batch["input_ids"]).loss.backward()
    weights = [value for name, value in model.named_parameters() if "embed_tokens" in name or "head" in name]
    return [weight.grad.cpu() for weight in weights if weight.grad is not None]

whole = load()
expected, learned = workspace.outputs(whole, device="cpu"), gradients(whole)
assert learned
with second_device.second_device():
    for apart in ("lm_head", "model.language_model.embed_tokens"):
        model = load()
        base = model if LORA is None else model.get_base_model()
        tiny.dispatch_to_two(base, second_device.DEVICE, [apart])
        weight = base.get_input_embeddings().weight
        assert weight is base.get_output_embeddings().weight
        assert str(weight.device) == "cpu"
        assert difference(expected, workspace.outputs(model, device="cpu")) == 0.0
        for mine, theirs in zip(gradients(model), learned, strict=True):
            assert torch.equal(mine, theirs)
print("as on one device")
"""


@pytest.mark.parametrize("adapter", ["default", "head", "embedding"])
def test_a_tied_weight_is_one_and_computes_where_it_is(
    workspace: Any, warm_child: Callable[..., Finished], adapter: str
) -> None:
    pytest.importorskip("torch")
    from gemma4_compat._lab.stand_ins import second_device

    if not second_device.available():
        pytest.skip("this PyTorch takes no backend in Python")
    done = warm_child("-c", _TWO_DEVICES, str(workspace.folder), adapter)
    assert done.stdout.endswith("as on one device\n"), done.stderr[-3000:]


@pytest.mark.parametrize("hooked", [False, True])
def test_a_weight_on_one_device_is_tied_as_upstream_does(hooked: bool) -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from accelerate.utils import retie_parameters

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first = model[0].weight
    if hooked:
        for module in model.modules():
            module._hf_hook = SimpleNamespace(execution_device="cpu")
    retie_parameters(model, [["0.weight", "1.weight"]])
    assert model[0].weight is model[1].weight is first
