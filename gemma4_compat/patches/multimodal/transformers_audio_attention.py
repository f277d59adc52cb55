"""An attention requested for the whole model applies to text and vision; audio keeps its own.

Symptom: ``ValueError: Gemma4AudioModel does not support an attention implementation through
torch.nn.functional.scaled_dot_product_attention yet`` from ``from_pretrained(..., attn_implementation="sdpa")``. The
same with ``"flex_attention"``, and with both in ``set_attn_implementation`` of a loaded model.

Cause: Upstream passes a request for the whole model to every part as if the user had named each one. The audio tower
has only its own chunked attention, and since 5.20.0 ``Gemma4AudioModel`` declares that. Without a request it falls
back by itself.

Fix: A request for the whole model applies to the parts that support it: text and vision run it, the audio tower runs
its eager attention, and one INFO line of the logger ``gemma4_compat`` says so. A dict that requests an unsupported
attention for ``audio_config`` by name still gets upstream's error, unless it requests the same for the model
(``""``) and for the text: that counts as one request.

Remove when: a request for the whole model does not raise for the audio tower and leaves its attention as it is.
"""

import contextvars
import functools
import logging
import sys
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat.patches.api import MODELING_GEMMA4, Detection, Original, Outcome, Patch, Workspace

PATCH = Patch("F8", severity="crash", affected=">=5.20.0")

_LOGGER = logging.getLogger("gemma4_compat")
_FLAGS = (
    ("flex_attention", "_supports_flex_attn"),
    ("sdpa", "_supports_sdpa"),
    ("flash", "_supports_flash_attn"),
)
#: The config of the model being built, in which the inner model finds how the outer one resolved a request.
_building: contextvars.ContextVar[Any] = contextvars.ContextVar("gemma4_compat_building", default=None)
#: The request that ``set_attn_implementation`` got for the whole model.
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("gemma4_compat_attention", default=None)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4ForConditionalGeneration.__init__")
@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.__init__")
def build(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    if _building.get() is not config:
        _settle(config)
    with in_place.bound(_building, config):
        return original(self, config, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4PreTrainedModel.set_attn_implementation")
def set_attn_implementation(original: Original, self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    whole = isinstance(attn_implementation, str) and getattr(self.config, "audio_config", None) is not None
    with in_place.bound(_asked, attn_implementation if whole else None):
        return original(self, attn_implementation, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioModel.get_correct_attn_implementation")
def get_correct_attn_implementation(
    original: Original, self: Any, requested_attention: str | None, *args: Any, **kwargs: Any
) -> Any:
    asked = _asked.get()
    if asked is not None and not _declares(type(self), asked):
        _say(asked)
        requested_attention = "eager"
    return original(self, requested_attention, *args, **kwargs)


def _settle(config: Any) -> None:
    """Give the audio tower eager attention if the request for the whole model is one it does not declare."""
    asked, audio = getattr(config, "_attn_implementation", None), getattr(config, "audio_config", None)
    if asked is None or audio is None:
        return
    # A dict that names only the tower makes no request for the others.
    if not asked == audio._attn_implementation == config.text_config._attn_implementation:
        return
    if not _declares(sys.modules[MODELING_GEMMA4].Gemma4AudioModel, asked):
        _say(asked)
        audio._attn_implementation_internal = "eager"  # where upstream stores its decision


def _declares(tower: Any, implementation: str) -> bool:
    """Whether a model class declares this attention; a user's own name counts as a backend."""
    name = implementation.removeprefix("paged|")
    if name == "eager":
        return True
    flag = next((flag for part, flag in _FLAGS if part in name), "_supports_attention_backend")
    return bool(getattr(tower, flag))


@functools.cache
def _say(implementation: str) -> None:
    _LOGGER.info(
        "gemma4_compat: attn_implementation=%r is for the text and vision models; the audio tower has only eager "
        "attention and runs that",
        implementation,
    )


def detect() -> Detection:
    tower = sys.modules[MODELING_GEMMA4].Gemma4AudioModel
    declared = all(getattr(tower, flag) for flag in (*dict(_FLAGS).values(), "_supports_attention_backend"))
    return Detection.NOT_AFFECTED if declared else Detection.AFFECTED


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import features

    workspace.needs("audio_tower")
    batch = tiny.inputs(workspace.main)
    reference = workspace.load()
    asked = tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation="sdpa")
    later = tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation="eager")
    later.set_attn_implementation("sdpa")
    for model in (asked, later):
        config, here = model.config, reference.config
        for part in ("text_config", "vision_config", "audio_config"):
            found, usual = (getattr(each, part)._attn_implementation for each in (config, here))
            if found != usual:
                return Outcome(True, f"{part} runs {found} attention, {usual} without a request")
        for modality in ("vision", "audio"):
            if not features(model, batch, modality).equal(features(reference, batch, modality)):
                return Outcome(True, f"the {modality} features are not those without a request")
    expected = workspace.reference()
    found = [workspace.difference(expected, model) for model in (asked, later)]
    return Outcome.of_parity(max(found), 'attn_implementation="sdpa"')
