"""The command ``export``: a saved adapter in the keys and the configuration of another reader.

* :mod:`job`: the export. :mod:`result`, :mod:`text`: its report.
* :mod:`plain`: a LoRA as every reader has it. :mod:`pieces`: its tensors, one at a time.
* :mod:`servers`: vLLM and SGLang. :mod:`gguf`: llama.cpp. :mod:`mlx`: mlx-lm and mlx-vlm.
"""

from __future__ import annotations
