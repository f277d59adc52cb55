"""Everything that this package leaves on models and on what belongs to them, declared once. Imports nothing upstream.

Three kinds. A *mark* is an attribute; what is declared here is its name, a plain string, since marks are read where a
model computes: a read is ``vars(owner).get(NAME)`` and no call of ours. *Hooks* are torch's, of a module; where they
are removed again, their handles are kept here. A *method* is one that :func:`in_place.replace` has put on an object.

Undoing: ``vars(owner).pop(NAME, None)``, :meth:`Hooks.remove`, :func:`in_place.restore`.
:mod:`gemma4_compat._gemma4.accelerate.listing` shows what hangs on a model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

PREFIX = "_gemma4_compat_"


@dataclass(frozen=True)
class Declared:
    """One thing that may hang on an object.

    Attributes:
        kind: ``"mark"``, ``"hooks"`` or ``"method"``.
        name: of the attribute or method; of hooks, what they are called.
        patch: id of the patch that puts it there.
        on: what it hangs on.
        purpose: what it is for, in one sentence.
        module: where it is put there, below ``gemma4_compat``: the functions of hooks and methods are defined there.
    """

    kind: str
    name: str
    patch: str
    on: str
    purpose: str
    module: str = ""

    @property
    def shown(self) -> str:
        """The name as a reader meets it."""
        return f"method {self.name}" if self.kind == "method" else self.name


DECLARED: list[Declared] = []


def of_patch(patch: str) -> list[Declared]:
    """What the patch of this id may leave on objects."""
    return [declared for declared in DECLARED if declared.patch == patch]


def _mark(name: str, patch: str, on: str, purpose: str) -> str:
    DECLARED.append(Declared("mark", PREFIX + name, patch, on, purpose))
    return PREFIX + name


def _method(name: str, patch: str, module: str, on: str, purpose: str) -> None:
    DECLARED.append(Declared("method", name, patch, on, purpose, module))


class Hooks:
    """The hooks of one kind, with their handles by module, for as long as the module lives. A copy has none here."""

    def __init__(self, name: str, patch: str, module: str, on: str, purpose: str) -> None:
        DECLARED.append(Declared("hooks", name, patch, on, purpose, module))
        self._handles: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()

    def add(self, module: Any, *handles: Any) -> None:
        """Keep the handles that torch gave for hooks of this module."""
        self._handles[module] = (*self._handles.get(module, ()), *handles)

    def remove(self, module: Any) -> None:
        """Remove the hooks of this module. Does nothing where it has none."""
        for handle in self._handles.pop(module, ()):
            handle.remove()

    def __contains__(self, module: Any) -> bool:
        return module in self._handles


# What it is and where it hangs, then what it is for.
# fmt: off
# ---------------------------------------------------------------------------------------------------- offloaded layers

STREAMING = Hooks("streaming hooks", "accelerate-paged-layers", "_offload.transfer.streaming", "an offloaded layer",
                  "They bring a layer's weights to the device before its forward, and release them after it.")
IDLE = Hooks("bypass hooks", "accelerate-paged-layers", "_offload.transfer.idle_hooks", "a dispatched model or tower",
             "During a forward they take accelerate's hooks that have nothing to move out of the way.")
_method("_call_impl", "accelerate-paged-layers", "_offload.model_lock", "a module with offloaded weights in it",
        "It lets one thread at a time into a model with offloaded weights.")
LOADING_HOOKS = Hooks("loading hooks", "accelerate-load-offloaded", "_offload.weights.state_loading",
                      "an offloaded module", "They have load_state_dict load offloaded weights where they are stored.")
LOADING = _mark("loading", "accelerate-load-offloaded", "an offloaded module, during load_state_dict",
                "What the module had before its weights are loaded.")
SCALE_HOOKS = Hooks("scale hooks", "transformers-load-4bit-state", "_gemma4.quantization.scale_loading",
                    "a module with 4-bit weights", "They have load_state_dict load the scales of 4-bit weights.")
SCALES = _mark("scales", "transformers-load-4bit-state", "a module with 4-bit weights, during load_state_dict",
               "The scales that its weights get after they are loaded.")
DISPATCHED_IN = _mark("dispatched_in", "accelerate-load-offloaded", "an offloaded module, or one tied to it",
                      "A weak reference to the dispatched model, to find the weights tied to the module's.")
LOOKUP = _mark("lookup", "accelerate-embedding-lookup", "accelerate's hook of an offloaded embedding",
               "How the embedding reads single rows where its weight is stored.")
LOOKUP_WARNED = _mark("warned", "accelerate-embedding-lookup", "accelerate's hook of an offloaded embedding",
                      "The warning about its weight on two devices was given.")
COPYS_WEIGHT = _mark("copys_weight", "transformers-tied-split", "a module that shares the weight of an adapter's copy",
                     "The module's hook, which does not offload meanwhile; None if it did not offload.")
_method("_apply", "accelerate-cast-offloaded", "patches.offload.accelerate_cast_offloaded", "an offloaded module",
        "A cast of the module is repeated whenever its stored weights are read.")
_method("to", "accelerate-cast-offloaded", "patches.offload.accelerate_cast_offloaded", "a dispatched model",
        "It lets a change of dtype through, which accelerate's guard refuses.")
_method("_apply", "accelerate-move-offloaded", "patches.offload.accelerate_move_offloaded", "a dispatched model",
        "It brings offloaded weights along on a move to the CPU, and refuses other moves before anything is moved.")

# ------------------------------------------------------------------------------------------------------------ adapters

ONLOADED = _mark("onloaded", "peft-keep-dispatch", "an adapter's layer, during its forward",
                 "The hook of its base layer, which offloads the weights after the layer's forward.")
ONLOADS = _mark("registered", "peft-keep-dispatch", "an adapter's layer that reads base weights",
                "The layer has its onloading hooks.")
Hooks("onloading hooks", "peft-keep-dispatch", "_offload.weights.peft_layers",
      "an adapter's layer that reads base weights",
      "They keep the offloaded base weight on the device for the whole forward of the layer.")
BRINGS_INPUTS = _mark("brings_inputs", "peft-input-devices", "an adapter's layer",
                      "The layer has its input hook.")
Hooks("input hook", "peft-input-devices", "patches.adapters.peft_input_devices", "an adapter's layer",
      "It brings the layer's inputs to the device of its base layer.")
UNMERGES = _mark("unmerge", "peft-merge-offloaded", "a dispatched model with merged layers",
                 "The handle of its unmerging hook.")
Hooks("unmerging hook", "peft-merge-offloaded", "_offload.weights.merged_layers",
      "a dispatched model with merged layers",
      "It unmerges layers whose adapters were disabled, before the forward onloads them.")
_method("unmerge", "peft-merge-offloaded", "_offload.weights.merged_layers", "a merged layer",
        "It onloads the base weight, and stores it again without the adapter.")
ADDED = _mark("added", "peft-quantized-experts", "an experts module, during a forward of PEFT",
              "What the adapter adds to the 4-bit experts.")

# ----------------------------------------------------------------------------------------------------------- quantized

PRISTINE = _mark("pristine", "bitsandbytes-meta-quant-state",
                 "the state of a 4-bit weight, or the scales of an 8-bit one",
                 "True on the host copy that belongs to an offloaded weight, and is never moved.")
ORIGIN = _mark("origin", "bitsandbytes-meta-quant-state", "the state of a 4-bit weight, or the scales of an 8-bit one",
               "The host copy that it was made from.")
UNPACKED = _mark("unpacked", "bitsandbytes-cpu-packing", "the state of a 4-bit weight that is repacked for the CPU",
                 "Its attributes before, to unpack the weight exactly.")
Hooks("scales hook", "transformers-quantized-experts", "_gemma4.quantization.expert_storage", "a 4-bit experts module",
      "It adds the scales of the experts to the state dict.")
STORED_EXPERTS = _mark("stored_experts", "transformers-quantized-experts", "a model's quantizer",
                       "The expert weights that are quantized in the checkpoint.")
IS_GEMMA4 = _mark("gemma4", "transformers-quantize-offloaded", "a model's quantizer",
                  "Whether its model is a Gemma 4.")
REFUSED = _mark("refused", "transformers-quantize-offloaded", "a model's quantizer, until it sees the model",
                "The device map to validate again if the model is not a Gemma 4.")
PLACEMENT = _mark("placement", "transformers-quantize-offloaded", "a model's quantizer, while weights are loaded",
                  "The device map, if it offloads anything.")
TO_WRITE = _mark("to_write", "transformers-quantize-offloaded", "a quantized weight, while weights are loaded",
                 "The weight has to be written to disk.")

# -------------------------------------------------------------------------------------------------------- whole models

DECODING = _mark("decoding", "transformers-graph-decoding", "a model",
                 "Its captured decoding steps, and the memory of its last static cache.")
_method("lazy_initialization", "transformers-graph-decoding", "_graphs.static_caches", "a layer of a static cache",
        "The layer takes the memory of the last cache, until its first update.")
TURNS = _mark("turns", "transformers-reuse-prefix", "a model",
              "The last conversation, with the keys and values of its tokens.")
SEEN = _mark("seen", "transformers-cudnn-padding", "an attention mask",
             "Whether each of its queries sees a key, until the mask is written to.")
SPANS = _mark("spans", "transformers-sliding-windows", "an attention mask",
              "Which keys each block of queries sees, until the mask is written to.")
LAYOUT = _mark("layout", "transformers-sliding-windows", "an attention mask",
               "Which queries are computed with which keys, until the mask is written to.")
WINDOWS = _mark("windows", "transformers-sliding-windows", "an attention mask",
                "The parts of it that blocks of queries need, until the mask is written to.")
TRAINED_ATTENTION = _mark("trained_attention", "transformers-sliding-windows",
                          "a text model or an attention module, after train_fast",
                          "Whether training computes sliding layers by windows, wide heads by products, and up to how "
                          "many tokens in graphs.")
CANDIDATES = _mark("candidates", "transformers-assistant-keys", "a generator of candidates",
                   "How many tokens it returned last.")
PAGED_LAYERS = _mark("layers", "transformers-paged-cache", "the configuration of a paged cache",
                     "The configuration of each layer.")
CHUNKED_LOSS = _mark("chunked_loss", "transformers-chunked-loss", "a model",
                     "When its loss is computed in chunks: 'training', 'always' or 'never'.")
CHUNKED_LOSS_WARNED = _mark("chunked_loss_warned", "transformers-chunked-loss", "a model",
                            "Why its loss was not computed in chunks, as already warned about.")
TRAINING = _mark("training", "", "a decoder layer after train_fast",
                 "The graphs of its training steps, and when they serve.")
_method("forward", "", "_training.fast", "a decoder layer after train_fast",
        "In training, it is replayed.")
CHUNKED_MLP = _mark("chunked_mlp", "transformers-chunked-mlp", "an MLP",
                    "How many tokens it computes at once in training; None: all of them.")
_method("forward", "transformers-chunked-mlp", "_training.mlp", "an MLP",
        "In training, it computes a few tokens at a time.")
CHUNKED_NORM = _mark("chunked_norm", "transformers-chunked-mlp", "a norm",
                     "With how many tokens, at most, it computes them all at once in training.")
_method("forward", "transformers-chunked-mlp", "_training.norms", "a norm",
        "In training, it computes a few tokens at a time.")
_method("_old_forward", "transformers-chunked-mlp", "_training.norms", "a norm with accelerate's hook",
        "The same, inside of the hook.")
_method("forward", "transformers-chunked-mlp", "_training.shared_states", "an attention module",
        "Computed again for a backward pass, it does not store keys and values for other layers once more.")
_method("_old_forward", "transformers-chunked-mlp", "_training.shared_states", "the same with accelerate's hook",
        "The same, inside of the hook.")
PER_LAYER_TOKENS = _mark("per_layer_tokens", "transformers-chunked-mlp", "a text model",
                         "With how many tokens, at most, its per-layer inputs have a graph in training.")
_method("project_per_layer_inputs", "transformers-chunked-mlp", "_training.per_layer", "a text model",
        "In training, it leaves out gradients that nobody reads.")
_method("forward", "transformers-chunked-mlp", "_training.per_layer", "the table of tokens",
        "It marks what it looks up.")
_method("_old_forward", "transformers-chunked-mlp", "_training.per_layer", "the table with accelerate's hook",
        "The same, inside of the hook.")
LOOKED_UP = _mark("looked_up", "transformers-chunked-mlp", "input embeddings",
                  "They were looked up in a table that is not trained.")
UNFED_TOWERS_WARNED = _mark("unfed_towers_warned", "transformers-unfed-towers", "a DistributedDataParallel module",
                            "The warning about towers without input was given.")
OVERFLOW_WARNED = _mark("overflow_warned", "transformers-fp16-logits", "a model that computes in float16",
                        "The warning about logits that are not numbers was given.")
SHARED_WEIGHTS = _mark("shared_weights", "transformers-shared-kv-weights", "a model",
                       "Names and files of checkpoint weights that the model does not have, to save them again.")
_method("_apply", "transformers-rotary-cast", "_gemma4.models.rotary", "a rotary embedding",
        "A cast of the model leaves its frequencies as precise as they are.")
