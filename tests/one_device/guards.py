"""Ways to change a model between two calls, and what each feature that keeps something does about it.

The features notice different things: ``reuse_prefix`` keeps keys and values, which every weight has gone into;
``decode_fast`` and ``train_fast`` keep graphs, which read weights where they are. A cell of the table says which of
three things holds: see :data:`Cell`. ``test_guards`` runs every cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemma4_compat._engine import versions

FEATURES = ("reuse_prefix", "decode_fast", "train_fast")


@dataclass(frozen=True)
class Noticed:
    """What was kept is not used: a prompt is read again, a graph captured again, or a layer runs without one."""


@dataclass(frozen=True)
class CannotMatter:
    """What was kept goes on being used, and the answers are right."""

    because: str


@dataclass(frozen=True)
class Documented:
    """It is not noticed, and a page of the documentation says so, with what to do about it."""

    page: str
    words: str


Cell = Noticed | CannotMatter | Documented
Change = Callable[[Any], Any]
NOTICED = Noticed()
ADDRESSES = CannotMatter("a graph reads weights where they are")
AUTOGRAD = CannotMatter("autograd runs it, outside of every graph")
NO_GRADIENT = CannotMatter("generate computes no gradients")
COPIED = CannotMatter("weights are copied from the host for every token")
EAGER = CannotMatter("layers whose weights are offloaded have no graph")
NOTHING = CannotMatter("nothing is computed otherwise")
PARTS = Documented("docs/DECODING.md", "into a part of a weight that is in host memory may be missed")
STATE = Documented("docs/DECODING.md", "what a hook of yours reads elsewhere")
WITH_HOOKS = CannotMatter("with a hook of the user's, each token and each layer runs without a graph")


@dataclass(frozen=True)
class Way:
    """A way to change a model.

    Attributes:
        change: makes it.
        cells: for each of :data:`FEATURES`.
        model: which one: ``"plain"`` has two adapters and trained norms, in float32; ``"4bit"``; ``"streamed"``.
        before: what happens to the model first.
        shows: whether ``generate`` answers otherwise afterwards.
        full: whether the fast suite leaves it out.
    """

    change: Change
    cells: tuple[Cell, Cell, Cell]
    model: str = "plain"
    before: Change | None = None
    shows: bool = True
    full: bool = True


def base(model: Any) -> Any:
    return model.get_base_model()


def layer(model: Any) -> Any:
    return base(model).get_decoder().layers[1]


def up(model: Any) -> Any:
    """A frozen weight of the base."""
    return layer(model).mlp.up_proj.base_layer


def norm(model: Any) -> Any:
    """A trained one."""
    return layer(model).input_layernorm


def table(model: Any) -> Any:
    return base(model).get_input_embeddings()


def adapters(model: Any, part: str = "lora_B.default") -> list[Any]:
    return [weight for name, weight in model.named_parameters() if part in name]


def writes(write: Callable[[Any], Any], *, inference: bool = False) -> Change:
    """Of a weight of the base, in place."""

    def change(model: Any) -> None:
        import torch

        with torch.inference_mode() if inference else torch.no_grad():
            write(up(model).weight)

    return change


def optimized(made: Callable[[list[Any]], Any]) -> Change:
    """A step of training, by an optimizer."""

    def change(model: Any) -> None:
        import torch

        ids = torch.randint(3, 240, (2, 12), generator=torch.Generator().manual_seed(4))
        was, weights = model.training, [weight for weight in model.parameters() if weight.requires_grad]
        model.train()
        model.zero_grad()
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
        made(weights).step()
        model.zero_grad()
        model.train(was)

    return change


def of_torch(name: str, **options: Any) -> Change:
    def made(weights: list[Any]) -> Any:
        import torch

        return getattr(torch.optim, name)(weights, lr=0.05, **options)

    return optimized(made)


def of_bitsandbytes(name: str) -> Change:
    def made(weights: list[Any]) -> Any:
        import bitsandbytes
        import pytest

        if weights[0].device.type == "cpu" and versions.newer("0.50", bitsandbytes.__version__):
            pytest.skip("optimizers of bitsandbytes before 0.50 need a GPU")
        return getattr(bitsandbytes.optim, name)(weights, lr=0.05)

    return optimized(made)


def averaged(model: Any) -> None:
    """A moving average, as of EMA."""
    import torch

    with torch.no_grad():
        for weight in adapters(model):
            weight.lerp_(torch.ones_like(weight), 0.3)


def by_foreach(model: Any) -> None:
    import torch

    with torch.no_grad():
        torch._foreach_mul_(adapters(model), -1.0)


def by_vector(model: Any) -> None:
    import torch

    weights = [weight.detach() for weight in adapters(model)]
    torch.nn.utils.vector_to_parameters(-torch.nn.utils.parameters_to_vector(weights), adapters(model))


def negated(model: Any) -> None:
    for weight in adapters(model):
        weight.data.neg_()


def a_row(model: Any) -> None:
    """Of the embeddings, as for a token that is initialized by hand."""
    weight = table(model).weight
    weight.data[7] = weight.data[20:30].mean(0)


def two_rows(model: Any) -> None:
    """Exchanged: every sum over the whole weight stays what it was."""
    weight = up(model).weight
    weight.data.copy_(weight.data.flip(0))


def new_parameter(model: Any) -> None:
    import torch

    norm(model).weight = torch.nn.Parameter(-norm(model).weight.detach())


def scaled(model: Any) -> None:
    for module in model.modules():
        strengths = getattr(module, "scaling", None)
        if isinstance(strengths, dict):
            strengths["default"] *= 3.0


def third_adapter(model: Any) -> None:
    import torch

    torch.manual_seed(1)
    model.add_adapter("third", model.peft_config["default"])
    model.set_adapter("third")


def swapped_weights(model: Any) -> None:
    """As ``hotswap_adapter`` and ``set_peft_model_state_dict`` do."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name="default")
    set_peft_model_state_dict(model, {name: weight * -1.5 for name, weight in state.items()}, adapter_name="default")


def another_activation(model: Any) -> None:
    import torch

    layer(model).mlp.act_fn = torch.nn.ReLU().train(model.training)


def another_class(model: Any) -> None:
    mlp = layer(model).mlp
    forward = type(mlp).forward
    mlp.__class__ = type("Negated", (type(mlp),), {"forward": lambda self, states: -forward(self, states)})


def own_forward(model: Any) -> None:
    module = norm(model)
    forward = module.forward
    module.forward = lambda states: -forward(states)


def scalar(model: Any) -> None:
    layer(model).layer_scalar = layer(model).layer_scalar * 2


def hooked(model: Any) -> None:
    layer(model).mlp.register_forward_hook(lambda _module, _given, output: output.roll(1, -1))


def hooked_before(model: Any) -> None:
    norm(model).register_forward_pre_hook(lambda _module, given: (-given[0],))


def steered(model: Any) -> None:
    """A hook that reads how far to go from a dictionary of the user's."""
    amount = {"by": 1}
    model.steering = amount
    layer(model).mlp.register_forward_hook(lambda _module, _given, output: output.roll(amount["by"], -1))


def collected(model: Any) -> None:
    """Hooks of transformers, which stay."""
    import torch

    ids = torch.full((1, 4), 9)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)


def seen_backwards(model: Any) -> None:
    layer(model).mlp.register_full_backward_hook(lambda _module, given, _found: tuple(2 * one for one in given))


def hooked_everywhere(model: Any) -> Any:
    import torch

    one = norm(model)
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, _given, output: -output if module is one else None
    )


def seen_backwards_everywhere(model: Any) -> Any:
    import torch

    one = layer(model).mlp
    return torch.nn.modules.module.register_module_full_backward_hook(
        lambda module, given, _found: tuple(2 * each for each in given) if module is one else None
    )


def trained(part: str, wanted: bool) -> Change:
    def change(model: Any) -> None:
        for name, weight in model.named_parameters():
            if part in name and not weight.is_meta:
                weight.requires_grad_(wanted)

    return change


def only_trained(part: str) -> Change:
    """Only these are trained, of an adapter or of norms."""

    def change(model: Any) -> None:
        for name, weight in model.named_parameters():
            weight.requires_grad_(part in name)

    return change


def modes(model: Any) -> None:
    """To the other mode, and back."""
    for _ in range(2):
        model.train(not model.training)


def cast(model: Any) -> None:
    import torch

    model.to(torch.bfloat16)
    vars(base(model)).pop("_cache", None)  # of float32, which transformers keeps (before 5.15) and does not look at


def dispatched(model: Any) -> None:
    import torch
    from accelerate import dispatch_model

    from gemma4_compat._lab import tiny

    main = torch.device("cpu")
    placement = tiny.device_map(base(model), "towers", main=main, offloaded=main)
    placement["model.language_model.layers.1"] = "cpu"
    dispatch_model(base(model), placement, main_device=main, skip_keys=tiny.skip_keys(base(model)))


def scales(model: Any) -> None:
    """On some CPUs bitsandbytes packs weights anew in their first forward, and scales are nested no more."""
    state = up(model).weight.quant_state
    (state.offset if state.nested else state.absmax).data.mul_(3)


def stored(model: Any) -> Any:
    """A weight in host memory, as it is stored."""
    from gemma4_compat._gemma4.accelerate import module_hooks
    from gemma4_compat._offload import host_memory

    return host_memory.stored(module_hooks.offload_hook(up(model)).weights_map, "weight").raw


def a_place(model: Any) -> None:
    """One number of a weight in host memory, next to one that is compared."""
    stored(model).data.view(-1)[1] = 30.0


WAYS: dict[str, Way] = {
    # values
    "in place": Way(writes(lambda weight: weight.mul_(-1.5)), (NOTICED, ADDRESSES, ADDRESSES)),
    "in place, inference mode": Way(
        writes(lambda weight: weight.mul_(-1.5), inference=True), (NOTICED, ADDRESSES, ADDRESSES)
    ),
    ".data of the base": Way(
        lambda model: up(model).weight.data.mul_(-1.5), (NOTICED, ADDRESSES, ADDRESSES), full=False
    ),
    ".data of a norm": Way(lambda model: norm(model).weight.data.neg_(), (NOTICED, ADDRESSES, ADDRESSES)),
    ".data of a row": Way(a_row, (NOTICED, ADDRESSES, ADDRESSES)),
    ".data, rows exchanged": Way(two_rows, (NOTICED, ADDRESSES, ADDRESSES)),
    "a view of numpy": Way(
        lambda model: up(model).weight.detach().numpy().__imul__(-1.5), (NOTICED, ADDRESSES, ADDRESSES)
    ),
    "the storage": Way(
        lambda model: norm(model).weight.untyped_storage().fill_(0x3F), (NOTICED, ADDRESSES, ADDRESSES)
    ),
    "another .data": Way(
        lambda model: setattr(up(model).weight, "data", up(model).weight.data.flip(0).contiguous()),
        (NOTICED, NOTICED, NOTICED),
    ),
    "another parameter": Way(new_parameter, (NOTICED, NOTICED, NOTICED)),
    "a state dict": Way(
        lambda model: norm(model).load_state_dict({"weight": -norm(model).weight.detach()}),
        (NOTICED, ADDRESSES, ADDRESSES),
    ),
    "vector_to_parameters": Way(by_vector, (NOTICED, NOTICED, NOTICED)),
    # optimizers
    "AdamW": Way(of_torch("AdamW", foreach=False), (NOTICED, ADDRESSES, ADDRESSES)),
    "AdamW(foreach)": Way(of_torch("AdamW", foreach=True), (NOTICED, ADDRESSES, ADDRESSES)),
    "AdamW(fused)": Way(of_torch("AdamW", fused=True), (NOTICED, ADDRESSES, ADDRESSES), full=False),
    "SGD(fused)": Way(of_torch("SGD", fused=True), (NOTICED, ADDRESSES, ADDRESSES)),
    "AdamW8bit": Way(of_bitsandbytes("AdamW8bit"), (NOTICED, ADDRESSES, ADDRESSES)),
    "Lion of bitsandbytes": Way(of_bitsandbytes("Lion"), (NOTICED, ADDRESSES, ADDRESSES)),
    "_foreach_mul_": Way(by_foreach, (NOTICED, ADDRESSES, ADDRESSES)),
    "a moving average": Way(averaged, (NOTICED, ADDRESSES, ADDRESSES)),
    # buffers
    "a buffer in place": Way(lambda model: layer(model).layer_scalar.mul_(1.5), (NOTICED, ADDRESSES, ADDRESSES)),
    ".data of a buffer": Way(lambda model: layer(model).layer_scalar.data.mul_(1.5), (NOTICED, ADDRESSES, ADDRESSES)),
    "another buffer": Way(scalar, (NOTICED, NOTICED, NOTICED)),
    # adapters
    "an adapter's .data negated": Way(negated, (NOTICED, ADDRESSES, ADDRESSES), full=False),
    "an adapter's state dict": Way(swapped_weights, (NOTICED, ADDRESSES, ADDRESSES)),
    "another adapter": Way(lambda model: model.set_adapter("second"), (NOTICED, NOTICED, NOTICED)),
    "a new adapter": Way(third_adapter, (NOTICED, NOTICED, NOTICED)),
    "no adapter": Way(lambda model: model.base_model.disable_adapter_layers(), (NOTICED, NOTICED, NOTICED)),
    "an adapter's strength": Way(scaled, (NOTICED, NOTICED, NOTICED)),
    "merged": Way(lambda model: model.merge_adapter(["second"]), (NOTICED, NOTICED, NOTICED)),
    "merged and taken out": Way(
        lambda model: (model.merge_adapter(["second"]), model.unmerge_adapter()),
        (NOTICED, ADDRESSES, ADDRESSES),  # it rounds
        shows=False,
    ),
    # attributes, modules, code
    "a number": Way(
        lambda model: setattr(layer(model).self_attn, "scaling", 0.5), (NOTICED, NOTICED, NOTICED), full=False
    ),
    "an epsilon": Way(
        lambda model: setattr(layer(model).post_feedforward_layernorm, "eps", 1e3), (NOTICED, NOTICED, NOTICED)
    ),
    "an activation": Way(another_activation, (NOTICED, NOTICED, NOTICED)),
    "a class": Way(another_class, (NOTICED, NOTICED, NOTICED)),
    "a forward": Way(own_forward, (NOTICED, NOTICED, NOTICED)),
    "the configuration": Way(
        lambda model: setattr(base(model).config.get_text_config(), "final_logit_softcapping", 2.0),
        (NOTICED, NOTICED, NOTICED),
    ),
    # hooks
    "a hook": Way(hooked, (NOTICED, NOTICED, NOTICED)),
    "a hook on every module": Way(hooked_everywhere, (NOTICED, NOTICED, NOTICED)),
    "a hook before a norm": Way(hooked_before, (NOTICED, NOTICED, NOTICED)),
    "what a hook reads": Way(
        lambda model: model.steering.update(by=3), (STATE, WITH_HOOKS, WITH_HOOKS), before=steered
    ),
    "a hook that collects": Way(collected, (NOTHING, NOTHING, NOTHING), shows=False),
    "a backward hook": Way(seen_backwards, (NO_GRADIENT, NO_GRADIENT, NOTICED), shows=False),
    "a backward hook on every module": Way(
        seen_backwards_everywhere, (NO_GRADIENT, NO_GRADIENT, NOTICED), shows=False
    ),
    "a hook on a gradient": Way(
        lambda model: norm(model).weight.register_hook(lambda gradient: gradient * 2),
        (NO_GRADIENT, NO_GRADIENT, AUTOGRAD),
        shows=False,
    ),
    # what is trained
    "more is trained": Way(
        trained("lora_A.default", True),
        (NO_GRADIENT, NO_GRADIENT, NOTICED),
        before=trained("lora_A", False),
        shows=False,
        full=False,
    ),
    "a frozen base is trained": Way(trained("base_layer", True), (NO_GRADIENT, NO_GRADIENT, NOTICED), shows=False),
    "less is trained": Way(trained("layernorm", False), (NO_GRADIENT, NO_GRADIENT, NOTICED), shows=False),
    "something else is trained": Way(
        only_trained("layernorm"),
        (NO_GRADIENT, NO_GRADIENT, NOTICED),
        before=only_trained("lora_B.default"),
        shows=False,
    ),
    "inputs require gradients": Way(
        lambda model: base(model).enable_input_require_grads(),
        (NOTICED, NOTICED, NOTICED),  # by a hook
        shows=False,
    ),
    # devices, dtypes, modes
    "another dtype": Way(cast, (NOTICED, NOTICED, NOTICED)),
    "moved to where it is": Way(lambda model: model.to("cpu"), (NOTHING, NOTHING, NOTHING), shows=False),
    "a layer offloaded": Way(dispatched, (NOTICED, NOTICED, NOTICED), shows=False),
    "trained and back": Way(modes, (NOTHING, NOTHING, NOTHING), shows=False),
    # 4 bits
    "packed bytes": Way(two_rows, (NOTICED, ADDRESSES, ADDRESSES), model="4bit"),
    "scales": Way(scales, (NOTICED, ADDRESSES, ADDRESSES), model="4bit"),
    # offloaded
    "in host memory": Way(lambda model: stored(model).mul_(-1.5), (NOTICED, COPIED, EAGER), model="streamed"),
    ".data in host memory": Way(lambda model: stored(model).data.neg_(), (NOTICED, COPIED, EAGER), model="streamed"),
    "a place in host memory": Way(a_place, (PARTS, COPIED, EAGER), model="streamed"),
}
