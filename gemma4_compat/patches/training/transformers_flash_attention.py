"""Flash attention runs in the layers whose heads are not too wide for it.

Symptom: ``RuntimeError: FlashAttention forward only supports head dimension at most 256`` from the first forward with
``attn_implementation="flash_attention_2"``. The same with ``"flash_attention_3"`` and with flash kernels from the hub.

Cause: The heads of full-attention layers are 512 wide, but upstream declares that Gemma 4 supports flash attention.
Masks are also made for one attention implementation: a flash kernel's mask only marks padding, so the tokens of an
image would not attend to each other in the 12B, the 26B-A4B and the 31B.

Fix: Full-attention layers run ``sdpa`` with the mask that upstream makes for ``sdpa``; sliding layers run flash. If a
flash kernel cannot express the mask (an image of a model whose image tokens attend to each other, several rows of
packed sequences, a four-dimensional mask from the caller), sliding layers also run ``sdpa``. ``cu_seq_lens_q`` and
positions that restart separate sequences in every layer. Outputs are those of ``sdpa`` up to a flash kernel's
rounding.

Remove when: transformers runs Gemma 4 with flash attention, or no longer declares that it does.
"""

import gc
import sys
from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.attention import flash, masks
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F54",
    severity="crash",
    affected=">=5.5.0",
    bug="https://github.com/Dao-AILab/flash-attention/issues/2427",
    after="transformers-cudnn-padding transformers-sliding-windows",  # its layers run their sdpa
)

#: Bound relative to the largest logit. The package's kernel does not accept float32; the stand-in does.
BOUNDS = {"torch.float32": 1e-4, "torch.bfloat16": 0.1}


@PATCH.replaces("transformers.masking_utils", "create_causal_mask")
def create_causal_mask(original: Original, *args: Any, **kwargs: Any) -> Any:
    if args or flash.is_plain(config := kwargs.get("config")) or not _is_split(config):
        return original(*args, **kwargs)
    return flash.full_mask(original, kwargs)


@PATCH.replaces("transformers.masking_utils", "create_sliding_window_causal_mask")
def create_sliding_window_causal_mask(original: Original, *args: Any, **kwargs: Any) -> Any:
    if args or flash.is_plain(config := kwargs.get("config")) or not _is_split(config):
        return original(*args, **kwargs)
    return flash.sliding_mask(original, kwargs)


@PATCH.replaces("transformers.masking_utils", "create_masks_for_generate")
def create_masks_for_generate(original: Original, *args: Any, **kwargs: Any) -> Any:
    config = args[0] if args else kwargs["config"] if "config" in kwargs else None  # noqa: SIM401
    if flash.is_plain(config):
        return original(*args, **kwargs)
    arguments = dict(zip(masks.NAMES, args)) | kwargs
    config = getattr(arguments.get("config"), "get_text_config", lambda: None)()
    if len(args) > len(masks.NAMES) or not _is_split(config):
        return original(*args, **kwargs)
    return masks.by_kind({**arguments, "config": config})


def _is_split(config: Any) -> bool:
    import torch

    found = flash.is_split(config)
    if found and not torch.compiler.is_compiling():
        dormant.activate(PATCH.id)
    return found


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._check_and_adjust_attn_implementation", activator=True)
def implementation(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What a model is made with, or given later: from the first flash kernel on, layers have to be told apart."""
    found = original(self, *args, **kwargs)
    if _may_be_flash(found):
        dormant.activate(PATCH.id)
    return found


def _is_dormant(late: bool) -> bool:
    """Whether no model can run flash yet. Where models may have been made before, all configurations are looked at."""
    name, kind = "_attn_implementation_internal", sys.modules["transformers.configuration_utils"].PreTrainedConfig
    made = [item for item in gc.get_objects() if issubclass(type(item), kind)] if late else []
    return not any(_may_be_flash(object.__getattribute__(config, "__dict__").get(name, "eager")) for config in made)


def _may_be_flash(implementation: Any) -> bool:
    return not isinstance(implementation, str | None) or flash.is_flash(implementation)


@PATCH.replaces(
    "transformers.modeling_utils", "AttentionInterface.__getitem__", affected="<5.7.0", dormant=_is_dormant
)
@PATCH.replaces(
    "transformers.modeling_utils", "AttentionInterface.get_interface", affected=">=5.7.0", dormant=_is_dormant
)
def attention_function(original: Original, self: Any, key: str | None, *default: Any) -> Any:
    found = original(self, key, *default)
    if key in flash.PLAIN:  # most layers ask for a plain one: no call
        return found
    name = str(key).removeprefix("paged|") if default else key  # `get_interface` leaves the prefix out
    return flash.by_layer(found, original(self, "sdpa", *default)) if flash.is_flash(name) else found


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.stand_ins.flash import kernel

    checkpoint = workspace.larger(full_width=512)
    batch = workspace.inputs(text_only=True)
    with torch.no_grad(), kernel() as (name, dtype):
        expected = tiny.load(checkpoint, device=workspace.main, dtype=dtype)(**batch).logits.float()
        model = tiny.load(checkpoint, device=workspace.main, dtype=dtype, attn_implementation={"text_config": name})
        off = (model(**batch).logits.float() - expected).abs().max().item()
    bound = BOUNDS[str(dtype)] * expected.abs().max().item()
    return Outcome(off > bound, f"the logits with flash attention differ by {off:.2g} from those with sdpa", off)
