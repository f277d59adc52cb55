"""Where each part of a Gemma 4 should go: ``gemma4_compat.plan_device_map`` and ``plan``.

Needs a configuration, no weights and no accelerator: the model's own class is built on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import shadowed
from gemma4_compat._engine.io.text import parse_size, size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._gemma4.quantization import config, expert_storage, qat
from gemma4_compat._generation.prompts import chunks
from gemma4_compat._memory import blueprint, layout
from gemma4_compat._memory.blueprint import Blueprint
from gemma4_compat._memory.formulas import Load
from gemma4_compat._memory.layout import Layout
from gemma4_compat._plan import assistants, budgets, code, prompt_kernels, requests, speed
from gemma4_compat._plan.cards import measured
from gemma4_compat._plan.requests import Request
from gemma4_compat._plan.result import Plan, Rate, Source

_FOUR_BIT = ("4bit", "4bit-double")
#: Tokens of a chunk where a prompt does not fit at once, in the order in which they are tried.
_CHUNKS = tuple(size for size in chunks.SIZES if size <= layout.PREFILL_CHUNK)
#: Tokens of an answer: chunks bring streamed layers once more each, and then each token brings fewer of them.
_ANSWER = 100
#: The patches that a plan depends on: what it reads of a configuration, what this transformers does with wide heads,
#: and whether this package's attention is on. The command's process applies no others.
PATCHES = (
    "transformers-config-names",
    "transformers-config-reads",
    "transformers-assistant-sharing",
    "transformers-wide-heads",
    windows.ID,
)
_NO_ROOM = "its static cache, the prefill into it and its graphs do not fit"
#: A model, its layout, its load, and why that is without fast decoding.
_Planned = tuple[Blueprint, Layout, Load, str]


def plan_device_map(
    model: Any,
    vram: float | str | Sequence[float | str] | Mapping[int | str, float | str] | None = None,
    *,
    context: int = 8192,
    batch: int = 1,
    prompt: int | None = None,
    prefill_chunk: int | None = None,
    quantize: str | None = "4bit",
    quantize_experts: bool | None = None,
    adapter: str | Path | None = None,
    vision: bool = False,
    audio: bool = False,
    cpu: float | str | None = None,
    disk: float | str | None = None,
    attention: str = "sdpa",
    balanced: bool = False,
    fast: bool = True,
    assistant: bool = False,
    bus: float | str | None = None,
    card: str | None = None,
) -> Plan:
    """A device map for ``model`` that stays inside ``vram`` while loading, in the prefill and while decoding.

    >>> plan = gemma4_compat.plan_device_map("E4B", "4GiB", context=2048)
    >>> plan.device_map["model.language_model.embed_tokens_per_layer"]
    'cpu'

    Needs torch and transformers, no weights and no accelerator. Whatever costs least leaves the accelerator first: the
    per-layer embeddings, the towers, the head and the embedding tied to it (with ``fast``, and a card of compute
    capability 8.0 or newer; a copy in 8 bits stays), the experts of as many decoder layers as necessary (each token
    fetches only the experts it is routed to), then as many whole layers as necessary, which are streamed.

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), a Gemma 4 configuration, or a model (on meta is enough).
        vram: what PyTorch may allocate on the accelerator: bytes or a size ("8GiB"); a list with one for each of
            several; or a mapping of the map's values to sizes. Leave out what the CUDA context and the display take.
            Default: the memory of ``card`` less 1 GiB, or else the free memory of this machine's GPUs less 0.5 GiB.
        context: tokens per sequence, prompt and answer together.
        batch: sequences per batch.
        prompt: tokens in the prompt; default: the whole context, the worst case.
        prefill_chunk: tokens of the prompt that one forward reads, for text prompts: long prompts then need less
            memory and some more time. The code sets ``prefill_chunk_size``. Default: all at once if that fits and
            streams no decoder layers that chunks would keep on the accelerator; otherwise the largest chunks that fit.
        quantize: "4bit" (nf4), "4bit-double" (nested), "8bit" or None.
        quantize_experts: quantize experts to 4 bits; False: keep them in bf16, like upstream. Default: quantize them
            if the weights are in 4 bits and experts in bf16 would not fit on the accelerator.
        adapter: the folder of a PEFT adapter that will be loaded onto the model.
        vision: inputs contain images, one per sequence.
        audio: inputs contain audio, 30 s per sequence.
        cpu: host memory for what is offloaded; default: as much as it takes.
        disk: disk space for what is offloaded; default: as much as it takes.
        attention: "sdpa" or "eager".
        balanced: over several accelerators, about the same on each; otherwise the first are filled.
        fast: decode with :func:`decode_fast` if it applies, and leave room for its static cache and graphs; otherwise
            ``slow_because`` says why not.
        assistant: True to leave room for the released assistant of the model, which drafts tokens, and with ``fast``
            for what ``decode_fast(assistants=True)`` keeps. The code loads it.
        bus: bandwidth of copies from pinned host memory to the accelerator, per second: bytes or a size ("12GiB"). The
            text of the plan says how many tokens per second it allows. Default: the text says so for common buses.
        card: the card whose tokens per second are modelled, and whose memory counts without ``vram``: a name ("RTX
            3060"; the error for an unknown name lists the known ones), or figures ("28 SMs, 1.78 GHz, 360 GB/s", its
            bus, ", 24GiB/s", and ", compute capability 8.6"). Default: some common cards. From compute capability 8.0
            on, ``decode_fast`` reads chunks of a prompt without PyTorch's copies of keys and values, which count where
            ``copies_because`` says why: as for ``vram`` without a card.

    Returns:
        The map, the expected use of each device, the longest context that fits, and the code that loads the model.

    Raises:
        Gemma4CompatError: it does not fit (the message says what would), or an argument cannot be understood.
    """
    return planned(Request(**locals()))


def planned(request: Request) -> Plan:
    """The plan for a request: see :func:`plan_device_map`."""
    shadowed.refuse("torch", "transformers")
    requests.refuse(request)
    card = request.card
    cards = {name: speed.CARDS[name] for name in speed.COMMON} if card is None else {card: speed.card(card)}
    given = budgets.of(request.vram, card)
    options = {"cpu": _bytes(request.cpu), "disk": _bytes(request.disk), "balanced": request.balanced}
    bus = _bytes(requests.bus(request)) or 0
    capability = prompt_kernels.capability(request.vram, card)
    built, name, assumed = build.on_meta(request.model)
    quantization = _quantization(built, request)
    stored = _stored_experts(built, name)

    def with_experts(experts: bool) -> _Planned:
        cut = _blueprint(built, quantization, request.adapter, experts=experts)
        load = request.load
        load = assistants.beside(load, cut) if request.assistant else load
        why = prompt_kernels.unsupported_reason(cut, load, capability)
        load = replace(load, head_away=prompt_kernels.reads_best_words(capability))
        try:
            return cut, *_read_as_fits(cut, given, replace(load, own_in_chunks=not why), options, fast=request.fast)
        except Gemma4CompatError as error:
            helps = why == prompt_kernels.UNKNOWN and request.fast and not _slow_anywhere(cut, given)
            if helps and prompt_kernels.fits(cut, given, load, _CHUNKS[-1]):
                raise Gemma4CompatError(f"{error} {prompt_kernels.NAME_A_CARD}") from error
            raise

    choose = request.quantize_experts is None and not stored and quantization in _FOUR_BIT
    found = _chosen_experts(with_experts) if choose else with_experts(stored or bool(request.quantize_experts))
    cut, placed, load, slow_because = found
    experts = quantization if any(block.experts for block in cut.blocks) else None
    source = Source(
        model=name,
        model_class=cut.model_class,
        quantization=quantization,
        skip=tuple(config.default_skip_modules(built)),
        adapter=None if request.adapter is None else str(request.adapter),
        assistant=_assistant(name) if request.assistant else None,
        speculative=load.fast and load.drafts > 0,
        experts=experts,
        stored_experts=stored,
        chosen_experts=choose and experts is not None,
        assumed=assumed,
        capability=capability,
    )
    limit = int(built.config.get_text_config().max_position_embeddings)
    timed = _measured(cut, placed, load, cards)
    modelled, why_not = _modelled(cut, placed, load, bus, {name: cards[name] for name in cards if name not in timed})
    return Plan(
        source=source,
        layout=placed,
        load=load,
        rate=Rate(slow_because=slow_because, bus=bus, modelled=modelled, not_modelled=why_not, measured=timed),
        longest_context=layout.longest_context(cut, given, load, limit=limit, placed=placed),
        chunked_prefill=_chunked_prefill(cut, placed, load),
        chosen_chunk=load.prefill_chunk != request.prefill_chunk,
        copies_because=prompt_kernels.copies(
            cut, placed, load, prompt_kernels.unsupported_reason(cut, load, capability)
        ),
        longest_chunked=_longest_chunked(cut, given, placed, load, limit),
        code=code.loading_code(source, placed, load),
    )


def _bytes(size: float | str | None) -> int | None:
    return None if size is None else parse_size(size)


def _chosen_experts(planned: Callable[[bool], _Planned]) -> _Planned:
    """The plan with experts in bf16, or in 4 bits if those in bf16 do not all stay on the accelerators."""
    found: _Planned | None
    try:
        found = planned(False)
    except Gemma4CompatError:  # if experts in 4 bits do not fit either, their error says what would
        found = None
    if found is not None:
        cut, placed, *_ = found
        if not (placed.streamed or placed.looked_up) or all(layer.experts_stored is None for layer in cut.layers):
            return found
    return planned(True)


def _read_as_fits(
    cut: Blueprint, given: Mapping[int | str, int], load: Load, options: Mapping[str, Any], *, fast: bool
) -> tuple[Layout, Load, str]:
    """As :func:`_placed`, with the prompt in chunks where it does not fit at once.

    Chunks are also read where they leave room for fast decoding, or for decoder layers that each token would wait for.
    Experts that leave do not count: each chunk brings all of them, and a token only a few.
    """
    errors: list[Gemma4CompatError] = []
    # Without PyTorch's copies, fast decoding may be what fits.
    less = fast and load.own_in_chunks and not _slow_anywhere(cut, given)

    def placed(wanted: Load) -> tuple[Layout, Load, str] | None:
        slow = layout.fits(cut, given, wanted)
        if not slow and not (less and wanted.chunked and layout.fits(cut, given, replace(wanted, fast=True))):
            return None
        try:
            return _placed(cut, given, wanted, options, fast=fast)
        except Gemma4CompatError as error:  # the host's memory or the disk are too small
            errors.extend([error] if slow else [])
            return None

    found, asked = placed(load), load.prefill_chunk is not None or load.vision or load.audio
    for size in () if asked else _CHUNKS:
        chunked = replace(load, prefill_chunk=size)
        if not chunked.chunked or (found is not None and found[2] != _NO_ROOM and not _leaves(found[0])):
            break
        other = placed(chunked)
        if other is not None and (found is None or _is_better(found, other)):
            found = other
    if found is not None:
        return _with_larger_chunks(cut, given, *found) if found[1].chunked and not asked else found
    if errors:
        raise errors[0]
    least = replace(load, prefill_chunk=_CHUNKS[-1])
    refused = load if asked or not least.chunked else least
    quick = replace(refused, fast=True)
    if less and layout.smallest_budget(cut, quick) < layout.smallest_budget(cut, refused):
        refused = refused if layout.fits(cut, given, quick) else quick
    return layout.layout(cut, given, refused, **options), refused, ""  # it raises what would fit


def _is_better(found: tuple[Layout, Load, str], other: tuple[Layout, Load, str]) -> bool:
    """Whether smaller chunks make up for bringing streamed layers once each, within :data:`_ANSWER` tokens, or keep
    the head on the accelerator.
    """
    if _NO_ROOM in (found[2], other[2]) and found[2] != other[2]:
        return found[2] == _NO_ROOM
    if not found[0].streamed:
        return _leaves(found[0]) and not _leaves(other[0])
    forwards = [-(-load.prompt_tokens // load.prefill) for _, load, _ in (found, other)]
    less = len(found[0].streamed) - len(other[0].streamed)
    return less * _ANSWER > (forwards[1] - forwards[0]) * len(other[0].streamed)


def _leaves(placed: Layout) -> bool:
    """Whether decoder layers leave the accelerator, or its head."""
    return bool(placed.streamed) or any(use.head_away for use in placed.use.values())


def _with_larger_chunks(
    cut: Blueprint, given: Mapping[int | str, int], placed: Layout, load: Load, slow_because: str
) -> tuple[Layout, Load, str]:
    """The same placement with the largest chunks that fit it."""

    def fits(size: int) -> bool:
        used = layout.placed_use(cut, placed, replace(load, prefill_chunk=size))
        return all(use.peak <= use.budget for use in used.values())

    streams = bool(placed.streamed or placed.looked_up)
    found = chunks.sizes(tokens=load.prompt_tokens, batch=load.batch, streams=streams)
    load = replace(load, prefill_chunk=max([load.prefill, *filter(fits, found)]))
    return replace(placed, use=layout.placed_use(cut, placed, load)), load, slow_because


def _placed(
    cut: Blueprint, given: Mapping[int | str, int], load: Load, options: Mapping[str, Any], *, fast: bool
) -> tuple[Layout, Load, str]:
    """The layout, the load it was made for, and why that is without fast decoding; empty if it is with it.

    Fast decoding is worth more than what leaves the accelerator for its cache and graphs.
    """
    slow_because = _slow_anywhere(cut, given) if fast else "it was not asked for"
    if not slow_because:
        wanted = replace(load, fast=True)
        try:
            placed = layout.layout(cut, given, wanted, **options) if layout.fits(cut, given, wanted) else None
        except Gemma4CompatError:  # if the rest does not fit either, the error below says so
            placed = None
        if placed is None:
            slow_because = _NO_ROOM
        else:
            slow_because = _slow_here(cut, placed)
            if not slow_because:
                return placed, wanted, ""
    return layout.layout(cut, given, load, **options), load, slow_because


def _measured(
    cut: Blueprint, placed: Layout, load: Load, cards: Mapping[str, speed.Card]
) -> dict[str, tuple[float, int]]:
    """Tokens per second by card, and the prompt they were measured after, where somebody measured this placement."""
    if not load.fast or load.batch != 1:
        return {}
    experts = [layer for layer in cut.layers if layer.experts_stored is not None]
    key = measured.Key(
        layers=len(cut.layers),
        hidden=cut.hidden,
        vocabulary=cut.vocabulary,
        quantization=cut.quantization,
        quantized_experts=any(layer.experts_stored != layer.experts_plain for layer in experts),
        away=measured.away(placed.device_map),
        adapter=any(layer.adapter for layer in cut.layers),
    )
    found = {name: measured.rate(name, key, load.context) for name in cards}
    return {name: rate for name, rate in found.items() if rate is not None}


def _modelled(
    cut: Blueprint, placed: Layout, load: Load, given_bus: int, cards: Mapping[str, speed.Card]
) -> tuple[dict[str, float], str]:
    """Tokens per second by card, and why they are unknown; empty if they are known."""
    if why := "no step is replayed" if not load.fast else speed.unknown(cut, batch=load.batch):
        return {}, why
    if any(card.capability is not None and card.capability < speed.BFLOAT16 for card in cards.values()):
        return {}, "no card before compute capability 8.0 was measured"
    done = speed.work(cut, context=load.context)
    found = {}
    for name, card in cards.items():
        bus = given_bus or measured.bus(name) or card.bus
        if placed.brought and not bus:
            return {}, f"each token brings {size_text(placed.brought)}, and nothing says over which bus"
        streamed = placed.brought - placed.awaited
        found[name] = 1 / speed.with_bus(speed.seconds(done, card), streamed, placed.awaited, bus)
    return found, ""


def _chunked_prefill(cut: Blueprint, placed: Layout, load: Load) -> int:
    """The peak of the prefill with the prompt in chunks, if that is less and the inputs are text; else 0."""
    chunked = replace(load, prefill_chunk=layout.PREFILL_CHUNK)
    if load.vision or load.audio or load.weights_only or chunked.prefill >= load.prefill:
        return 0
    forwards = layout.placed_use(cut, placed, chunked), placed.use
    found, now = (max(use.prefill - use.head for use in one.values()) for one in forwards)
    return found if found < now else 0


def _longest_chunked(cut: Blueprint, given: Mapping[int | str, int], placed: Layout, load: Load, limit: int) -> int:
    """The longest context that fits with the prompt in chunks, if it is read at once and would be longer; else 0."""
    if load.vision or load.audio or load.prefill_chunk is not None:
        return 0
    chunked = replace(load, prefill_chunk=layout.PREFILL_CHUNK)
    found, now = (layout.longest_context(cut, given, one, limit=limit, placed=placed) for one in (chunked, load))
    return found if found > now else 0


def _slow_anywhere(cut: Blueprint, given: Mapping[int | str, int]) -> str:
    if not all(isinstance(device, int) or device.partition(":")[0] == "cuda" for device in given):
        return "graphs need CUDA"
    if cut.quantization == "8bit":
        return "bitsandbytes' 8-bit layers synchronize with the host in each step"
    return ""


def _slow_here(cut: Blueprint, placed: Layout) -> str:
    # A tower runs once per prompt, which is not replayed.
    towers = {block.name for block in cut.blocks if block.kind == "tower"}
    if any(device == "disk" for name, device in placed.device_map.items() if name not in towers):
        return "weights on disk are read by the host for every token"
    if len(placed.use) > 1:
        return "a graph covers one accelerator"
    return ""


def _quantization(model: Any, request: Request) -> str | None:
    """How the checkpoint says its weights are stored, or else the request."""
    quantization = None if request.quantize == "none" else request.quantize
    settings = config.stored_settings(model.config)
    if settings is not None:
        quantization = config.name_of(settings)
        qat.refuse_plan(settings)
        if quantization is None:
            raise Gemma4CompatError(
                f"the checkpoint is quantized with {settings.get('quant_method')!r}; plans know bitsandbytes and "
                "bf16. Give the checkpoint it was made from"
            )
    if request.quantize_experts and quantization not in _FOUR_BIT:
        raise Gemma4CompatError(
            f"quantize_experts quantizes to 4 bits, and quantize is {quantization!r}; use quantize='4bit' or "
            "'4bit-double'"
        )
    return quantization


def _assistant(name: str) -> str:
    """The id of the released assistant for a model; of a model that nobody knows, what to replace."""
    variant = variants.find(name)
    return "ASSISTANT" if variant is None else f"google/gemma-4-{variant}-it-assistant"


def _stored_experts(model: Any, name: str) -> bool:
    """Whether the checkpoint in the folder ``name`` has its experts in 4 bits."""
    if config.stored_settings(model.config) is None or not Path(name).is_dir():
        return False
    return bool(expert_storage.in_checkpoint(Path(name).glob("*.safetensors")))


def _blueprint(model: Any, quantization: str | None, adapter: str | Path | None, *, experts: bool) -> Blueprint:
    names = config.linear_names(model, config.default_skip_modules(model)) if quantization else None
    sizes = None if adapter is None else blueprint.adapter_sizes(adapter)
    return blueprint.describe(model, quantization, names, adapter=sizes, experts=experts)
