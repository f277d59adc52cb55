"""What tests of scans against a base share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat._adapter_tools.scan.result import Scan

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "target_modules": ["q_proj"]}


def scan(adapter: Path, base: Any, **options: Any) -> Scan:
    return gemma4_compat.scan_adapter(adapter, base, **options)


def ids(found: Scan) -> list[str]:
    return [problem.id for problem in found.problems]


def hits(found: Scan) -> dict[tuple[str, str], int]:
    return {(hit.tower, hit.kind): hit.modules for hit in found.hits}


def saved_with(config: Any, model: Any, folder: Path) -> Path:
    import peft

    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def expected_shapes(config: Any, model: Any) -> dict[str, tuple[int, ...]]:
    import peft

    adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    own = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {key: tuple(tensor.shape) for key, tensor in own.items()}


def json_of(config: Any) -> dict[str, Any]:
    data = config.to_dict()
    data = {key: sorted(value) if isinstance(value, set) else value for key, value in data.items()}
    return json.loads(json.dumps(data, default=str)) | {"peft_type": config.peft_type.value}
