"""With an assistant or prompt lookup, a given cache is continued, not filled with the same text once more.

Symptom: silent: with ``assistant_model=`` or ``prompt_lookup_num_tokens=``, a second turn on the returned cache
(``past_key_values=``) gives other tokens than without: the logits are those of a conversation that is in the cache
twice. Before 5.14.0 this also happens if only the new tokens are passed.

Cause: ``GenerationMixin._prefill`` leaves out what the cache holds, but ``_assisted_decoding`` does not call it: its
first forward reads the whole text, at positions that begin with 0. If only the new tokens are passed, it cuts the mask
to their number, and before 5.14.0 the cache as well.

Fix: For Gemma 4, the first forward reads only what is new, at its own positions, and masks and caches are cut at the
place in the whole text. A prompt of which nothing is new is refused, as by ``transformers-held-prompts``; so are
``output_attentions`` and ``output_hidden_states`` with ``return_dict_in_generate``, which transformers splits by the
length of the text.

Remove when: ``_assisted_decoding`` reads only what the cache does not hold.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.cache import cache_names, prefill
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F24", severity="wrong_result", affected=">=5.5.0")

#: What transformers splits by the length of the text.
_SPLIT = ("output_attentions", "output_hidden_states")


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._assisted_decoding")
def assisted_decoding(original: Original, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    cache, config = cache_names.cache_in(kwargs), kwargs.get("generation_config")
    held = int(cache.get_seq_length()) if cache is not None else 0
    if not held or args or config is None or not is_gemma4_config(self.config):
        return original(self, input_ids, *args, **kwargs)
    embeds = kwargs.get("inputs_embeds")
    whole = input_ids.shape[1] if embeds is None else embeds.shape[1]
    new = prefill.new_tokens(input_ids, config, kwargs) if embeds is None else whole - held
    if new <= 0:
        raise prefill.nothing_new(held, whole)
    wanted = [name for name in _SPLIT if getattr(config, name)] if config.return_dict_in_generate else []
    if wanted:
        raise Gemma4CompatError(
            f"{wanted[0]} with an assistant or prompt lookup, and a cache that holds {held} tokens: leave out one of "
            "the three. transformers would split what is returned at wrong places."
        )
    absent = held if new == whole else 0
    with contextlib.ExitStack() as stack:
        if absent:
            stack.enter_context(in_place.replaced(cache, "crop", functools.partial(_crop, absent)))
        return original(_Continued(self, held, absent, kwargs.get("attention_mask")), input_ids, **kwargs)


def _crop(absent: int, below: Callable[[int], None], length: int) -> None:
    """Cut at a place in the whole text. A negative length is how much is cut off."""
    below(length + absent if length > 0 else length)


class _Continued(Proxy):
    """A view of a model, for a cache that holds the beginning of the text. Everything else is the model's.

    Args:
        model: of transformers.
        held: how many tokens the cache holds.
        absent: how many of them are not in ``input_ids``: none or all.
        mask: of the whole text, (1, length); None if nothing is masked.
    """

    def __init__(self, model: Any, held: int, absent: int, mask: Any) -> None:
        super().__init__(model)
        self._self_held, self._self_absent, self._self_mask = held, absent, mask

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Any, *, next_sequence_length: int | None, is_first_iteration: bool, **kwargs: Any
    ) -> Any:
        import torch

        if self._self_absent and kwargs.get("attention_mask") is not None:
            added = self._self_absent + input_ids.shape[1] - self._self_mask.shape[1]
            kwargs["attention_mask"] = torch.nn.functional.pad(self._self_mask, (0, added), value=1)
        if not self._self_absent and is_first_iteration:
            embeds = kwargs.get("inputs_embeds")
            next_sequence_length = (input_ids if embeds is None else embeds).shape[1] - self._self_held
        return self.__wrapped__.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from transformers import DynamicCache

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    cache = DynamicCache()  # keeps everything: before 5.15 nothing else can be cut
    first = model.generate(**tiny.inputs(workspace.main, text_only=True), **options, past_key_values=cache)
    ids = torch.cat([first.sequences, first.sequences[:, 3:12]], dim=-1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(**batch, **options)
    found = model.generate(**batch, **options, past_key_values=cache, prompt_lookup_num_tokens=2)
    off = (expected.logits[0] - found.logits[0]).abs().max().item()
    rounding = 1e-4 * expected.logits[0].abs().max().item()  # float32, other kernels for other lengths
    return Outcome(off > rounding, f"a second turn with prompt lookup: its logits are off by {off:.2g}")
