"""The code that loads a planned model, as Python text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemma4_compat._engine.text import runs

if TYPE_CHECKING:
    from gemma4_compat._planner.result import Plan


#: What fast decoding is.
FAST = "Static cache; the decoding step is replayed as one CUDA graph: same tokens as with disable_compile=True"


def loading_code(
    plan: Plan, *, skip: Sequence[str], adapter: str | Path | None, quantize_experts: bool, attention: str
) -> str:
    """Python that loads the model of ``plan`` where it says.

    Args:
        plan: all of it but its ``code``.
        skip: ``llm_int8_skip_modules``.
        adapter: folder of a PEFT adapter to load onto it.
        quantize_experts: the experts are quantized while loading; not those that the checkpoint has in 4 bits.
        attention: "sdpa" or "eager".
    """
    quantization, model_class = plan.quantization, plan.model_class
    imports = f"BitsAndBytesConfig, {model_class}" if quantization else model_class
    lines = ["import gemma4_compat  # before the others", "", "import torch"]
    lines += ["from peft import PeftModel"] if adapter is not None else []
    lines += [f"from transformers import {imports}", "", "device_map = {"]
    lines += [f"    {entry}," for entry in _entries(plan.device_map)]
    lines += ["}"]
    lines += _quantization_config(quantization, skip, offloads=plan.quantize_offloaded) if quantization else []
    arguments = ["dtype=torch.bfloat16", "device_map=device_map"]
    arguments += ["quantization_config=quantization_config"] if quantization else []
    arguments += ['attn_implementation="eager"'] if attention == "eager" else []
    arguments += ['offload_folder="offload"'] if plan.disk else []
    call = [f"model = {model_class}.from_pretrained(", f"    {_quoted(plan.model)},"]
    call += [f"    {argument}," for argument in arguments] + [")"]
    contexts = ["gemma4_compat.quantize_experts()"] if quantize_experts else []
    contexts += ["gemma4_compat.quantize_offloaded()"] if plan.quantize_offloaded else []
    if contexts:
        lines += [f"with {', '.join(contexts)}:", *(f"    {line}" for line in call)]
    else:
        lines += call
    lines += [f"model = PeftModel.from_pretrained(model, {_quoted(str(adapter))})"] if adapter is not None else []
    lines += ["model.eval()"]
    lines += [f"# {FAST}.", "gemma4_compat.decode_fast(model)"] if plan.fast else []
    return "\n".join(lines)


def _quantization_config(quantization: str, skip: Sequence[str], *, offloads: bool) -> list[str]:
    lines = ["quantization_config = BitsAndBytesConfig("]
    if quantization == "8bit":
        lines += ["    load_in_8bit=True,"]
    else:
        lines += ["    load_in_4bit=True,", '    bnb_4bit_quant_type="nf4",']
        lines += ["    bnb_4bit_use_double_quant=True,"] if quantization == "4bit-double" else []
        lines += ["    bnb_4bit_compute_dtype=torch.bfloat16,"]
    lines += ["    llm_int8_enable_fp32_cpu_offload=True,"] if offloads else []
    return [*lines, f"    llm_int8_skip_modules=[{', '.join(map(_quoted, skip))}],", ")"]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _entries(device_map: Mapping[str, int | str]) -> list[str]:
    """The map's items as Python, one line for all numbered modules that go to one device."""
    lines: list[str] = []
    for prefix, numbers, device in grouped(device_map):
        place = _quoted(device) if isinstance(device, str) else str(device)
        if numbers is None:
            lines.append(f"{_quoted(prefix)}: {place}")
            continue
        spans = [f"range({first}, {last + 1})" if last > first else str(first) for first, last in runs(numbers)]
        if len(spans) == 1 and len(numbers) > 1:
            text = spans[0]
        else:
            parts = [f"*{span}" if span.startswith("range") else span for span in spans]
            text = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        lines.append(f'**{{f"{prefix}.{{i}}": {place} for i in {text}}}')
    return lines


def grouped(device_map: Mapping[str, int | str]) -> list[tuple[str, list[int] | None, int | str]]:
    """The map's items, numbered modules of one device together: (path before the number, numbers, device)."""
    groups: dict[tuple[str, int | str], list[int] | None] = {}
    for name, device in device_map.items():
        prefix, _, last = name.rpartition(".")
        if last.isdigit():
            numbers = groups.setdefault((prefix, device), [])
            assert numbers is not None  # a module is not both a list and an entry
            numbers.append(int(last))
        else:
            groups[name, device] = None
    return [(prefix, numbers and sorted(numbers), device) for (prefix, device), numbers in groups.items()]
