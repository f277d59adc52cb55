"""A model of how long a replayed decoding step takes on a card, from what a token reads and what the card can do.

It is a model, not a measurement. :data:`SPEED` holds the fitted constants and says what they were fitted to. It covers
4-bit weights, batch 1 and everything on one card; :func:`with_bus` adds what a token copies over the bus.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from gemma4_compat._engine import settings
from gemma4_compat._engine.io.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._memory.blueprint import Block, Blueprint


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Constants of :func:`seconds`, fitted by ``benchmarks/decoding/multiprocessors.py --fit`` to measured steps.

    Attributes:
        layer: seconds that the kernels of a decoder layer take in addition to reading weights.
        quantized: bytes of 4-bit weights that one SM multiplies by per second, for each GHz of its clock.
        experts: the same for 4-bit experts.
        memory: share of the memory's bandwidth at which weights are read.
        adapted: seconds that a LoRA adapter adds to a decoder layer.

    Fitted on 2026-11-26 to steps with the kernels of ``decode_fast`` on H100s limited to 28 to 132 of their SMs,
    and checked with the 12B, which is not in the fit: docs/BENCHMARKS.md lists each of them with its
    error. ``experts`` is fitted to one row and includes everything that a mixture of experts takes in addition to its
    weights. A per-layer table in host memory made a difference of 1 %, so the model has none.
    """

    layer: float
    quantized: float
    experts: float
    memory: float
    adapted: float


SPEED = Speed(layer=3.48e-05, quantized=7.16e09, experts=5.85e08, memory=0.544, adapted=7.63e-06)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the speed of a card depends on in this model, as its vendor states it.

    Attributes:
        multiprocessors: their number (SMs).
        ghz: their highest clock.
        gb_s: bandwidth of its memory, in GB/s (1e9 bytes).
        bus: bytes per second, roughly, of a copy from pinned host memory; 0: not stated.
        gib: its memory, in GiB; 0: not stated. For a card sold in several sizes: the size that ``gb_s`` belongs to, or
            else the smallest.
        capability: its compute capability; None: not stated.
    """

    multiprocessors: int
    ghz: float
    gb_s: float
    bus: int = 0
    gib: int = 0
    capability: tuple[int, int] | None = None


#: The least compute capability with bfloat16, and of the cards that were measured.
BFLOAT16 = (8, 0)
#: The share of the bus's speed that replay reached with all layers streamed: the first if the host waits for each
#: token, with a slow CPU; the second if it does not (E2B, E4B, double quantization, H200:
#: benchmarks/decoding/graph_decoding.py, 2026-11-23 and 2026-11-24).
BUS_SHARE = (0.76, 0.97)
#: Bytes per second, roughly, of a pinned copy over common buses. Half the lanes have half of it.
PCIE_3_X16, PCIE_4_X16, PCIE_5_X16 = 12 << 30, 24 << 30, 49 << 30

#: Cards by name, from the vendors' data sheets, with boost clocks.
CARDS = {
    "RTX 2070": Card(multiprocessors=36, ghz=1.62, gb_s=448, bus=PCIE_3_X16, gib=8, capability=(7, 5)),
    "RTX 2080 Ti": Card(multiprocessors=68, ghz=1.54, gb_s=616, bus=PCIE_3_X16, gib=11, capability=(7, 5)),
    "RTX 3050": Card(multiprocessors=20, ghz=1.78, gb_s=224, bus=PCIE_4_X16 // 2, gib=8, capability=(8, 6)),
    "RTX 3060": Card(multiprocessors=28, ghz=1.78, gb_s=360, bus=PCIE_4_X16, gib=12, capability=(8, 6)),
    "RTX 3060 Ti": Card(multiprocessors=38, ghz=1.67, gb_s=448, bus=PCIE_4_X16, gib=8, capability=(8, 6)),
    "RTX 3070": Card(multiprocessors=46, ghz=1.73, gb_s=448, bus=PCIE_4_X16, gib=8, capability=(8, 6)),
    "RTX 3080": Card(multiprocessors=68, ghz=1.71, gb_s=760, bus=PCIE_4_X16, gib=10, capability=(8, 6)),
    "RTX 3090": Card(multiprocessors=82, ghz=1.70, gb_s=936, bus=PCIE_4_X16, gib=24, capability=(8, 6)),
    "RTX 4060": Card(multiprocessors=24, ghz=2.46, gb_s=272, bus=PCIE_4_X16 // 2, gib=8, capability=(8, 9)),
    "RTX 4060 Ti": Card(multiprocessors=34, ghz=2.54, gb_s=288, bus=PCIE_4_X16 // 2, gib=8, capability=(8, 9)),
    "RTX 4060 Ti 16GB": Card(multiprocessors=34, ghz=2.54, gb_s=288, bus=PCIE_4_X16 // 2, gib=16, capability=(8, 9)),
    "RTX 4070": Card(multiprocessors=46, ghz=2.48, gb_s=504, bus=PCIE_4_X16, gib=12, capability=(8, 9)),
    "RTX 4070 Ti": Card(multiprocessors=60, ghz=2.61, gb_s=504, bus=PCIE_4_X16, gib=12, capability=(8, 9)),
    "RTX 4080": Card(multiprocessors=76, ghz=2.51, gb_s=717, bus=PCIE_4_X16, gib=16, capability=(8, 9)),
    "RTX 4090": Card(multiprocessors=128, ghz=2.52, gb_s=1008, bus=PCIE_4_X16, gib=24, capability=(8, 9)),
    "RTX 5060": Card(multiprocessors=30, ghz=2.50, gb_s=448, bus=PCIE_5_X16 // 2, gib=8, capability=(12, 0)),
    "RTX 5060 Ti": Card(multiprocessors=36, ghz=2.57, gb_s=448, bus=PCIE_5_X16 // 2, gib=8, capability=(12, 0)),
    "RTX 5060 Ti 16GB": Card(multiprocessors=36, ghz=2.57, gb_s=448, bus=PCIE_5_X16 // 2, gib=16, capability=(12, 0)),
    "RTX 5070": Card(multiprocessors=48, ghz=2.51, gb_s=672, bus=PCIE_5_X16, gib=12, capability=(12, 0)),
    "RTX 5070 Ti": Card(multiprocessors=70, ghz=2.45, gb_s=896, bus=PCIE_5_X16, gib=16, capability=(12, 0)),
    "RTX 5080": Card(multiprocessors=84, ghz=2.62, gb_s=960, bus=PCIE_5_X16, gib=16, capability=(12, 0)),
    "RTX 5090": Card(multiprocessors=170, ghz=2.41, gb_s=1792, bus=PCIE_5_X16, gib=32, capability=(12, 0)),
    "RTX A6000": Card(multiprocessors=84, ghz=1.80, gb_s=768, bus=PCIE_4_X16, gib=48, capability=(8, 6)),
    "P100": Card(multiprocessors=56, ghz=1.30, gb_s=732, bus=PCIE_3_X16, gib=16, capability=(6, 0)),
    "V100": Card(multiprocessors=80, ghz=1.38, gb_s=900, bus=PCIE_3_X16, gib=16, capability=(7, 0)),
    "V100 32GB": Card(multiprocessors=80, ghz=1.53, gb_s=900, bus=PCIE_3_X16, gib=32, capability=(7, 0)),
    "T4": Card(multiprocessors=40, ghz=1.59, gb_s=320, bus=PCIE_3_X16, gib=15, capability=(7, 5)),  # ECC takes 1 of 16
    "L4": Card(multiprocessors=58, ghz=2.04, gb_s=300, bus=PCIE_4_X16, gib=24, capability=(8, 9)),
    "A10": Card(multiprocessors=72, ghz=1.70, gb_s=600, bus=PCIE_4_X16, gib=24, capability=(8, 6)),
    "A40": Card(multiprocessors=84, ghz=1.74, gb_s=696, bus=PCIE_4_X16, gib=48, capability=(8, 6)),
    "L40S": Card(multiprocessors=142, ghz=2.52, gb_s=864, bus=PCIE_4_X16, gib=48, capability=(8, 9)),
    "A100": Card(multiprocessors=108, ghz=1.41, gb_s=1555, bus=PCIE_4_X16, gib=40, capability=(8, 0)),
    "A100 80GB": Card(multiprocessors=108, ghz=1.41, gb_s=2039, bus=PCIE_4_X16, gib=80, capability=(8, 0)),
    "H100": Card(multiprocessors=132, ghz=1.98, gb_s=3350, bus=PCIE_5_X16, gib=80, capability=(9, 0)),
    "H200": Card(multiprocessors=132, ghz=1.98, gb_s=4800, bus=PCIE_5_X16, gib=141, capability=(9, 0)),
}
#: The cards that a plan names by default.
COMMON = ("RTX 3060", "RTX 4060 Ti", "RTX 4090")

_MAKER = re.compile(r"^(nvidia|geforce|tesla|quadro|\s)+")
#: What a driver adds to a name, and a size of memory at its end.
_VARIANT, _SIZE = re.compile(r"[\s-]+(sxm\d?|pcie|hbm\w*)\b"), re.compile(r"[\s-]+(\d+) ?gb$")
_STATED = re.compile(
    r"(\d+) SMs?, (\d+(?:\.\d+)?) GHz, (\d+(?:\.\d+)?) GB/s(?:, (?!compute)(.+?)(?:/s)?)?"
    r"(?:, compute capability (\d+)\.(\d+))?",
    re.IGNORECASE,
)


def card(text: Any) -> Card:
    """A card by its name in :data:`CARDS`, or by its figures: "28 SMs, 1.78 GHz, 360 GB/s", and if they are known its
    bus, "24GiB/s", and "compute capability 8.6".

    Raises:
        Gemma4CompatError: it is neither.
    """
    wanted = " ".join(str(text).split())
    if (found := CARDS.get(_name(wanted) or "")) is not None:
        return found
    if (stated := _STATED.fullmatch(wanted)) and all(float(figure) > 0 for figure in stated.groups()[:3]):
        count, ghz, gb_s, bus, *capability = stated.groups()
        return Card(
            multiprocessors=int(count),
            ghz=float(ghz),
            gb_s=float(gb_s),
            bus=parse_size(bus) if bus else 0,
            capability=None if None in capability else (int(capability[0]), int(capability[1])),
        )
    close = settings.nearest(wanted.upper(), CARDS)
    raise Gemma4CompatError(
        f"card {text!r} is unknown; {f'did you mean {close!r}? Use it, or ' if close else 'use '}one of "
        f"{', '.join(CARDS)}, or figures as in '28 SMs, 1.78 GHz, 360 GB/s' (multiprocessors, highest clock, "
        "bandwidth of its memory; 'deviceQuery' and the vendor's page have them)"
    )


def _name(wanted: str) -> str | None:
    """The name in :data:`CARDS` for one that a user or a driver writes: "rtx4090", "Tesla V100-SXM2-16GB"."""
    known = {name.casefold().replace(" ", ""): name for name in CARDS}
    plain = _VARIANT.sub("", _MAKER.sub("", wanted.casefold()))
    found, size = known.get(re.sub(r"[\s-]", "", plain)), _SIZE.search(plain)
    if found is None and size is not None:
        found = known.get(re.sub(r"[\s-]", "", _SIZE.sub("", plain)))
        if found is not None and abs(CARDS[found].gib - int(size[1])) > 1:  # another size than the one that is known
            return None
    return found


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one token needs from a card.

    Attributes:
        layers: number of decoder layers that compute there.
        quantized: bytes of 4-bit weights that are multiplied by, including their scales.
        experts: bytes of the 4-bit experts that a token is routed to.
        plain: bytes that are read unchanged: the head, other weights in bf16, the KV cache.
        adapted: number of decoder layers with an adapter.
    """

    layers: int
    quantized: int
    experts: int
    plain: int
    adapted: int = 0

    def as_data(self) -> dict[str, int]:
        return asdict(self)


def unknown(blueprint: Blueprint, *, batch: int) -> str:
    """Why a step cannot be modelled: nothing like it was measured. Empty if it can be."""
    if batch != 1:
        return "only one sequence at a time was measured"
    if blueprint.quantization not in ("4bit", "4bit-double"):
        return "only weights in 4 bits were measured"
    if any(layer.experts_stored == layer.experts_plain for layer in blueprint.layers if layer.experts_stored):
        return "only experts in 4 bits were measured"
    return ""


def work(blueprint: Blueprint, *, context: int) -> Work:
    """What one token needs from a whole model with a static cache of ``context`` tokens, unless it is :func:`unknown`.

    Layers in host memory also count: they are copied to the card and computed there.
    """
    parts = [block for block in blueprint.blocks if block.kind in ("layer", "rest", "head")]
    layers = blueprint.layers
    hit = 0.0
    if blueprint.experts is not None:
        count, used, _ = blueprint.experts
        hit = used / count * sum(layer.experts_stored.nbytes for layer in layers if layer.experts_stored)
    quantized = plain = 0
    for block in parts:
        rest = block.without_experts()
        if rest.stored.nbytes < rest.plain.nbytes:
            quantized += rest.stored.nbytes
        elif block.kind != "head":
            plain += rest.stored.nbytes
    plain += blueprint.vocabulary * blueprint.hidden * blueprint.item  # tied or not, all of it is read
    plain += sum(_cached(layer, context, blueprint.item) for layer in layers)
    return Work(
        layers=len(layers),
        quantized=quantized,
        experts=round(hit),
        plain=plain,
        adapted=sum(layer.adapter > 0 for layer in layers),
    )


def _cached(layer: Block, context: int, item: int) -> int:
    """Bytes of keys and values that a step reads, also in layers that share those of another layer."""
    found = layer.attention
    if found is None:
        return 0
    tokens = context if found.window is None else min(context, found.window)
    return 2 * tokens * found.kv_heads * found.head_dim * item


def seconds(done: Work, card: Card, speed: Speed = SPEED) -> float:
    """Seconds of one replayed step with everything on ``card``.

    Layers run one after the other on any card. 4-bit weights and experts take as long as the SMs or the
    memory do, whichever is longer. Everything else is read at the speed of the memory.
    """
    computed = card.multiprocessors * card.ghz
    memory = speed.memory * card.gb_s * 1e9
    found = done.layers * speed.layer + done.adapted * speed.adapted
    found += done.plain / memory
    for nbytes, each in ((done.quantized, speed.quantized), (done.experts, speed.experts)):
        found += nbytes / min(each * computed, memory)
    return found


def with_bus(computed: float, streamed: int, awaited: int, bus: int) -> float:
    """Seconds of a step that takes ``computed`` on the card and copies these bytes at ``bus`` bytes per second.

    Streamed layers arrive while others compute; a layer waits for the experts that its token is routed to.
    """
    if not streamed and not awaited:
        return computed
    return max(computed, streamed / (BUS_SHARE[1] * bus)) + awaited / bus
