"""Errors that no patch is about, and that many people meet: ``explain`` says what they are and what to do."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._doctor.explain import common_errors, messages, search

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
    ("ImportError: \nGemma4VideoProcessor requires the Torchvision library but it was not found in your", "pip install pillow torchvision"),
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


def test_every_kind_of_answer_is_met() -> None:
    met = {found.what for text, _ in PASTED if (found := common_errors.advice(messages.read(text)))}
    assert met == {known.advice.what for known in (*common_errors.ERRORS, *common_errors._LAST)}


@pytest.mark.parametrize("text", ["KeyError: 'gemma4_compat.x'", "ValueError: bad", "RuntimeError: out of range"])
def test_other_errors_get_none(text: str) -> None:
    assert common_errors.advice(messages.read(text)) is None


def test_a_model_is_named_in_the_command() -> None:
    assert messages.read("loading google/gemma-4-26B-A4B-it\nValueError: x").model == "google/gemma-4-26B-A4B-it"
    assert messages.read("ValueError: x").model == ""
