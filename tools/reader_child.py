"""One reader on checkpoints, in the reader's own environment: what it says, and its logits. See tools/readers.py.

python tools/reader_child.py READER IDS CHECKPOINT ...

It prints a line for each checkpoint: {"error": null or text, "logits": nested lists or null}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = tuple[str | None, list[list[float]] | None]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _float32(model: Any) -> None:
    import mlx.core as mx
    from mlx.utils import tree_map

    model.update(tree_map(lambda value: value.astype(mx.float32), model.parameters()))


def mlx_lm(checkpoint: Path, ids: list[int]) -> Answer:
    """The strict load of ``mlx_lm.load``, and logits in float32."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    settings = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    # Read beside the text model's; released ones have the default there.
    size = {"vocab_size": settings.get("text_config", settings)["vocab_size"]}
    try:
        model, _ = load_model(checkpoint, strict=True, model_config=size)
    except (ValueError, KeyError, TypeError) as error:
        return _one_line(error), None
    _float32(model)
    # With a cache, as in a generation: some releases share keys and values only then.
    return None, model(mx.array([ids]), cache=make_prompt_cache(model))[0].tolist()


def mlx_vlm(checkpoint: Path, ids: list[int]) -> Answer:
    """The strict load of ``mlx_vlm.load``, vision and audio with it, and logits of text in float32."""
    import mlx.core as mx
    from mlx_vlm.models.cache import make_prompt_cache
    from mlx_vlm.utils import load_model

    try:
        model = load_model(checkpoint)
    except (ValueError, KeyError, TypeError) as error:
        return _one_line(error), None
    _float32(model)
    found = model(mx.array([ids]), pixel_values=None, cache=make_prompt_cache(model.language_model))
    return None, getattr(found, "logits", found)[0].tolist()


#: What llama.cpp's converter renames before it looks a name up (conversion/gemma.py, Gemma4Model).
_SCALARS = ("per_dim_scale", "layer_scalar")
#: What it takes out by itself, and settings that it reads without a default.
_BY_ITSELF = ("router.scale", ".per_expert_scale")
_SETTINGS = (
    "num_kv_shared_layers",
    "layer_types",
    "global_head_dim",
    "head_dim",
    "intermediate_size",
    "sliding_window",
)
_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


def llama_cpp(checkpoint: Path, ids: list[int]) -> Answer:  # it converts, it does not compute
    """Names and settings of the language model as llama.cpp's converter looks them up, in the map of its package."""
    import gguf
    from safetensors import safe_open

    settings = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = settings.get("text_config", settings)
    if missing := [name for name in _SETTINGS if name not in text]:
        return f"KeyError: {missing[0]!r}", None
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text["num_hidden_layers"])
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118  # a file, not a mapping
                if any(part in name for part in _TOWERS) or name.endswith(_BY_ITSELF[0]) or _BY_ITSELF[1] in name:
                    continue
                wanted = name.replace("language_model.", "")
                if wanted.endswith(_SCALARS) or (".experts." in wanted and not wanted.endswith(".weight")):
                    wanted += ".weight"
                if known.get_name(wanted, try_suffixes=(".weight", ".bias")) is None:
                    return f"ValueError: Can not map tensor {name!r}", None
    return None, None


def vllm(checkpoint: Path, ids: list[int]) -> Answer:  # it loads, it does not compute
    """The language model in vLLM's own module tree, with its strict check; its source is in the folder SOURCE."""
    import vllm_loader  # beside this file
    from safetensors.torch import load_file

    settings = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    source, kind = Path(os.environ["SOURCE"]), settings["model_type"]
    if not (source / "vllm" / "model_executor" / "models" / f"{kind.removesuffix('_text')}.py").exists():
        return f"no model file for {kind}", None
    weights = {name: value for file in checkpoint.glob("*.safetensors") for name, value in load_file(file).items()}
    try:
        vllm_loader.load(source, settings.get("text_config", settings), iter(weights.items()))
    except (ValueError, KeyError, TypeError) as error:
        return _one_line(error), None
    return None, None


READERS: dict[str, Callable[[Path, list[int]], Answer]] = {
    "mlx-lm": mlx_lm,
    "mlx-vlm": mlx_vlm,
    "llama.cpp": llama_cpp,
    "vLLM": vllm,
}


def main() -> None:
    reader, ids, *checkpoints = sys.argv[1:]
    for checkpoint in checkpoints:
        error, logits = READERS[reader](Path(checkpoint), json.loads(ids))
        print(json.dumps({"error": error, "logits": logits}), flush=True)


if __name__ == "__main__":
    main()
