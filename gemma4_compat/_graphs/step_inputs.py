"""The inputs of the next step, made from those of the last one, where no user's code runs between two tokens.

``generate`` builds all inputs anew for each token: positions, and a mask for each kind of layer. These thirty
operations are most of what the host does between two tokens. But a graph's own inputs become those of the next token
with four: the token, positions plus one, and one more valid key in each mask. :class:`Loop` has ``generate`` leave out
the rest.

The first time in each ``generate``, and again when the sliding windows have become full, the inputs made here are
compared with those that ``generate`` built. If one bit differs, this ``generate`` goes on building them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.models import family, walk
from gemma4_compat._graphs import deferred_stop, static_caches, steps
from gemma4_compat._graphs.captured_calls import State
from gemma4_compat._graphs.steps import Graph, Step

#: What :class:`Loop` leaves out.
_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "create_masks_for_generate")
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Inputs:
    """The tensors that a graph reads, which become those of the next token in place.

    Args:
        static: these inputs by name, as they were for the last token.
        cache: it counts that token already.

    Attributes:
        left: tokens for which this works: until a sliding window is full, or the cache.
    """

    def __init__(self, static: dict[str, Any], cache: Any) -> None:
        masks = static["attention_mask"]
        self._tokens, self._positions = static["input_ids"], static["position_ids"]
        layers = static_caches.sliding(cache)
        self._next = int(layers[0].cumulative_length_int)  # the position of the next token
        lengths = [int(layer.max_cache_len) for layer in layers if not static_caches.window_full(layer)]
        self._growing = [mask for name, mask in masks.items() if name == _FULL or lengths]
        self._shifting = [mask for name, mask in masks.items() if name == _SLIDING and not lengths]
        self.left = min([mask.shape[-1] for mask in self._growing] + lengths, default=0) - self._next

    @classmethod
    def of(cls, static: dict[str, Any], cache: Any) -> Inputs | None:
        """None if masks are not those for ``sdpa``. Other inputs (of images, in 5.17) are the same for every token."""
        import torch

        masks = static.get("attention_mask")
        if not isinstance(masks, dict) or not masks.keys() <= {_FULL, _SLIDING}:
            return None
        expected = [static.get("input_ids"), static.get("position_ids"), *masks.values()]
        if any(not isinstance(tensor, torch.Tensor) for tensor in expected):
            return None
        if any(mask.dtype != torch.bool for mask in masks.values()):
            return None
        layers = static_caches.sliding(cache)
        if len({(layer.cumulative_length_int, layer.max_cache_len) for layer in layers}) != 1:
            return None
        return cls(static, cache)

    def advance(self, tokens: Any) -> None:
        """Make them the inputs of the next token.

        Args:
            tokens: [batch, 1].
        """
        self._tokens.copy_(tokens)
        self._positions.add_(1)
        for mask in self._growing:
            mask.select(-1, self._next).fill_(True)
        for mask in self._shifting:  # the last key is the newest token, which is valid
            mask[..., :-1].copy_(mask[..., 1:].clone())
        self._next += 1
        self.left -= 1

    def follows(self, cache: Any) -> bool:
        """Whether the next token of this cache is the one that they are for."""
        return static_caches.held(cache) == self._next

    def settle(self) -> None:
        """Leave masks alone that no longer change: every key in the window is valid, and so is every later one."""
        self._shifting = [mask for mask in self._shifting if not bool(mask.all())]


class Replayed(NamedTuple):
    """A step that was replayed.

    Attributes:
        step: whose inputs ``generate`` built, or the last one of which this is true.
        graph: that it was replayed with.
    """

    step: Step
    graph: Graph


class Following:
    """What one ``generate`` knows of its last step.

    Attributes:
        last: the step, once one was replayed.
    """

    def __init__(self) -> None:
        self.last: Replayed | None = None
        self._inputs: Inputs | None = None
        self._compared = self._refused = False
        self._outputs: tuple[Any, Any] = (None, None)

    @property
    def ready(self) -> bool:
        """Whether the next step may follow from the last one."""
        return self._compared and self._inputs is not None and self._inputs.left > 0

    @property
    def continues(self) -> bool:
        """Whether the cache holds what the last step left, in the same memory, and such a step can be replayed."""
        assert self.last is not None
        assert self._inputs is not None
        step = self.last.step
        return step.unsupported_reason is None and step.is_in_place and self._inputs.follows(step.cache)

    def compare(self, graph: Graph, step: Step) -> None:
        """Before a replay of a step that ``generate`` built: whether its inputs are those that would be made here."""
        import torch

        known, self._inputs, self._compared = self._inputs, None, False
        if known is None or self.last is None or graph is not self.last.graph or known.left <= 0:
            return
        known.advance(step.inputs["input_ids"])
        if all(map(torch.equal, graph.inputs, step.tensors)):
            known.settle()
            self._inputs, self._compared = known, True
        else:
            self._refused = True

    def replayed(self, graph: Graph, step: Step) -> None:
        """After that replay."""
        self.last = Replayed(step, graph)
        if not self._compared:
            self._inputs = None if self._refused else Inputs.of(graph.static, step.cache)

    def interrupt(self) -> None:
        """After a forward that was no replay of a step: the next one does not follow from the last replay."""
        self.last, self._inputs, self._compared = None, None, False

    def advance(self, ids: Any) -> None:
        """Make the graph's inputs those of the token that ends ``ids``, [batch, length]."""
        assert self._inputs is not None
        self._inputs.advance(ids.narrow(1, ids.shape[1] - 1, 1))

    def stop(self) -> dict[str, Any]:
        """All inputs of this step, if it cannot be replayed: nothing follows from it."""
        assert self.last is not None
        self._inputs, self._compared = None, False
        found: dict[str, Any] = steps.exchanged(self.last.graph.static, steps.CACHE, self.last.step.cache)
        return found

    def outputs(self) -> Any:
        """The model's output after a replay, with copies of its tensors: another graph may write into their memory."""
        assert self.last is not None
        cache, found = self.last.step.cache, self.last.graph.outputs
        if self._outputs[0] is not found:
            others = [name for name, value in found.items() if name not in cache_names.NAMES and value is not None]
            only_logits = others == ["logits"]
            self._outputs = found, steps.exchanged(found, steps.CACHE, cache) if only_logits else None
        own = self._outputs[1]  # of the last token, which `generate` has let go
        if own is None:
            return steps.exchanged(found, steps.CACHE, cache, copies=True)
        own["logits"] = found["logits"].clone()
        return own


class Loop(PlainView):
    """A model as ``GenerationMixin._sample`` sees it while nobody else looks.

    A plain view, since each token reads its attributes: 0.12 us, and 0.31 us for those of a proxy.

    Args:
        model: :func:`serves` it.
        decoder_class: of calls that can follow.
        watched: a user's streamer may change the model, its cache or its methods between two tokens.
    """

    def __init__(self, model: Any, decoder_class: type, *, watched: bool = False) -> None:
        super().__init__(model)
        self._decoder_class, self._watched = decoder_class, watched
        self._decoder: Any = None
        self._ids: Any = None  # of the step that follows
        self._followed: Any = None  # its output
        self._kwargs: dict[str, Any] = {}  # of `generate`
        self._behind = 0  # tokens that they do not count yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._of(*args, **kwargs)

    def get_compiled_call(self, *args: Any, **kwargs: Any) -> Any:
        """What calls the model for each token."""
        found = self._of.get_compiled_call(*args, **kwargs)
        if not isinstance(found, self._decoder_class):
            return found
        self._decoder = found
        self._decoder.following = Following()
        return self._call

    def _optimize_model_for_decode(self) -> Any:
        """What the model's own returns; it looks for submodels once, not twice."""
        known = None if self._decoder is None else self._decoder.state
        return _with(_Submodels(self._of, known), "_optimize_model_for_decode")

    def prepare_inputs_for_generation(self, input_ids: Any, **given: Any) -> dict[str, Any]:
        """Nothing, if the inputs follow from the last ones."""
        following = None if self._decoder is None else self._decoder.following
        if following is not None and following.ready and not (self._watched and self._is_touched(following)):
            self._ids = input_ids
            return {}
        if self._behind:
            counted, self._behind = self._behind, 0
            options = {"is_encoder_decoder": False, "num_new_tokens": counted}
            self._kwargs |= self._of._update_model_kwargs_for_generation(self._followed, self._kwargs, **options)
            given |= self._kwargs
        found: dict[str, Any] = self._of.prepare_inputs_for_generation(input_ids, **given)
        return found

    def _is_touched(self, following: Following) -> bool:
        """Whether the model builds its inputs otherwise than it did, or from another cache."""
        return not (serves(self._of) and following.continues)

    def _call(self, **inputs: Any) -> Any:
        if self._ids is None:
            return self._decoder(**inputs)
        ids, self._ids = self._ids, None
        self._followed = self._decoder.follow(ids)
        return self._followed

    def _update_model_kwargs_for_generation(self, outputs: Any, kwargs: dict[str, Any], **options: Any) -> Any:
        if outputs is None or outputs is not self._followed or "token_type_ids" in kwargs:
            return self._of._update_model_kwargs_for_generation(outputs, kwargs, **options)
        self._kwargs = kwargs
        self._behind += 1
        return kwargs


class _Submodels(Proxy):
    """A model whose ``set_experts_implementation`` is told which of its 1,600 modules are models.

    Args:
        model: of transformers.
        state: keeps what was found, as long as the model's modules stay; or None.
    """

    def __init__(self, model: Any, state: State | None) -> None:
        super().__init__(model)
        self._self_state = state
        self._self_found: list[Any] | None = None

    def set_experts_implementation(self, implementation: Any) -> None:
        """Have the configurations name this one."""
        _with(self, "set_experts_implementation", implementation)

    def modules(self) -> list[Any]:
        """The models in it."""
        if self._self_found is None:
            self._self_found = self._kept()
        if self._self_found is None:
            from transformers import PreTrainedModel

            below = walk.modules(self.__wrapped__)[1:]
            self._self_found = [module for module in below if isinstance(module, PreTrainedModel)]
            if self._self_state is not None:
                self._self_state.notes[_Submodels] = list(map(weakref.ref, self._self_found))
        return self._self_found

    def _kept(self) -> list[Any] | None:
        if self._self_state is None or _Submodels not in self._self_state.notes:
            return None
        found = [reference() for reference in self._self_state.notes[_Submodels]]
        return None if None in found else found


def _with(view: _Submodels, name: str, *args: Any) -> Any:
    """Call a method of the model's class with a view of the model, or what the model has in its place."""
    own = getattr(view.__wrapped__, name)
    function = getattr(own, "__func__", None)
    return own(*args) if function is None else function(view, *args)


def serves(model: Any) -> bool:
    """Whether the model builds inputs as transformers' Gemma 4 does."""
    if not family.is_gemma4_config(model.config) or not deferred_stop.is_of_libraries(type(model).__module__):
        return False
    methods = [getattr(type(model), name, None) for name in _METHODS]
    return not any(name in vars(model) for name in _METHODS) and all(map(deferred_stop.is_libraries, methods))
