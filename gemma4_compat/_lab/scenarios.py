"""Scenarios that several reproductions and tests share."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from gemma4_compat._engine.patch import Outcome
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import NEW_TOKENS, MissingPartError, Workspace, difference


def of_both_classes(
    workspace: Workspace, *, gemma4: Callable[[Workspace], Outcome], unified: Callable[[Workspace], Outcome]
) -> Outcome:
    """One reproduction for ``gemma4`` and for ``gemma4_unified``, as far as the variant and the release have them."""
    found: dict[str, Outcome] = {}
    if workspace.variant != variants.UNIFIED:
        found["gemma4"] = _outcome(gemma4, workspace)
    if workspace.variant in (None, variants.UNIFIED) and (other := workspace.unified()) is not None:
        found["gemma4_unified"] = _outcome(unified, other)
    parities = [outcome.parity for outcome in found.values() if outcome.parity is not None]
    return Outcome(
        defect=any(outcome.defect for outcome in found.values()),
        detail="; ".join(f"{name}: {outcome.detail}" for name, outcome in found.items()),
        parity=max(parities, default=None),
        applicable=any(outcome.applicable for outcome in found.values()),
    )


def _outcome(reproduce: Callable[[Workspace], Outcome], workspace: Workspace) -> Outcome:
    try:
        return reproduce(workspace)
    except MissingPartError as error:
        return Outcome(False, str(error), applicable=False)
    except Exception as error:  # here the user's crash is the result
        return Outcome.of_error(error)


def assisted(workspace: Workspace, *, without_arguments: bool = False) -> Outcome:
    """Whether generation with an assistant model gives the same tokens as without.

    ``without_arguments``: raise the crash that transformers-assistant-arguments fixes.
    """
    import torch

    model, batch = workspace.load(), workspace.inputs()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**batch, **options)
    try:
        assistant = workspace.load_assistant()
    except ImportError as error:
        return Outcome(False, str(error), applicable=False)
    try:
        found = model.generate(**batch, **options, assistant_model=assistant)
    except ValueError as error:
        if "Cannot `crop`" not in str(error):
            raise
        return Outcome(False, "this release cannot take tokens back from a sliding cache", applicable=False)
    except TypeError as error:
        if without_arguments or "CandidateGenerator.__init__" not in str(error):
            raise
        return Outcome(False, "this release cannot call the assistant it creates", applicable=False)
    if torch.equal(expected, found):
        return Outcome(False, f"{NEW_TOKENS} tokens with an assistant model are those without")
    return Outcome(True, "with an assistant model other tokens are generated")


def transposed(layer: Any) -> Outcome:
    """Whether a linear has the same outputs for a transposed input, (1, 8, in_features) in bfloat16, and its copy."""
    import torch

    columns = torch.randn(1, layer.in_features, 8, generator=torch.Generator().manual_seed(0))
    columns = columns.to(layer.weight.device, torch.bfloat16)
    with torch.no_grad():
        found, expected = layer(columns.transpose(1, 2)), layer(columns.transpose(1, 2).contiguous())
    worst = (found - expected).abs().max().item()
    scale = expected.abs().max().item()
    if worst:
        return Outcome(True, f"a transposed input's outputs, of up to {scale:.2g}, are off by up to {worst:.2g}")
    return Outcome(False, "a transposed input and its contiguous copy have bit-equal outputs", 0.0)


@contextlib.contextmanager
def noted(owner: Any, name: str, what: Callable[..., Any] = lambda *_, **__: None) -> Iterator[list[Any]]:
    """Inside, each call of ``owner.name`` adds ``what`` of its arguments to the list."""
    function, found = getattr(owner, name), []

    def called(*args: Any, **kwargs: Any) -> Any:
        found.append(what(*args, **kwargs))
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, called):
        yield found


def promised_states(model: Any, batch: dict[str, Any]) -> list[str]:
    """The layer types whose keys and values a model returns when an assistant model requests them."""
    import torch

    with torch.no_grad():
        outputs = model(**batch, return_shared_kv_states=True)
    return sorted(getattr(outputs, "shared_kv_states", None) or {})


def features(model: Any, batch: dict[str, Any], modality: str) -> Any:
    """The features of the image (``modality`` "vision") or the audio ("audio") in ``batch`` that the language model
    gets: float32, one row per soft token.
    """
    import torch

    inner = model.model  # not every release has these on the outer class
    with torch.no_grad():
        if modality == "vision":
            found = inner.get_image_features(batch["pixel_values"], batch["image_position_ids"], return_dict=True)
            parts = found.pooler_output
            pooled = torch.cat(list(parts)) if isinstance(parts, (list, tuple)) else parts
        else:
            found = inner.get_audio_features(batch["input_features"], batch["input_features_mask"], return_dict=True)
            pooled = found.pooler_output[found.attention_mask]
    return pooled.float().cpu()


def compare_quantized_tower(workspace: Workspace, quantization: str, modality: str) -> tuple[float, float]:
    """Relative differences of a quantized tower's features: from those of the dequantized weights, and between two
    very different inputs. The ideal is about 0 and 1.4.
    """
    batch = workspace.inputs()
    other = dict(batch, pixel_values=1 - batch["pixel_values"])
    if modality == "audio":
        other["input_features"] = -batch["input_features"]
    model = workspace.load(quantization, towers=True)
    found, another = features(model, batch, modality), features(model, other, modality)
    plain = tiny.dequantize(workspace.load(quantization, towers=True))
    return relative(found, features(plain, batch, modality)), relative(another, found)


def relative(found: Any, reference: Any) -> float:
    """The norm of the difference relative to the norm of ``reference``."""
    return float((found - reference).norm() / reference.norm())


def in_another_process(module: str, build: Callable[[], Any], *, reverse: bool) -> Any:
    """The result of ``build`` with sets of names in ``module`` iterated in sorted or ``reverse`` order.

    The order differs between processes, because Python salts the hashes of strings in each.
    """
    code = importlib.import_module(module)

    def ordered(names: Iterable[str]) -> dict[str, None]:
        return dict.fromkeys(sorted(names, reverse=reverse))

    code.set = ordered  # type: ignore[attr-defined]
    try:
        return build()
    finally:
        del code.set


def second_rank(module: str, workspace: Workspace) -> Outcome:
    """Compare the outputs of two DDP ranks that iterate a set of names in different orders."""

    def build() -> Any:  # not workspace.load(), whose model may have been built before, in either order
        return tiny.load(workspace.checkpoint, device=workspace.main)

    first, second = (in_another_process(module, build, reverse=reverse) for reverse in (False, True))
    reference = workspace.outputs(first)
    broadcast_buffers(first, second)
    return Outcome.of_parity(difference(reference, workspace.outputs(second)), "a second rank of DDP")


def broadcast_buffers(source: Any, target: Any) -> None:
    """Copy buffers as ``DistributedDataParallel`` does between processes: those of one dtype together, by position."""
    import torch

    with torch.no_grad():
        for dtype in {buffer.dtype for buffer in target.buffers()}:
            own = [buffer for buffer in target.buffers() if buffer.dtype == dtype]
            sent = torch.cat([buffer.flatten() for buffer in source.buffers() if buffer.dtype == dtype])
            for buffer, piece in zip(own, sent.split([buffer.numel() for buffer in own]), strict=True):
                buffer.copy_(piece.view_as(buffer))


def image_in_second_part(model: Any, batch: dict[str, Any]) -> Outcome:
    """Compare a prompt read in two parts (an image in the second) with a static cache to the prompt read at once."""
    import torch
    from transformers import StaticCache

    ids = batch["input_ids"]
    kinds = torch.zeros_like(ids)
    kinds[:, 18:22] = 1
    cache = StaticCache(config=model.config, max_cache_len=2 * ids.shape[1])
    with torch.no_grad():
        expected = model(ids, mm_token_type_ids=kinds, use_cache=False).logits
        model(ids[:, :12], past_key_values=cache)
        found = model(ids[:, 12:], mm_token_type_ids=kinds, past_key_values=cache).logits
    off = (expected[:, 12:] - found).abs().max().item()
    return Outcome(off > 1e-3, f"after an image in the second part of a text the logits are off by {off:.2g}")


def image_masks(model: Any, kinds: Any) -> dict[str, Any]:
    """The masks of a text of one row without padding, bool of shape (1, 1, text, text): causal in full attention; in
    sliding layers the tokens of an image also see each other, inside the window. ``kinds``: its ``mm_token_type_ids``.
    """
    import torch

    vision = (kinds[0] == 1) | (kinds[0] == 2)
    first = vision & ~torch.nn.functional.pad(vision[:-1], (1, 0))
    number = torch.where(vision, first.cumsum(0), 0)
    query, key = torch.meshgrid(*[torch.arange(kinds.shape[1], device=kinds.device)] * 2, indexing="ij")
    causal, image = key <= query, (number[query] == number[key]) & vision[query]
    inside = key > query - model.config.get_text_config().sliding_window
    seen = {"full_attention": causal, "sliding_attention": (causal | image) & inside}
    return {kind: mask[None, None] for kind, mask in seen.items()}
