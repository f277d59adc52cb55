"""F19, F117: checkpointing of either kind gives the gradients of no checkpointing."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat.patches.training.transformers_reentrant_checkpointing import PATCH
from tests.patches.promise import Promise

REENTRANT = {"use_reentrant": True}
#: How a caller may ask for the reentrant kind; the last two by saying nothing, which PyTorch takes for yes.
ASKED = [REENTRANT, {}, {"preserve_rng_state": False}]
COSINE = 0.9999


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the loss is right; the gradient of .*\.[kv]_proj\.weight has cosine 0\.\d+ with the right one"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Gemma4CompatWarning)
        yield


def enable(model: Any, **kwargs: Any) -> None:
    with quiet():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def step(
    model: Any, main: Any, *, text_only: bool = False, variant: str | None = None
) -> tuple[float, dict[str, Any]]:
    """Loss, and gradients (float32, flat, on the CPU) of whatever is trained."""
    batch = tiny.inputs(main, text_only=text_only, variant=variant)
    model.train()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss.item(), {
        name.replace(".default", ""): weight.grad.float().flatten().cpu()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def same(right: tuple[float, dict[str, Any]], found: tuple[float, dict[str, Any]]) -> None:
    import torch

    assert found[0] == right[0]
    assert found[1].keys() == right[1].keys()
    assert [name for name in right[1] if name.endswith(("k_proj.weight", "k_proj.lora_A.weight"))]
    for name, gradient in right[1].items():
        if gradient.abs().max() > 0:
            assert torch.cosine_similarity(gradient, found[1][name], dim=0) >= COSINE, name
            assert torch.allclose(gradient.norm(), found[1][name].norm(), rtol=1e-2), name


def with_adapter(workspace: Any, model: Any, targets: str = "all") -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, workspace.adapter(targets), is_trainable=True)


@pytest.fixture(scope="module")
def right(workspace: Any) -> Callable[[str | None, bool], tuple[float, dict[str, Any]]]:
    """``right(quantization, adapter)``: the training step of that model on one device without checkpointing."""

    @functools.cache
    def of(quantization: str | None, adapter: bool) -> tuple[float, dict[str, Any]]:
        model = workspace.load(quantization)
        return step(with_adapter(workspace, model) if adapter else model, workspace.main)

    return of


@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, *ASKED], ids=str)
def test_every_weight(workspace: Any, right: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    model = workspace.load()
    enable(model, **kwargs)
    same(right(None, False), step(model, workspace.main))


@pytest.mark.parametrize("split", [False, True], ids=["one-device", "paged"])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_adapters_of_the_language_model_and_both_towers(
    workspace: Any, right: Callable[..., Any], quantization: str | None, split: bool
) -> None:
    base = workspace.split(quantization) if split else workspace.load(quantization)
    model = with_adapter(workspace, base)
    model.enable_input_require_grads()
    enable(model, **REENTRANT)
    assert model.get_base_model().is_gradient_checkpointing
    same(right(quantization, True), step(model, workspace.main))


def test_the_vision_tower_learns(workspace: Any) -> None:
    model = with_adapter(workspace, workspace.load(), "towers")
    enable(model, **REENTRANT)
    gradients = step(model, workspace.main)[1]
    assert [name for name in gradients if "vision_tower" in name]
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if "lora_B" in name)


@pytest.mark.parametrize("asked", [None, REENTRANT, {"use_reentrant": False}], ids=str)
def test_pefts_preparation(workspace: Any, right: Callable[..., Any], asked: Any) -> None:
    from peft import prepare_model_for_kbit_training

    model = workspace.load("4bit")
    plain = step(with_adapter(workspace, prepare_model_for_kbit_training(copy.deepcopy(model), False)), workspace.main)
    with quiet():
        prepared = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=asked)
    assert prepared.is_gradient_checkpointing
    same(plain, step(with_adapter(workspace, prepared), workspace.main))


@pytest.mark.parametrize("asked", [None, REENTRANT], ids=str)
def test_the_trainer(workspace: Any, tmp_path: Path, asked: Any) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    batch = {name: value.cpu()[0] for name, value in tiny.inputs(text_only=True).items()}
    data = [{**batch, "labels": batch["input_ids"]}]

    def norms(**kwargs: Any) -> list[float]:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, report_to=[], save_strategy="no", **kwargs
        )
        torch.manual_seed(0)
        trainer = Trainer(workspace.load(), arguments, train_dataset=data)
        with quiet():
            trainer.train()
        return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]

    found = norms(gradient_checkpointing=True, gradient_checkpointing_kwargs=asked)
    assert len(found) == 4
    assert found == pytest.approx(norms(), rel=1e-3)


def test_the_unified_models(workspace: Any) -> None:
    try:
        models = [tiny_models.unified_text_model() for _ in range(2)]
    except ImportError:
        pytest.skip("this transformers has no gemma4_unified")
    enable(models[1], **REENTRANT)
    same(*(step(model.to(workspace.main), workspace.main, text_only=True) for model in models))


def kinds(model: Any, part: str = "") -> set[Any]:
    """``use_reentrant`` of every checkpointed layer, in modules with ``part`` in their names."""
    return {
        module._gradient_checkpointing_func.keywords.get("use_reentrant")
        for name, module in model.named_modules()
        if part in name and getattr(module, "gradient_checkpointing", False)
    }


def large(workspace: Any, variant: str) -> Any:
    """A model none of whose layers shares keys and values: with both towers, or the 12B."""
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
        return workspace.unified().load()
    folder = workspace.cached(tiny_models.build_checkpoint, text_variant=variant)
    return tiny.load(folder, device=workspace.main)


@pytest.mark.full
@pytest.mark.parametrize("kwargs", ASKED, ids=str)
@pytest.mark.parametrize("variant", ["12B", "26B-A4B", "31B"])
def test_every_weight_of_a_model_that_shares_nothing(workspace: Any, variant: str, kwargs: dict[str, Any]) -> None:
    unified = variant if variant == variants.UNIFIED else None
    expected = step(large(workspace, variant), workspace.main, variant=unified)
    model = large(workspace, variant)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if kwargs == REENTRANT:
        assert kinds(model, "language_model") == {True}
    same(expected, step(model, workspace.main, variant=unified))


def tower_step(workspace: Any, asked: Any, way: str, folder: Path) -> dict[str, Any]:
    """Gradients of adapters in both towers and the language model of a 31B, float32."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = large(workspace, "31B").float()
    with quiet():
        if way == "PEFT":
            model.is_loaded_in_4bit = True
            model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=asked)
        torch.manual_seed(0)
        targets = r".*(tower.*\.[qv]_proj\.linear|language_model.*\.q_proj)"
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
        if way == "split":
            main = torch.device(workspace.main)
            placement = tiny.device_map(model.get_base_model(), "both", main=main, offloaded="disk")
            tiny.dispatch(model.get_base_model(), placement, folder)
        if way in ("model", "split"):
            model.enable_input_require_grads()
            model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs=asked)
    return step(model, workspace.main)[1]


@pytest.mark.parametrize(("way", "asked"), [
    ("model", REENTRANT), ("PEFT", None), ("PEFT", REENTRANT), ("PEFT", {"use_reentrant": False}),
    ("split", REENTRANT),
    *[pytest.param(way, {}, marks=pytest.mark.full) for way in ("model", "PEFT", "split")],
], ids=str)  # fmt: skip
def test_adapters_in_towers_learn(workspace: Any, tmp_path: Path, way: str, asked: Any) -> None:
    expected = tower_step(workspace, None, "none", tmp_path)
    found = tower_step(workspace, asked, way, tmp_path)
    towers = [name for name, value in found.items() if "tower" in name and value.abs().max() > 0]
    assert {name.split("tower")[0].rsplit(".", 1)[-1] for name in towers} == {"vision_", "audio_"}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value - found[name]).abs().max() <= 1e-4 * max(value.abs().max(), 1e-6), name


def test_a_trainer_teaches_towers(workspace: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    batch = {name: value.cpu()[0] for name, value in tiny.inputs().items()}
    norms = []
    for options in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}):
        model = large(workspace, "31B").float()
        for name, weight in model.named_parameters():
            weight.requires_grad_("vision_tower.encoder" in name)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, **options
        )
        trainer = Trainer(model, arguments, train_dataset=[{**batch, "labels": batch["input_ids"]}])
        trainer.train()
        norms += [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def unshared(workspace: Any) -> Any:
    """A language model none of whose layers shares keys and values."""
    import torch
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    torch.manual_seed(0)
    shape = {**tiny_configs.text_shape(), "num_kv_shared_layers": 0}
    model = gemma4.Gemma4ForCausalLM(
        gemma4.Gemma4TextConfig(
            **shape, vocab_size_per_layer_input=tiny_configs.VOCABULARY, hidden_size_per_layer_input=64
        )
    )
    return tiny_models.randomized(model).to(workspace.main)


@pytest.mark.parametrize("split", [False, True], ids=["one-device", "paged"])
def test_a_model_that_shares_nothing_is_checkpointed_as_asked(workspace: Any, split: bool) -> None:
    whole = unshared(workspace)
    model = copy.deepcopy(whole)
    for layers in (whole, model):
        for name, weight in layers.named_parameters():
            weight.requires_grad_("layers.1." in name)
    if split:
        placement = {"model": workspace.main, "lm_head": workspace.main}
        placement = {f"model.{name}": workspace.main for name, _ in model.model.named_children() if name != "layers"}
        places = [workspace.offloaded if index in (0, 3) else workspace.main for index in range(6)]
        placement |= {f"model.layers.{index}": place for index, place in enumerate(places)}
        model = workspace.dispatch_map(model, placement | {"lm_head": workspace.main})
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    model.enable_input_require_grads()
    assert kinds(model) == {True}
    same(step(whole, workspace.main, text_only=True), step(model, workspace.main, text_only=True))


def test_a_tower_by_itself_learns_and_other_models_are_checkpointed_as_asked(workspace: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower, other = workspace.load().model.vision_tower, LlamaForCausalLM(LlamaConfig(**shape, vocab_size=8))
    for model in (tower, other):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    assert kinds(tower) == {False}
    assert kinds(other) == {True}


def test_only_who_asked_by_name_is_told(workspace: Any) -> None:
    model = workspace.load()
    with pytest.warns(Gemma4CompatWarning, match="use_reentrant=True gives wrong gradients in Gemma4For") as told:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    assert len([one for one in told if one.category is Gemma4CompatWarning]) == 1
    assert {one.filename for one in told if one.category is Gemma4CompatWarning} == {__file__}
    for kwargs in (None, {}, {"use_reentrant": False}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", Gemma4CompatWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        assert kinds(model) == {False}


def test_other_arguments_are_kept(workspace: Any) -> None:
    model = workspace.load()
    enable(model, use_reentrant=True, preserve_rng_state=False)
    (keywords,) = {
        tuple(sorted(module._gradient_checkpointing_func.keywords.items()))
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    }
    assert keywords == (("preserve_rng_state", False), ("use_reentrant", False))
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_somebody_elses_checkpoint_function_is_left_alone(workspace: Any) -> None:
    def own(function: Any, *args: Any, **_: Any) -> Any:
        return function(*args)

    model = workspace.load()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=own)
    assert model.model.language_model.layers[0]._gradient_checkpointing_func is own


@pytest.mark.skipif(
    not versions.admits(">=5.22", versions.installed("transformers") or "0"), reason="has no offload=True"
)
def test_activations_that_are_kept_on_the_host(workspace: Any, right: Callable[..., Any]) -> None:
    model = workspace.load()
    with quiet():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT, offload=True)
    assert kinds(model) == {False}
    if workspace.main != "cpu":  # it pins host memory
        same(right(None, False), step(model, workspace.main))


def test_a_checkpointed_model_can_be_copied_and_pickled(workspace: Any) -> None:
    model = workspace.load()
    enable(model, **REENTRANT)
    model.disable_input_require_grads()  # upstream's hook for it cannot be pickled
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kinds(other) == {False}


def test_undone_it_is_upstreams_again(workspace: Any) -> None:
    gemma4_compat.revert(PATCH.id)
    try:
        model = workspace.load()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
        assert kinds(model) == {True}
    finally:
        gemma4_compat.install()
