"""Which operation may follow which: the sequence of a seed.

As in ``case.py`` a sequence is a pure function of its seed, the same on every stack and machine, and JSON. Those of
one group share a checkpoint. What the libraries cannot do on one device either need not be kept out: there a sequence
ends.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

from tests.generated.search import case as cases
from tests.generated.search.case import GROUP, MAIN, OFFLOADED, QUANTIZATIONS, Case, Map, is_complete
from tests.generated.search.sequence import Operation, Sequence, operation

#: Adapters by what they train; see ``sequences_bench.py``.
KINDS = ("text", "towers", "both", "dora", "head", "save-head", "save-embedding", "tokens")
#: How many different adapters there are of each kind, so that two of one kind can be told apart.
VARIATIONS = 2
NAMES = ("a", "b", "c")


@dataclass
class State:
    """What is known of the model while a sequence is generated.

    Attributes:
        case: of the sequence.
        choose: where choices come from.
        choose_later: where those come from that were added later, so that a seed's other choices stay what they were.
        adapters: kinds by name.
        way: ``"peft"`` (a PeftModel) or ``"transformers"`` (``model.load_adapter``); None before the first adapter.
        plain: the adapter's layers are gone (``merge_and_unload``, ``unload``).
        hooked: hooks of the user's are there.
        merged: weights of the base have an adapter in them.
        over: nothing may follow.
    """

    case: Case
    choose: random.Random
    choose_later: random.Random
    adapters: dict[str, str] = field(default_factory=dict)
    way: str | None = None
    hooked: bool = False
    merged: bool = False
    over: bool = False

    @property
    def prompts(self) -> tuple[str, ...]:
        return ("text", "media", "media") if self.case.vision or self.case.audio else ("text",)

    @property
    def layer(self) -> int:
        """One of the text layers."""
        return self.choose.randrange(self.case.layers)


def generate(seed: int) -> Sequence:
    """The sequence of a seed."""
    case = _shape(random.Random(f"sequence shape {seed // GROUP}"))
    choose = random.Random(f"sequence {seed}")
    quantization = choose.choice((None, *QUANTIZATIONS))
    load = choose.choice(("from_pretrained", "dispatch_model"))
    if quantization is not None:
        load = "dispatch_model"  # see case.generate
    case = dataclasses.replace(
        case, quantization=quantization, load=load, offloaded_to=choose.choice(("cpu", "disk")), skip_keys="own"
    )
    case = dataclasses.replace(case, placement=some_map(choose, case))
    state = State(case, choose, random.Random(f"sequence {seed}, later"))
    steps: list[Operation] = []
    if choose.random() < 0.6:
        steps += filter(None, [_load_adapter(state)])
    for _ in range(choose.randint(1, 5)):
        if state.over:
            break
        steps.append(_step(state))
        if choose.random() < 0.6 and not state.over:
            steps.append(_forward(state))
    if not state.over:
        steps.append(operation("forward", prompt=state.prompts[-1]))
    return Sequence(case=case, operations=tuple(steps), seed=seed)


def _shape(choose: random.Random) -> Case:
    """The configuration of a group: as small as its kind can be."""
    layers, period = choose.randint(3, 5), choose.choice((2, 3))
    per_layer = choose.random() < 0.7
    causal = choose.random() < 0.3
    return Case(
        model="causal" if causal else "conditional",
        layers=layers,
        period=period,
        kv_shared=min(choose.randint(0, 2), layers - period) if per_layer else 0,  # see case.generate
        per_layer=per_layer,
        experts=choose.random() < 0.2,
        keys_are_values=choose.random() < 0.2,
        wide_mlp=choose.random() < 0.4,
        vision=not causal and choose.random() < 0.7,
        audio=not causal and choose.random() < 0.3,
        placement=(("", MAIN),),
    )


def some_map(choose: random.Random, case: Case) -> Map:
    """As a user writes it: some modules leave, the rest stays. Or any map."""
    while True:
        placement = cases.random_map(choose, cases.tree(case)) if choose.random() < 0.3 else _plain_map(choose, case)
        offloaded = OFFLOADED in dict(placement).values()
        if offloaded and is_complete(dataclasses.replace(case, placement=placement)):
            return placement


def _plain_map(choose: random.Random, case: Case) -> Map:
    nodes = [node.name for node in cases.walk(cases.tree(case))]
    ends = ("embed_tokens", "embed_tokens_per_layer", "lm_head", "_tower", "model.norm", "embedding_projection")
    large = [name for name in nodes if name.endswith(ends)]
    layers = [name for name in nodes if "_tower" not in name and name.rpartition(".")[0].endswith(".layers")]
    parts = [name for name in nodes if name.endswith((".mlp", ".self_attn", ".layers")) and "_tower" not in name]
    leave = [name for name in large if choose.random() < 0.35]
    leave += [name for name in layers if choose.random() < 0.3]
    leave += [choose.choice(parts)] if choose.random() < 0.2 else []
    if case.experts:
        experts = [name for name in nodes if name.endswith(".experts")]
        share = choose.choice((0.0, 0.5, 1.0))
        leave += [name for name in experts if choose.random() < share]
    return (("", MAIN), *((name, OFFLOADED) for name in dict.fromkeys(leave)))


def _step(state: State) -> Operation:
    """An operation that may come now; the state is afterwards that after it."""
    while True:
        rule = state.choose.choices(RULES, [weight for weight, _ in RULES])[0][1]
        found: Operation | None = rule(state)
        if found is not None:
            return found


def _forward(state: State) -> Operation:
    choose, prompt = state.choose, state.choose.choice(state.prompts)
    kind = choose.randrange(11)
    if kind == 10:
        return operation("forward", prompt="text", embeddings=True, gradients=choose.random() < 0.5)
    if kind < 6:
        return operation("forward", prompt=prompt)
    if kind == 6:
        return operation("forward", prompt=prompt, batch=choose.choice(("two", "padded")))
    if kind == 7:
        return operation("forward", prompt="text", attentions=True)
    if kind == 8:
        return operation("forward", prompt=prompt, autocast=choose.choice(("bfloat16", "bfloat16", "float16")))
    return operation("forward", prompt=prompt, gradients=True)


def _generate(state: State) -> Operation:
    mode, static = state.choose.choice(("greedy", "sample", "beams")), state.choose_later.random() < 0.5
    return operation("generate", prompt=state.choose.choice(state.prompts), mode=mode, static=static)


def _turns(state: State) -> Operation:
    return operation("turns", prompt=state.choose.choice(state.prompts), turns=state.choose.randint(2, 3))


def _load_adapter(state: State) -> Operation | None:
    free = [name for name in NAMES if name not in state.adapters]
    if not free:
        return None
    choose = state.choose
    towers = state.case.vision or state.case.audio
    kind = choose.choice([kind for kind in KINDS if towers or kind not in ("towers", "both")])
    if state.way is None:
        state.way = choose.choice(("peft", "peft", "peft", "transformers"))
    if kind in ("tokens", "dora") and state.way == "transformers":
        kind = "text"
    name = free[0]
    state.adapters[name] = kind
    trainable = choose.random() < 0.7
    return operation(
        "load_adapter",
        adapter=name,
        kind=kind,
        number=choose.randrange(VARIATIONS),
        way=state.way,
        trainable=trainable,
    )


def _new_adapter(state: State) -> Operation | None:
    free = [name for name in NAMES if name not in state.adapters]
    if not free or state.way == "transformers":
        return None
    towers = state.case.vision or state.case.audio
    kind = state.choose.choice([kind for kind in KINDS if towers or kind not in ("towers", "both")])
    state.way, state.adapters[free[0]] = "peft", kind
    return operation("new_adapter", adapter=free[0], kind=kind)


def _on_adapter(name: str, **needs: bool) -> Any:
    """An operation on one of the loaded adapters."""

    def rule(state: State) -> Operation | None:
        if not state.adapters or (needs.get("peft") and state.way != "peft"):
            return None
        chosen = state.choose.choice(sorted(state.adapters))
        if name == "delete_adapter":
            del state.adapters[chosen]
        return operation(name, adapter=chosen)

    return rule


def _on_adapters(name: str) -> Any:
    """An operation on whatever adapters there are, of a PeftModel."""

    def rule(state: State) -> Operation | None:
        if not state.adapters or state.way != "peft":
            return None
        if name in ("merge_and_unload", "unload"):
            state.adapters.clear()
            state.way = None
        return operation(name)

    return rule


def _disable(state: State) -> Operation | None:
    return operation("disable_adapter", prompt=state.choose.choice(state.prompts)) if state.adapters else None


def _weighted(state: State) -> Operation | None:
    free = [name for name in NAMES if name not in state.adapters]
    if len(state.adapters) < 2 or state.way != "peft" or not free:
        return None
    names = sorted(state.adapters)[:2]
    state.adapters[free[0]] = "text"
    how = state.choose.choice(("linear", "cat", "svd"))
    return operation("add_weighted_adapter", adapters=tuple(names), adapter=free[0], combination=how)


def _hotswap(state: State) -> Operation | None:
    able = [name for name, kind in sorted(state.adapters.items()) if kind in ("text", "towers", "both")]
    if not able or state.way != "peft":
        return None
    name = state.choose.choice(able)
    number = state.choose.randrange(VARIATIONS)
    return operation("hotswap", adapter=name, kind=state.adapters[name], number=number)


def _mixed(state: State) -> Operation | None:
    if not state.adapters or state.way != "peft":
        return None
    names = [state.choose.choice(("__base__", *sorted(state.adapters))) for _ in range(2)]
    return operation("mixed_batch", adapters=tuple(names))


def _train(state: State) -> Operation | None:
    if not state.adapters:
        return None
    choose = state.choose
    return operation(
        "train",
        prompt=choose.choice(state.prompts),
        checkpointing=choose.choice(("none", "none", "reentrant", "not reentrant")),
        accumulate=choose.choice((1, 1, 2)),
        mode=choose.choice(("train", "train", "eval")),
        autocast=choose.choice(("none", "none", "bfloat16")),
    )


def _second_derivative(state: State) -> Operation | None:
    return operation("double_backward") if state.adapters else None


def _choice(name: str, **options: tuple[Any, ...]) -> Any:
    """An operation that may always come, with one of the values of each option."""

    def rule(state: State) -> Operation:
        return operation(name, **{key: state.choose.choice(values) for key, values in options.items()})

    return rule


def _redispatch(state: State) -> Operation:
    away = state.choose.choice(("cpu", "disk"))
    return operation("redispatch", placement=some_map(state.choose, state.case), offloaded_to=away)


def _hooks(state: State) -> Operation:
    kind = state.choose.choice(("pre_hook", "hook", "full_backward_hook", "replaced_forward"))
    return operation("user_hook", kind=kind, layer=state.layer)


def _failing(state: State) -> Operation:
    where = state.choose.choice(("layer", "mlp", "head"))
    gradients = state.choose.random() < 0.3
    return operation("failing_forward", where=where, layer=state.layer, gradients=gradients)


def _failing_backward(state: State) -> Operation:
    return operation("failing_backward", layer=state.layer)


def _change(state: State) -> Operation:
    return operation("change_weight", layer=state.layer)


def _collect(state: State) -> Operation:
    state.over = True
    return operation("collect")


#: How often each is tried, and the rule that makes one; None says that it cannot come now.
RULES: tuple[tuple[int, Any], ...] = (
    (3, _generate),
    (3, _turns),
    (10, _load_adapter),
    (4, _new_adapter),
    (5, _on_adapter("set_adapter")),
    (4, _on_adapter("delete_adapter")),
    (3, _disable),
    (6, _on_adapters("merge_adapter")),
    (5, _on_adapters("unmerge_adapter")),
    (3, _on_adapters("merge_and_unload")),
    (4, _on_adapters("unload")),
    (12, _weighted),
    (6, _hotswap),
    (4, _mixed),
    (9, _train),
    (4, _second_derivative),
    (3, _choice("to_dtype", how=("float", "half", "bfloat16", "to float32", "to float16"))),
    (1, _choice("prepare_for_training", checkpointing=(False, True))),
    (2, _choice("resize_token_embeddings", tokens=(256, 264, 272), mean=(False, True))),
    (2, _choice("tie_weights")),
    (2, _choice("save")),
    (2, _choice("reload")),
    (2, _choice("state_dict", saved=(False, True))),
    (2, _choice("load_state_dict", what=("all", "embedding", "layers"), assign=(False, False, True))),
    (2, _choice("deepcopy", keep=("copy", "original"))),
    (3, _redispatch),
    (1, _choice("remove_hooks")),
    (2, _hooks),
    (2, _choice("remove_user_hooks")),
    (3, _failing),
    (2, _failing_backward),
    (2, _change),
    (2, _choice("undo_and_install")),
    (2, _choice("second_model")),
    (2, _choice("to_model_device")),
    (2, _choice("threads", number=(2, 3))),
    (1, _collect),
)
