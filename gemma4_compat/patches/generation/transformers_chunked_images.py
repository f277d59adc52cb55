"""Prefill in chunks never cuts through an image (12B, 26B-A4B, 31B).

Symptom: silent: with ``prefill_chunk_size`` the 12B, the 26B-A4B and the 31B process an image differently when a
chunk ends inside it. The tokens in its first part do not attend to those in its second part, and the logits are off
by as much as between any two prompts.

Cause: In these models the tokens of one image attend to each other in both directions. From 5.23.0 on,
``GenerationMixin._prefill`` also reads prompts with images in chunks, and cuts them wherever the size says. Tokens
cannot attend to a later chunk.

Fix: A chunk ends before an image that it could hold only in part. An image that is larger than a chunk is read at
once. Other chunks are never larger than requested. The frames of a video count as images, and a cut must not go
through an image in any row of the batch.

Remove when: transformers cuts prompts between images.
"""

import copy
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.cache import prefill as prefill_of
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F24 F30", severity="wrong_result", affected=">=5.23.0")


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
    size, kinds = generation_config.prefill_chunk_size, model_kwargs.get("mm_token_type_ids")
    if (
        isinstance(size, int)
        and size > 0  # transformers refuses other values itself
        and kinds is not None
        and is_gemma4_config(self.config)
        and getattr(self.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    ):
        length = prefill_of.new_tokens(input_ids, generation_config, model_kwargs)
        vision = (kinds[:, -length:] == 1) | (kinds[:, -length:] == 2)  # images, frames of videos
        inside = (vision[:, 1:] & vision[:, :-1]).any(dim=0).tolist()
        if any(inside[size - 1 :: size]):
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = chunks(inside, size)  # torch.split accepts a size or sizes
    return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


def chunks(inside: list[bool], size: int) -> list[int]:
    """The sizes of the chunks of a prompt, at most ``size`` each if possible. ``inside[i]``: whether a cut between its
    tokens i and i + 1 would go through an image in any row of the batch.
    """
    sizes, start, end = [], 0, len(inside) + 1
    while start < end:
        stop = min(start + size, end)
        while start < stop < end and inside[stop - 1]:
            stop -= 1
        if stop == start:  # the image is larger than a chunk
            stop = start + size
            while stop < end and inside[stop - 1]:
                stop += 1
        sizes.append(stop - start)
        start = stop
    return sizes


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    model = (workspace.load_31b() if workspace.variant is None else workspace.load()).float()
    batch = tiny.without(workspace.inputs(), "input_features")
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    try:
        expected, *found = (model.generate(**batch, **options, prefill_chunk_size=size) for size in (None, 6, 8))
    except Gemma4CompatError:  # before 5.23.0, if transformers-chunked-media is on
        return Outcome(False, "prompts with images are not read in chunks")
    cut, between = ((expected.logits[0] - one.logits[0]).abs().max().item() for one in found)
    rounding = 1e-4 * expected.logits[0].abs().max().item()  # float32, other kernels for other lengths
    return Outcome(
        cut > rounding >= between,  # if images are left out, chunks between them are also wrong
        f"where a chunk ends inside an image the logits are off by {cut:.2g}, elsewhere by {between:.2g}",
    )
