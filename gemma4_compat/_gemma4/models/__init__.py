"""What a Gemma 4 model is and where its parts are. Reads models and changes none.

* :mod:`family`: whether something is a Gemma 4. :mod:`variants`: the shapes of the released ones.
* :mod:`walk`: a model's modules. :mod:`inspection`: where it wants its inputs, and which tensors have no values.
* :mod:`build`: a model on the meta device.
* :mod:`shared_weights`: the layers that share keys and values.
* :mod:`per_layer`, :mod:`padding_row`: the per-layer embeddings of E2B and E4B.
* :mod:`media`: images and sounds in a prompt. :mod:`random_inputs`: prompts of random values.
* :mod:`rotary`: buffers of rotary embeddings. :mod:`autocast`: what autocast does on a device.
* :mod:`compute_dtype`: the dtype in which a quantized layer computes.
* :mod:`config_names`: names that differ between releases.
"""

from __future__ import annotations
