"""A saved ``config.json`` names the head size and the key-value heads of full attention, as released ones do.

Symptom: silent: ``config.json`` of a saved 12B, 26B-A4B or 31B lacks ``num_global_key_value_heads``, and that of every
model lacks ``global_head_dim``. mlx-lm and mlx-vlm then build layers of other shapes: ``Expected shape ... but
received shape ... for parameter ...self_attn.k_proj.weight``. transformers before 5.15.0 says ``size mismatch``.

Cause: transformers 5.15.0 turned the two settings into ``per_layer_config``, which other readers do not know. It reads
both forms but writes only that one.

Fix: A text model's configuration is written with both. The values are those of its full-attention layers. If these
layers differ from each other, the names cannot express it, and nothing is added.

Remove when: the configuration's ``to_dict`` has ``global_head_dim`` and ``num_global_key_value_heads``, or readers
understand ``per_layer_config``.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.models import config_names
from gemma4_compat.patches.api import Outcome, Patch, Workspace

PATCH = Patch("F55", severity="wrong_result", affected=">=5.15.0")


@PATCH.replaces("transformers.models.gemma4.configuration_gemma4", "Gemma4TextConfig.to_dict")
@PATCH.replaces(
    "transformers.models.gemma4_unified.configuration_gemma4_unified",
    "Gemma4UnifiedTextConfig.to_dict",
    group="unified",
)
def to_dict(original: Callable[..., dict[str, Any]], self: Any) -> dict[str, Any]:
    output = original(self)
    return output | config_names.restored(output)


def reproduce(workspace: Workspace) -> Outcome:
    import json
    from pathlib import Path

    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_configs

    name = workspace.variant or "31B"
    config = tiny_configs.config(variant=name)
    folder = workspace.new_folder()
    config.save_pretrained(folder)
    text = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["text_config"]
    heads = variants.shape(name)["text"].get("num_global_key_value_heads")
    expected = {
        "global_head_dim": tiny_configs.TEXT["global_head_dim"],
        "num_global_key_value_heads": None if heads is None else 1,
    }
    lost = [setting for setting, value in expected.items() if setting not in text or text[setting] != value]
    return Outcome(bool(lost), f"config.json of the {name} lacks: {', '.join(lost) or 'nothing'}")
