"""The code that loads a planned model, and trains an adapter on it, as Python text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemma4_compat._engine.io.text import runs
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._memory.formulas import Load
from gemma4_compat._memory.layout import Layout
from gemma4_compat._plan import assistants
from gemma4_compat._plan.result import Source
from gemma4_compat._plan.training_step import TARGETS, Step
from gemma4_compat._training import mlp
from gemma4_compat._training.captured import layers

_ASSISTANT = "With it: model.generate(**inputs, assistant_model=assistant)"
#: What fast decoding does.
FAST = "Static cache; the decoding step is replayed as one CUDA graph. For PyTorch's bits: exact=True"
_TRAINING = """\
model = get_peft_model(
    model,
    LoraConfig(r={r}, lora_alpha={r}, target_modules=r"{targets}"),
)
{fast}arguments = TrainingArguments(
    "adapter",
    {precision}=True,
    per_device_train_batch_size={batch},
    gradient_checkpointing={checkpointing},
    gradient_checkpointing_kwargs={{"use_reentrant": False{offload}}},
    optim="{optim}",
)
# DATASET yields dicts with input_ids, attention_mask and labels, of at most {max_length} tokens.{lengths}
trainer = Trainer(model, arguments, train_dataset=DATASET)
trainer.train()
model.save_pretrained("adapter")"""
#: The least compute capability that CUDA 13 compiles for.
_CUDA_13 = (7, 5)
_LENGTHS = "\n# Only lengths that come back are replayed: pad to one or a few (pad_to_multiple_of), or pack."


def without_bfloat16(source: Source) -> str:
    """What a reader must know of a card without bfloat16; empty for any other."""
    if source.dtype == "bfloat16" or source.capability is None:
        return ""
    found = "the card has no bfloat16 (compute capability {}.{})".format(*source.capability)
    if source.capability < _CUDA_13:
        found += ". PyTorch's builds for CUDA 13 do not run on it, those for CUDA 12.6 do"
    return f"{found}. If logits are not finite, use torch.float32 (docs/FLOAT16.md)"


def loading_code(source: Source, placed: Layout, load: Load) -> str:
    """Python that loads a model as a layout places it, ready for a load.

    Args:
        source: what is loaded.
        placed: its layout.
        load: its purpose: attention, chunks of the prompt, fast decoding.
    """
    adapter = source.adapter
    imports = "from peft import PeftModel" if adapter is not None else ""
    names = [assistants.class_of(source.model_class)] if source.assistant is not None else []
    lines = loading_lines(source, placed, attention=load.attention, imports=(imports, names))
    lines += [f"model = PeftModel.from_pretrained(model, {_quoted(adapter)})"] if adapter is not None else []
    lines += ["model.eval()"]
    chunk = load.prefill_chunk
    lines += [f"model.generation_config.prefill_chunk_size = {chunk}  # long prompts in parts"] if chunk else []
    options = "model, assistants=True" if source.assistant is not None and source.speculative else "model"
    lines += [f"# {FAST}.", f"gemma4_compat.decode_fast({options})"] if load.fast else []
    if source.assistant is not None:
        arguments = f'{_quoted(source.assistant)}, dtype=torch.{source.dtype}, device_map={{"": {_first(placed)}}}'
        lines += [f"# {_ASSISTANT}.", f"assistant = {names[0]}.from_pretrained(", f"    {arguments}", ").eval()"]
    return "\n".join(lines)


def _first(placed: Layout) -> str:
    """The accelerator that computes the embeddings and the logits, as Python."""
    device = next(iter(placed.use))
    return _quoted(device) if isinstance(device, str) else str(device)


def loading_lines(
    source: Source, placed: Layout, *, attention: str = "sdpa", imports: tuple[str, Sequence[str]] = ("", ())
) -> list[str]:
    """Lines of Python that import everything and load the model as the variable ``model``.

    Args:
        source: what is loaded.
        placed: its layout.
        attention: "sdpa" or "eager".
        imports: a line that imports from PEFT, and further names from transformers.
    """
    quantization, offloads = source.quantization, bool(source.quantization) and placed.offloads
    names = sorted(["BitsAndBytesConfig"] * bool(quantization) + [source.model_class, *imports[1]])
    lines = ["import gemma4_compat  # before the others", "", "import torch"]
    lines += [imports[0]] if imports[0] else []
    lines += [f"from transformers import {', '.join(names)}", "", "device_map = {"]
    lines += [f"    {entry}," for entry in _entries(placed.device_map)]
    lines += ["}"]
    lines += _quantization_config(quantization, source) if quantization else []
    arguments = [f"dtype=torch.{source.dtype}", "device_map=device_map"]
    arguments += ["quantization_config=quantization_config"] if quantization else []
    arguments += ['attn_implementation="eager"'] if attention == "eager" else []
    arguments += ['offload_folder="offload"'] if placed.disk else []
    call = [f"model = {source.model_class}.from_pretrained(", f"    {_quoted(source.model)},"]
    call += [f"    {argument}," for argument in arguments] + [")"]
    quantized = ["offloaded=True"] if offloads else []
    quantized += ["experts=True"] if source.experts is not None and not source.stored_experts else []
    if quantized:
        return [*lines, f"with gemma4_compat.quantize({', '.join(quantized)}):", *(f"    {line}" for line in call)]
    return lines + call


def _quantization_config(quantization: str, source: Source) -> list[str]:
    lines = ["quantization_config = BitsAndBytesConfig("]
    if quantization == "8bit":
        lines += ["    load_in_8bit=True,"]
    else:
        lines += ["    load_in_4bit=True,", '    bnb_4bit_quant_type="nf4",']
        lines += ["    bnb_4bit_use_double_quant=True,"] if quantization == "4bit-double" else []
        lines += [f"    bnb_4bit_compute_dtype=torch.{source.dtype},"]
    return [*lines, f"    llm_int8_skip_modules=[{', '.join(map(_quoted, source.skip))}],", ")"]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _entries(device_map: Mapping[str, int | str]) -> list[str]:
    """The map's items as Python, with one line for all numbered modules on a device."""
    lines: list[str] = []
    for (prefix, after), numbers, device in grouped(device_map):
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
        lines.append(f'**{{f"{prefix}.{{i}}{after}": {place} for i in {text}}}')
    return lines


def grouped(device_map: Mapping[str, int | str]) -> list[tuple[tuple[str, str], list[int] | None, int | str]]:
    """The map's items, with numbered modules of one device joined: (before the number, after it), numbers, device.

    Without numbers, "before the number" is the whole path.
    """
    groups: dict[tuple[tuple[str, str], int | str], list[int] | None] = {}
    for name, device in device_map.items():
        path, _, last = name.removesuffix(".experts").rpartition(".")
        if last.isdigit():
            after = ".experts" if name.endswith(".experts") else ""
            numbers = groups.setdefault(((path, after), device), [])
            assert numbers is not None  # a module is not both a list and an entry
            numbers.append(int(last))
        else:
            groups[(name, ""), device] = None
    return [(path, numbers and sorted(numbers), device) for (path, device), numbers in groups.items()]


def _fast(step: Step) -> str:
    """The call that turns on what was planned: what it would choose otherwise is named."""
    if not (step.chunked_loss or step.chunked_mlp or step.sliding_windows or step.train_fast):
        return ""
    tokens, named = step.max_length * step.batch, []
    if step.train_fast and tokens > layers.MAX_TOKENS:
        named.append(f"max_tokens={tokens}")
    named += [] if step.chunked_loss else ["loss=False"]
    named += [f"mlp={step.chunked_mlp}"] if tokens > mlp.TOKENS else []
    if step.max_length >= windows.LEAST_ON_GPU and not step.sliding_windows:
        named += ["windows=False", "products=False"]
    named += [] if step.train_fast else ["graphs=False"]
    return f"model = gemma4_compat.train_fast({', '.join(['model', *named])})\n"


def training_code(source: Source, placed: Layout, step: Step) -> str:
    """Python that loads a model as a layout places it, and trains an adapter on it."""
    imports = ("from peft import LoraConfig, get_peft_model", ("Trainer", "TrainingArguments"))
    training = _TRAINING.format(
        r=step.r,
        fast=_fast(step),
        precision="bf16" if source.dtype == "bfloat16" else "fp16",
        lengths=_LENGTHS if step.train_fast else "",
        targets=TARGETS,
        batch=step.batch,
        checkpointing=step.gradient_checkpointing,
        offload=', "offload": True' if step.activation_offloading else "",
        optim=step.optim,
        max_length=step.max_length,
    )
    return "\n".join([*loading_lines(source, placed, imports=imports), training])
