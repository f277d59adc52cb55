"""Commands about adapters and checkpoints: ``scan``, ``export``, ``merge``, ``repair``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import gemma4_compat
from gemma4_compat.cli.app import Json, answer, app, command, fail, imports_less, tell, working

# Options of `merge`.
_Start = Annotated[
    str,
    typer.Option(
        metavar="original|dequantized",
        help="The weights to merge into. original: as they are on disk; right if the merged model is used in bf16, "
        "or quantized again by another tool. dequantized: each weight that bitsandbytes would quantize goes to 4 bits "
        "and back first; right if the adapter was trained and evaluated on the quantized base, and the merged model "
        "must give the same outputs. The first has better weights that the adapter never saw; the second keeps the "
        "quantization errors that the adapter learned to compensate.",
    ),
]
_QuantizeBase = Annotated[
    str | None,
    typer.Option(
        help="For --start dequantized: 4bit, 4bit-double or 8bit; default: what the base says, or 4bit-double."
    ),
]
_Others = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="OTHER=WEIGHT", help="Another LoRA and its weight to add; may be repeated."),
]
_SkipModules = Annotated[
    list[str] | None,
    typer.Option(
        "--skip-module",
        help="For --start dequantized and --quantize-result: an entry of llm_int8_skip_modules; may be repeated.",
    ),
]
_CheckDevice = Annotated[
    str | None, typer.Option(help="Where the check runs: auto, cpu, cuda:0 or JSON; default: a GPU, or the CPU.")
]
_Tolerance = Annotated[
    float | None, typer.Option(help="Largest difference of logits; default: a bound measured on this model.")
]


@app.command()
@command("a scan with BASE")
def scan(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A saved adapter's folder, or a cached id.")],
    base: Annotated[
        str | None,
        typer.Argument(
            metavar="BASE", help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint's folder, or a cached id; default: none."
        ),
    ] = None,
    quantize: Annotated[
        str, typer.Option(help="How BASE will be quantized: 4bit, 4bit-double, 8bit or none.")
    ] = "none",
    as_json: Json = False,
) -> None:
    """Show what is in a saved adapter and what it would do on BASE, problems first.

    Reads headers and configurations, no weights and no pickle. Needs torch, transformers and PEFT only with BASE.
    Exit 0 without problems, 1 with some, 2 if ADAPTER or BASE cannot be read.
    """
    from gemma4_compat._adapter_tools.scan import text as _scan_text

    if base is not None:
        working(f"comparing the adapter with {base}: importing torch, transformers and PEFT first")
        imports_less()
    found = gemma4_compat.scan_adapter(adapter, base, quantize=quantize)
    answer(found, _scan_text.scan_text, as_json=as_json)
    raise typer.Exit(0 if found.ok else 1)


@app.command()
@command("an export")
def export(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A saved adapter's folder, or a cached id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist, or be empty.")],
    target: Annotated[
        str,
        typer.Option(
            "--for", metavar="vllm|sglang|mlx|gguf|peft", help="What reads it; llama.cpp, or ollama, is gguf."
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint's folder, or a cached id; default: what ADAPTER names."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an adapter with the keys and the configuration that another reader expects.

    Exit 0 if OUT was written, 2 if the reader cannot use the adapter, or it cannot be read.
    """
    from gemma4_compat._adapter_tools.export import text as _export_text

    working(f"writing the adapter for {target}: importing torch and transformers first")
    imports_less()
    report = gemma4_compat.export_adapter(adapter, out, target, base=base)
    answer(report, _export_text.report_text, as_json=as_json)


@app.command()
@command("a merge")
def merge(
    base_model: Annotated[
        str, typer.Argument(metavar="BASE", help="Folder of the base's checkpoint in safetensors, or a cached id.")
    ],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter, or a cached id.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the merged model; must not exist, or be empty.")
    ],
    start: _Start = "original",
    quantize: _QuantizeBase = None,
    skip: _SkipModules = None,
    others: _Others = None,
    weight: Annotated[float, typer.Option(help="Multiply the change that ADAPTER makes by this.")] = 1.0,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: the base's.")] = None,
    quantize_result: Annotated[
        str | None, typer.Option(help="Write OUT in 4bit, 4bit-double or 8bit of bitsandbytes; default: --dtype.")
    ] = None,
    device_map: _CheckDevice = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file with weights.")] = "5GB",
    check: Annotated[int, typer.Option(help="How many prompts to compare outputs on; 0: no check.")] = 4,
    tolerance: _Tolerance = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read an adapter_model.bin (tensors and nothing else).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Merge an adapter into its base with little memory, and compare the outputs with the adapter's.

    Exit 0 if OUT was written and parity is within bounds, 1 if parity is not (nothing is written), 2 on bad input.
    """
    from gemma4_compat._adapter_tools.merge import result
    from gemma4_compat._adapter_tools.merge import text as _merge_text

    working(f"merging into {base_model}: importing torch, transformers and PEFT first")
    try:
        report = gemma4_compat.merge_adapter(
            base_model,
            _weighted(adapter, weight, others or []),
            out,
            start=start,
            quantize=quantize,
            skip_modules=skip or None,
            dtype=dtype,
            quantize_result=quantize_result,
            device_map=_device_map(device_map),
            max_shard_size=max_shard_size,
            check=check,
            tolerance=tolerance,
            allow_pickle=allow_pickle,
        )
    except result.MergeParityError as error:
        tell(str(error))
        report = error.report
    answer(report, _merge_text.report_text, as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


def _weighted(adapter: str, weight: float, others: list[str]) -> str | dict[str | Path, float]:
    if not others and weight == 1:
        return adapter
    found: dict[str | Path, float] = {adapter: weight}
    for text in others:
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            name = ""
        if not name:
            fail(f"--adapter is a folder and its weight, as in my-adapter=0.5, not {text!r}")
        if name in found:
            fail(f"the adapter {name!r} is given twice; add its weights up")
        found[name] = number
    return found


def _device_map(text: str | None) -> Any:
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except RecursionError:
        fail("--device-map is nested too deeply; it is a name, or JSON that names a device for each module")
    except ValueError as error:
        fail(f"--device-map is neither a name nor JSON: {error}")


@app.command()
@command("a repair")
def repair(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint that save_pretrained wrote.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the repaired checkpoint; must not exist, or be empty.")
    ],
    original: Annotated[
        str,
        typer.Option("--from", metavar="ORIGINAL", help="Folder of the checkpoint it was made from, or a cached id."),
    ],
    max_shard_size: Annotated[str, typer.Option(help="Largest file with weights.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Give a saved checkpoint back what servers ask for: keys and values of KV-shared layers, names of settings.

    transformers drops them on load; its outputs do not depend on them. Exit 0 if OUT was written, 2 on bad input,
    which includes a checkpoint that lacks nothing.
    """
    from gemma4_compat._adapter_tools.repair import report_text

    working(f"comparing {checkpoint} with {original}")
    report = gemma4_compat.repair_checkpoint(checkpoint, original, out, max_shard_size=max_shard_size)
    answer(report, report_text, as_json=as_json)
