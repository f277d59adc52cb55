"""Calls of ``generate`` with and without replay, of models and scenarios that a CPU has and a GPU has."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import gemma4_compat
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._graphs import decoder
from gemma4_compat._lab import tiny
from tests.unit.offload import threads

PATCH = "transformers-graph-decoding"
NEW = 4  # tokens: of a prompt, of an eager step, and two of replays
WINDOW = 8  # of tiny models
TABLE = "model.language_model.embed_tokens_per_layer"
#: Ends replays.
EAGER = {"disable_compile": True}
#: Quantization, adapter and ``where`` of :class:`Models`.
PLACES = (
    (None, None, "device"),
    ("4bit-double", "language", "device"),
    ("4bit", None, "streamed"),
    (None, "all", "host"),
)
Outputs = list[Any]
#: Runs a ``generate`` or several, given further arguments for each.
Run = Callable[[dict[str, Any]], Outputs]


class Models:
    """Each model, loaded once.

    ``where``: everything on the "device"; the table of embeddings and towers on the "host"; and every layer
    "streamed". ``own``: after ``decode_fast``; otherwise steps have PyTorch's bits.
    """

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace
        self.known: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        quantization: str | None = "4bit-double",
        adapter: str | None = None,
        where: str = "device",
        *,
        own: bool = False,
    ) -> Any:
        key = quantization, adapter, where, own
        if key not in self.known:
            self.known[key] = self.fresh(quantization, adapter, where, own=own)
        return self.known[key]

    def fresh(
        self,
        quantization: str | None = "4bit-double",
        adapter: str | None = None,
        where: str = "device",
        *,
        own: bool = False,
    ) -> Any:
        """A model of the test's own, to change."""
        model = self.workspace.load(quantization)
        if where != "device":
            model = self._dispatched(model, streamed=where == "streamed")
        if own or (where == "device" and quantization is None):  # which transformers would compile
            gemma4_compat.decode_fast(model, exact=not own)
            model.generation_config.cache_implementation = None  # each call says
        return threads.adapted(self.workspace, model, adapter).eval()

    def _dispatched(self, model: Any, *, streamed: bool) -> Any:
        import torch
        from accelerate import dispatch_model

        main = torch.device(self.workspace.main)
        placement = tiny.device_map(model, "towers", main=main, offloaded="cpu")
        placement[TABLE] = "cpu"
        if streamed:
            placement |= {name: "cpu" for name in placement if ".layers." in name}
        skip = tiny.skip_keys(model)
        return dispatch_model(model, placement, main_device=main, skip_keys=skip)


def base(model: Any) -> Any:
    """The transformers model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers(model: Any) -> Any:
    return base(model).get_decoder().layers


def steps(model: Any) -> Any:
    """The statistics as they are now."""
    return dataclasses.replace(decoder.statistics(model))


def text(model: Any, length: int = 24, *, batch: int = 1, seed: int = 7) -> dict[str, Any]:
    """Every second sequence of a batch is padded on the left."""
    import torch

    ids = torch.randint(3, 240, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[1::2, : length // 3], mask[1::2, : length // 3] = 0, 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def other_media(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Other images and sounds in the same prompt."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    media = {name: batch[name] for name in ("pixel_values", "input_features") if name in batch}
    return batch | {
        name: torch.rand(values.shape, generator=generator).to(values.device) for name, values in media.items()
    }


def fast(models: Models, *where: Any, exact: bool = True) -> Any:
    """A model after ``decode_fast``."""
    return gemma4_compat.decode_fast(models.fresh(*where), exact=exact)


def generate(
    model: Any, batch: dict[str, Any], way: dict[str, Any] | None = None, *, new: int = NEW, **options: Any
) -> Any:
    """What ``generate`` returns, but for the cache: what somebody holds cannot serve the next call."""
    found = whole(model, batch, way, new=new, **options)
    return types.SimpleNamespace(**{name: value for name, value in found.items() if name not in cache_names.NAMES})


def whole(
    model: Any, batch: dict[str, Any], way: dict[str, Any] | None = None, *, new: int = NEW, **options: Any
) -> Any:
    """What ``generate`` returns, with its cache."""
    import torch

    torch.manual_seed(3)
    asked = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
    cache = {} if cache_names.cache_in(options) is not None else {"cache_implementation": "static"}
    kept = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**batch, **{**asked, **cache, **kept, **options, **(way or {})})


def compared(model: Any, run: Run, *, replays: bool = True) -> Outputs:
    """The outputs of ``run``, which are the same both ways; unless ``replays``, nothing is replayed."""
    before = steps(model).replayed
    found = run({})
    after = steps(model).replayed
    assert (after > before) == replays, steps(model)
    expected = run({"disable_compile": True})
    assert steps(model).replayed == after
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    return found


def assert_equal(one: Any, other: Any) -> None:
    """The same tokens, and the same logits bit by bit."""
    import torch

    assert torch.equal(one.sequences, other.sequences)
    assert len(one.logits) == len(other.logits) > 0
    assert all(torch.equal(*pair) for pair in zip(one.logits, other.logits))


def differ(some: Outputs, others: Outputs) -> bool:
    """Whether the answers are others: those of a stale graph would show."""
    import torch

    return not any(torch.equal(one.logits[-1], other.logits[-1]) for one, other in zip(some, others, strict=True))


def ask(model: Any, **options: Any) -> Run:
    return lambda way: [generate(model, text(model), way, **options)]


def sized(model: Any, length: int) -> None:
    """Have ``generate`` make caches for so many tokens at least, or skip the test (transformers before 5.13)."""
    import pytest

    if not hasattr(base(model).generation_config, "max_cache_len"):
        pytest.skip("this transformers has no max_cache_len")
    base(model).generation_config.max_cache_len = length


def static_cache(model: Any, length: int = 64) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)


def turns(model: Any) -> Run:
    """Three turns on one cache: each goes on from all that was said."""

    def run(way: dict[str, Any]) -> Outputs:
        import torch

        cache = static_cache(model)
        found: Outputs = []
        ids = text(model, 5)["input_ids"]
        for turn in range(3):
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            found.append(generate(model, batch, way, past_key_values=cache))
            ids = torch.cat([found[-1].sequences, text(model, 4, seed=turn)["input_ids"]], dim=-1)
        return found

    return run


SCENARIOS: dict[str, Callable[[Any, Models], Run]] = {
    "greedy": lambda model, _: ask(model),
    "sampled": lambda model, _: ask(model, do_sample=True, temperature=0.8, top_k=50),
    "several": lambda model, _: ask(model, do_sample=True, num_return_sequences=3),
    "beams": lambda model, _: ask(model, num_beams=3),
    "padded": lambda model, _: lambda way: [generate(model, text(model, batch=2), way)],
    "media": lambda model, models: lambda way: [generate(model, models.workspace.inputs(), way)],
    "across the window": lambda model, _: lambda way: [generate(model, text(model, 3), way, new=WINDOW + 4)],
    "three turns": lambda model, _: turns(model),
}


Change = Callable[[Any], None]
#: What a user may change between two calls, so that the answer is another one.
CHANGES: dict[str, Change] = {}
CHANGES_OF_QUANTIZED: dict[str, Change] = {}


def _change(function: Change) -> Change:
    CHANGES[function.__name__.strip("_").replace("_", " ")] = function
    return function


def _change_of_quantized(function: Change) -> Change:
    CHANGES_OF_QUANTIZED[function.__name__.strip("_").replace("_", " ")] = function
    return function


@_change
def _in_place(model: Any) -> None:
    layers(model)[1].input_layernorm.weight.data.mul_(-1.5)


@_change
def _new_data(model: Any) -> None:
    weight = layers(model)[1].mlp.up_proj.weight
    weight.data = weight.data.flip(0).contiguous()


@_change
def _new_parameter(model: Any) -> None:
    import torch

    norm = layers(model)[1].post_attention_layernorm
    norm.weight = torch.nn.Parameter(-norm.weight.detach(), requires_grad=False)


@_change
def _another_module(model: Any) -> None:
    layers(model)[1].mlp, layers(model)[2].mlp = layers(model)[2].mlp, layers(model)[1].mlp


@_change
def _weights_loaded(model: Any) -> None:
    norm = layers(model)[2].input_layernorm
    norm.load_state_dict({"weight": -norm.weight.data})


@_change
def _another_activation(model: Any) -> None:
    import torch

    layers(model)[0].mlp.act_fn = torch.nn.ReLU().eval()


@_change
def _embeddings(model: Any) -> None:
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data.flip(0).contiguous()


@_change
def _buffer(model: Any) -> None:
    layers(model)[1].layer_scalar = layers(model)[1].layer_scalar * 2


@_change
def _buffer_set_to_another_type(model: Any) -> None:
    layers(model)[1].layer_scalar = layers(model)[1].layer_scalar.float() * 2


@_change
def _number(model: Any) -> None:
    layers(model)[1].self_attn.scaling *= 0.5


def reads_attributes(module: Any) -> None:
    """A forward of the user's, which reads attributes of all kinds."""
    import torch

    forward = module.forward
    module.own_list, module.own_dict, module.own_tensor = [1.0], {"factor": 1.0}, torch.ones(1)

    def own(states: Any) -> Any:
        factor = module.own_list[0] * module.own_dict.get("further", 1.0) * getattr(module, "own_switch", 1.0)
        found = forward(states)
        return torch.cat([found[..., :8] * factor * module.own_tensor.to(found.dtype), found[..., 8:]], dim=-1)

    module.forward = own


#: What such a forward reads, changed.
ATTRIBUTES: dict[str, Change] = {
    "an item of a list": lambda module: module.own_list.__setitem__(0, -3.0),
    "a key that a dictionary had not": lambda module: module.own_dict.update(further=-3.0),
    "an attribute that was not there": lambda module: setattr(module, "own_switch", -3.0),
    "the data of a tensor": lambda module: setattr(module.own_tensor, "data", module.own_tensor.data * -3),
}


@_change
def _strides_of_a_weight(model: Any) -> None:
    weight = model.get_input_embeddings().weight  # never packed: a packed weight has one column
    weight.data = weight.data.as_strided(weight.shape, (1, 1))


@_change
def _class_of_a_module(model: Any) -> None:
    mlp = layers(model)[1].mlp
    forward = type(mlp).forward
    mlp.__class__ = type("Negated", (type(mlp),), {"forward": lambda self, states: -forward(self, states)})


@_change
def _another_configuration(model: Any) -> None:
    import copy

    config = copy.deepcopy(model.config)
    config.get_text_config().final_logit_softcapping = 2.0
    model.config = config


@_change
def _option_of_the_configuration(model: Any) -> None:
    model.config.get_text_config().final_logit_softcapping = 2.0


@_change
def _order_of_layers(model: Any) -> None:
    found = layers(model)
    found[0], found[1] = found[1], found[0]
    for index in (0, 1):
        found[index].self_attn.layer_idx = index


@_change
def _forward_of_a_module(model: Any) -> None:
    norm = layers(model)[1].input_layernorm
    original = norm.forward
    norm.forward = lambda states: -original(states)


@_change
def _output_embeddings_tied_no_more(model: Any) -> None:
    import torch

    weight = model.get_output_embeddings().weight
    model.get_output_embeddings().weight = torch.nn.Parameter(weight.detach().flip(-1).contiguous())


@_change_of_quantized
def _quantized_weight(model: Any) -> None:
    one, other = (layers(model)[index].mlp.up_proj for index in (1, 2))
    one.weight, other.weight = other.weight, one.weight


@_change_of_quantized
def _packed_bytes(model: Any) -> None:
    weight = layers(model)[1].mlp.up_proj.weight
    weight.data = weight.data.flip(0).contiguous()


@_change_of_quantized
def _packed_bytes_in_place(model: Any) -> None:
    weight = layers(model)[1].mlp.up_proj.weight
    weight.data.copy_(weight.data.flip(0))


@_change_of_quantized
def _quantization_state(model: Any) -> None:
    one, other = (layers(model)[index].mlp.up_proj.weight for index in (1, 2))
    one.quant_state = other.quant_state


@_change_of_quantized
def _scales(model: Any) -> None:
    state = layers(model)[1].mlp.up_proj.weight.quant_state
    state.absmax = state.absmax.flip(-1).contiguous()


@_change_of_quantized
def _nested_scales(model: Any) -> None:
    """On some CPUs bitsandbytes packs weights anew in their first forward, and scales are nested no more."""
    state = layers(model)[1].mlp.up_proj.weight.quant_state
    if state.nested:
        state.offset, state.state2.absmax = state.offset * 3, state.state2.absmax * 2
    else:
        state.absmax = state.absmax * 2


def failing(model: Any, fails: Callable[[Any], None], layer: int = 3) -> list[Callable[[Any], None]]:
    """Have a module of a layer call ``fails``, for as long as it is in the list."""
    import torch

    actions = [fails]

    class Activation(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: Any) -> Any:
            for action in actions:
                action(states)
            return self.inner(states)

    mlp = layers(model)[layer].mlp
    mlp.act_fn = Activation(mlp.act_fn).eval()
    return actions


def switched(model: Any) -> tuple[Outputs, Outputs]:
    """The answers with the first of two adapters, and with none; after the second one, and the first one again."""
    first = compared(model, ask(model))
    model.set_adapter("second")
    second = compared(model, ask(model))
    assert differ(first, second)
    with model.disable_adapter():
        plain = compared(model, ask(model))
    assert differ(plain, first)
    assert differ(plain, second)
    model.set_adapter("default")
    assert not differ(compared(model, ask(model)), first)
    return first, plain
