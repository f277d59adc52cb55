"""Continuous batching gives the tokens of ``generate``, or raises an error before it starts.

Symptom: ``AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute`` from ``generate_batch`` and
``cache_implementation="paged"``. Before 5.15 ``ValueError: num_key_value_heads or num_attention_heads could not be
found in the config`` or ``AttributeError: 'Gemma4Config' object has no attribute 'num_attention_heads'``; a text model
logs ``RuntimeError: index_copy_(): Source/destination tensor must have same slice shapes`` and answers ``{}``.

Cause: The paged cache has one head size and one number of key-value heads for all layers. In Gemma 4, full attention
and sliding attention have different ones.

Fix: From 5.18.0 on each kind of attention has its own part of the cache, which gets the shape of its layers. Flash
kernels do not support heads this wide, so the attention implementation stays as it was; if that is flash, an error
says what to set. Before 5.18.0 all layers share one tensor, and a clear error says so.

Remove when: the paged cache of all supported releases has a separate head size for each kind of attention.
"""

from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import flash
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F97", severity="crash", affected=">=5.5.0")

_LAYERS = attached.PAGED_LAYERS
_SHAPE = ("num_key_value_heads", "head_dim")


class _OneHeadSizeError(Gemma4CompatError, ValueError, AttributeError):
    """Upstream raises ``ValueError``, or ``AttributeError`` before 5.13."""


@PATCH.replaces(
    "transformers.generation.continuous_batching.continuous_api", "ContinuousMixin.init_continuous_batching"
)
def start(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if family.is_gemma4(self) and _differ(self.config.get_text_config()):
        from transformers.generation.continuous_batching import cache

        if not hasattr(cache, "ATTN_TYPE_TO_ALLOCATOR"):
            import transformers

            raise _OneHeadSizeError(
                f"continuous batching (generate_batch, cache_implementation='paged') of transformers "
                f"{transformers.__version__} has one head size for all layers, and Gemma 4 has several. "
                "Use generate, with a batch of padded prompts, or transformers 5.18.0 or newer."
            )
    return original(self, *args, **kwargs)


@PATCH.replaces(
    "transformers.generation.continuous_batching.continuous_api",
    "ContinuousBatchingManager.switch_to_cb_friendly_attn",
    optional=True,
    group="cache",
)
def choose_attention(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    text = model.config.get_text_config()
    if not family.is_gemma4(model) or not _differ(text):
        return original(self, model, *args, **kwargs)
    if flash.is_split(text):
        raise Gemma4CompatError(
            f"continuous batching cannot run {text._attn_implementation!r} for Gemma 4: the heads of its full "
            f"attention are wider than {flash.WIDEST}. Use model.set_attn_implementation('sdpa')."
        )
    with in_place.assigned(model, "_supports_flash_attn", False):  # otherwise it changes to flash if that is installed
        return original(self, model, *args, **kwargs)


@PATCH.replaces("transformers.generation.continuous_batching.cache", "PagedAttentionCache.__init__", group="cache")
def make_cache(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    if not family.is_gemma4_config(config) or not _differ(config):
        original(self, config, *args, **kwargs)
        return
    layers = list(config.per_layer_config)
    largest = config.per_layer_config[0]  # a copy; memory is reserved for the largest of all layers
    for name in _SHAPE:
        setattr(largest, name, max(getattr(layer, name) for layer in layers))
    vars(largest)[_LAYERS] = layers
    original(self, largest, *args, **kwargs)
    self.config = config


@PATCH.replaces(
    "transformers.generation.continuous_batching.cache_allocators.full_attention",
    "FullAttentionCacheAllocator.__init__",
    optional=True,
    group="cache",
)
def make_part(original: Original, self: Any, **arguments: Any) -> None:
    config, heads = arguments["config"], arguments["num_key_value_heads"]
    layers = vars(config).get(_LAYERS)
    if layers is not None:
        own, ranks = layers[arguments["layer_indices"][0]], config.num_key_value_heads // heads
        if own.num_key_value_heads % ranks:
            raise Gemma4CompatError(
                f"continuous batching cannot divide {own.num_key_value_heads} key-value heads of Gemma 4 among "
                f"{ranks} devices of tensor parallelism. Use fewer devices."
            )
        arguments |= {"config": own, "num_key_value_heads": own.num_key_value_heads // ranks}
    original(self, **arguments)


def _differ(text: Any) -> bool:
    """Whether the keys of layers differ in shape."""
    if layers := getattr(text, "per_layer_config", None):
        return len({tuple(getattr(layer, name) for name in _SHAPE) for layer in layers}) > 1
    heads = text.num_global_key_value_heads if text.attention_k_eq_v else None
    return (text.global_head_dim, heads or text.num_key_value_heads) != (text.head_dim, text.num_key_value_heads)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

    model = workspace.load().float()
    prompts = [list(range(3, 23)), list(range(40, 60)), [5, 6, 7]]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=1)
    options = {"generation_config": config, "progress_bar": False}
    options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    expected = [
        model.generate(torch.tensor([prompt], device=model.device), generation_config=config)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    try:
        answers = model.generate_batch(prompts, **options)
    except Gemma4CompatError as error:
        return Outcome(False, f"refused: {error}")
    found = [list(answers[name].generated_tokens) for name in sorted(answers)]
    return Outcome(found != expected, f"generate_batch gives {found}, generate {expected}")
