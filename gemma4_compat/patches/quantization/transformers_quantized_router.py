"""The routers of a quantized mixture of experts stay in bf16.

Symptom: silent: a mixture of experts (26B-A4B) in 4 (or 8) bits sends tokens to other experts than it would in bf16.

Cause: ``_process_model_before_weight_loading`` of the bitsandbytes quantizers prepares every linear layer for
quantization, including ``router.proj``. That is the smallest linear of a decoder layer (26B-A4B: 0.7 MB of 1.6 GB)
and the one whose small differences decide. A router chooses the 8 highest of 128 scores, and many of them are close.

Fix: The routers of Gemma 4 models that bitsandbytes quantizes while loading stay in bf16. The patch adds them to
``llm_int8_skip_modules`` of the model's configuration, so a saved model also names them and loads anywhere. The
configuration passed by the caller is not changed. A checkpoint whose routers are quantized is loaded as it is.

Remove when: transformers leaves routers unquantized.
"""

import copy
from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F21", severity="wrong_result", affected=">=5.5", requires="accelerate bitsandbytes")

_ROUTER = "router.proj"


@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_before_weight_loading"
)
@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer._process_model_before_weight_loading"
)
def process_model_before_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.pre_quantized and family.has_parts(model):
        routers = [name for name, _ in model.named_modules() if name.endswith(f".{_ROUTER}")]
        skip = self.quantization_config.llm_int8_skip_modules
        if any(map(config.converts(skip or ()), routers)):
            if skip is None:  # then upstream has its own list, which an explicit one replaces
                skip = self.get_modules_to_not_convert(model)
            self.quantization_config = copy.copy(self.quantization_config)
            self.quantization_config.llm_int8_skip_modules = [*skip, _ROUTER]
    return original(self, model, *args, **kwargs)


def routes(model: Any, batch: dict[str, Any]) -> Any:
    """The experts to which each decoder layer routes each token of a batch, ascending: (layers, tokens, experts)."""
    import torch

    found: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: found.append(output[2].sort().values))
        for name, module in model.named_modules()
        if name.endswith(".router")
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny, tiny_models

    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    batch = tiny.inputs(workspace.main, text_only=True)
    found = []
    for quantization in ("4bit", "8bit"):
        model = tiny.load(checkpoint, quantization, device=workspace.main)
        reference = tiny.load(checkpoint, quantization, device=workspace.main, skip_modules=[_ROUTER])
        router = model.model.language_model.layers[0].router.proj
        if type(router).__name__ != "Linear":
            other = (routes(model, batch) != routes(reference, batch)).any(dim=-1).float().mean()
            return Outcome(
                True,
                f"router.proj is a {type(router).__name__}; {other:.0%} of the tokens are sent to other experts than "
                "by a router in bf16",
            )
        found.append(workspace.difference(workspace.outputs(reference, text_only=True), model, text_only=True))
    return Outcome.of_parity(max(found), "4-bit and 8-bit models whose routers are in bf16")
