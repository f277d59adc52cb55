"""``gemma4-compat explain ERROR``: every known error finds its patch, however it is written; others find none."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import PatchState, PatchStatus, Reason, cli
from gemma4_compat._doctor.explain import answers, messages, search
from tests.collecting import collect_failures
from tests.helpers import ON_A_GPU, WITH_OTHER_LIBRARIES
from tests.unit.commands.helpers import ROOT
from tests.unit.commands.test_json import assert_as_documented
from tools.matrix import stacks as matrix_stacks

PATCHES = gemma4_compat.patches()
PARAMS4BIT = "TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'"


def raised() -> dict[str, list[str]]:
    """What the reproduction of each patch whose symptom is an error raised in each stack, from docs/evidence."""
    stacks = matrix_stacks.results().values()
    found: dict[str, list[str]] = {}
    for patch in PATCHES:
        if patch.symptom.startswith("silent"):
            continue
        for stack in stacks:
            off = stack["patches"].get(patch.id, {}).get("off") or {}
            for part in re.split(r"(?:^|; )gemma4(?:_unified)?: ", off.get("detail", "") if off.get("defect") else ""):
                if re.match(r"\w+Error: ?", part):
                    found.setdefault(part, []).append(patch.id)
    return found


RAISED = raised()
#: Where the crash that another patch repairs comes first, on the releases that have it.
OF_OTHERS = {
    PARAMS4BIT: {"accelerate-train-offloaded"},
    "KeyError: 3": {"transformers-tied-split", "peft-input-devices", "peft-offloaded-inits"},
    "ValueError: The set of layer types producing a cache is different than the set of layer types using them": {
        "transformers-assistant-offloaded"
    },
}


def found_for(text: str) -> list[str]:
    return [match.patch.id for match in search.search(messages.read(text), PATCHES).matches]


@collect_failures(text=RAISED)
def test_the_error_of_a_reproduction_finds_its_patch(text: str) -> None:
    owners = {patch_id for patch_id in RAISED[text] if patch_id not in OF_OTHERS.get(text, ())}
    assert owners
    assert owners <= set(found_for(text))


def test_every_patch_whose_symptom_is_an_error_has_one_that_finds_it() -> None:
    raising = {patch_id for ids in RAISED.values() for patch_id in ids}
    for patch in PATCHES:
        if not patch.symptom.startswith("silent"):
            quoted = re.findall(r"``(\w+Error\b.*?)``", patch.symptom)[0]
            assert patch.id in found_for(quoted), quoted
            # Measured where its reproduction raises; the others report what they saw.
            assert patch.id in raising or patch.id in NOT_RAISED | {*ON_A_GPU, *WITH_OTHER_LIBRARIES}, patch.id


#: Their reproductions catch the error, and report a detail.
NOT_RAISED = {"accelerate-remove-hooks", "transformers-save-tied-offloaded"}

ANYBODYS = """\
ModuleNotFoundError: No module named 'flash_attn'
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 11.99 GiB of \
which 12.00 MiB is free.
KeyError: 'input_ids'
ValueError: The following `model_kwargs` are not used by the model: ['foo'] (note: typos in the generate arguments \
will also show up in this list)
RuntimeError: CUDA error: device-side assert triggered
OSError: google/gemma-4-E2B-it is not a local folder and is not a valid model identifier listed on 'https://huggingface.co'
AttributeError: 'NoneType' object has no attribute 'shape'
ValueError: too many values to unpack (expected 2)
AssertionError: Torch not compiled with CUDA enabled
ImportError: cannot import name 'HybridCache' from 'transformers' (/usr/lib/python3/site-packages/transformers/x.py)
RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "fc.weight".
ValueError: Cannot use chat template functions because tokenizer.chat_template is not set
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
FileNotFoundError: [Errno 2] No such file or directory: '/data/model.safetensors.index.json'
huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo
TypeError: forward() got an unexpected keyword argument 'num_items_in_batch'
TypeError: __init__() got an unexpected keyword argument 'dispatch_batches'
RuntimeError: expected scalar type Half but found Float
safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge
RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn
ValueError: Unable to create tensor, you should probably activate truncation and/or padding
RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled system error
RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.
ZeroDivisionError: division by zero""".splitlines()


def test_anybodys_error_that_a_patch_repairs_is_only_possible() -> None:
    """Its text is Python's; without a traceback nobody can tell."""
    answer = search.search(messages.read("TypeError: 'NoneType' object is not subscriptable"), gemma4_compat.patches())
    assert [(match.patch.id, match.certain) for match in answer.matches] == [("transformers-absent-per-layer", False)]


@pytest.mark.parametrize("text", ANYBODYS)
def test_errors_of_other_programs_are_not_claimed(text: str) -> None:
    assert found_for(text) == []
    done = CliRunner().invoke(cli.app, ["explain", text])
    assert done.exit_code == 1
    if "No patch is about that." in done.stdout:
        assert "To do:" in done.stdout
    else:
        assert "No known patch concerns this error." in done.stdout
        assert "gemma4-compat env" in done.stdout


@pytest.mark.parametrize(
    "text, patch_id",
    [
        (PARAMS4BIT.replace("Params4bit", "Int8Params"), "accelerate-hf-initialized"),
        (f"\x1b[31mTypeError\x1b[0m{PARAMS4BIT[9:]}", "accelerate-hf-initialized"),
        (f"[rank1]: {PARAMS4BIT}", "accelerate-hf-initialized"),
        (f"E       {PARAMS4BIT}", "accelerate-hf-initialized"),
        (f"2026-11-20 ERROR train failed: {PARAMS4BIT}", "accelerate-hf-initialized"),
        (PARAMS4BIT.partition(": ")[2], "accelerate-hf-initialized"),
        (f"bitsandbytes.nn.x.{PARAMS4BIT}\n\nThe above exception was the cause\n", "accelerate-hf-initialized"),
        ("KeyError: 22", "transformers-shared-kv"),
        (
            "RuntimeError: Tensor on device meta is not on the expected device cuda:1!",
            "transformers-offloaded-embedding",
        ),
        (
            "ValueError: Target module Gemma4ClippableLinear(\n  (linear): Linear4bit(in_features=768)\n)"
            " is not supported. Currently, only the following modules are supported: `torch.nn.Linear`.",
            "peft-clippable-linear",
        ),
        (
            "ValueError: The device_map provided does not give any device for the following parameters: "
            "model.vision_tower.encoder.layers.26.mlp.gate_proj.input_min, model.x.layers.1.y",
            "accelerate-split-buffers",
        ),
        (
            "RuntimeError: index_copy_(): Source/destination tensor must have same slice shapes. Destination slice "
            "shape: 8 2 512 at dimension 2 and source slice shape: 4 1 256 at dimension 0.",
            "transformers-static-chunks",
        ),
    ],
)
def test_shapes_names_numbers_and_surroundings_do_not_matter(text: str, patch_id: str) -> None:
    assert patch_id in found_for(text)


def test_a_text_that_any_program_raises_is_a_possible_match_and_said_to_be_one() -> None:
    text = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"
    answer = search.search(messages.read(text), PATCHES)
    assert answer.matches
    assert not any(match.certain for match in answer.matches)
    assert "Programs without Gemma 4 also raise this text." in CliRunner().invoke(cli.app, ["explain", text]).stdout


def traceback(*frames: tuple[str, str], error: str) -> str:
    lines = [f'  File "/opt/x/site-packages/{file}", line 7, in {function}\n    x()\n' for file, function in frames]
    return "Traceback (most recent call last):\n" + "".join(lines) + error + "\n"


def test_a_traceback_tells_which_of_several_it_is() -> None:
    error = "NotImplementedError: Cannot copy out of meta tensor; no data!"
    assert not any(match.certain for match in search.search(messages.read(error), PATCHES).matches)
    saving = traceback(("peft/peft_model.py", "save_pretrained"), ("torch/x.py", "cpu"), error=error)
    answer = search.search(messages.read(saving), PATCHES)
    assert (answer.matches[0].patch.id, answer.matches[0].certain) == ("peft-save-offloaded", True)


KEY = "KeyError: 'base_model.model.model.model.audio_tower.layers.0.feed_forward1.ffw_layer_1'"


@pytest.mark.parametrize(
    "text",
    [KEY, traceback(("peft/peft_model.py", "load_adapter"), ("peft/peft_model.py", "_update_offload"), error=KEY)],
)
def test_a_quoted_part_that_is_left_out_stands_for_any(text: str) -> None:
    match = search.search(messages.read(text), PATCHES).matches[0]
    assert (match.patch.id, match.certain) == ("peft-keep-dispatch", True)
    scales = KEY.replace("ffw_layer_1", "weight.absmax")
    assert search.search(messages.read(scales), PATCHES).matches[0].patch.id == "peft-quantized-tuners"


def test_of_several_the_one_about_the_same_devices_comes_first() -> None:
    text = (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and {}!"
    )
    assert found_for(text.format("cpu"))[0] in ("peft-keep-dispatch", "transformers-adapter-placement")
    assert found_for(text.format("cuda:1"))[0] not in ("peft-keep-dispatch", "transformers-adapter-placement")


def test_an_unknown_text_of_code_that_a_patch_replaces_is_a_possible_match() -> None:
    error = "KeyError: 'a name that nobody has seen'"
    answer = search.search(messages.read(traceback(("peft/peft_model.py", "load_adapter"), error=error)), PATCHES)
    assert answer.matches[0].patch.id == "peft-keep-dispatch"
    assert not any(match.certain for match in answer.matches)
    assert search.search(messages.read(traceback(("mine/x.py", "load_adapter"), error=error)), PATCHES).matches == ()


def test_a_failure_point_shows_its_patches() -> None:
    done = CliRunner().invoke(cli.app, ["explain", "f14"])
    assert done.exit_code == 0
    assert {patch.id for patch in PATCHES if "F14" in patch.failure_points} <= set(done.stdout.split())


def test_here_says_which_release_has_the_bug() -> None:
    patch = next(patch for patch in PATCHES if patch.id == "peft-keep-dispatch")
    status = PatchStatus(
        id=patch.id,
        state=PatchState.PENDING,
        reason_code=Reason.WAITING,
        reason="waiting",
        versions={"peft": patch.measured},
    )
    expected = f"peft {patch.measured} has this bug; it is repaired as soon as peft is imported"
    said = messages.read("KeyError: 1")
    assert answers.here(patch, said, status) == expected
    newer = dataclasses.replace(status, versions={"peft": "99.0"})
    assert "may have this bug" in answers.here(patch, said, newer)


def test_of_a_chain_the_last_error_counts_and_an_earlier_one_where_the_last_is_unknown() -> None:
    both = f"{PARAMS4BIT}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert found_for(both + "AttributeError: 'PeftModel' object has no attribute '_hf_hook'")[0] == (
        "accelerate-remove-hooks"
    )
    assert found_for(both + "ZeroDivisionError: division by zero")[0] == "accelerate-hf-initialized"


def test_a_traceback_on_standard_input() -> None:
    text = traceback(("accelerate/utils/modeling.py", "set_module_tensor_to_device"), error=PARAMS4BIT)
    done = CliRunner().invoke(cli.app, ["explain", "-"], input=text)
    assert done.exit_code == 0, done.output
    for part in ("accelerate-hf-initialized", "F1 of docs", "to do", PARAMS4BIT):
        assert part in done.stdout


def test_what_to_do_is_the_import_or_the_command_that_starts_a_program() -> None:
    patch = {patch.id: patch for patch in PATCHES}["accelerate-hf-initialized"]
    waiting = {"reason_code": Reason.WAITING, "reason": "waiting for an import"}
    pending = PatchStatus(id=patch.id, state=PatchState.PENDING, **waiting)
    said = answers.remedy(patch, messages.read("KeyError: 1"), pending)
    assert said.startswith(
        "put `import gemma4_compat` at the top of the program, or start it with `gemma4-compat run`."
    )
    assert "`gemma4-compat doctor accelerate-hf-initialized`" in said
    assert said.endswith("Or upgrade: accelerate 1.14.0 has it repaired.")


SHARED = 'KeyError: 22\n  File "/nix/x-transformers-{}/lib/transformers/models/gemma4/modeling_gemma4.py", line 1219'


@pytest.mark.parametrize(
    "text, here, to_do",
    [
        (SHARED.format("5.6.2"), "5.6.2, which the text names, has this bug, which transformers 5.23.0", "Or upgrade"),
        (SHARED.format("5.24.0"), "5.24.0, which the text names, does not have this bug", "this is not its error"),
        ("KeyError: 22\n- `transformers` version: 5.6.2", "which the text names, has this bug", "gemma4_compat"),
        ("KeyError: 22\ntransformers==4.57.1", "does not have this bug", "upgrade: pip install 'transformers>="),
    ],
)
def test_the_releases_in_a_text_decide_before_those_installed_here(text: str, here: str, to_do: str) -> None:
    said = messages.read(text)
    patch = {patch.id: patch for patch in PATCHES}["transformers-shared-kv"]
    status = gemma4_compat.status()[patch.id]
    assert here in answers.here(patch, said, status)
    assert to_do in answers.remedy(patch, said, status)


def test_the_headline_comes_before_the_patches_are_imported() -> None:
    """The symptoms of patches, which are searched, are in their files: importing them takes most of a second."""
    program = """
import sys
from gemma4_compat._engine.io import terminal
from gemma4_compat import cli
written = []
terminal.write = lambda text, **_: written.append((text, sum(name.startswith("gemma4_compat.patches.") for name in
    sys.modules)))
sys.argv = ["gemma4-compat", "explain", "KeyError: 3"]
try: cli.main()
except SystemExit: pass
print(len(written), written[0][0], written[0][1] < 5, written[-1][1] > 100, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split("\n")[0] == "2 KeyError: 3 True True False", done.stderr


@pytest.mark.parametrize("text, code", [(PARAMS4BIT, 0), ("ZeroDivisionError: division by zero", 1)])
def test_the_json_of_an_answer(text: str, code: int) -> None:
    done = CliRunner().invoke(cli.app, ["explain", text, "--json"])
    assert done.exit_code == code
    absent = ("patches", "matches") if code else ()
    data = assert_as_documented("explain", done.stdout, absent=absent)
    assert data["error"] == text
    assert [item["id"] for item in data["patches"]] == [item["id"] for item in data["matches"]]


@pytest.mark.parametrize("text", ["", "\n\n", "   "])
def test_nothing_on_standard_input_is_bad_usage(text: str) -> None:
    done = CliRunner().invoke(cli.app, ["explain", "-"], input=text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("gemma4-compat: there is no error in this text")


def test_an_input_that_never_ends_is_refused() -> None:
    with Path("/dev/zero").open("rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-m", "gemma4_compat", "explain", "-"],
            stdin=zeros,
            capture_output=True,
            cwd=ROOT,
            timeout=240,
        )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input has more than 256 MiB" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "AError: " * 40_000,
        'File "' + ".py" * 90_000,
        "RuntimeError: " + "tensor meta device " * 20_000,
        "A.a" * 100_000,
        "the model is slow " * 26,
        "ValueError: Missing 60 parameters: " + "self_attn.k_norm.weight " * 200,
        "\n".join(f"/x/site-packages/a{number}/b.py:1 in f" for number in range(5000)),
    ],
)
def test_any_text_takes_little_time(text: str) -> None:
    started = time.process_time()
    search.answer(messages.read(text), PATCHES)
    assert time.process_time() - started < 3


def test_the_terminal_is_not_obeyed() -> None:
    done = CliRunner().invoke(cli.app, ["explain", "KeyError: '\x1b[31mred\x07\u202e'"])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", done.output)
