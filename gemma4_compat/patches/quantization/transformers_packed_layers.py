"""4-bit checkpoints of compressed-tensors stay packed, and can be offloaded and adapted.

Symptom: silent: the first forward of a model from a ``pack-quantized`` checkpoint of compressed-tensors (Google's QAT
``w4a16``, llm-compressor's ``W4A16``) unpacks all its layers to bfloat16, and they stay so. From then on the model
takes what the unquantized one does, about four times what it took after loading: ``torch.OutOfMemoryError`` on a card
that it was chosen for. Before the first forward no adapter can be created (``AttributeError: 'Linear' object has no
attribute 'weight'``), and a map that offloads such layers fails in it.

Cause: ``CompressedTensorsHfQuantizer`` only loads the packed tensors. A hook that compressed-tensors leaves on the
model decompresses all modules before the first forward, and for that replaces accelerate's offloading by its own.

Fix: On Gemma 4 models the linear layers with packed symmetric integers of 4 or 8 bits and unrounded activations keep
them if the decompressed model would not fit, if the map offloads, or inside ``gemma4_compat.quantize(packed=True)``.
Each forward unpacks the layer's weight as compressed-tensors does, multiplies by it and drops it; the backward pass
unpacks it again; on NVIDIA GPUs one kernel of this package unpacks 4 bits. The outputs are, bit for bit, those of the
decompressed model, except after ``decode_fast`` without ``exact=True``: its kernels read the integers, and round less.
accelerate offloads the layers like any others, ``save_pretrained`` writes the tensors of the checkpoint, and adapters
work as over plain weights, but merges are refused. Unpacking takes time in each forward, so a model that fits is
decompressed as before, and so are layers of other formats. compressed-tensors before 0.15 has a class of its own for
such layers, which unpacks them for good; it is left as it is.

Remove when: transformers or compressed-tensors computes with the packed weights.
"""

from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F66", severity="memory", affected=">=5.5.0")


@PATCH.replaces(
    "transformers.quantizers.quantizer_compressed_tensors",
    "CompressedTensorsHfQuantizer._process_model_before_weight_loading",
)
def process_model_before_weight_loading(original: Original, self: Any, model: Any, **kwargs: Any) -> Any:
    result = original(self, model, **kwargs)
    settings = self.quantization_config
    # Before transformers 5.15 the setting was `run_compressed`, and meant the opposite.
    plain = getattr(settings, "dequantize", not getattr(settings, "run_compressed", True))
    if not plain and hasattr(model, "ct_decompress_hook") and family.has_parts(model):
        from gemma4_compat._gemma4.quantization import packed_linear
        from gemma4_compat._kernels.match import dequantizing

        if packed_linear.is_wanted(model, kwargs.get("device_map")):
            packed_linear.keep_packed(model, dequantizing.unpacked)
    return result


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._gemma4.quantization import opt_in
    from gemma4_compat._lab import tiny

    with opt_in.PACKED.enabled():
        model = tiny.load(workspace.packed(), device=workspace.main)
    plain = tiny.load(workspace.packed(packed=False), device=workspace.main)
    loaded, expected = _bytes(model), workspace.outputs(plain)
    difference = workspace.difference(expected, model)
    used = _bytes(model)
    if used > loaded:
        return Outcome(True, f"{loaded} bytes of weights after loading, {used} after a forward; bf16: {_bytes(plain)}")
    return Outcome.of_parity(difference, f"a model whose {used} bytes of weights stay packed")


def _bytes(model: Any) -> int:
    return sum(value.nbytes for value in [*model.parameters(), *model.buffers()])
