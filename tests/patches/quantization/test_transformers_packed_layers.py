"""transformers-packed-layers: layers that stay packed compute, train, move and save as plain ones of the same values.

Most tests build the layers as compressed-tensors leaves them, which needs no library; those marked ``needs_library``
load with it.
"""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.quantization.other_quantizers import is_packed
from gemma4_compat._lab import tiny, tiny_qat
from gemma4_compat.patches.quantization.transformers_packed_layers import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import packed, qat
from tests.patches.quantization.test_accelerate_subclass_offload import logits
from tests.unit.kernels.conftest import on_host as on_host
from tests.unit.kernels.conftest import tapes as tapes
from tools.pages import packed as page

PLACES = ("one device", "host memory", "disk")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"bytes of weights after loading, \d+ after a forward"


def same(expected: Any, found: Any) -> bool:
    return all(one.equal(other) for one, other in zip(expected, found, strict=True))


def placed(workspace: Any, model: Any, place: str) -> Any:
    if place == "host memory":
        return qat.into_host_memory(model, "layers")
    return workspace.dispatch_map(model, qat.layout(model, "layers")) if place == "disk" else model


def gradients(model: Any) -> dict[str, Any]:
    batch = tiny.inputs(text_only=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert found
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "scales"), [(64, (5, 2)), (64, (5, 1)), (64, (1,)), (13, (5, 1)), (13, (1,))])
def test_unpacked(bits: int, columns: int, scales: tuple[int, ...], dtype: str) -> None:
    import torch

    from gemma4_compat._gemma4.quantization import packed_linear

    words = torch.randint(-(2**31), 2**31, (5, -(-columns * bits // 32)), generator=torch.Generator().manual_seed(0))
    scale = torch.rand(scales, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    places = torch.arange(0, 32, bits)
    values = ((words[..., None] >> places) & (2**bits - 1)).flatten(1)[:, :columns] - 2 ** (bits - 1)
    expected = packed.reference(values, scale)
    for cast in (scale.dtype, torch.float32):  # as the scales of a layer, after it was loaded
        found = packed_linear.unpacked(words.to(torch.int32), scale.to(cast), columns, bits, scale.dtype)
        assert found.dtype == cast
        assert found.equal(expected.to(cast))


@pytest.mark.parametrize(("bits", "group"), packed.FORMATS)
def test_outputs_are_those_of_the_values_and_nothing_stays_unpacked(workspace: Any, bits: int, group: int) -> None:
    plain = packed.plain(workspace, bits=bits, group=group)
    model = packed.kept(workspace, bits=bits, group=group)
    before = packed.nbytes(model)
    assert before < packed.nbytes(plain)
    assert workspace.difference(workspace.outputs(plain), model) == 0.0
    assert packed.nbytes(model) == before
    gradients(qat.adapted(model))
    assert packed.nbytes(model) - before == sum(
        weight.nbytes for name, weight in model.named_parameters() if "lora_" in name
    )


@pytest.mark.parametrize("part", ["layers", "embedding", "towers"])
@pytest.mark.parametrize("place", ["host memory", "disk"])
def test_offloaded(workspace: Any, place: str, part: str) -> None:
    model = packed.kept(workspace)
    expected, whole = workspace.outputs(packed.plain(workspace)), packed.nbytes(model)
    if place == "disk":
        model = workspace.dispatch_map(model, qat.layout(model, part))
    else:
        model = qat.into_host_memory(model, part)
    assert packed.nbytes(model) < whole
    assert workspace.difference(expected, model) == 0.0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": r".*language_model.*_proj"}])
def test_an_adapter(workspace: Any, place: str, options: dict[str, Any]) -> None:
    plain, model = (
        qat.adapted(placed(workspace, build(workspace), place), **options) for build in (packed.plain, packed.kept)
    )
    assert same(logits(plain), logits(model))
    expected, found = gradients(plain), gradients(model)
    assert all(expected[name].equal(found[name]) for name in expected)


def decoded(model: Any, *, exact: bool) -> list[Any]:
    """The logits of three texts, decoded from the same prompt: in the first, steps come before they are fused."""
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    gemma4_compat.decode_fast(model, exact=exact)
    found = [model.generate(**tiny.inputs(text_only=True), **options).logits for _ in range(3)]
    assert gemma4_compat.statistics(model).decoding.replayed
    return found


@pytest.mark.usefixtures("tapes", "on_host")
def test_replayed_in_decoding(workspace: Any) -> None:
    found = [decoded(build(workspace), exact=True) for build in (packed.plain, packed.kept)]
    assert all(same(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("tapes", "on_host")
def test_decoded_by_kernels_without_unpacking(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the logits of the same model with its bits, and the same wherever the layers are, fused or not."""
    from gemma4_compat._graphs import fused_steps
    from tests.unit.kernels.test_custom import NEAR

    monkeypatch.setattr(fused_steps.Progress, "after", 4)
    expected = decoded(packed.kept(workspace), exact=True)[0]
    model = packed.kept(workspace)
    found = decoded(model, exact=False)
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.fused, counted.not_fused) == (1, ())
    found += decoded(qat.into_host_memory(packed.kept(workspace), "layers"), exact=False)
    assert all(same(found[0], one) for one in found)
    assert found[0][0].equal(expected[0])  # of the prompt
    difference = (found[0][1] - expected[1]).abs().max()
    assert 0 < difference < NEAR * expected[1].std(), difference


@pytest.mark.parametrize(("bits", "group", "rows"), [(4, 32, 1), (4, 0, 64), (4, 32, 65), (8, 0, 1)])
@pytest.mark.usefixtures("on_host")
def test_what_is_unpacked_in_decoding(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, bits: int, group: int, rows: int
) -> None:
    import torch

    from gemma4_compat._kernels.match import custom

    layer = packed.kept(workspace, bits=bits, group=group).get_decoder().layers[0].mlp.down_proj
    given = torch.ones(1, rows, layer.in_features, dtype=torch.bfloat16)
    with torch.no_grad(), monkeypatch.context() as context:
        expected, unpack, calls = layer(given), layer.unpack, []
        context.setattr(layer, "unpack", lambda *args: calls.append(args) or unpack(*args))
        with custom.CustomKernels(given.device, rows):
            found = layer(given)
    assert bool(calls) == (bits == 8 or rows > 64)
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.usefixtures("tapes")
def test_replayed_in_training(workspace: Any) -> None:
    found = []
    for build in (packed.plain, packed.kept):
        model = gemma4_compat.train_fast(qat.adapted(build(workspace)).train())
        for _ in range(4):
            model.zero_grad()
            values = gradients(model)
        assert gemma4_compat.statistics(model).training.replayed
        found.append(values)
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_prepared_for_training(workspace: Any) -> None:
    import torch
    from peft import prepare_model_for_kbit_training

    expected = logits(packed.plain(workspace))
    model = prepare_model_for_kbit_training(packed.kept(workspace))
    assert same(expected, logits(model))
    layer = model.model.language_model.layers[0]
    assert (layer.input_layernorm.weight.dtype, layer.mlp.up_proj.weight_scale.dtype) == (
        torch.float32,
        torch.bfloat16,
    )


def test_cast(workspace: Any) -> None:
    """Loaded in bf16, the values are rounded to bf16 whatever they are cast to later."""
    assert same(*(logits(build(workspace).float()) for build in (packed.plain, packed.kept)))


def test_gradient_checkpointing(workspace: Any) -> None:
    found = []
    for checkpointing in (False, True):
        model = qat.adapted(packed.kept(workspace)).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable()
        found.append(gradients(model))
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_the_backward_pass_keeps_no_weight(workspace: Any) -> None:
    import torch

    model = qat.adapted(packed.kept(workspace))
    shapes = {(layer.out_features, layer.in_features) for layer in model.modules() if is_packed(layer)}
    kept, batch = [], tiny.inputs(text_only=True)

    def keep(tensor: Any) -> Any:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch, labels=batch["input_ids"])
    assert any(tensor.dtype == torch.int32 for tensor in kept)
    floating = {tuple(tensor.shape) for tensor in kept if tensor.is_floating_point()}
    assert not floating & {*shapes, *(shape[::-1] for shape in shapes)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_and_autocast(workspace: Any, dtype: str) -> None:
    import torch

    model = packed.as_loaded(workspace)
    layer = model.model.language_model.layers[0].mlp.up_proj
    layer.bias = torch.nn.Parameter(torch.randn(layer.out_features).to(torch.bfloat16))
    from gemma4_compat._gemma4.quantization import packed_linear

    packed_linear.keep_packed(model, packed_linear.unpacked)
    plain = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16)
    plain.weight = torch.nn.Parameter(layer.weight.detach().clone().float().to(torch.bfloat16), requires_grad=False)
    plain.bias = torch.nn.Parameter(layer.bias.detach().clone())
    found = []
    for one in (plain, layer):
        inputs = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", getattr(torch, dtype)):
            output = one(inputs)
        output.float().square().sum().backward()
        found.append((output, inputs.grad, one.bias.grad))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(workspace: Any, backend: str) -> None:
    import torch

    found = []
    for build in (packed.plain, packed.kept):
        torch.compiler.reset()
        layer = build(workspace).model.language_model.layers[0].mlp
        inputs = torch.ones(1, 4, layer.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        with torch.no_grad():
            output = compiled(inputs)
        compiled(inputs).sum().backward()
        found.append((output, inputs.grad))
    torch.compiler.reset()
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_saved_as_in_the_checkpoint(workspace: Any, place: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = placed(workspace, packed.kept(workspace), place)
    logits(model)
    model.save_pretrained(tmp_path)
    expected, found = packed.stored(workspace), load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(value.equal(found[name]) for name, value in expected.items())


def test_copied_and_pickled(workspace: Any) -> None:
    import torch

    model = packed.kept(workspace)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert same(logits(model), logits(other))


def test_an_adapter_is_saved_and_loaded(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model = qat.adapted(packed.kept(workspace))
    model.save_pretrained(tmp_path)
    assert same(logits(model), logits(PeftModel.from_pretrained(packed.kept(workspace), tmp_path).eval()))
    assert same(logits(packed.plain(workspace)), logits(model.unload()))


@pytest.mark.parametrize("method", ["merge_adapter", "merge_and_unload"])
@pytest.mark.skipif(not qat.has_quantizer(), reason="peft-qat-merge needs transformers 5.11")
def test_merges_are_refused(workspace: Any, method: str) -> None:
    model = qat.adapted(packed.kept(workspace), target_modules=["q_proj", "lm_head"])
    expected = logits(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"cannot be merged into 6 layers.*dequantize=True"):
        getattr(model, method)()
    assert same(expected, logits(model))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_changes_the_base_is_refused(workspace: Any, init: str) -> None:
    model = packed.kept(workspace)
    expected = logits(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=rf"{init}.*compressed-tensors.*stays packed"):
        qat.adapted(model, init_lora_weights=init)
    assert same(expected, logits(model))
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"modules_to_save.*dequantize=True"):
        qat.adapted(model, modules_to_save=["0.mlp.up_proj"])
    assert same(expected, logits(model))


def test_nothing_is_assigned_to_a_weight(workspace: Any) -> None:
    import torch

    layer = packed.kept(workspace).model.language_model.layers[0].mlp.up_proj
    value = torch.zeros(layer.out_features, layer.in_features)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="cannot be replaced, nor merged into"):
        layer.weight.data += value
    with pytest.raises(AttributeError, match=r"no setter|can't set"):
        layer.weight = value
    assert not layer.weight.equal(value)


NOT_UNDERSTOOD: dict[str, dict[str, Any]] = {
    "asymmetric": {"symmetric": False},
    "rounded activations": {"input_activations": {"num_bits": 8}},
    "floating point": {"type": "float"},
    "6 bits": {"num_bits": 6},
    "another width": {"num_bits": 8},
    "blocks": {"strategy": "block"},
}


@pytest.mark.parametrize("kind", [*NOT_UNDERSTOOD, "reordered columns"])
def test_other_layers_are_left_to_the_library(workspace: Any, kind: str) -> None:
    import torch

    from gemma4_compat._gemma4.quantization import packed_linear

    model = packed.as_loaded(workspace, scheme=NOT_UNDERSTOOD.get(kind))
    layers = [module for module in model.modules() if hasattr(module, "weight_packed")]
    if kind == "reordered columns":
        for layer in layers:
            layer.register_parameter("weight_g_idx", torch.nn.Parameter(torch.zeros(4), requires_grad=False))
    packed_linear.keep_packed(model, packed_linear.unpacked)
    assert {type(layer) for layer in layers} == {torch.nn.Linear}
    assert all(hasattr(layer, "quantization_scheme") for layer in layers)
    with pytest.raises(AssertionError, match="would decompress the model"):
        model(**tiny.inputs(text_only=True))
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"no weight before the first forward.*dequantize=True"):
        qat.adapted(model)
    for part in ("layers", "embedding"):
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"cannot be offloaded.*dequantize=True"):
            workspace.dispatch_map(model, qat.layout(model, part))


def test_among_others_the_library_decompresses_only_those(workspace: Any) -> None:
    from gemma4_compat._gemma4.quantization import packed_linear

    model = packed.as_loaded(workspace)
    other = model.model.language_model.layers[0].mlp.up_proj
    other.quantization_scheme.weights.symmetric = False
    packed_linear.keep_packed(model, packed_linear.unpacked)
    assert [module for module in model.modules() if hasattr(module, "quantization_scheme")] == [other]
    assert hasattr(model, "ct_decompress_hook")


def test_the_page_says_what_they_take() -> None:
    if not hasattr(pytest.importorskip("transformers"), "Gemma4UnifiedConfig"):
        pytest.skip("the 12B's classes came with transformers 5.10")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page(text) == text, "python -m tools.pages.packed"


@packed.needs_library
@pytest.mark.parametrize(("bits", "group"), packed.FORMATS)
def test_loaded_with_the_library(workspace: Any, bits: int, group: int, tmp_path: Path) -> None:
    folder = packed.folder(workspace, bits=bits, group=group)
    with gemma4_compat.quantize(packed=True):
        model = tiny.load(folder)
    expected = packed.kept(workspace, bits=bits, group=group)
    assert {name: type(module) for name, module in model.named_modules()} == {
        name: type(module) for name, module in expected.named_modules()
    }
    state = model.state_dict()
    assert all(value.equal(state[name]) for name, value in expected.state_dict().items())
    found = workspace.outputs(expected)
    assert workspace.difference(found, model) == 0.0
    assert not any(hasattr(module, "quantization_scheme") for module in model.modules())
    away = tiny.load(folder, device_map=qat.layout(expected, "layers"), offload_folder=tmp_path)
    assert packed.nbytes(away) < packed.nbytes(model)
    assert workspace.difference(found, away) == 0.0


@packed.needs_library
@pytest.mark.parametrize(("bits", "group"), packed.FORMATS)
def test_the_library_unpacks_the_same_bits(workspace: Any, bits: int, group: int) -> None:
    """A model that fits is decompressed in the first forward, as without the patch."""
    model = packed.kept(workspace, bits=bits, group=group)
    upstream = tiny.load(packed.folder(workspace, bits=bits, group=group))
    assert workspace.difference(workspace.outputs(model), upstream) == 0.0
    layers = [module for module in upstream.modules() if hasattr(module, "quantization_scheme")]
    weights = {name: module.weight for name, module in model.named_modules() if is_packed(module)}
    assert len(layers) == len(weights)
    assert all(upstream.get_submodule(name).weight.equal(weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("device_map", "free", "asked", "wanted"),
    [
        (None, None, False, False),
        (None, None, True, True),
        ({"": "cpu"}, None, False, False),
        ({"": "disk"}, None, False, True),
        ({"": 0}, 1.01, False, False),
        ({"": 0}, 0.99, False, True),
        ({"model": 0, "lm_head": "cuda:1"}, 0.6, False, False),
        ({"model": 0, "lm_head": "cuda:1"}, 0.4, False, True),
        ({"model": 0, "lm_head": "cpu"}, 9.0, False, True),
        ("auto", 0.6, False, False),
        ("auto", 0.4, False, True),
        (None, 1.01, False, False),
        (None, 0.99, False, True),
    ],
)
def test_layers_stay_packed_where_the_model_would_not_fit(
    workspace: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device_map: Any,
    free: float | None,
    asked: bool,
    wanted: bool,
) -> None:
    """``free``: on each of two GPUs, of what the decompressed model takes; None without a GPU."""
    import torch

    from gemma4_compat._gemma4.quantization import packed_linear

    model, whole = packed.as_loaded(workspace), packed.nbytes(packed.plain(workspace))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: free is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(packed_linear.host, "free_memory", lambda device: int(whole * (free or 0)))
    with gemma4_compat.quantize(packed=True) if asked else contextlib.nullcontext():
        assert packed_linear.is_wanted(model, device_map) == wanted
    short = wanted and not asked and not packed_linear._offloads(device_map)
    assert ("stay packed" in caplog.text) == short


@packed.needs_library
def test_what_may_be_done_with_a_model_that_is_decompressed(workspace: Any) -> None:
    model = tiny.load(packed.folder(workspace))
    assert not any(is_packed(module) for module in model.modules())
    said = r"quantize\(packed=True\).*dequantize=True"
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=said):
        qat.adapted(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=said):
        workspace.dispatch_map(model, qat.layout(model, "layers"))


@packed.needs_library
def test_dequantized_if_asked(workspace: Any) -> None:
    import transformers

    try:
        settings = transformers.CompressedTensorsConfig(dequantize=True)
    except TypeError:  # before 5.15
        settings = transformers.CompressedTensorsConfig(run_compressed=False)
    cls = transformers.Gemma4ForConditionalGeneration
    model = cls.from_pretrained(packed.folder(workspace), dtype="bfloat16", quantization_config=settings).eval()
    assert not any(is_packed(module) for module in model.modules())
    assert same(logits(packed.kept(workspace)), logits(model))


@packed.needs_library
def test_another_model_is_decompressed_as_before(tmp_path: Path) -> None:
    import torch
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    tiny_qat.build_packed_checkpoint(tmp_path / "plain", tmp_path / "packed")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    before = packed.nbytes(loaded)
    loaded(torch.tensor([[1, 2, 3]]))
    assert packed.nbytes(loaded) > before
