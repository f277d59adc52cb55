"""After ``decode_fast(reuse_prefix=True)``, a prompt that begins like the last conversation reads only what is new.

Symptom: silent: every turn of a chat reads the whole conversation again, through ``generate`` and through pipelines,
although the cache of the last turn held nearly all of it. Passed back as ``past_key_values``, that cache helps only if
nothing before its end has changed, and a processor's images have to be left out: ``ValueError: Image features and
image tokens do not match``.

Cause: ``generate`` makes a new cache for each call. A cache does not contain its tokens, so ``generate`` cannot tell
whether a given one holds the beginning of the prompt; and sliding layers cannot be cut to where a history was edited.

Fix: After ``gemma4_compat.decode_fast(model, reuse_prefix=True)`` the model keeps the last cache of ``generate``,
with its tokens, images and sounds, and copies of the rows that sliding layers drop. The next call gets that cache, cut
to the longest common prefix. Without ``reuse_prefix`` nothing changes.

Remove when: ``generate`` reuses the longest common prefix of the last call by itself.
"""

from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.prefix_cache import session
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F106",
    kind="speed",
    severity="speed",
    affected=">=5.5",
    needs="transformers-chunked-turns transformers-vision-masks",
    after=(
        "transformers-expanded-media transformers-assisted-cache transformers-chunked-media "
        "transformers-chunked-images transformers-chunked-turns transformers-held-prompts "
        "transformers-unread-chunks transformers-graph-decoding"
    ),
)

_TOKENS = 4


@PATCH.replaces("transformers.generation.utils", "GenerationMixin.generate")
def generate(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    kept = session.of(self)
    if kept is None:
        return original(self, *args, **kwargs)
    found = session.begin(self, kept, args, kwargs)
    with session.running(found):
        if found is None:
            return original(self, *args, **kwargs)
        output = original(self, **found.arguments)
    found.end(output)
    return output


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prepare_cache_for_generation")
def prepare_cache(
    original: Original,
    self: Any,
    generation_config: Any,
    model_kwargs: Any,
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    found = session.current(self)
    room = max_cache_length if found is None else found.room(max_cache_length)
    result = original(self, generation_config, model_kwargs, generation_mode, batch_size, room)
    if found is not None:
        found.prepare(model_kwargs, generation_mode.value, max_cache_length)
    return result


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill")
def prefill(
    original: Original,
    self: Any,
    input_ids: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    found = session.current(self)
    if found is None:
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    with found.reading(cache_names.cache_in(model_kwargs), in_chunks=generation_config.prefill_chunk_size is not None):
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    """How many tokens the second turn of a conversation reads."""
    import torch

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    options = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    first = tiny.inputs(workspace.main, text_only=True)
    first = {name: first[name][:1] for name in ("input_ids", "attention_mask")}
    lengths: list[int] = []
    handle = (
        model.get_decoder()
        .layers[0]
        .register_forward_pre_hook(lambda _module, inputs: lengths.append(inputs[0].shape[1]))
    )

    def second_turn() -> tuple[int, Any]:
        ids = model.generate(**first, **options).sequences
        ids = torch.cat([ids, first["input_ids"][:, :5]], dim=-1)
        lengths.clear()
        return ids.shape[1], model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)

    try:
        whole, expected = second_turn()
        session.ask(model)
        whole, found = second_turn()
    finally:
        handle.remove()
        session.forget(model)
    read = lengths[0]
    off = max((one - other).abs().max().item() for one, other in zip(expected.logits, found.logits))
    rounding = 1e-4 * expected.logits[0].abs().max().item()  # float32, other kernels for other lengths
    if off > rounding or not torch.equal(expected.sequences, found.sequences):
        return Outcome(True, f"the second turn reads {read} of {whole} tokens, and its logits are off by {off:.2g}")
    return Outcome(read == whole, f"the second turn reads {read} of {whole} tokens")
