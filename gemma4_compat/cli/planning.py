"""``gemma4-compat plan`` and ``gemma4-compat plan-training``."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import gemma4_compat
from gemma4_compat import _shim, _startup
from gemma4_compat.cli.app import Json, answer, app, command, fail, imports_less, working

_Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint folder, or a cached model id."),
]
_HostMemory = Annotated[
    str | None, typer.Option(help="Host memory for offloaded modules; default: as much as they need.")
]
_QuantizeExperts = Annotated[
    bool | None,
    typer.Option(
        help="Quantize the experts to 4 bits, or keep them in bf16; default: quantize them if they do not fit."
    ),
]


@app.command()
@command("a plan")
def plan(
    model: _Model,
    vram: Annotated[
        list[str] | None,
        typer.Option(
            help="What PyTorch may allocate, such as 8GiB; repeat it for each GPU. Default: what --card has, or what "
            "is free on this machine's GPUs."
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Tokens per sequence, prompt and answer together.", show_default=True)
    ] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences per batch.")] = 1,
    prompt: Annotated[int | None, typer.Option(help="Tokens in the prompt; default: the whole context.")] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Read the prompt in chunks of this many tokens; default: as needed.")
    ] = None,
    quantize: Annotated[str, typer.Option(help="4bit, 4bit-double, 8bit or none.")] = "4bit",
    quantize_experts: _QuantizeExperts = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT adapter to load.")] = None,
    vision: Annotated[bool, typer.Option("--vision", help="Inputs contain images.")] = False,
    audio: Annotated[bool, typer.Option("--audio", help="Inputs contain audio.")] = False,
    cpu: _HostMemory = None,
    disk: Annotated[
        str | None, typer.Option(help="Disk space for offloaded modules; default: as much as they need.")
    ] = None,
    fast: Annotated[bool, typer.Option(help="Reserve memory for gemma4_compat.decode_fast and call it.")] = True,
    assistant: Annotated[
        bool, typer.Option("--assistant", help="Leave room for the model's released assistant, and load it.")
    ] = False,
    bus: Annotated[str | None, typer.Option(help="Host-to-GPU bandwidth, such as 12GiB/s.")] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="Fit this card and estimate its tokens/s: 'RTX 3060', or '28 SMs, 1.78 GHz, 360 GB/s' with --vram. "
            "From compute capability 8.0 on, prompts with --fast need less."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a model into a VRAM budget: device map, expected peaks and loading code.

    Needs torch and transformers, no weights and no GPU. Exit 0 with a plan, 2 if nothing fits or on bad usage.
    `plan-training` plans a training.
    """
    options = _options(locals(), vram or None)
    working(f"planning {model}: importing torch and transformers first")
    imports_less()
    from gemma4_compat._plan.plan import PATCHES

    if _startup.is_command_line():  # nothing else runs in this process, and it ends with the answer
        _shim.engine.narrow(PATCHES)
    _show(gemma4_compat.plan_device_map(**options), as_json=as_json)


@app.command(name="plan-training")
@command("a training plan")
def plan_training(
    model: _Model,
    vram: Annotated[
        list[str] | None,
        typer.Option(
            help="What PyTorch may allocate on the GPU, such as 12GiB. Default: what --card has, or what is free on "
            "this machine's GPU."
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 1,
    padding: Annotated[
        bool | None, typer.Option(help="Count masks of padded sequences; default: in a batch of several.")
    ] = None,
    r: Annotated[int, typer.Option(help="LoRA rank.")] = 16,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute activations.")] = True,
    optim: Annotated[str, typer.Option(help="The optimizer, as TrainingArguments.optim names it.")] = "adamw_torch",
    chunked_loss: Annotated[
        bool | None, typer.Option(help="Compute the loss in chunks; default: if it is needed.")
    ] = None,
    chunked_mlp: Annotated[
        bool | None, typer.Option(help="Compute MLPs in chunks; default: if it does not fit without.")
    ] = None,
    sliding_windows: Annotated[
        bool | None,
        typer.Option(
            help="Compute sliding layers by windows and full ones by products, from 4,096 tokens; default: if needed."
        ),
    ] = None,
    train_fast: Annotated[
        bool | None, typer.Option(help="Replay decoder layers; default: up to 2,048 tokens, where it serves and fits.")
    ] = None,
    activation_offloading: Annotated[
        bool, typer.Option(help="Keep checkpointed activations in host memory (transformers 5.17 or newer).")
    ] = False,
    quantize: Annotated[str, typer.Option(help="4bit, 4bit-double or none.")] = "4bit",
    quantize_experts: _QuantizeExperts = None,
    cpu: _HostMemory = None,
    card: Annotated[str | None, typer.Option(help="Fit this card, such as 'RTX 3060'.")] = None,
    as_json: Json = False,
) -> None:
    """Fit a QLoRA training into a VRAM budget: what a step takes, what each option would change, and the code.

    For text. Needs torch, transformers and PEFT, no weights and no GPU. Exit 0 with a plan, 2 if nothing fits or on
    bad usage.
    """
    options = _options(locals(), vram[0] if vram else None)
    if vram and len(vram) > 1:
        fail("a training plan covers one accelerator; give --vram once")
    working(
        f"planning a training of {model}: its step runs several times on tensors without memory, half a minute, "
        "or more than one for a long sequence"
    )
    imports_less()
    _show(gemma4_compat.plan_training(**options), as_json=as_json)


def _options(given: dict[str, Any], vram: Any) -> dict[str, Any]:
    """The arguments of a command that are those of its function."""
    return {name: value for name, value in given.items() if name != "as_json"} | {"vram": vram}


def _show(planned: Any, *, as_json: bool) -> None:
    from gemma4_compat._plan import text

    blocks = text.can_show_blocks(getattr(sys.stdout, "encoding", None))  # has it the characters of the bars?
    answer(planned, functools.partial(text.plan_text, blocks=blocks), as_json=as_json)
