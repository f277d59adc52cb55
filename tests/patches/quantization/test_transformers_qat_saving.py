"""transformers-qat-saving: what was loaded from a QAT checkpoint can be saved, and is the same model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_qat_saving import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "'bool' object is not callable"


@qat.needs_quantizer
@pytest.mark.parametrize("place", ["nowhere", "layers", "embedding", "everything"])
def test_saved_in_shards_from_anywhere(workspace: Any, tmp_path: Path, place: str) -> None:
    import torch
    from safetensors.torch import load_file

    model = qat.load(workspace.qat())
    expected = workspace.outputs(model)
    if place != "nowhere":
        model = workspace.dispatch_map(model, qat.layout(model, place))
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    saved: dict[str, Any] = {}
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        saved |= load_file(file)
    original = load_file(workspace.qat() / "model.safetensors")
    lost = {name for name in original if name not in saved}
    assert all(name.endswith("_cache_scale") for name in lost), lost
    packed = [name for name, value in original.items() if not value.is_floating_point()]
    assert packed
    assert all(torch.equal(original[name], saved[name]) for name in packed)
    assert difference(expected, workspace.outputs(qat.load(tmp_path))) == 0.0
