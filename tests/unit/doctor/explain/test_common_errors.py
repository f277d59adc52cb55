"""Errors and symptoms that many people meet: ``explain`` says what they are and what to do, with a patch or without.

``common_samples.json`` has a text for each, and a part of what is said; ``thread_errors.json`` what people pasted into
public threads, with the right answer, which was written before ``explain`` was asked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._doctor.explain import common_errors, messages, search
from tests.collecting import collect_failures
from tests.helpers import ROOT
from tools.pages.errors import SAID

HERE = Path(__file__).parent
SAMPLES, THREADS = (
    json.loads((HERE / name).read_text(encoding="utf-8")) for name in ("common_samples.json", "thread_errors.json")
)
PATCHES = gemma4_compat.patches()
#: What is pasted, and a part of what is to be done.
PASTED = [
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 11.76 "
        "GiB of which 1.20 GiB is free. Loading google/gemma-4-E4B-it",
        "gemma4-compat plan E4B --vram",
    ),
    ("RuntimeError: CUDA error: out of memory", "gemma4-compat plan MODEL --vram"),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 3221225472 bytes.",
        "gemma4-compat plan",
    ),
    (
        "ValueError: The checkpoint you are trying to load has model type `gemma4` but Transformers does not "
        "recognize this architecture. This could be because of an issue with the checkpoint, or because your version "
        "of Transformers is out of date.",
        "pip install -U",
    ),
    ("KeyError: 'gemma4'", "pip install -U"),
    ("KeyError: 'gemma4_unified'", "pip install -U"),
    (
        "OSError: You are trying to access a gated repo.\nMake sure to have access to it at "
        "https://huggingface.co/google/gemma-4-E2B-it.\n401 Client Error.",
        "hf auth login",
    ),
    ("huggingface_hub.errors.GatedRepoError: 403 Client Error. Access to model x is restricted", "hf auth login"),
    (
        "OSError: google/gemma-4-E2B-it is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        "Check the spelling",
    ),
    ("ImportError: Gemma4ImageProcessor requires the PIL library but it was not found.", "pip install pillow"),
    ("ModuleNotFoundError: No module named 'PIL'", "pip install pillow"),
    (
        "ImportError: Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install bitsandbytes`",
        "pip install -U bitsandbytes",
    ),
    (
        "ValueError: Using a `device_map`, `tp_plan`, `torch.device` context manager or setting "
        "`torch.set_default_device(device)` requires `accelerate`. You can install it with `pip install accelerate`",
        "pip install -U accelerate",
    ),
    ("ModuleNotFoundError: No module named 'flash_attn'", "attn_implementation"),
    ("AssertionError: Torch not compiled with CUDA enabled", "gemma4-compat env"),
    (
        "ImportError: \nGemma4VideoProcessor requires the Torchvision library but it was not found in your",
        "pip install pillow torchvision",
    ),
    ("ModuleNotFoundError: No module named 'torchvision'", "pip install pillow torchvision"),
    (  # of the 12B
        "ValueError: Could not load any image processor class for google/gemma-4-12B-it. The model configuration "
        "resolves to the following image processor classes: torchvision: Gemma4UnifiedImageProcessor. None of these "
        "classes could be imported. Missing optional dependencies: torchvision. Please install the missing",
        "pip install pillow torchvision",
    ),
    ("RuntimeError: operator torchvision::nms does not exist", "pip install torch==RELEASE torchvision"),
    ("RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA major versions", "index"),
    ("AttributeError: partially initialized module 'torchvision' has no attribute 'extension'", "pip uninstall"),
    (
        "ModuleNotFoundError: Could not import module 'Trainer'. Are this object's requirements defined correctly? "
        "Set the logging verbosity to DEBUG for the original import error.",
        "python -c 'import torchvision'",
    ),
    ("RuntimeError: No CUDA GPUs are available", "gemma4-compat env"),
    ("OSError: [Errno 28] No space left on device: '/tmp/offload/model.dat'", "offload_folder"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "hf download"),
    ("RuntimeError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"),
    (
        "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template "
        "argument was passed!",
        "-it",
    ),
]


@pytest.mark.parametrize("text, to_do", PASTED, ids=[text[:50] for text, _ in PASTED])
def test_a_common_error_gets_an_answer(text: str, to_do: str) -> None:
    said = messages.read(text)
    found = common_errors.advice(said)
    assert found is not None
    assert to_do in found.to_do
    assert not any(match.certain for match in search.search(said, gemma4_compat.patches()).matches)
    done = CliRunner().invoke(cli.app, ["explain", text, "--json"])
    assert done.exit_code == 1  # no patch
    assert to_do in json.loads(done.stdout)["advice"]


def answered(text: str) -> search.Answer:
    return search.answer(messages.read(text), PATCHES)


@collect_failures(number=range(len(SAMPLES)))
def test_each_common_error_and_symptom_is_recognized(number: int) -> None:
    found = answered("\n".join(SAMPLES[number]["text"]))
    assert found.advice is not None
    said = f"{found.advice.what} {found.advice.to_do}"
    assert any(part in said for part in SAMPLES[number]["says"].split("|"))
    assert found.advice.patches or not any(match.certain for match in found.matches)
    assert [match.patch.id for match in found.matches][: len(found.advice.patches)] == [*found.advice.patches]


def test_every_kind_of_answer_is_met() -> None:
    texts = [text for text, _ in PASTED] + ["\n".join(one["text"]) for one in SAMPLES]
    met = {found.what for text in texts if (found := common_errors.advice(messages.read(text)))}
    table = common_errors.table()
    for known in (*table["errors"], *table["symptoms"]):
        assert any(what.startswith(known["what"]) for what in met), known["what"]


def test_the_table() -> None:
    known = {patch.id for patch in PATCHES}
    fields = {
        "errors": {"name", "kinds", "text", "file", "what", "to_do", "more", "patches", "alone", "last"},
        "symptoms": {"words", "what", "to_do", "more", "patches"},
        "programs": {"name", "folders", "package", "to_do", "more", "marks"},
    }
    for kind, allowed in fields.items():
        for one in common_errors.table()[kind]:
            assert set(one) <= allowed, one
            assert set(one.get("patches", ())) <= known
            for expression in (one.get("kinds"), one.get("text"), one.get("file"), *one.get("words", ())):
                assert expression is None or re.compile(expression)
            more = one.get("more", "https://")
            assert more.startswith("https://") or (ROOT / more).is_file(), more
            assert all(text.endswith((".", "?")) for text in (one.get("what", "."), one.get("to_do", "."))), one


def test_the_page_says_how_many() -> None:
    page = (ROOT / "docs" / "EVIDENCE.md").read_text(encoding="utf-8")
    held_out = sum(one.get("held_out", False) for one in THREADS)
    assert f"{len(THREADS)} texts of public threads" in page
    assert f"{held_out} texts were" in page
    now = [int(row) for row in re.findall(r"^\| \d+\D.*\| (\d+) \|$", page.partition("right now")[2], re.MULTILINE)]
    assert sum(now) == len(THREADS) - len(WRONG)


def test_what_the_table_names_exists() -> None:
    text = (ROOT / "gemma4_compat" / "_doctor" / "explain" / "common_errors.json").read_text(encoding="utf-8")
    assert set(re.findall(r"gemma4_compat\.(\w+)", text)) <= {*gemma4_compat.__all__}
    commands = set(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"gemma4-compat ([a-z-]+)", text)) <= commands
    pages = {name for name in re.findall(r"docs/\w+\.md", text) if not (ROOT / name).is_file()}
    assert pages == set()


@collect_failures(number=range(len(THREADS)))
def test_the_answer_is_right_for_what_people_pasted_into_threads(number: int) -> None:
    one = THREADS[number]
    if number in WRONG:
        pytest.skip("not answered")
    found = answered("\n".join(one["text"]))
    wanted = one.get("patches", ())
    said = f"{found.advice.what} {found.advice.to_do} {found.advice.more}".lower() if found.advice else ""
    first = found.matches[0].patch.id if found.matches else None
    certain = [match.patch.id for match in found.matches if match.certain]
    right = said and set(certain) <= set(wanted) and all(part.lower() in said for part in one.get("says", ()))
    assert first in wanted or right, (one["right"], first, said)


#: Of them, by number, those that are not answered as they should be: it does not say that this is Gemma 3n.
WRONG = {56}


@pytest.mark.parametrize("text, patch_id", [(re.sub("[`*]", "", said), name) for name, said in SAID.items()])
def test_what_readme_says_of_a_silent_failure_finds_its_patch(text: str, patch_id: str) -> None:
    found = answered(text)
    assert found.matches[0].patch.id == patch_id


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'gemma4_compat.x'",
        "ValueError: bad",
        "RuntimeError: out of range",
        "how do I cook rice",
        "my cat ignores me",
        "what is the context length of Gemma 4",
        "the build is slow on my laptop",
        "please add support for tool calling",
        "Segmentation fault (core dumped)",
        "adapter power supply 12V",
        "how do I start vllm",
        "git merge gives a wrong result",
        "my network adapter is ignored",
        "the image in the README is not seen",
        "the website is slow on long pages",
        "I get a 500 from the server",
        "vision_tower.std_bias",
        "Gemma4ForConditionalGeneration",
        "language_model.layers.15.self_attn.k_proj.weight",
        "KeyError: 'model.layers.3.self_attn.q_proj.weight'",
        "KeyError: 'language_model.model.layers.15.self_attn.attn'",
    ],
)
def test_where_nothing_is_known_nothing_is_said(text: str) -> None:
    """The name of a layer or a class in a text is no evidence."""
    assert common_errors.advice(messages.read(text)) is None
    assert answered(text).matches == ()


def test_words_that_fit_nothing_are_answered_with_what_to_look_at() -> None:
    said = CliRunner().invoke(cli.app, ["explain", "my", "cat", "is", "hungry"])
    assert said.exit_code == 1
    assert "Nothing of ours fits these words." in said.stdout
    assert "gemma4-compat check MODEL" in " ".join(said.stdout.split())


def test_a_file_is_not_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "traceback.txt"
    file.write_text("KeyError: 3")
    said = CliRunner().invoke(cli.app, ["explain", str(file)])
    assert (said.exit_code, said.stdout) == (2, "")
    assert f"gemma4-compat explain - < {file}" in said.stderr


FRAMES = """\
Traceback (most recent call last):
  File "/home/me/vllm/serve.py", line 3, in <module>
    run()
  File "/opt/x/site-packages/{}", line 40, in load
    raise {}
{}"""


def test_an_error_of_other_software_is_not_ours() -> None:
    """Its code is not patched, whatever layer it names."""
    error = "KeyError: 'base_model.model.model.model.audio_tower.layers.0.feed_forward1.ffw_layer_1'"
    peft = answered(FRAMES.format("peft/peft_model.py", "KeyError(name)", error))
    assert peft.matches[0].certain
    assert peft.advice is None
    vllm = answered(FRAMES.format("vllm/lora/utils.py", "KeyError(name)", error))
    assert vllm.matches == ()
    assert vllm.advice is not None
    assert vllm.advice.what.startswith("vLLM raises this")
    through_torch = FRAMES.format(
        "vllm/lora/utils.py", "x", 'File "/opt/x/site-packages/torch/nn/m.py", line 1, in f\n'
    )
    assert "vLLM" in str(answered(through_torch + error).advice)


def test_an_error_of_software_that_nobody_listed_is_not_ours() -> None:
    found = answered(FRAMES.format("lmms_eval/models/x.py", "KeyError(name)", "KeyError: 'model.layers.0.weight'"))
    assert found.matches == ()
    assert str(found.advice and found.advice.what).startswith("lmms_eval raises this")


def test_a_script_in_a_folder_that_is_called_as_a_program_is_not_one() -> None:
    text = 'Traceback (most recent call last):\n  File "/home/me/vllm/serve.py", line 3, in <module>\nKeyError: 1.5'
    assert common_errors.raised_by(messages.read(text)) is None


def test_a_model_is_named_in_the_command() -> None:
    assert messages.read("loading google/gemma-4-26B-A4B-it\nValueError: x").model == "google/gemma-4-26B-A4B-it"
    assert messages.read("ValueError: x").model == ""
