"""What depth.py takes for granted: a text that was not read, ways that keep their graphs, files that are filled."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.decoding import kernel_times
from benchmarks.peers import heads

ORDER = {"shape": "tiny", "saved": False, "where": "gpu", "allocated": 0, "way": "replayed", "settled": 2}
TOKENS, CONTEXT = 6, 80


@pytest.fixture
def measure(tmp_path: Path) -> Iterator[Any]:
    """depth_measure, with a tiny model."""
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    from benchmarks.decoding import depth_measure
    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins import tape

    order = ORDER | {"folder": str(tmp_path)}
    with tape.standing_in(recording.RECORDERS), mock.patch.multiple(depth_measure, _weights=None, _decodings={}):
        depth_measure.build(order)
        depth_measure.load(order)
        yield depth_measure
        depth_measure.measure.use(None)


def test_a_text_that_was_not_read_has_positions_masks_and_lengths_of_one_that_was(measure: Any) -> None:
    import torch

    seen: list[dict[str, Any]] = []

    def hook(_module: Any, _given: Any, inputs: dict[str, Any]) -> None:
        from gemma4_compat._gemma4.cache import cache_names

        layers = [layer for layer in cache_names.cache_in(inputs).layers if layer.keys is not None]
        found = {f"mask {name}": mask for name, mask in inputs["attention_mask"].items()}
        found["positions"] = inputs["position_ids"]
        found |= {
            f"layer {index}": layer.cumulative_length
            for index, layer in enumerate(layers)
            if not hasattr(layer, "cumulative_length_int")
        }
        found["windows"] = torch.tensor([getattr(layer, "cumulative_length_int", 0) for layer in layers])
        seen.append({name: value.clone() for name, value in found.items() if value is not None})

    model = measure.measure.model()
    batch = measure.models.text_prompt(model, CONTEXT)
    model.register_forward_pre_hook(hook, with_kwargs=True)
    steps = []
    for reads in (True, False):
        seen.clear()
        measure.room(ORDER)
        with measure.filled(0 if reads else CONTEXT):
            measure.measure.generate("eager", TOKENS, batch)
        steps.append([*seen[1:]])
    assert len(steps[0]) == len(steps[1]) == TOKENS - 1
    for read, filled in zip(*steps, strict=True):
        assert read.keys() == filled.keys() >= {"positions", "windows"}
        assert any(name.startswith("layer") for name in read)
        for name, value in read.items():
            assert torch.equal(value, filled[name]), name
    assert steps[1][0]["positions"].item() == CONTEXT


def test_each_way_keeps_its_graphs(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma4_compat._kernels.match import fusing

    kinds = frozenset({"products"})
    monkeypatch.setattr(fusing, "KINDS", kinds)
    order = ORDER | {"tokens": TOKENS, "prompt": CONTEXT}
    for way in measure.WAYS:
        with measure.using(way):
            found = fusing.KINDS
        assert found == (frozenset() if way == "before" else kinds)
        measure.warm(order | {"arithmetic": way})
    kept = dict(measure._decodings)
    assert len({id(one) for one in kept.values()}) == 3
    assert [one.preferred for one in kept.values()] == [False, False, True]
    for way in (*measure.WAYS, "before"):
        found = measure.turn(order | {"arithmetic": way})
        assert (found["captured"], found["replayed"]) == (0, TOKENS - 1)
    assert all(measure._decodings[way] is one for way, one in kept.items())


def test_kernels_that_differ_in_a_number_are_of_one_kind() -> None:
    found = kernel_times.listed(
        [("fused_3", 20.0, 10), ("fused_11", 40.0, 10), ("gemm", 50.0, 20), ("idle", 0.0, 9)], 10
    )
    assert [one["name"] for one in found["longest"]] == ["fused_", "gemm"]
    assert found["longest"][0]["ms"] == pytest.approx(0.006)
    assert found["longest"][0]["count"] == pytest.approx(2)
    assert found["kernels_a_token"] == pytest.approx(4)
    assert found["ms_a_token"] == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("token_embd.weight", (262144, 1536), "Q6_K"),
        ("token_embd.weight", (256, 64), "Q8_0"),
        ("per_layer_token_embd.weight", (262144, 8960), "Q6_K"),
        ("blk.3.attn_q.weight", (2048, 1536), "Q4_0"),
        ("blk.3.attn_q_norm.weight", (256,), None),
        ("per_layer_model_proj.weight", (8960, 1536), None),
        ("blk.3.layer_output_scale.weight", (1,), None),
    ],
)
def test_types_are_those_of_llama_quantize(name: str, shape: tuple[int, ...], kind: str | None) -> None:
    assert heads.quantized(name, shape) == kind


def test_a_head_is_filled_with_blocks_of_its_types(tmp_path: Path) -> None:
    import numpy

    tensors = [
        {"name": "norm.weight", "type": "F32", "nbytes": 64, "offset": 32},
        {"name": "w.weight", "type": "Q4_0", "nbytes": 18 * 400_000, "offset": 96},
        {"name": "w.weight.lora_a", "type": "F32", "nbytes": 32, "offset": 7_200_096},
    ]
    packed = base64.b64encode(zlib.compress(b"GGUF" * 8)).decode()
    head = tmp_path / "E2B-q4_0.json"
    head.write_text(json.dumps({"size": 7_200_128, "tensors": tensors, "head": packed}), encoding="utf-8")
    data = heads.filled(head, tmp_path).read_bytes()
    assert (len(data), data[:32]) == (7_200_128, b"GGUF" * 8)
    assert set(numpy.frombuffer(data[32:96], numpy.float32)) == {1.0}
    blocks = numpy.frombuffer(data[96 : 96 + 18 * 400_000], numpy.uint8).reshape(-1, 18)
    scales = blocks[:, :2].copy().view(numpy.float16)
    assert set(scales.ravel()) == {numpy.float16(heads.SCALES["Q4_0"])}
    assert len(set(blocks[:, 5])) == 256
    adapter = numpy.frombuffer(data[7_200_096:], numpy.float32)
    assert 0 < float(abs(adapter).max()) < 0.2
    with pytest.raises(OSError, match="E4B"):
        heads.filled(heads.named(tmp_path, "E4B", "q4_0"), tmp_path)
