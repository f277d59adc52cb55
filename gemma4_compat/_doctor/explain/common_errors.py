"""Errors that no patch repairs, and what to do about each: too little memory, an old release, a missing package.

Other programs raise them as well, so they are looked at only after the errors of patches.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from gemma4_compat._doctor.explain.messages import Said

#: Variants that ``plan`` knows by name.
_VARIANT = re.compile(r"E2B|E4B|12B|26B-A4B|31B", re.IGNORECASE)

#: How classes of errors are called. Others, and no class, may be subclasses of any.
_ERROR = re.compile(r"Error$|Exception$|Warning$")


class Advice(NamedTuple):
    """What an error is, and what to do about it, each in a sentence or two."""

    what: str
    to_do: str


class _Known(NamedTuple):
    kinds: str  # the class, as a pattern; "" is any
    text: str  # found in the message
    advice: Advice
    file: str = ""  # in which it was raised, if the text is anybody's


def _known(kinds: str, text: str, what: str, to_do: str, file: str = "") -> _Known:
    return _Known(kinds, text, Advice(what, to_do), file)


_TOO_OLD = (
    "The installed transformers is older than Gemma 4.",
    'Upgrade it: `pip install -U "transformers>=5.5"`. `gemma4-compat needed` says how many fixes it then needs.',
)
NO_TORCHVISION = Advice(
    "The video processor of a Gemma 4 needs torchvision, and so does AutoProcessor, with images or without.",
    "`pip install 'gemma4-compat[images]'`, or only torchvision, from the index that torch came from (CPU builds: "
    "`--index-url https://download.pytorch.org/whl/cpu`). Programs with only text take AutoTokenizer, without it.",
)
OTHER_TORCH = Advice(
    "The installed torchvision was built for another torch. transformers then fails to import nearly every class, "
    "under that class's name.",
    "Install the torchvision of the installed torch, from the same index: `pip install torch==RELEASE torchvision` "
    "with the release that `gemma4-compat env` shows (CPU builds: `--index-url "
    "https://download.pytorch.org/whl/cpu`). If you only need text: `pip uninstall torchvision`.",
)
NO_IMPORT = Advice(
    "Something that transformers imports cannot be imported, most often a torchvision that was built for another "
    "torch. The class in the message is not the cause.",
    "`python -c 'import torchvision'` shows whether it is that: then install the torchvision of the installed torch, "
    "or, if you only need text, `pip uninstall torchvision`. Otherwise the errors above this one name the library.",
)
#: Nothing of a patch has run then, whatever the traceback goes through.
IMPORTS = (NO_TORCHVISION, OTHER_TORCH, NO_IMPORT)
_IMPORT = "ImportError|ModuleNotFoundError"
#: The first that fits is taken; ``{model}`` and ``{variant}`` stand for what the text names.
ERRORS = (
    _known(
        "OutOfMemoryError|RuntimeError",
        r"CUDA out of memory|CUDA error: out of memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "The model, its cache or its activations do not fit.",
        "`gemma4-compat plan {variant} --vram 12GiB` (your card's memory) prints a script that fits (`--context` for "
        "long prompts); `gemma4-compat plan-training` does so for training. For a long prompt, "
        "generate(prefill_chunk_size=512) is often enough.",
    ),
    _known(
        "ValueError|ValidationError|KeyError",
        r"model type [`'\"]?gemma4\w*[`'\"]? but Transformers does not recognize|^'?gemma4\w*'?$",
        *_TOO_OLD,
    ),
    _known("AttributeError", r"^'list' object has no attribute 'keys'$", *_TOO_OLD, "/tokenization_utils_base.py"),
    _known(
        "GatedRepoError|OSError|HTTPError|HfHubHTTPError",
        r"gated repo|Access to model .* is restricted|awaiting a review|401 Client Error|403 Client Error",
        "The checkpoint is behind a licence page that this account has not accepted, or nobody is logged in.",
        "Accept the licence on the model's page, then `hf auth login` (or set HF_TOKEN), and load again.",
    ),
    _known(
        "OSError|RepositoryNotFoundError",
        r"is not a local folder and is not a valid model identifier|Repository Not Found|404 Client Error",
        "No folder and no repository has this name.",
        "Check the spelling, and a local path for a typing error; a private repository needs `hf auth login`.",
    ),
    _known(
        f"{_IMPORT}|RuntimeError|AttributeError|OSError",
        r"operator torchvision::\w+ does not exist|PyTorch and torchvision were compiled with different CUDA"
        r"|partially initialized module 'torchvision'|Couldn't load custom C\+\+ ops"
        r"|torchvision\S*\.so\S*: (?:undefined symbol|cannot open)",
        *OTHER_TORCH,
    ),
    _known(
        f"{_IMPORT}|ValueError",
        r"requires the Torchvision library|No module named 'torchvision'|Missing optional dependencies: .*torchvision",
        *NO_TORCHVISION,
    ),
    _known(
        f"{_IMPORT}|ValueError",
        r"requires the PIL library|No module named 'PIL'|requires .*pillow|Missing optional dependencies: Pillow",
        "The image processor needs Pillow.",
        "`pip install pillow`. It is needed for prompts with images only; text alone takes AutoTokenizer.",
    ),
    _known(
        "ImportError|ModuleNotFoundError|PackageNotFoundError",
        r"(?:requires|[Uu]sing) .*bitsandbytes|No (?:module named|package metadata was found for) '?bitsandbytes",
        "4-bit and 8-bit weights need bitsandbytes.",
        "`pip install -U bitsandbytes`, in the environment that runs the program.",
    ),
    _known(
        "ImportError|ModuleNotFoundError|ValueError",
        r"requires [`']?accelerate|No module named 'accelerate'|install accelerate",
        "`device_map` and offloading need accelerate.",
        "`pip install -U accelerate`, in the environment that runs the program.",
    ),
    _known(
        "ImportError|ModuleNotFoundError",
        r"flash_attn|FlashAttention2 has been toggled on",
        "flash-attn is not installed. Gemma 4 does not need it: its full layers have heads of 512, wider than "
        "flash-attn computes.",
        'Leave `attn_implementation` out, or give "sdpa".',
    ),
    _known(
        "AssertionError|RuntimeError",
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        "PyTorch sees no GPU: it is the build for CPUs, or there is no driver.",
        "`gemma4-compat env` shows the build and the driver; install the CUDA build from https://pytorch.org.",
    ),
    _known(
        "OSError|RuntimeError|SafetensorError",
        r"No space left on device|os error 28|errno 28",
        "The disk is full.",
        "Make room, or move `offload_folder`, HF_HOME or TMPDIR to a larger disk, and load again.",
    ),
    _known(
        "SafetensorError",
        r"HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer",
        "A weight file is cut short, or is a Git LFS pointer instead of the file.",
        "Delete the file and download it again: `hf download {model}`.",
    ),
    _known(
        "RuntimeError|AcceleratorError",
        r"device-side assert triggered",
        "A kernel met an index out of range; the traceback names a later line.",
        "Run again with CUDA_LAUNCH_BLOCKING=1 for the right line. With Gemma 4 it is most often a token id beyond "
        "the vocabulary: a tokenizer of another model, or new tokens without `resize_token_embeddings`. If the lines "
        "above it say `probability tensor`, the logits are NaN: compute in bfloat16 or float32 (docs/FLOAT16.md).",
    ),
    _known(
        "ValueError",
        r"tokenizer\.chat_template is not set|does not have a chat template",
        "The checkpoint is a base model, or its chat template is in another file.",
        "Load the instruction-tuned checkpoint (its name ends in `-it`), or give `chat_template=`.",
    ),
)
#: The same, where nothing above fits any error of a text.
_LAST = (_known(_IMPORT, r"Could not import module '\w+'\. Are this object's requirements", *NO_IMPORT),)


def advice(said: Said) -> Advice | None:
    """What to do about the last error that is a common one; None if none is."""
    for message, known in itertools.chain(*(itertools.product(said.messages, each) for each in (ERRORS, _LAST))):
        kind = not _ERROR.search(message.kind) or re.fullmatch(known.kinds, message.kind)
        there = not known.file or any(frame.file.endswith(known.file) for frame in said.frames)
        if kind and there and re.search(known.text, message.text):
            names = {"model": said.model or "MODEL", "variant": _variant(said.model)}
            return Advice(known.advice.what, known.advice.to_do.format(**names))
    return None


def _variant(model: str) -> str:
    found = _VARIANT.search(model)
    return found[0].upper() if found else "MODEL"
