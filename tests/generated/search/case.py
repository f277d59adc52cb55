"""One case of the search: a tiny Gemma 4, a way to load it, a prompt, and a map of its modules to two places.

A case is a pure function of its seed, the same on every stack and machine, and JSON. Cases of one *group* (``seed //
GROUP``) share their configuration and :data:`KINDS` ways to quantize, adapt and prompt it, so that checkpoints,
adapters and the outputs of one device are computed once for several maps.

What the libraries cannot do on one device either is never generated; each such rule has its reason beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GROUP = 10
KINDS = 3
MAIN, OFFLOADED = "main", "offloaded"
QUANTIZATIONS = (None, "4bit", "4bit-double", "8bit")
ADAPTERS = (None, "text", "towers", "both")

#: Places by module, the more specific entry wins: ``(("", "main"), ("lm_head", "offloaded"))``.
Map = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """See :func:`generate`. The defaults are what shrinking aims at, so what a shrunk case needs stands out.

    Attributes:
        seed: where the case comes from; None once it was shrunk.
        model: ``"conditional"`` (Gemma4ForConditionalGeneration) or ``"causal"`` (Gemma4ForCausalLM).
        layers: text layers, 4-9 (a shrunk case may have fewer).
        period: every ``period``-th text layer has full attention, and the last.
        kv_shared: how many of the last text layers share keys and values.
        per_layer: with per-layer embeddings.
        experts: dense, or a mixture of experts beside the dense MLP.
        keys_are_values: full attention has no value projection, as in the big models.
        wide_mlp: KV-shared layers have MLPs of double width, as in E2B.
        vision: with a vision tower.
        audio: with an audio tower.
        quantization: None (bf16), ``"4bit"``, ``"4bit-double"`` or ``"8bit"``.
        adapter: None, or a LoRA on ``"text"``, ``"towers"`` or ``"both"``.
        prompt: ``"text"``, or ``"media"``: an image and a sound, where there are towers for them.
        load: ``"from_pretrained"`` with a ``device_map``, or onto one device and then ``"dispatch_model"``.
        skip_keys: for ``dispatch_model``: ``"none"``, as accelerate's documentation calls it, or ``"own"``, the
            model's own list, as transformers calls it.
        offloaded_to: ``"cpu"`` or ``"disk"``; where the model computes on the CPU always the disk.
        placement: the map.
    """

    seed: int | None = None
    model: str = "causal"
    layers: int = 2
    period: int = 2
    kv_shared: int = 0
    per_layer: bool = False
    experts: bool = False
    keys_are_values: bool = False
    wide_mlp: bool = False
    vision: bool = False
    audio: bool = False
    quantization: str | None = None
    adapter: str | None = None
    prompt: str = "text"
    load: str = "dispatch_model"
    skip_keys: str = "own"
    offloaded_to: str = "cpu"
    placement: Map

    @property
    def config_key(self) -> tuple[Any, ...]:
        """Equal for cases that have the same checkpoint."""
        return (
            self.model, self.layers, self.period, self.kv_shared, self.per_layer, self.experts, self.keys_are_values,
            self.wide_mlp, self.vision, self.audio,
        )  # fmt: skip

    @property
    def reference_key(self) -> tuple[Any, ...]:
        """Equal for cases that must give the same outputs."""
        return (*self.config_key, self.quantization, self.adapter, self.prompt)

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        data["placement"] = dict(self.placement)
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Case:
        data = json.loads(text)
        data["placement"] = tuple(data["placement"].items())
        return cls(**data)


@dataclass(frozen=True)
class Node:
    """A module that a map may name.

    ``splittable`` says that its children (here) are all it has, so a map may name each of them and not the module
    itself. Otherwise it has tensors of its own, or its children differ between releases.
    """

    name: str
    children: tuple[Node, ...] = ()
    splittable: bool = False


def tree(case: Case) -> Node:
    """The modules of the case's model, from the model itself ("") down to single projections."""

    def node(name: str, *children: Node, splittable: bool = True) -> Node:
        return Node(name, children, splittable and bool(children))

    def leaves(parent: str, *names: str) -> list[Node]:
        return [node(f"{parent}.{name}") for name in names]

    text = "model.language_model" if case.model == "conditional" else "model"

    def text_layer(index: int) -> Node:
        name = f"{text}.layers.{index}"
        parts = [
            # KV-shared layers have k_proj, v_proj and k_norm in some releases only.
            node(f"{name}.self_attn", *leaves(f"{name}.self_attn", "q_proj", "q_norm", "o_proj"), splittable=False),
            node(f"{name}.mlp", *leaves(f"{name}.mlp", "gate_proj", "up_proj", "down_proj")),
            *leaves(name, "input_layernorm", "post_attention_layernorm"),
            *leaves(name, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ]
        if case.per_layer:
            parts += leaves(name, "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
        if case.experts:
            parts += leaves(name, "router", "experts", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
            parts += leaves(name, "pre_feedforward_layernorm_2")
        return node(name, *parts, splittable=False)  # layer_scalar is its own

    def encoder_layer(name: str, *names: str) -> Node:
        return node(name, *leaves(name, *names), splittable=False)

    text_parts = [
        node(f"{text}.embed_tokens"),
        node(f"{text}.layers", *(text_layer(index) for index in range(case.layers))),
        node(f"{text}.norm"),
    ]
    if case.per_layer:
        text_parts += leaves(text, "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    if case.model == "causal":
        return node("", node("model", *text_parts), node("lm_head"))

    parts = [node(text, *text_parts)]
    if case.vision:
        tower = "model.vision_tower"
        layers = [encoder_layer(f"{tower}.encoder.layers.{i}", "self_attn", "mlp", "input_layernorm") for i in (0, 1)]
        embedder = node(f"{tower}.patch_embedder", node(f"{tower}.patch_embedder.input_proj"), splittable=False)
        parts += [
            node(tower, embedder, node(f"{tower}.encoder", node(f"{tower}.encoder.layers", *layers))),
            node("model.embed_vision", node("model.embed_vision.embedding_projection")),
        ]
    if case.audio:
        tower = "model.audio_tower"
        names = ("self_attn", "feed_forward1", "feed_forward2", "lconv1d", "norm_out")
        layers = [encoder_layer(f"{tower}.layers.{i}", *names) for i in (0, 1)]
        convolution = f"{tower}.subsample_conv_projection"
        parts += [
            node(
                tower,
                node(convolution, *leaves(convolution, "layer0", "layer1", "input_proj_linear")),
                node(f"{tower}.layers", *layers),
                node(f"{tower}.output_proj"),
                splittable=False,  # rel_pos_enc has a buffer, persistent in some releases
            ),
            node("model.embed_audio", node("model.embed_audio.embedding_projection")),
        ]
    return node("", node("model", *parts), node("lm_head"))


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def owner(placement: Map, tensor: str) -> str | None:
    """The key of the most specific entry that covers a tensor; None where none does."""
    covering = [name for name, _ in placement if name == "" or tensor == name or tensor.startswith(f"{name}.")]
    return max(covering, key=len, default=None)


def is_complete(case: Case) -> bool:
    """Whether the map covers every module, and something stays on the main device.

    A model that is offloaded as a whole has no main device: with "cpu" entries alone accelerate computes on the CPU.
    """

    def covered(node: Node) -> bool:
        if owner(case.placement, node.name) is not None:
            return True
        return node.splittable and all(covered(child) for child in node.children)

    places = dict(case.placement)
    leaves = [node.name for node in walk(tree(case)) if not node.children]
    if not covered(tree(case)):
        return False
    return MAIN in {places[key] for key in (owner(case.placement, leaf) for leaf in leaves) if key is not None}


def generate(seed: int) -> Case:
    """The case of a seed."""
    shape = random.Random(f"shape {seed // GROUP}")
    layers, period = shape.randint(4, 9), shape.choice((2, 3))
    per_layer = shape.random() < 0.7
    # Sharing needs an unshared layer of each type before it. Without per-layer embeddings there is none: generate then
    # raises in transformers 5.23.0 on one device too, without this package (F108), and no released model is like that.
    kv_shared = min(shape.randint(0, 4), layers - period) if per_layer else 0
    causal = shape.random() < 0.3
    vision = not causal and shape.random() < 0.8
    audio = not causal and shape.random() < 0.6
    kinds = []
    for number in range(KINDS):
        # One kind is always bf16: only there a map can be given to from_pretrained (see below).
        quantization = shape.choice(QUANTIZATIONS[1:]) if number else None
        adapter = shape.choice(ADAPTERS if vision or audio else ADAPTERS[:2])
        prompt = shape.choice(("text", "media", "media")) if vision or audio else "text"
        kinds.append((quantization, adapter, prompt))
    config: dict[str, Any] = {
        "model": "causal" if causal else "conditional",
        "layers": layers,
        "period": period,
        "kv_shared": kv_shared,
        "per_layer": per_layer,
        "experts": shape.random() < 0.3,
        "keys_are_values": shape.random() < 0.25,
        "wide_mlp": shape.random() < 0.5,
        "vision": vision,
        "audio": audio,
    }
    chosen = random.Random(f"case {seed}")
    quantization, adapter, prompt = chosen.choice(kinds)
    load = chosen.choice(("from_pretrained", "dispatch_model"))
    if quantization is not None:
        # from_pretrained leaves "cpu" and "disk" entries of a quantized model in bf16 (on purpose), which are other
        # weights than the reference's, and where the model computes on the CPU it refuses them.
        load = "dispatch_model"
    case = Case(
        seed=seed,
        **config,
        quantization=quantization,
        adapter=adapter,
        prompt=prompt,
        load=load,
        skip_keys=chosen.choice(("none", "own")) if load == "dispatch_model" else "own",
        offloaded_to=chosen.choice(("cpu", "disk")),
        placement=(),
    )
    while True:
        case = dataclasses.replace(case, placement=random_map(chosen, tree(case)))
        if is_complete(case):
            return case


def random_map(chosen: random.Random, root: Node) -> Map:
    """Entries of any depth. Half of the maps are nested: entries below other entries, in either direction."""
    entries: dict[str, str] = {}
    offloaded = chosen.choice((0.15, 0.4, 0.7))  # the share that is offloaded
    stop = chosen.choice((0.15, 0.35, 0.7))  # how likely an entry is for a whole module, not for its parts
    override = chosen.choice((0.0, 0.0, 0.02, 0.08))  # how likely a module below an entry has one of its own

    def place() -> str:
        return OFFLOADED if chosen.random() < offloaded else MAIN

    def visit(node: Node, above: str | None) -> None:
        if above is None:
            root_of_all = node.name in ("", "model")
            if not node.splittable or chosen.random() < (stop / 4 if root_of_all else stop):
                above = entries[node.name] = place()
        elif chosen.random() < override:
            above = entries[node.name] = OFFLOADED if above == MAIN else MAIN
        for child in node.children:
            if above is None or override:
                visit(child, above)

    visit(root, None)
    items = list(entries.items())
    if chosen.random() < 0.25:
        chosen.shuffle(items)  # the order of a map is the user's
    return tuple(items)


def simplifications(case: Case) -> Iterator[Case]:
    """Simpler cases, the biggest steps first. Not all of them are complete; see :func:`is_complete`."""

    def but(**changes: Any) -> Case:
        return dataclasses.replace(case, seed=None, **changes)

    def without_modules(**changes: Any) -> Case:
        smaller = but(**changes)
        names = {node.name for node in walk(tree(smaller))}
        return dataclasses.replace(smaller, placement=tuple(item for item in case.placement if item[0] in names))

    if case.adapter is not None:
        yield but(adapter=None)
    if case.quantization is not None:
        yield but(quantization=None)
    if case.prompt != "text":
        yield but(prompt="text")
    if case.model == "conditional" and case.adapter in (None, "text"):
        inner = [
            (name.replace("model.language_model", "model"), place)
            for name, place in case.placement
            if "_tower" not in name and not name.startswith("model.embed_")
        ]
        yield but(model="causal", vision=False, audio=False, prompt="text", placement=tuple(dict(inner).items()))
    for tower in ("vision", "audio"):
        others = {"vision", "audio"} - {tower}
        if getattr(case, tower) and (case.adapter in (None, "text") or any(getattr(case, other) for other in others)):
            alone = not any(getattr(case, other) for other in others)
            yield without_modules(**{tower: False}, **({"prompt": "text"} if alone else {}))
    for field in ("experts", "keys_are_values", "wide_mlp"):
        if getattr(case, field):
            yield without_modules(**{field: False})
    if case.kv_shared:
        yield but(kv_shared=0)
    elif case.per_layer:
        yield without_modules(per_layer=False)
    for layers in (case.period, case.period + 1, case.layers - 2, case.layers - 1):
        if case.period <= layers < case.layers and layers - case.kv_shared >= case.period:
            yield without_modules(layers=layers)
    if case.period == 3 and case.layers > 2:
        yield but(period=2)
    if case.offloaded_to == "disk":
        yield but(offloaded_to="cpu")
    if case.load == "from_pretrained":
        yield but(load="dispatch_model")
    elif case.skip_keys == "none":
        yield but(skip_keys="own")
    yield from (but(placement=placement) for placement in (*simpler_maps(case), *_renumbered(case)))


def simpler_maps(case: Case) -> Iterator[Map]:
    placement = case.placement
    root = tree(case)
    # one entry for all that is below a module
    for node in walk(root):
        below = [item for item in placement if node.name == "" or item[0].startswith(f"{node.name}.")]
        if len(below) > 1 and node.children:
            for place in (MAIN, OFFLOADED):
                yield (*(item for item in placement if item not in below and item[0] != node.name), (node.name, place))
    for item in placement:
        yield tuple(other for other in placement if other != item)
    for item in placement:
        if item[1] == OFFLOADED:
            yield tuple((name, MAIN if name == item[0] else place) for name, place in placement)
    # as if written by hand: the order of the modules
    order = {node.name: position for position, node in enumerate(walk(root))}
    ordered = tuple(sorted(placement, key=lambda item: order[item[0]]))
    if ordered != placement:
        yield ordered


def _renumbered(case: Case) -> Iterator[Map]:
    """Entries for one text layer moved to an earlier one that has none, so that the later can go."""
    pattern = r"(model\.(?:language_model\.)?layers\.)(\d+)(.*)"
    matches = {name: re.fullmatch(pattern, name) for name, _ in case.placement}
    named = sorted({int(match[2]) for match in matches.values() if match})
    free = [index for index in range(case.layers) if index not in named]
    for index in reversed(named):
        for earlier in (other for other in free if other < index):
            yield tuple(
                (f"{match[1]}{earlier}{match[3]}" if match and int(match[2]) == index else name, place)
                for (name, place), match in zip(case.placement, matches.values())
            )


def size(case: Case) -> tuple[int, ...]:
    """What shrinking makes smaller, most important first; it only ever steps down, so it ends."""
    features = (
        case.adapter is not None, case.quantization is not None, case.prompt != "text", case.model == "conditional",
        case.vision, case.audio, case.experts, case.keys_are_values, case.wide_mlp, case.per_layer,
    )  # fmt: skip
    offloaded = sum(place == OFFLOADED for _, place in case.placement)
    loading = (case.load == "from_pretrained") * 4 + (case.skip_keys == "none") * 2 + (case.offloaded_to == "disk")
    order = {node.name: position for position, node in enumerate(walk(tree(case)))}
    positions = [order[name] for name, _ in case.placement]
    indices = sum(int(index) for name, _ in case.placement for index in re.findall(r"\d+", name))
    inversions = sum(a > b for a, b in itertools.pairwise(positions))
    return (
        sum(features), case.kv_shared, case.layers, case.period, len(case.placement), loading, offloaded, indices,
        inversions,
    )  # fmt: skip
