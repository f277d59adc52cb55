"""Layers that share their weights with other layers are quantized (DiffusionGemma, Zamba).

Symptom: silent: ``load_in_4bit`` (or 8 bits) of a DiffusionGemma quantizes nothing of its text model. All linears of
its layers stay in bf16, and so do those that layers of a Zamba or Zamba2 share. With a skip list of one's own they are
quantized, and then a model that was saved raises ``RuntimeError: We encountered some issues during automatic
conversion`` when it is loaded, and in 8 bits the answers are wrong.

Cause: The encoder and the decoder of a DiffusionGemma share all weights of their layers, the hybrid layers of a Zamba
those of attention and MLP. Without a list, ``get_keys_to_not_convert`` leaves every tied weight unquantized, because
it thinks of a head and its embedding. With one, a saved model has the scales of both names and the weight of one. In
8 bits, ``Linear8bitLt`` takes the scales away from its weight, and the second layer with that weight finds none.

Fix: While a model is quantized, a weight in a layer that is tied to the same weight of another layer is no reason to
skip it. The patch writes the other modules that upstream skips into ``llm_int8_skip_modules`` of the model's
configuration, so a saved model names them and loads anywhere. The configuration passed by the caller is not changed.
The scales of a tied weight are saved once, and both layers have them in 8 bits. A quantized checkpoint is loaded as it
is.

Remove when: transformers quantizes weights that layers share, and saves their scales once.
"""

import copy
from typing import Any

from gemma4_compat._gemma4.quantization import config
from gemma4_compat._offload.weights import tied_pairs
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F122",
    severity="memory",
    affected=">=5.11",
    acts_on="every model",
    requires="accelerate bitsandbytes",
    after="transformers-quantized-router transformers-tied-head transformers-save-tied-offloaded",
)


@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_before_weight_loading"
)
@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer._process_model_before_weight_loading"
)
def process_model_before_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = self.quantization_config.llm_int8_skip_modules
    if not self.pre_quantized and given is None:
        tied = config.tied_layers(model)
        names = {name.removesuffix(".weight") for pair in tied.items() for name in pair}
        if names:
            skip = sorted(set(self.get_modules_to_not_convert(model)) - names)
            self.quantization_config = copy.copy(self.quantization_config)
            self.quantization_config.llm_int8_skip_modules = skip
    return original(self, model, *args, **kwargs)


@PATCH.replaces("transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer._process_model_after_weight_loading")
def process_model_after_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = original(self, model, *args, **kwargs)
    for target, source in config.tied_layers(model).items():
        one, other = (model.get_submodule(name.rpartition(".")[0]) for name in (target, source))
        if type(one).__name__ == "Linear8bitLt" and one.weight is other.weight:
            one.state = other.state
    return loaded


@PATCH.replaces("transformers.modeling_utils", "remove_tied_weights_from_state_dict")
def remove_tied_weights_from_state_dict(original: Original, state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    once = [
        name
        for name, owner in config.tied_layers(model).items()
        if {name, owner} <= state_dict.keys()
        and not state_dict[name].is_floating_point()
        and tied_pairs.is_shared(model, name, owner)
    ]
    if once:
        scales = tuple(f"{name}." for name in once)  # of 4 bits; those of 8 bits are beside the weight
        beside = {f"{name.removesuffix('weight')}{end}" for name in once for end in ("SCB", "weight_format")}
        state_dict = {
            name: value for name, value in state_dict.items() if name not in beside and not name.startswith(scales)
        }
    return original(state_dict, model)  # type: ignore[no-any-return]


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import relatives

    checkpoint = workspace.cached(relatives.build)
    apart = workspace.cached(relatives.build_untied_diffusion)
    found = []
    for quantization in ("4bit", "8bit"):
        model = relatives.load_relative(checkpoint, quantization, device=workspace.main)
        plain = relatives.plain_linears(model.model.decoder.layers)
        if plain:
            return Outcome(True, f"{len(plain)} linears of the decoder are in bf16 in a model in {quantization}")
        skip = model.config.quantization_config.llm_int8_skip_modules
        reference = relatives.load_relative(apart, quantization, device=workspace.main, skip_modules=skip)
        folder = workspace.new_folder()
        model.save_pretrained(folder)
        again = relatives.load_relative(folder, device=workspace.main)
        expected = relatives.outputs(reference)
        found += [workspace.difference(expected, relatives.outputs(other)) for other in (model, again)]
    return Outcome.of_parity(max(found), "a DiffusionGemma in 4 and 8 bits, and saved and loaded again")
