"""transformers-quantized-experts: experts in 4 bits, and the line that says when they are not."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage
from gemma4_compat._gemma4.quantization import experts as _quantized_experts
from gemma4_compat._gemma4.quantization.bytes import stored_bytes, stored_bytes_of
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_quantized_experts import PATCH, by_hand
from tests.patches.promise import Promise

LAYERS = "model.language_model.layers"
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"experts: \d+ of the \d+ bytes of a 4-bit model are in bf16"


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


@pytest.fixture(scope="module")
def load(workspace: Any, checkpoint: Path) -> Callable[..., Any]:
    """``load(quantization, experts=True, **options)``: the mixture of experts, in eval mode."""

    def load(quantization: str | None = "4bit", *, experts: bool = True, **options: Any) -> Any:
        folder = options.pop("folder", checkpoint)
        options = {"device": workspace.main, **options}
        if not experts:
            return tiny.load(folder, quantization, **options)
        with gemma4_compat.quantize(experts=True):
            return tiny.load(folder, quantization, **options)

    return load


@pytest.fixture(scope="module")
def reference(workspace: Any, load: Callable[..., Any]) -> Callable[[str], Any]:
    """``reference(quantization)``: the answers of a model whose experts were quantized by hand."""
    known: dict[str, Any] = {}

    def outputs(quantization: str) -> Any:
        if quantization not in known:
            model = by_hand(load(quantization, experts=False), quantization)
            known[quantization] = workspace.outputs(model, text_only=True)
        return known[quantization]

    return outputs


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="gemma4_compat")

    def found() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name == "gemma4_compat"]
        caplog.clear()
        return [text for text in texts if "experts:" in text]

    return found


def kinds(model: Any) -> set[str]:
    return {
        type(parameter).__name__
        for module in _quantized_experts.all_experts(model).values()
        for parameter in module.parameters()
    }


def is_exact(workspace: Any, expected: Any, model: Any) -> bool:
    return difference(expected, workspace.outputs(model, text_only=True)) == 0.0


def nbytes(model: Any) -> int:
    return stored_bytes_of(model)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_answers_are_those_of_each_matrix_quantized_by_hand(
    workspace: Any, load: Callable[..., Any], quantization: str, implementation: str
) -> None:
    model = load(quantization, experts_implementation=implementation)
    assert kinds(model) == {"Params4bit"}
    plain = by_hand(load(quantization, experts=False, experts_implementation=implementation), quantization)
    assert is_exact(workspace, workspace.outputs(plain, text_only=True), model)


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_each_matrix_is_bitsandbytes_own(load: Callable[..., Any], quantization: str) -> None:
    import torch
    from bitsandbytes import functional

    plain = _quantized_experts.all_experts(load(quantization, experts=False))
    for path, module in _quantized_experts.all_experts(load(quantization)).items():
        for name in _quantized_experts.NAMES:
            parameter = module.get_parameter(name)
            matrices = plain[path].get_parameter(name)
            chosen = torch.tensor([3, 17, 30], device=matrices.device)
            values = expert_storage.dequantized(parameter)
            assert torch.equal(expert_storage.dequantized(parameter, chosen), values[chosen])
            assert values.dtype == torch.bfloat16
            assert values.shape == matrices.shape
            for index in (0, 31):
                packed, state = functional.quantize_4bit(
                    matrices[index].contiguous(), quant_type="nf4", compress_statistics=quantization == "4bit-double"
                )
                assert torch.equal(parameter.data.view(32, -1)[index], packed.flatten())
                assert torch.equal(values[index], functional.dequantize_4bit(packed, state))


def test_other_kinds_of_4_bit(workspace: Any, checkpoint: Path, tmp_path: Path) -> None:
    """fp4, and bytes stored as bf16 (as FSDP wants them)."""
    import torch
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4",
        bnb_4bit_quant_storage=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "model.vision_tower", "model.embed_vision"],
    )
    with gemma4_compat.quantize(experts=True):
        model = Gemma4ForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.bfloat16, device_map={"": workspace.main}, quantization_config=config
        )
    model.save_pretrained(tmp_path)
    again = Gemma4ForConditionalGeneration.from_pretrained(tmp_path, device_map={"": workspace.main})
    plain = tiny.load(checkpoint, device=workspace.main).get_submodule(f"{LAYERS}.1.experts")
    for one in (model, again):
        parameter = one.get_submodule(f"{LAYERS}.1.experts").gate_up_proj
        assert parameter.dtype == torch.bfloat16
        values = expert_storage.dequantized(parameter)
        for index in (0, 31):
            matrix = plain.gate_up_proj.data[index].contiguous()
            packed = functional.quantize_4bit(matrix, quant_type="fp4")
            assert torch.equal(values[index], functional.dequantize_4bit(*packed))


def test_few_tokens_dequantize_few_experts(workspace: Any, load: Callable[..., Any], monkeypatch: Any) -> None:
    import torch

    seen: list[int] = []
    dequantized = expert_storage.dequantized

    def counted(parameter: Any, chosen: Any = None, rows: Any = None) -> Any:
        seen.append(32 if chosen is None else len(chosen))
        return dequantized(parameter, chosen, rows)

    model = load()
    monkeypatch.setattr(expert_forward, "dequantized", counted)
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    with torch.no_grad():
        model(input_ids=ids[:, :1])
        assert set(seen) == {2}
        seen.clear()
        model(input_ids=ids[:, :4])
        assert max(seen) <= 8
        seen.clear()
        model(input_ids=ids)
        assert set(seen) == {32}


def test_bytes_before_and_after(load: Callable[..., Any]) -> None:
    before, after = load(experts=False), load()
    experts = [weight for module in _quantized_experts.all_experts(before).values() for weight in module.parameters()]
    plain = sum(weight.nbytes for weight in experts)
    values = plain // 2
    packed = sum(
        stored_bytes(weight)
        for module in _quantized_experts.all_experts(after).values()
        for weight in module.parameters()
    )
    assert packed == values // 2 + 4 * values // 64 + 4 * 16 * len(experts)
    assert nbytes(before) - nbytes(after) == plain - packed


def test_loading_holds_one_parameter_of_one_layer_at_a_time(
    workspace: Any, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, beside what is quantized already."""
    import gc

    import torch

    def experts() -> list[Any]:
        found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.ndim == 3]
        return [item for item in found if item.device.type != "meta" and len(item) == 32]

    alive: list[int] = []
    quantized = expert_storage.quantized

    def watched(values: Any, like: Any) -> Any:
        fresh = [item.untyped_storage() for item in experts() if id(item) not in others]
        storages = {storage.data_ptr(): storage.nbytes() for storage in fresh}
        alive.append(sum(storages.values()) // (values.numel() * 2))
        return quantized(values, like)

    monkeypatch.setattr(expert_storage, "quantized", watched)
    gc.collect()
    # Weights that other tests of this process have left are none of this load's. Held, they keep their ids.
    others = {id(item): item for item in experts()}
    load()
    assert alive == [1] * 6


def test_copies_moves_and_pickles(workspace: Any, load: Callable[..., Any], reference: Callable[[str], Any]) -> None:
    model = load("4bit-double")
    assert is_exact(workspace, reference("4bit-double"), copy.deepcopy(model))
    assert is_exact(workspace, reference("4bit-double"), model.to(workspace.main))
    again = pickle.loads(pickle.dumps(model))
    assert is_exact(workspace, reference("4bit-double"), again)
    assert set(again.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "unpaged"])
def test_offloaded(
    workspace: Any, load: Callable[..., Any], reference: Callable[[str], Any], quantization: str, paged: bool
) -> None:
    if not paged:
        gemma4_compat.revert("accelerate-paged-layers")
    try:
        model = load(quantization)
        placement = dict.fromkeys(
            tiny.device_map(model, "none", main=workspace.main, offloaded="disk"), workspace.main
        )
        placement |= {f"{LAYERS}.{index}": workspace.offloaded for index in (0, 2)}
        model = workspace.dispatch_map(model, placement)
        assert next(iter(_quantized_experts.all_experts(model).values())).gate_up_proj.device.type == "meta"
        assert is_exact(workspace, reference(quantization), model)
    finally:
        gemma4_compat.install()


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_loaded_with_a_map_saved_and_loaded_again(
    workspace: Any, load: Callable[..., Any], reference: Callable[[str], Any], tmp_path: Path, quantization: str
) -> None:
    from transformers import Gemma4ForConditionalGeneration

    placement: dict[str, Any] = {"": workspace.main, f"{LAYERS}.1": workspace.offloaded}
    with gemma4_compat.quantize(offloaded=True):
        model = load(quantization, device_map=placement, offload_folder=str(tmp_path / "offload"))
    assert kinds(model) == {"Params4bit"}
    assert is_exact(workspace, reference(quantization), model)
    model.save_pretrained(tmp_path / "saved")
    size = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.safetensors"))
    assert size < nbytes(model) + 100_000
    for folder, again_map in (("whole", {"": workspace.main}), ("split", placement)):
        with gemma4_compat.quantize(offloaded=True):
            again = Gemma4ForConditionalGeneration.from_pretrained(
                tmp_path / "saved", device_map=again_map, offload_folder=str(tmp_path / folder)
            ).eval()
        assert kinds(again) == {"Params4bit"}, folder
        assert is_exact(workspace, reference(quantization), again), folder
    # Upstream cannot save any re-loaded 4-bit model in the layout of the checkpoint it came from.
    again.save_pretrained(tmp_path / "twice", save_original_format=False)
    with gemma4_compat.quantize(offloaded=True):  # the saved flag would keep all of a "cpu" unquantized
        third = Gemma4ForConditionalGeneration.from_pretrained(tmp_path / "twice", device_map={"": workspace.main})
    assert is_exact(workspace, reference(quantization), third.eval())


def test_a_saved_model_whose_experts_are_in_bf16_is_loaded_as_it_is(
    workspace: Any, load: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import Gemma4ForConditionalGeneration

    model = load(experts=False)
    model.save_pretrained(tmp_path)
    with gemma4_compat.quantize(experts=True):
        again = Gemma4ForConditionalGeneration.from_pretrained(tmp_path, device_map={"": workspace.main}).eval()
    assert kinds(again) == {"Parameter"}
    assert is_exact(workspace, workspace.outputs(model, text_only=True), again)


def test_the_language_model_alone(
    workspace: Any, checkpoint: Path, load: Callable[..., Any], reference: Callable[[str], Any], tmp_path: Path
) -> None:
    from transformers import Gemma4ForCausalLM

    (tmp_path / "twin").mkdir()
    tiny_models.build_text_copy(checkpoint, tmp_path / "twin")
    model = load(folder=tmp_path / "twin", cls="Gemma4ForCausalLM")
    assert is_exact(workspace, reference("4bit"), model)
    model.save_pretrained(tmp_path / "saved")
    again = Gemma4ForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": workspace.main}).eval()
    assert kinds(again) == {"Params4bit"}
    assert is_exact(workspace, reference("4bit"), again)


def test_training_keeps_the_packed_weights_for_the_backward_pass(workspace: Any, load: Callable[..., Any]) -> None:
    import torch

    batch = tiny.inputs(workspace.main, text_only=True)
    gradients, kept = [], []
    for model in (by_hand(load(experts=False), "4bit"), load()):
        model.requires_grad_(False)
        inputs: list[Any] = []
        model.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, output, inputs=inputs: inputs.append(output.requires_grad_()) or output
        )
        shapes: list[Any] = []
        known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Any, shapes: list[Any] = shapes, known: set[int] = known) -> Any:
            if tensor.ndim == 3 and len(tensor) == 32 and tensor.untyped_storage().data_ptr() not in known:
                shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**batch).logits.float().square().mean()
        gradients.append(torch.autograd.grad(loss, inputs[-1])[0])
        kept.append(shapes)
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0
    assert kept[1] == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_checkpoint_keeps_nothing_of_their_forward(
    workspace: Any, load: Callable[..., Any], implementation: str
) -> None:
    """Between the two passes there are as many tensors of its size as with experts in bf16."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import checkpoint

    class Made(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.storages: list[Any] = []

        def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = op(*args, **(kwargs or {}))
            given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
            if (
                torch.is_tensor(found)
                and found.untyped_storage()._cdata not in given
                and found.numel() >= states.numel()
            ):
                self.storages.append(StorageWeakRef(found.untyped_storage()))
            return found

        def live(self) -> int:
            gc.collect()
            return len({one.cdata for one in self.storages if not one.expired()})

    generator = torch.Generator().manual_seed(0)
    states = torch.randn((24, 64), generator=generator).to(workspace.main, torch.bfloat16)
    weights, chosen = torch.rand((24, 32), generator=generator).to(workspace.main).topk(2)
    kept, gradients = [], []
    for experts in (False, True):
        model = load(experts=experts, experts_implementation=implementation)
        model = model if experts else by_hand(model, "4bit")
        module = model.requires_grad_(False).get_submodule(f"{LAYERS}.1.experts")
        given, made = states.clone().requires_grad_(), Made()
        with made:
            found = checkpoint(module, given, chosen, weights, use_reentrant=False)
        kept.append(made.live())
        gradients.append(torch.autograd.grad(found.float().square().sum(), given)[0])
    assert torch.equal(*gradients)
    assert kept[1] == kept[0]


def test_prepared_for_training_they_stay_as_they_are(workspace: Any, load: Callable[..., Any]) -> None:
    import peft
    import torch

    model = load()
    before = {name: weight.data for name, weight in model.named_parameters() if ".experts." in name}
    outputs = workspace.outputs(model, text_only=True)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert len(before) == 6
    assert all(torch.equal(model.get_parameter(name), data) for name, data in before.items())
    assert is_exact(workspace, outputs, model)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double"])
def test_compiled(workspace: Any, load: Callable[..., Any], quantization: str | None, implementation: str) -> None:
    """The experts alone: upstream's quantized linear layers cannot be traced on every CPU."""
    import torch

    torch.compiler.reset()
    module = load(quantization, experts_implementation=implementation).get_submodule(f"{LAYERS}.1.experts")
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 24):
        states = torch.randn(tokens, 64, generator=generator).to(workspace.main, torch.bfloat16)
        weights, experts = torch.rand(tokens, 32, generator=generator).to(workspace.main).topk(2)
        with torch.no_grad():
            expected = module(states, experts, weights)
            # Some releases log on the way to the grouped kernel, which breaks the graph there.
            whole = implementation == "batched_mm"
            found = torch.compile(module, backend="eager", fullgraph=whole)(states, experts, weights)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_dequantized_they_are_what_they_computed_with(workspace: Any, load: Callable[..., Any], split: bool) -> None:
    import torch

    model = load("4bit-double")
    values = {
        path: expert_storage.dequantized(module.gate_up_proj)
        for path, module in _quantized_experts.all_experts(model).items()
    }
    if split:
        placement = dict.fromkeys(
            tiny.device_map(model, "none", main=workspace.main, offloaded="disk"), workspace.main
        )
        model = workspace.dispatch_map(model, placement | {f"{LAYERS}.1.experts": workspace.offloaded})
    model = model.dequantize()
    assert kinds(model) == {"Parameter"}
    for path, module in _quantized_experts.all_experts(model).items():
        with _placement.weights_brought_in(module):
            assert torch.equal(module.gate_up_proj, values[path])
    assert workspace.outputs(model, text_only=True).logits[0].isfinite().all()


def test_skipped_experts_stay_and_the_line_says_so(load: Callable[..., Any], lines: Callable[[], list[str]]) -> None:
    model = load(skip_modules=[f"{LAYERS}.1.experts"])
    found = {path: kind for path, kind in _found(model).items()}
    assert found == {f"{LAYERS}.0": "Params4bit", f"{LAYERS}.1": "Parameter", f"{LAYERS}.2": "Params4bit"}
    (line,) = lines()
    assert "of" in line
    assert line.endswith(
        "stay bf16; they are skipped (llm_int8_skip_modules, offloaded), or are not a multiple of a block"
    )


def _found(model: Any) -> dict[str, str]:
    return {
        path.removesuffix(".experts"): type(module.get_parameter("down_proj")).__name__
        for path, module in _quantized_experts.all_experts(model).items()
    }


def test_one_line_says_how_much_stays_in_bf16(
    workspace: Any, load: Callable[..., Any], lines: Callable[[], list[str]]
) -> None:
    load()
    assert not lines(), "all are quantized"
    model = load(experts=False)
    experts = sum(w.nbytes for module in _quantized_experts.all_experts(model).values() for w in module.parameters())
    text = f"{_quantized_experts.gigabytes(experts)} of {_quantized_experts.gigabytes(nbytes(model))} stay bf16"
    (line,) = lines()
    assert line == (
        f"gemma4_compat: experts: {text}; load inside gemma4_compat.quantize(experts=True) to quantize them too"
    )
    load("8bit")
    (line,) = lines()
    assert "experts can only be quantized to 4 bits" in line
    load(None, experts=False)
    workspace.load("4bit")
    assert not lines(), "not quantized, or without experts"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (45_675_970_560, "45.7 GB"), (2_400_000, "2.4 MB"), (1e13, "10000.0 GB")]
)
def test_sizes_as_text(nbytes: int, text: str) -> None:
    assert _quantized_experts.gigabytes(nbytes) == text


def test_the_environment_asks_for_the_whole_process(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", PATCH.id)
    assert kinds(load(experts=False)) == {"Params4bit"}


def test_undone_it_says_so(load: Callable[..., Any]) -> None:
    gemma4_compat.revert(PATCH.id)
    try:
        with pytest.raises(Gemma4CompatError, match="which is reverted"):
            load()
    finally:
        gemma4_compat.install()


def test_experts_that_are_no_multiple_of_a_block_stay(
    workspace: Any, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    import torch
    from transformers import Gemma4ForConditionalGeneration

    config = tiny_configs.moe_config()
    config.text_config.moe_intermediate_size = 33
    config.text_config.hidden_size = 96
    model = tiny_models.randomized(Gemma4ForConditionalGeneration(config))
    module = next(iter(_quantized_experts.all_experts(model).values()))
    before = [weight.clone() for weight in module.parameters()]
    with pytest.raises(Gemma4CompatError, match=r"96 x 33 values are not a multiple of a block of 64.*skip_modules"):
        expert_storage.quantize_module(module, tiny.quantization_config("4bit"))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))
