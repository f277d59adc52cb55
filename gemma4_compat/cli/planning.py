"""``gemma4-compat plan``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import gemma4_compat
from gemma4_compat.cli.app import Json, app, command, fail, print_json, say

_CONTEXT = 8192


@app.command()
@command("a plan")
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint's folder, or a cached id."),
    ],
    vram: Annotated[
        list[str], typer.Option("--vram", help="What PyTorch may allocate, such as 8GiB; once for each accelerator.")
    ],
    context: Annotated[
        int | None, typer.Option("--context", help=f"Tokens of a sequence, prompt and answer; default: {_CONTEXT}.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at a time.")] = 1,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Tokens of the prompt; default: the context.")] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option("--prefill-chunk", help="Tokens of the prompt that a forward takes in; default: all of them."),
    ] = None,
    quantize: Annotated[str, typer.Option("--quantize", help="4bit, 4bit-double, 8bit or none.")] = "4bit",
    quantize_experts: Annotated[
        bool, typer.Option("--quantize-experts", help="Experts to 4 bits, too; otherwise they stay in bf16.")
    ] = False,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Folder of a PEFT adapter to be loaded.")] = None,
    vision: Annotated[bool, typer.Option("--vision", help="Inputs contain images.")] = False,
    audio: Annotated[bool, typer.Option("--audio", help="Inputs contain audio.")] = False,
    cpu: Annotated[str | None, typer.Option("--cpu", help="Host memory for what is offloaded.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="Disk space for what is offloaded.")] = None,
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="Room for gemma4_compat.decode_fast, and the call in the code.")
    ] = True,
    bus: Annotated[
        str | None, typer.Option("--bus", help="What a pinned copy to the accelerator reaches, such as 12GiB/s.")
    ] = None,
    card: Annotated[
        str | None,
        typer.Option("--card", help="Model its tokens a second: 'RTX 3060', or '28 SMs, 1.78 GHz, 360 GB/s'."),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan a QLoRA step on text, and not decoding.")] = False,
    sequence: Annotated[int | None, typer.Option("--sequence", help="With --train: tokens of a sequence.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="With --train: of LoRA.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="With --train: of activations.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="With --train: as TrainingArguments.optim names it.")
    ] = None,
    chunked_loss: Annotated[
        bool | None,
        typer.Option("--chunked-loss/--no-chunked-loss", help="With --train: gemma4_compat.chunked_loss."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which part of a model goes where in the memory there is, what that will use, and the code that loads it.

    With --train: what a training step takes, what each option would change, and the code that trains. Needs torch and
    transformers (with --train PEFT, too), no weights and no GPU. Exit 0 with a plan, 2 when nothing fits or on bad
    usage.
    """
    training = {
        "sequence": sequence,
        "rank": rank,
        "checkpointing": checkpointing,
        "optimizer": optimizer,
        "chunked_loss": chunked_loss,
    }
    given = {name: value for name, value in training.items() if value is not None}
    if train:
        decoding = {
            "--context": context is not None,
            "--prompt": prompt is not None,
            "--prefill-chunk": prefill_chunk is not None,
            "--adapter": adapter is not None,
            "--vision": vision,
            "--audio": audio,
            "--disk": disk is not None,
            "--bus": bus is not None,
            "--card": card is not None,
            "--quantize-experts": quantize_experts,
        }
        _refuse([name for name, found in decoding.items() if found], "is not for --train")
        if len(vram) > 1:
            fail("a training plan is of one accelerator; give --vram once")
        _train(model, vram[0], {"batch": batch, "quantize": quantize, "cpu": cpu, **given}, as_json)
        return
    _refuse([f"--{name.replace('_', '-')}" for name in given], "needs --train")
    from gemma4_compat._planner import text as _plan_text

    planned = gemma4_compat.plan_device_map(
        model,
        vram,
        context=_CONTEXT if context is None else context,
        batch=batch,
        prompt=prompt,
        prefill_chunk=prefill_chunk,
        quantize=quantize,
        quantize_experts=quantize_experts,
        adapter=adapter,
        vision=vision,
        audio=audio,
        cpu=cpu,
        disk=disk,
        fast=fast,
        bus=bus,
        card=card,
    )
    if as_json:
        print_json(planned.as_data())
    else:
        say(_plan_text.plan_text(planned, blocks=_plan_text.can_show_blocks(getattr(sys.stdout, "encoding", None))))


def _train(model: str, vram: str, options: Mapping[str, Any], as_json: bool) -> None:
    from gemma4_compat._planner import text, training_text

    planned = gemma4_compat.plan_training(model, vram, **options)
    if as_json:
        print_json(planned.as_data())
    else:
        blocks = text.can_show_blocks(getattr(sys.stdout, "encoding", None))
        say(training_text.training_text(planned, blocks=blocks))


def _refuse(options: Sequence[str], why: str) -> None:
    if options:
        fail(f"{options[0]} {why}")
