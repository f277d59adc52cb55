"""A plan as text: a bar for each device, the map, the expected peaks, and the code that loads or trains it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from gemma4_compat._engine.io.text import runs_text, size_text
from gemma4_compat._memory.layout import PREFILL_CHUNK
from gemma4_compat._memory.use import Use
from gemma4_compat._plan import prompt_kernels, speed
from gemma4_compat._plan.cards import measured
from gemma4_compat._plan.code import FAST, grouped, without_bfloat16
from gemma4_compat._plan.result import Plan, TrainingPlan

#: The buses that a plan names by default.
BUSES = {
    "12 GiB/s (PCIe 3 x16)": speed.PCIE_3_X16,
    "24 (PCIe 4 x16)": speed.PCIE_4_X16,
    "49 (PCIe 5 x16)": speed.PCIE_5_X16,
}
#: The meaning of a bar's cells, and how they look in block characters and in ASCII.
_PARTS = ("weights", "streaming buffers", "KV cache", "temporaries", "free")
_TRAINING_PARTS = ("weights", "streaming buffers", "adapter and optimizer", "activations and gradients", "free")
BLOCKS = "█▓▒░·"
ASCII = "#=+-."
_STORED = {None: "bf16", "8bit": "8 bit", "4bit": "4 bit", "4bit-double": "4 bit, double quantization"}


def can_show_blocks(encoding: str | None) -> bool:
    """Whether an output with this encoding has the characters of the bars."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plan_text(plan: Plan | TrainingPlan, *, width: int | None = None, blocks: bool = True) -> str:
    """The whole plan; lines of the report are at most ``width`` columns, by default the terminal's."""
    width = max(50, min(width or shutil.get_terminal_size().columns, 100))
    cells = BLOCKS if blocks else ASCII
    report = _training(plan, width, cells) if isinstance(plan, TrainingPlan) else _generating(plan, width, cells)
    return "\n".join([*report, "", plan.code])


def bar(parts: Sequence[int], budget: int, room: int, cells: str) -> str:
    """``room`` cells for the budget: so many for each part, and the rest is free."""
    found, done = "", 0
    for cell, nbytes in zip(cells, parts):
        done += nbytes
        found += cell * (round(room * done / budget) - len(found))
    return found[:room].ljust(room, cells[-1])


def _legend(cells: str, parts: Sequence[str], width: int) -> list[str]:
    return textwrap.wrap("  ".join(f"{cell} {part}" for cell, part in zip(cells, parts)), width)


def _generating(plan: Plan, width: int, cells: str) -> Iterator[str]:
    yield from _heading(plan, width)
    yield ""
    yield from _bars(plan, width, cells)
    yield ""
    yield from map_lines(plan.device_map, width)
    yield from _streamed(plan, width)
    yield ""
    yield from _peaks(plan, width)
    yield from _attention(plan, width)
    yield ""
    yield from _decoding(plan, width)
    yield from _assistant(plan, width)


def _heading(plan: Plan, width: int) -> Iterator[str]:
    given = [name for name in ("vision", "audio") if getattr(plan, name)]
    experts = ", experts too" if plan.experts else ""
    title = f"{plan.model} ({plan.model_class}), {_STORED[plan.quantization]}{experts}, context {plan.context}"
    title += f", prompt in chunks of {plan.prefill_chunk}" if plan.prefill_chunk is not None else ""
    title += f", batch {plan.batch}" + "".join(f", {name}" for name in given)
    yield from textwrap.wrap(title, width)
    if plan.source.chosen_experts:
        chosen = "The experts are quantized as well, because in bf16 they would not all stay on the accelerator. "
        chosen += "--no-quantize-experts keeps them in bf16."
        yield from textwrap.wrap(chosen, width, break_on_hyphens=False)
    if plan.chosen_chunk:
        chosen = (
            "The prompt is read in chunks: at once it would not fit, or leave less room for decoder layers and fast "
        )
        yield from textwrap.wrap(
            f"{chosen}decoding. --prefill-chunk sets another size.", width, break_on_hyphens=False
        )
    if plan.assumed:
        yield from textwrap.wrap(f"Assumed: {plan.assumed}.", width)
    if why := without_bfloat16(plan.source):
        yield from textwrap.wrap(f"In float16: {why}.", width, break_on_hyphens=False)


def _bars(plan: Plan, width: int, cells: str) -> Iterator[str]:
    labels = {device: f"gpu {device}" if isinstance(device, int) else str(device) for device in plan.use}
    label_width = max(len(label) for label in (*labels.values(), "disk"))
    room = width - label_width - len("  []  10.00 GiB of 10.00 GiB")
    for device, use in plan.use.items():
        shown = bar(_parts(use), use.budget, room, cells)
        yield f"{labels[device]:<{label_width}}  [{shown}]  {size_text(use.peak)} of {size_text(use.budget)}"
    for label, nbytes in (("cpu", plan.cpu), ("disk", plan.disk)):
        if nbytes:
            yield f"{label:<{label_width}}  {size_text(nbytes)}"
    yield from _legend(cells, _PARTS, width)


def _parts(use: Use) -> tuple[int, ...]:
    """What the larger of the two forwards uses."""
    kv = min(use.kv, max(0, use.peak - use.weights - use.adapter - use.stream_buffers))
    known = (use.weights + use.adapter, use.stream_buffers, kv)
    return (*known, max(0, use.peak - sum(known)))


def map_lines(device_map: Mapping[str, int | str], width: int) -> Iterator[str]:
    """A device map, device by device, with numbered modules as ranges."""
    by_device: dict[int | str, list[str]] = {}
    for (path, after), numbers, device in grouped(device_map):
        by_device.setdefault(device, []).append(path if numbers is None else f"{path} {runs_text(numbers)}{after}")
    for device, entries in by_device.items():
        label = f"{device}: "
        yield from textwrap.wrap(
            ", ".join(entries), width, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False
        )


def _streamed(plan: Plan, width: int) -> Iterator[str]:
    if plan.looked_up:
        looked_up = (
            f"The experts of {len(plan.looked_up)} decoder layers are off the accelerator; each token fetches only "
        )
        looked_up += "those it is routed to."
        yield from textwrap.wrap(looked_up, width)
    if plan.streamed:
        streamed = f"{len(plan.streamed)} decoder layers are streamed: copied to the accelerator while others compute."
        yield from textwrap.wrap(streamed, width)
    if any(use.head_away for use in plan.use.values()):
        head = "The head and the embedding tied to it are in host memory. Where all logits matter (without top-k, or "
        head += "with exact=True, say), each token reads all of the head over the bus."
        yield from textwrap.wrap(head, width)


def _peaks(plan: Plan, width: int) -> Iterator[str]:
    yield "Expected peaks:"
    for device, use in plan.use.items():
        phases = (f"{name} {size_text(getattr(use, name))}" for name in ("loading", "prefill", "decode"))
        yield from textwrap.wrap(
            f"{device}: {', '.join(phases)}", width, initial_indent="  ", subsequent_indent="    "
        )
    yield from textwrap.wrap(f"Longest context that fits this map: {plan.longest_context} tokens.", width)
    if plan.chunked_prefill:
        chunked = f"With the prompt in chunks of {PREFILL_CHUNK} tokens (--prefill-chunk {PREFILL_CHUNK}) this map's "
        longest = f", and {plan.longest_chunked} tokens fit" if plan.longest_chunked else ""
        yield from textwrap.wrap(f"{chunked}prefill peaks at {size_text(plan.chunked_prefill)}{longest}.", width)


def _attention(plan: Plan, width: int) -> Iterator[str]:
    if plan.own_attention:
        text = "Chunks are read with this package's attention, which makes no copies of keys and values. It needs "
        text += "compute capability 8.0 or newer."
    elif plan.copies_because:
        text = f"The prefill includes copies that PyTorch's attention makes, because {plan.copies_because}."
        if plan.copies_because == prompt_kernels.UNKNOWN:
            text += " From 8.0 on, fast decoding makes none: --card names the card."
    else:
        return
    yield from textwrap.wrap(text, width, break_on_hyphens=False)


def _assistant(plan: Plan, width: int) -> Iterator[str]:
    taken = sum(use.assistant for use in plan.use.values())
    if not taken:
        return
    text = f"The assistant takes {size_text(taken)}"
    if plan.source.speculative:
        text += ": weights, a second window of sliding layers, and graphs. How many tokens it drafts is measured as it"
        text += " runs, and it stops where drafts do not pay."
    elif plan.fast:
        text += ". With it, transformers decodes without replays: with experts in bf16, a token differs bitwise beside"
        text += " others."
    else:
        text += ", and transformers decodes with it as without this package."
    yield from textwrap.wrap(text, width, break_on_hyphens=False)


def _decoding(plan: Plan, width: int) -> Iterator[str]:
    if not plan.fast:
        yield from textwrap.wrap(f"No fast decoding: {plan.slow_because}.", width)
        return
    pools = sum(use.graph for use in plan.use.values())
    text = f"Fast decoding (gemma4_compat.decode_fast): {FAST[0].lower()}{FAST[1:]}. "
    text += f"Its graphs keep {size_text(pools)}"
    copies = sum(use.head for use in plan.use.values())
    text += f", and a copy of the head in 8 bits {size_text(copies)}." if copies else "."
    if kept := sum(use.experts for use in plan.use.values()):
        text += f" The experts used last stay on the accelerator, {size_text(kept)} of them: no token brings those."
    most, least = ("at most ", "at least ") if kept else ("", "")
    if plan.brought:
        text += f" The bus limits its speed: each token brings {most}{size_text(plan.brought)} over it."
        if plan.streamed:
            shares = " to ".join(str(round(100 * share)) for share in speed.BUS_SHARE)
            text += f" Where it was measured, replay of streamed layers reached {shares} % of the bus."
        buses = {f"{size_text(plan.bus)}/s": plan.bus} if plan.bus else BUSES
        allowed = ", ".join(f"{bus / plan.brought:.1f} at {name}" for name, bus in buses.items())
        text += f" Tokens a second that the bus allows, computed: {least}{allowed}."
    else:
        text += " The card limits its speed."
    if plan.rate.measured:
        found = (f"{rate:.0f} on {name} after {tokens} tokens" for name, (rate, tokens) in plan.rate.measured.items())
        text += f" Tokens a second, measured: {', '.join(found)} (docs/CARDS.md)."
    if plan.modelled:
        over = {name for name in plan.modelled if plan.brought and not plan.bus and measured.bus(name)}
        rates = ", ".join(
            f"{rate:.0f} on {name}{' (its bus is measured)' if name in over else ''}"
            for name, rate in plan.modelled.items()
        )
        text += f" Tokens a second, modelled and not measured: {rates}."
    elif plan.not_modelled and not plan.rate.measured:
        text += f" Its tokens a second cannot be modelled: {plan.not_modelled}."
    yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _training(plan: TrainingPlan, width: int, cells: str) -> Iterator[str]:
    stored = _STORED[plan.quantization] + (", experts too" if plan.experts else "")
    checkpointing = "with" if plan.gradient_checkpointing else "without"
    yield from textwrap.wrap(
        f"Training {plan.model} ({plan.model_class}), {stored}: sequences of {plan.max_length} tokens, batch "
        f"{plan.batch}, LoRA of rank {plan.r} on {plan.trained:,} weights, {plan.optim}, {checkpointing} "
        f"checkpointing{', the loss in chunks' if plan.chunked_loss else ''}"
        f"{', MLPs in chunks' if plan.chunked_mlp else ''}"
        f"{', sliding layers by windows' if plan.sliding_windows else ''}"
        f"{', decoder layers replayed' if plan.train_fast else ''}",
        width,
    )
    if plan.assumed:
        yield from textwrap.wrap(f"Assumed: {plan.assumed}.", width)
    yield ""
    room = width - len("gpu 0  []  10.00 GiB of 10.00 GiB")
    parts = (plan.weights, plan.buffers, plan.adapter + plan.optimizer_states, plan.activations + plan.graphs)
    yield f"gpu 0  [{bar(parts, plan.budget, room, cells)}]  {size_text(plan.peak)} of {size_text(plan.budget)}"
    if plan.cpu:
        yield f"cpu    {size_text(plan.cpu)}"
    yield from _legend(cells, _TRAINING_PARTS, width)
    yield ""
    yield from map_lines(plan.device_map, width)
    if plan.streamed:
        yield from textwrap.wrap(
            f"{len(plan.streamed)} decoder layers are streamed: copied to the accelerator in the forward and again in "
            "the backward pass.",
            width,
        )
    yield ""
    yield f"Expected peak: {size_text(plan.peak)} in a step, {size_text(plan.loading)} while loading."
    for name, nbytes in (
        ("base weights", plan.weights),
        ("streaming buffers", plan.buffers),
        ("adapter", plan.adapter),
        (f"states of {plan.optim}", plan.optimizer_states),
        ("activations, loss and gradients", plan.activations),
        *([("graphs of train_fast", plan.graphs)] if plan.train_fast else []),
    ):
        yield f"  {name:<33}{size_text(nbytes):>11}"
    if plan.warning:
        yield from textwrap.wrap(f"Warning: {plan.warning}.", width)
    yield "Switches:"
    for name, reason in plan.reasons.items():
        on = getattr(plan, name, None)
        state = "" if on is None else "on: " if on else "off: "
        yield from textwrap.wrap(
            f"{name.replace('_', ' ')}: {state}{reason}.", width, initial_indent="  ", subsequent_indent="    "
        )
    yield "What an option would change:"
    for option, nbytes in plan.changes.items():
        yield f"  {option:<33}{'-' if nbytes < 0 else '+'}{size_text(abs(nbytes)):>10}"
