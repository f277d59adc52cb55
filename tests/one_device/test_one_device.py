"""A model on one device is left alone: what serves split models has no part in its forwards.

What each patch shows there is compared by ``python -m tests.generated.search --sequences --one-device``.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from tests.helpers import Finished

#: Folders of the package with what serves split models.
SPLIT = ("_offload", "patches/offload", "patches/placement", "patches/checkpoints", "patches/adapters")
#: Of these, what runs in a forward or for a token, with how often at most.
ASKED = {
    "patches/placement/transformers_tensor_parallel.py:model_forward": 1,  # is the embedding split?
    "patches/offload/transformers_offloaded_embedding.py:model_forward": 1,  # is the embedding offloaded?
    "patches/offload/transformers_offloaded_embedding.py:get_per_layer_inputs": 1,
    "patches/placement/transformers_embedding_devices.py:model_forward": 1,  # is there a hook of the embedding?
    "patches/placement/transformers_embedding_devices.py:get_per_layer_inputs": 1,
    "patches/placement/transformers_embedding_devices.py:_called": 2,
    "patches/placement/transformers_per_layer_devices.py:project_per_layer_inputs": 1,  # is there a hook?
    "patches/offload/transformers_model_device.py:device": 2,  # `generate` reads it; is it meta?
    "patches/checkpoints/transformers_config_reads.py:missing": 24,  # names that a configuration lacks
    "patches/checkpoints/transformers_config_reads.py:write": 8,
    "patches/adapters/peft_adapter_names.py:of_any_tuner": 1,  # are there `adapter_names`?
    "patches/adapters/peft_adapter_names.py:enable_hooks": 1,
    "patches/placement/transformers_shared_kv.py:decoder_layer": 6,  # each layer, before 5.23: is there a hook?
}
#: Once for a `generate`, however long.
ONCE = {
    "patches/offload/transformers_model_device.py:valid_auto_compile_criteria": 1,
    "patches/adapters/transformers_adapter_names.py:expand_inputs": 1,
}
#: `generate` reads `device` before its first token, too.
DEVICES = 8


def calls(run: Callable[[], Any]) -> collections.Counter[str]:
    """The functions in :data:`SPLIT` that ``run`` calls, and how often."""
    found: collections.Counter[str] = collections.Counter()
    package = str(Path(gemma4_compat.__file__).parent)

    def look(frame: Any, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            file = Path(code.co_filename).relative_to(package).as_posix()
            if file.startswith(SPLIT):
                found[f"{file}:{code.co_name}"] += 1

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def loaded(workspace: Any, quantization: str | None, adapter: str | None) -> Any:
    from peft import PeftModel

    model = workspace.load(quantization)
    if adapter is None:
        return model
    return PeftModel.from_pretrained(model, workspace.adapter(adapter), is_trainable=True).eval()


@pytest.mark.parametrize("adapter", [None, "language"])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_a_forward_and_a_backward_pass_ask_once(workspace: Any, quantization: str | None, adapter: str | None) -> None:
    import torch

    model = loaded(workspace, quantization, adapter)
    batch = workspace.inputs(text_only=True)
    with torch.no_grad():
        model(**batch)
        assert calls(lambda: model(**batch)) <= collections.Counter(ASKED)
    model.train()
    found = calls(lambda: model(**batch, labels=batch["input_ids"]).loss.backward())
    assert found <= collections.Counter(ASKED)


def test_a_token_asks_once(workspace: Any) -> None:
    import torch

    model = workspace.load()
    batch = workspace.inputs(text_only=True)

    def generate(tokens: int) -> collections.Counter[str]:
        with torch.no_grad():
            return calls(
                lambda: model.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            )

    generate(2)
    few, many = generate(6), generate(16)
    assert many - few <= collections.Counter({name: 10 * number for name, number in ASKED.items()})
    expected = collections.Counter({name: 6 * number for name, number in ASKED.items()})
    expected += collections.Counter(ONCE)
    expected["patches/offload/transformers_model_device.py:device"] += DEVICES
    assert few <= expected


#: Counts the calls of Python and C functions for one token, with the shim and without, and the 4-bit linears that are
#: packed for a CPU. In a process of its own: a model with hooks wakes what serves it for good.
COUNT = """
import json, pathlib, sys
import gemma4_compat
import torch
from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._lab import tiny

model, batch = tiny.load(pathlib.Path(sys.argv[1]), sys.argv[2] or None), tiny.inputs(text_only=True)

def generated(tokens):
    count = 0

    def look(_frame, event, _argument):
        nonlocal count
        count += event in ("call", "c_call")

    with torch.no_grad():
        sys.setprofile(look)
        model.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        sys.setprofile(None)
    return count

def token():
    generated(2)
    return (generated(12) - generated(2)) / 10

on = token()
packed = [quant_states.is_packed(getattr(weight, "quant_state", None)) for weight in model.parameters()]
gemma4_compat.revert()
print(json.dumps([on, token(), sum(packed)]))
"""


@pytest.mark.skipif(
    not versions.admits(">=5.24", versions.installed("transformers") or "0"),
    reason="older releases have more to repair",
)
@pytest.mark.parametrize(
    ("layers", "quantization"),
    [(6, ""), (6, "4bit"), pytest.param(6, "4bit-double", marks=pytest.mark.full), (36, "")],
)
def test_a_token_of_a_whole_model_has_twelve_calls_in_a_thousand_more(
    tmp_path: Path, warm_child: Callable[..., Finished], layers: int, quantization: str
) -> None:
    """36 layers are one more than an E2B has. A 4-bit linear on a CPU is asked whether it trains, or is to be packed:
    six calls more.
    """
    from gemma4_compat._lab import tiny_models

    if quantization:
        pytest.importorskip("bitsandbytes")
    checkpoint = tiny_models.build_checkpoint(tmp_path / "checkpoint", layers=layers)
    on, off, packed = warm_child("-c", COUNT, str(checkpoint), quantization).data
    assert packed == 0 or quantization
    assert off < on <= 1.012 * off + 6 * packed, (on, off, packed)


#: Functions of ``_offload`` that only ask whether something is offloaded.
ASKING = {
    "host_room.py": {"warn_if_short", "host_bytes", "kept", "available"},
    "joined_weights.py": {"model_of"},
    "merged_layers.py": {
        "merging", "onload_layer", "are_tied", "is_merged_alone", "_model_of", "_pairs", "_with",
        "parting", "_forget_addresses", "join",  # is the head tied? these are for one device as well
    },
    "peft_layers.py": {
        "_base", "_is_additive", "_refuse_offloaded_biases", "inject_adapter", "modules_to_save_update",
        "move_adapter_to_device_of_base_layer", "replace_module", "trainable_tokens_update_layer",
    },
    "gathered_weights.py": {"gathered"},
    "stored_weights.py": {"is_same", "read", "holder", "equal"},
    "tied_pairs.py": {"pairs", "_place", "is_apart"},
    "tied_weights.py": {"tied_apart"},
}  # fmt: skip


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_what_changes_weights_asks_and_does_nothing(workspace: Any, quantization: str | None) -> None:
    from peft import LoraConfig, get_peft_model

    def everything() -> None:
        model = workspace.load(quantization)
        model.tie_weights()
        model.load_state_dict(model.state_dict(), strict=False)
        model.resize_token_embeddings(300)
        config = LoraConfig(
            r=2,
            target_modules=["q_proj"],
            modules_to_save=["lm_head"],
            trainable_token_indices={"embed_tokens_per_layer": [3, 4]},
        )
        adapted = get_peft_model(model, config)
        adapted.merge_adapter()
        adapted.unmerge_adapter()
        adapted.merge_and_unload()

    found = [name.rpartition("/")[2].split(":") for name in calls(everything) if name.startswith("_offload/")]
    assert {file for file, _ in found} == ASKING.keys()
    more = [(file, name) for file, name in found if name not in ASKING[file] and not name.startswith("<")]
    assert not more


def test_there_is_no_hook_and_no_lock(workspace: Any) -> None:
    """Also where ``dispatch_model`` was called with a map of one device."""
    from accelerate import dispatch_model

    before = hooks(workspace.load())
    dispatched = dispatch_model(workspace.load(), {"": workspace.main})
    assert hooks(dispatched) == before


def hooks(model: Any) -> list[tuple[str, str]]:
    return [
        (name, kind)
        for name, module in model.named_modules()
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_hf_hook")
        if vars(module).get(kind)
    ]
