"""What changes the model itself between two calls of ``generate``: weights, buffers, modules, attributes, types."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.generated.search.replay_world import ReplayWorld


def weight(world: ReplayWorld, layer: int, part: str, by: str) -> None:
    """Another weight: its memory written, its data replaced, or the parameter."""
    import torch

    module = world.part(layer, part)
    parameter = module.weight
    by_name: dict[str, Callable[[], Any]] = {
        "in place": lambda: parameter.data.mul_(-1.5),
        "copied": lambda: parameter.data.copy_(parameter.data.flip(0)),
        "data": lambda: setattr(parameter, "data", parameter.data.flip(0).contiguous()),
        "transposed": lambda: setattr(parameter, "data", parameter.data.t()),
        "reshaped": lambda: setattr(parameter, "data", parameter.data.as_strided(parameter.shape, (1, 1))),
        "parameter": lambda: setattr(module, "weight", torch.nn.Parameter(-parameter.detach(), requires_grad=False)),
        "float32": lambda: module.float(),
        "bias": lambda: setattr(module, "bias", torch.nn.Parameter(torch.ones_like(parameter[:, 0]))),
        "no bias": lambda: setattr(module, "bias", None),
        "parametrized": lambda: torch.nn.utils.parametrizations.weight_norm(module).eval(),
    }
    by_name[by]()


def requires_grad(world: ReplayWorld, layer: int, part: str, trained: bool) -> None:
    """A weight of the base that is unfrozen, or frozen."""
    world.part(layer, part).requires_grad_(trained)


def buffer(world: ReplayWorld, layer: int, by: str) -> None:
    found = world.layer(layer)
    if by == "in place":
        found.layer_scalar.mul_(1.5)
    elif by == "another":
        found.layer_scalar = found.layer_scalar * 2
    elif by == "type":
        found.layer_scalar = found.layer_scalar.float() * 2
    else:
        rotary = world.text.rotary_emb
        name = next(name for name in rotary._buffers if name.endswith("inv_freq"))
        setattr(rotary, name, getattr(rotary, name) * 0.5)


def attribute(world: ReplayWorld, layer: int, what: str) -> None:
    """A plain attribute, or what the configuration says."""
    import torch

    found = world.layer(layer)
    if what == "number":
        found.self_attn.scaling *= 0.5
    elif what == "epsilon":
        found.input_layernorm.eps = 0.5
    elif what == "activation":
        found.mlp.act_fn = torch.nn.ReLU().eval()
    elif what == "config":
        config = copy.deepcopy(world.text.config)
        config.final_logit_softcapping = 3.0
        world.base.config = config
    else:
        world.base.config.get_text_config().final_logit_softcapping = 2.0


def own_forward(world: ReplayWorld, layer: int) -> None:
    """A forward of the user's, which reads attributes of all kinds."""
    import torch

    module = world.layer(layer).mlp
    forward = module.forward
    module.own_list, module.own_dict = [1.0], {"factor": 1.0}
    module.own_tensor, module.own_nested = torch.ones(1), ([2.0],)

    def own(states: Any) -> Any:
        switched = -1.0 if getattr(module, "own_switch", False) else 1.0
        factor = module.own_list[0] * module.own_dict.get("further", 1.0) * switched * module.own_nested[0][0]
        found = forward(states)
        # Not a factor of all, which the norm that follows would undo.
        return torch.cat([found[..., :8] * factor * module.own_tensor.to(found.dtype), found[..., 8:]], dim=-1)

    module.forward = own


def own_attribute(world: ReplayWorld, layer: int, what: str) -> None:
    """What that forward reads: what is in a list or a dictionary, a tensor's data, a switch that was not there."""
    module = world.layer(layer).mlp
    if what == "list":
        module.own_list[0] += 1.0
    elif what == "dict":
        module.own_dict["further"] = 3.0 + module.own_dict.get("further", 0.0)
    elif what == "tensor":
        module.own_tensor.data = module.own_tensor.data * 2
    elif what == "nested":
        module.own_nested[0][0] += 0.5
    else:
        module.own_switch = not getattr(module, "own_switch", False)


def module(world: ReplayWorld, layer: int, by: str) -> None:
    """The tree of modules."""
    layers, other = world.text.layers, (layer + 1) % len(world.text.layers)
    if by == "swapped":
        layers[layer].mlp, layers[other].mlp = layers[other].mlp, layers[layer].mlp
    elif by == "copied":
        layers[layer].mlp = copy.deepcopy(layers[layer].mlp)
    elif by == "shared":
        layers[layer].mlp = layers[other].mlp
    elif by == "class":
        kind = type(layers[layer].mlp)
        layers[layer].mlp.__class__ = type("Negated", (kind,), {"forward": _negated(kind.forward)})
    elif by == "identity":
        import torch

        layers[layer].post_feedforward_layernorm = torch.nn.Identity().eval()
    else:
        norm = layers[layer].input_layernorm
        norm.forward = _negated(norm.forward)


def _negated(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: -forward(*args, **kwargs)


def function(world: ReplayWorld, of: str) -> None:
    """A function that forwards call is replaced, until the sequence ends or the next call."""
    import sys
    from unittest import mock

    attention = type(world.layer(0).self_attn)
    names = vars(sys.modules[attention.__module__])
    if world.undone._exit_callbacks:  # type: ignore[attr-defined]
        world.undone.close()
        return
    if of == "class":
        kind = type(world.layer(0).mlp)
        replaced = mock.patch.object(kind, "forward", _negated(kind.forward))
    elif of == "call":
        replaced = mock.patch.object(attention, "__call__", _first_negated(attention.__call__), create=True)
    elif of == "global":
        replaced = mock.patch.dict(names, {"apply_rotary_pos_emb": _doubled(names["apply_rotary_pos_emb"])})
    else:
        functions = names["ALL_ATTENTION_FUNCTIONS"]
        sdpa = functions["sdpa"]
        replaced = mock.patch.dict(functions, {"sdpa": lambda m, q, *a, **k: sdpa(m, q / 2, *a, **k)})
    world.undone.enter_context(replaced)


def _first_negated(call: Callable[..., Any]) -> Callable[..., Any]:
    def negated(*args: Any, **kwargs: Any) -> Any:
        first, *others = call(*args, **kwargs)
        return (-first, *others)

    return negated


def _doubled(rotary: Callable[..., Any]) -> Callable[..., Any]:
    return lambda states, *args, **kwargs: 2 * rotary(states, *args, **kwargs)


def cast(world: ReplayWorld, to: str) -> None:
    import torch

    world.model.to(getattr(torch, to))
    vars(world.base).pop("_cache", None)  # before transformers 5.15 of the other type, and it does not look


def load_state_dict(world: ReplayWorld, layer: int, assign: bool) -> None:
    norm = world.layer(layer).input_layernorm
    norm.load_state_dict({"weight": -norm.weight.data}, assign=assign)


def head(world: ReplayWorld, by: str) -> None:
    import torch

    output = world.base.get_output_embeddings()
    if by == "tied":
        world.base.tie_weights()
    elif by == "resized":
        world.base.resize_token_embeddings(264)
    else:
        output.weight = torch.nn.Parameter(output.weight.detach().flip(-1).contiguous(), requires_grad=False)


def attention(world: ReplayWorld, implementation: str) -> None:
    world.base.set_attn_implementation(implementation)


def mode(world: ReplayWorld, layer: int | None, training: bool) -> None:
    """The mode of the model, or of one module."""
    (world.model if layer is None else world.layer(layer).mlp).train(training)
