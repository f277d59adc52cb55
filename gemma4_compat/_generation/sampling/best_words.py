"""The head in two stages (:mod:`specs.head`) for a ``generate`` in which only the best words matter.

The copy of the head is made anew in the first step of each ``generate``, which takes as long as a token or less: so it
is a copy of the head as it is then, however somebody has written to it. Within a ``generate`` only code of the user's
could, and where that runs between two tokens, the whole head is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat._generation.sampling import fast_processors
from gemma4_compat._graphs import deferred_stop
from gemma4_compat._graphs.guards import torch_hooks
from gemma4_compat._offload.transfer import idle_hooks, row_lookup

#: Processors that hide words, and the tensor that names them.
_HIDING = {
    "MinLengthLogitsProcessor": "eos_token_id",
    "MinNewTokensLengthLogitsProcessor": "eos_token_id",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
}
#: Temperatures that keep different logits different, and finite.
_TEMPERATURES = 1e-6, 1e6
_SHORT = "memory is short"
_ALL = "all logits are asked for"
_NOT_OURS = "which words matter is not known: a beam search, or transformers before 5.17"


def most(processors: Collection[Any], config: Any) -> int | str:
    """How many of the best words matter for a token, or why all words do.

    What comes after top-k gets the same scores, -inf for all others.

    Args:
        processors: of logits, those of ``_sample``.
        config: of the ``generate``.
    """
    if config.return_dict_in_generate and (config.output_logits or config.output_scores):
        return _ALL
    if config.do_sample and not any(type(one).__name__ == "TopKLogitsWarper" for one in processors):
        return "tokens are sampled without top-k"
    hidden = 0
    for one in processors:
        name = type(one).__name__
        if not fast_processors.is_class(one, name):
            return f"a logits processor: {name}"
        if name == "TopKLogitsWarper" and one.filter_value == -float("inf"):
            return int(one.top_k) + hidden
        if name in _HIDING:
            hidden += int(getattr(one, _HIDING[name]).numel())
        elif name != "TemperatureLogitsWarper" or not _TEMPERATURES[0] <= one.temperature <= _TEMPERATURES[1]:
            return f"a logits processor: {name}"
    return 1 + hidden


class Kept:
    """The memory of a copy, which a model keeps.

    Args:
        weight: of the head.
        copy: a ``head.Copy``, not yet made.
    """

    def __init__(self, weight: Any, copy: Any) -> None:
        self.copy = copy
        self._weight: Any = weakref.ref(weight)
        self._layout = weight.data_ptr(), weight.shape, weight.dtype

    def is_of(self, weight: Any) -> bool:
        """Whether this is the weight, in its place."""
        if weight is None or weight is not self._weight():
            return False
        return (weight.data_ptr(), weight.shape, weight.dtype) == self._layout

    def counts(self) -> tuple[int, int]:
        """Words that were computed from the head, and tokens. Waits for the device."""
        words, tokens = self.copy.counts.tolist()
        return int(words), int(tokens)


class Head:
    """The head, as a ``generate`` asks for it.

    Args:
        kept: its copy.
        most: how many of the best words matter at least.
        cap: the model's soft cap; 0 without.

    Attributes:
        asked: what the operator ``best`` gets beside hidden states and weight.
    """

    def __init__(self, kept: Kept, most: int, cap: float) -> None:
        self.is_of, self.most, self.asked = kept.is_of, most, (*kept.copy, most, cap)


def of(decoding: Any, model: Any, rows: int) -> Head | None:
    """The head in two stages for a ``generate``, its copy made now; None if the whole head is computed.

    Counts it in the statistics, where custom kernels compute.

    Args:
        decoding: of the model, a ``decoder.Decoding``.
        model: of transformers.
        rows: of the batch.
    """
    from gemma4_compat._kernels.match import custom

    if not decoding.custom or custom.unsupported_reason(model.device) is not None:
        return None
    running = deferred_stop.current()
    wanted = _NOT_OURS if running is None else running.most
    found = wanted if isinstance(wanted, str) else _made(decoding, model, rows, wanted)
    if isinstance(found, str):
        counted = decoding.statistics.whole_heads
        decoding.statistics.whole_heads = {**counted, found: counted.get(found, 0) + 1}
        return None
    decoding.statistics.heads_in_two_stages += 1
    return found


def _made(decoding: Any, model: Any, rows: int, wanted: int) -> Head | str:
    import torch

    from gemma4_compat._kernels.match import custom
    from gemma4_compat._kernels.specs import head, products

    if not decoding.has_room_for_head:
        return _SHORT
    if rows > products.MAX_ROWS:
        return f"more than {products.MAX_ROWS} texts"
    asked = max(head.FEWEST, 2 << (wanted - 1).bit_length())
    if asked > head.MOST:
        return f"more than {head.MOST // 2} words matter"
    linear = model.get_output_embeddings()
    caps = {getattr(one, "final_logit_softcapping", None) for one in (model.config, model.config.get_text_config())}
    cap = max((one for one in caps if one is not None), default=0.0)
    reason = _seen_by_others(model, linear)
    if reason is None and (len(caps - {None}) > 1 or not 0.0 <= cap < 1e6):
        reason = "an unusual soft cap"
    weight: Any = None if reason else row_lookup.weight_of(linear, rows)
    if reason is None:
        with torch.no_grad():
            reason = head.unsupported_reason(weight)
    if reason is None and weight.device != model.device:
        reason = "the head is not on the model's device"
    if reason is None and not custom.computes_best_words(weight):
        reason = "this package's kernels do not have the head's bits here"
    return reason or _copied(decoding, weight, asked, float(cap), in_place=weight is not linear.weight)


def _copied(decoding: Any, weight: Any, asked: int, cap: float, *, in_place: bool) -> Head | str:
    import torch

    from gemma4_compat._kernels.match import custom
    from gemma4_compat._kernels.specs import head

    kept: Kept | None = decoding.head
    if kept is None or not kept.is_of(weight):
        decoding.drop_head()
        left = host.free_memory(weight.device, decoding.prompts.nbytes)
        # Without the copy, a head in host memory crosses the bus for every token.
        if left is not None and left < (1 if in_place else 2) * head.nbytes(*weight.shape):
            return _SHORT
        try:
            with torch.inference_mode(False):
                kept = Kept(weight, head.Copy.of(weight))
        except torch.OutOfMemoryError:
            return _SHORT
    custom.launch(weight.device, kept.copy.made_from(weight))
    decoding.head = kept
    return Head(kept, asked, cap)


def _seen_by_others(model: Any, linear: Any) -> str | None:
    """What could see logits, or change them, beside the model and transformers' loop."""
    import torch

    if type(linear) is not torch.nn.Linear or linear.bias is not None:
        return "the head is not a plain linear layer"
    for module in (model, linear):
        for hooks in (vars(module)[kind] for kind in torch_hooks.kinds()):
            if torch_hooks.counted({key: hook for key, hook in hooks.items() if not idle_hooks.is_own(hook)}):
                return "a hook sees logits"
        if not _has_own_forward(module):
            return "a forward was replaced"
    if any(map(torch_hooks.counted, torch_hooks.on_every_module())):
        return "a hook sees logits"
    return None if deferred_stop.is_libraries(type(model).forward) else "a forward was replaced"


def _has_own_forward(module: Any) -> bool:
    """Whether a call runs the forward of its class, directly or through accelerate's hook."""
    found = vars(module).get("forward")
    if found is None:
        return True
    is_hooked = getattr(getattr(found, "func", None), "__module__", None) == "accelerate.hooks"
    return is_hooked and getattr(vars(module).get("_old_forward"), "__func__", None) is type(module).forward
