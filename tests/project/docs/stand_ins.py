"""What lets the documentation's code run as it is written, on a machine with no GPU and no model hub.

- **Names of a hub are folders.** transformers, PEFT and this package take a folder where they take a name, so the code
  runs in a working folder that has ``google/gemma-4-E4B-it`` (a tiny Gemma 4 with random weights, and a tokenizer of
  characters), the other variants that pages name, ``my-adapter``, and the repository's ``constraints``.
- **The CPU is the card, the disk is host memory**, where there is no GPU: device 0 of a ``device_map`` or a
  ``max_memory`` that is given to ``from_pretrained`` becomes the CPU, "cpu" becomes the disk.

Anyone can do the first by hand; CONTRIBUTING.md says so.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from tests.helpers import ROOT

#: The names that pages may use for checkpoints, and what the tiny model in their place has.
CHECKPOINTS = {
    "google/gemma-4-E2B-it": None,
    "google/gemma-4-E4B-it": None,
    "google/gemma-4-26B-A4B-it": "experts",
}

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}<model>"


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with a token a character, inside the tiny model's vocabulary, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def build(folder: Path, workspace: Any) -> Path:
    """The working folder, made once; :func:`enter` copies it."""
    from gemma4_compat._lab import tiny_models

    for name, kind in CHECKPOINTS.items():
        target = folder / name
        if kind == "experts":
            tiny_models.build_moe_checkpoint(target)
        else:
            shutil.copytree(workspace.checkpoint, target)
        write_tokenizer(target)
    shutil.copytree(workspace.adapter("all"), folder / "my-adapter")
    shutil.copytree(ROOT / "constraints", folder / "constraints")
    return folder


def enter(folder: Path, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the working folder at ``where`` is the current one, and there is a card, or what stands for it."""
    import torch
    from transformers import PreTrainedModel

    shutil.copytree(folder, where, dirs_exist_ok=True)
    monkeypatch.chdir(where)
    if torch.cuda.is_available():
        return
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return original(cls, *args, **on_the_cpu(kwargs, where))

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))


@contextlib.contextmanager
def server() -> Iterator[None]:
    """What docs/SERVING.md starts in the working folder; its clients find it at another port."""
    openai = pytest.importorskip("openai", reason="needs the extra [serve]: pip install '.[serve]'")
    from gemma4_compat.cli.serving import loading
    from tests.unit.commands import serving

    try:
        loading.refuse_release()
    except gemma4_compat.Gemma4CompatError as error:
        pytest.skip(str(error))
    adapters, plan = ["pirate=my-adapter"], {"context": 256}
    served = loading.load(loading.Wanted("google/gemma-4-E4B-it", adapters, plan=plan), str(Path.cwd() / "offload"))
    with serving.running(served) as found, pytest.MonkeyPatch.context() as patch:
        made = openai.OpenAI
        patch.setattr(openai, "OpenAI", lambda base_url, **options: made(base_url=f"{found.address}/v1", **options))
        yield


def on_the_cpu(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The options of ``from_pretrained``, with the CPU for the card and the disk for host memory."""
    places = {0: "cpu", "cuda": "cpu", "cuda:0": "cpu", "cpu": "disk"}
    placed = dict(options)
    if isinstance(options.get("device_map"), dict):
        placed["device_map"] = {name: places.get(place, place) for name, place in options["device_map"].items()}
    if "max_memory" in options:
        placed["max_memory"] = {"cpu": options["max_memory"][0]}
    if "device_map" in placed:
        placed.setdefault("offload_folder", str(folder / "offload"))
    return placed


def versions_are(stack: str) -> bool:
    """Whether the installed releases are those of ``constraints/STACK.txt``."""
    from gemma4_compat._engine import versions

    lines = (ROOT / "constraints" / f"{stack}.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return all(
        versions.installed(name) == pins[name] for name in ("transformers", "accelerate", "peft", "bitsandbytes")
    )
