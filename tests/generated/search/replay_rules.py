"""What may change a model between two calls of ``generate``: the replay sequence of a seed.

As elsewhere a sequence is a pure function of its seed, the same on every stack and machine, and JSON. What a library
cannot do need not be kept out: that change is skipped, and whatever it has done before it raised stays.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.generated.search.case import GROUP, MAIN, OFFLOADED, Case
from tests.generated.search.replay_around import GRAPHS
from tests.generated.search.replay_showing import MODES
from tests.generated.search.replay_tuners import TUNERS
from tests.generated.search.sequence import Operation, Sequence, operation

PARTS = ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj", "input_layernorm")
WEIGHTS = (
    *("in place", "copied", "data", "transposed", "reshaped", "parameter", "float32", "bias", "no bias"),
    "parametrized",
)
OPTIMIZERS = ("sgd", "sgd fused", "adamw fused", "adamw foreach")
ATTRIBUTES = ("number", "epsilon", "activation", "config", "softcap")
#: Those that a forward of the user's reads.
OWN = ("list", "dict", "tensor", "nested", "switch")
EXTRAS = ("eos", "max_length", "criteria", "penalty", "hidden", "scores", "chunks", "constraint", "processor")
#: Whose undoing changes what a forward computes, or how it gets there.
PATCHES = (
    *("transformers-sliding-cache", "accelerate-paged-layers", "transformers-wide-heads", "peft-adapter-load"),
    *("transformers-deferred-stop", GRAPHS),
)


@dataclass
class State:
    """What is known of the model while a sequence is drawn.

    Attributes:
        case: of the sequence.
        choose: where choices come from.
        tuner: of its adapters; None: it gets none.
        adapters: their names.
        own: a layer has a forward of the user's.
        saved: how many were saved.
    """

    case: Case
    choose: random.Random
    tuner: str | None
    adapters: list[str] = field(default_factory=list)
    own: bool = False
    saved: int = 0

    @property
    def layer(self) -> int:
        return self.choose.randrange(self.case.layers)

    @property
    def adapter(self) -> str:
        return self.choose.choice(self.adapters or ["a"])

    @property
    def seed(self) -> int:
        return self.choose.randrange(100)


def generate(seed: int) -> Sequence:
    """The sequence of a seed."""
    case = _shape(random.Random(f"replay shape {seed // GROUP}"))
    choose = random.Random(f"replay {seed}")
    quantization = choose.choices((None, "4bit", "4bit-double"), (8, 1, 1))[0]
    places = {"": MAIN}
    if quantization is None and choose.random() < 0.15:  # streamed
        prefix = "model" if case.model == "causal" else "model.language_model"
        places |= {f"{prefix}.layers.{index}": OFFLOADED for index in range(case.layers) if choose.random() < 0.7}
    case = dataclasses.replace(case, quantization=quantization, placement=tuple(places.items()))
    state = State(case, choose, choose.choice(list(TUNERS)) if choose.random() < 0.6 else None)
    steps = [operation("decode_fast", enabled=True)] if choose.random() < 0.6 else []
    if choose.random() < 0.4:
        state.own = True
        steps.append(operation("own_forward", layer=0))
    if state.tuner is not None and choose.random() < 0.8:
        steps.append(_new_adapter(state))
    shown = _showing(state)
    steps.append(shown)
    for _ in range(choose.randint(3, 5)):
        steps.append(_change(state))
        if choose.random() < 0.3:
            steps.append(_change(state))
        # As the one before in most cases, so that a graph is there that would serve.
        shown = _again(shown) if choose.random() < 0.6 else _showing(state)
        steps.append(shown)
    return Sequence(case=case, operations=tuple(steps), seed=seed)


def _again(shown: Operation) -> Operation:
    """The same, without what keeps it from being replayed, or from ending."""
    options = {key: value for key, value in shown.options if key not in ("inside", "fails", "names")}
    return operation(shown.name, **options)


def _shape(choose: random.Random) -> Case:
    """The configuration of a group: as small as its kind can be."""
    layers, per_layer = choose.choice((2, 2, 3)), choose.random() < 0.5
    return Case(
        model="causal" if choose.random() < 0.8 else "conditional",
        layers=layers,
        kv_shared=layers - 2 if per_layer else 0,
        per_layer=per_layer,
        experts=choose.random() < 0.15,
        keys_are_values=choose.random() < 0.2,
        placement=(("", MAIN),),
    )


def _showing(state: State) -> Operation:
    choose = state.choose
    kind = choose.randrange(20)
    if kind == 0:
        return operation("turns", seed=state.seed)
    if kind == 2:
        return operation("on_the_returned_cache", seed=state.seed, cache=choose.choice(("static", "dynamic")))
    if kind == 1 and not state.case.experts:  # quantized ones are unpacked in place: upstream's threads are inexact
        return operation("threads", seed=state.seed)
    options = {
        "mode": choose.choice(list(MODES)) if choose.random() < 0.4 else "greedy",
        "cache": choose.choices(("static", "fast", "own", "dynamic", "none"), (9, 6, 3, 1, 1))[0],
    }
    if choose.random() < 0.3:
        options["rows"] = 2
    if choose.random() < 0.3:
        options["length"] = choose.choice((2, 3, 6, 9))
    if choose.random() < 0.4:
        options["new"] = choose.choice((4, 5, 7))
    if choose.random() < 0.3:
        options["extra"] = choose.choice(EXTRAS)
    if choose.random() < 0.1:
        options["fails"] = choose.choice(("error", "interrupt"))
    if choose.random() < 0.2:
        within = ("inference", "gradients", "autocast")
        options["inside"] = "disabled" if state.tuner and choose.random() < 0.8 else choose.choice(within)
    if state.adapters and options.get("rows") == 2 and choose.random() < 0.3:
        options["names"] = (state.adapter, choose.choice([*state.adapters, "__base__"]))
    return operation("generate", seed=state.seed, **options)


def _change(state: State) -> Operation:
    """A change that may come now; the state is afterwards that after it."""
    adapters = state.tuner is not None and state.choose.random() < 0.65
    rules = ADAPTERS if adapters else CHANGES
    return state.choose.choices(list(rules), list(rules.values()))[0](state)


def _new_adapter(state: State) -> Operation:
    name = "abcdefgh"[len(state.adapters) % 8]
    state.adapters.append(name)
    tuner = state.tuner if state.choose.random() < 0.9 else state.choose.choice(list(TUNERS))
    return operation("new_adapter", adapter=name, tuner=tuner, seed=state.seed)


def _set_adapter(state: State) -> Operation:
    if not state.adapters:
        return _new_adapter(state)
    several = len(state.adapters) > 1 and state.choose.random() < 0.2
    return operation("set_adapter", adapters=tuple(state.adapters[:2]) if several else (state.adapter,))


def _save_adapter(state: State) -> Operation:
    state.saved += 1
    return operation("save_adapter")


def _load_adapter(state: State) -> Operation:
    if not state.saved:
        return _save_adapter(state)
    if state.choose.random() < 0.5:
        return operation("hotswap", adapter=state.adapter, number=state.choose.randrange(3))
    state.adapters.append("abcdefgh"[len(state.adapters) % 8])
    return operation("load_adapter", adapter=state.adapters[-1], number=state.choose.randrange(3))


def _add_weighted(state: State) -> Operation:
    combination = state.choose.choice(("linear", "cat", "svd"))
    return operation("add_weighted_adapter", adapters=tuple(state.adapters[:2]), combination=combination)


def _delete_adapter(state: State) -> Operation:
    if len(state.adapters) < 2:
        return _new_adapter(state)
    state.adapters.remove(gone := state.adapter)
    return operation("delete_adapter", adapter=gone)


def _attribute(state: State) -> Operation:
    if state.own and state.choose.random() < 0.6:
        return operation("own_attribute", layer=0, what=state.choose.choice(OWN))
    return operation("attribute", layer=state.layer, what=state.choose.choice(ATTRIBUTES))


def _several(name: str, **options: tuple[object, ...]) -> Callable[[State], Operation]:
    """A rule: one of the values for each option; where ``layer`` or ``seed`` has none, any."""

    def rule(state: State) -> Operation:
        own = {"layer": state.layer, "seed": state.seed, "adapter": state.adapter}
        return operation(name, **{key: state.choose.choice(vs) if vs else own[key] for key, vs in options.items()})

    return rule


ANY: tuple[object, ...] = ()
NUMBERS: tuple[object, ...] = tuple(range(12))
#: By how often they are drawn.
ADAPTERS: dict[Callable[[State], Operation], int] = {
    _new_adapter: 5,
    _set_adapter: 6,
    _several("disable_layers"): 4,
    _several("enable_layers"): 4,
    _several("disable_one", number=NUMBERS, enabled=(False, False, True)): 2,
    _several("merge_adapter", safe=(False, True)): 4,
    _several("unmerge_adapter"): 3,
    _several("merge_one", number=NUMBERS): 2,
    _add_weighted: 2,
    _delete_adapter: 3,
    _several("set_scale", adapter=ANY, by=("set", "scale", "unscale", "dictionary")): 2,
    _several("change_adapter", seed=ANY, by=("in place", "data")): 4,
    _save_adapter: 2,
    _load_adapter: 3,
    _several("merge_and_unload"): 2,
    _several("unload"): 1,
    _several("train", seed=ANY, optimizer=OPTIMIZERS): 3,
}
CHANGES: dict[Callable[[State], Operation], int] = {
    _several("weight", layer=ANY, part=PARTS, by=WEIGHTS): 10,
    _several("buffer", layer=ANY, by=("in place", "another", "type", "frequencies")): 3,
    _attribute: 10,
    _several("module", layer=ANY, by=("swapped", "copied", "shared", "class", "identity", "forward")): 6,
    _several("function", of=("class", "call", "global", "registered")): 4,
    _several("cast", to=("float32", "bfloat16", "float16")): 2,
    _several("load_state_dict", layer=ANY, assign=(False, True)): 2,
    _several("head", by=("tied", "resized", "another")): 3,
    _several("attention", implementation=("eager", "sdpa")): 2,
    _several("mode", layer=(None, 0, 1), training=(True, False, False)): 2,
    _several("hook", layer=ANY, kind=("own", "library", "library", "library", "before", "everywhere", "model")): 4,
    _several("remove_hooks"): 4,
    _several("copied", by=("deepcopy", "pickle"), keep=(True, False)): 3,
    _several("decode_fast", enabled=(True, True, False)): 2,
    _several("undo_and_install", patch=(None, *PATCHES)): 2,
    _several("undo", patch=PATCHES): 2,
    _several("hold_cache"): 2,
    _several("edit_cache", by=("written", "reset")): 2,
    _several("train", seed=ANY, optimizer=OPTIMIZERS): 1,
    _several("requires_grad", layer=ANY, part=PARTS, trained=(True, False)): 2,
    _several("let_go"): 2,
    _several("longest_cache", length=(24, 32, None)): 1,
    _several("settings", what=("precision", "type", "deterministic")): 2,
    _several("forward"): 2,
    _several("transformers_adapter", adapter=("t",), seed=ANY): 1,
}
