"""F110: MLPs in chunks are upstream's MLPs, for every class, wherever their weights are and whatever they are."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._lab import tiny
from gemma4_compat._plan import training_step
from gemma4_compat._training import mlp, mlp_chunks
from gemma4_compat.patches.training.transformers_chunked_mlp import PATCH
from tests.patches.promise import Promise
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import batch, built, off, step

TOKENS = 7
#: Of the norm of all gradients: how far the two ways are apart. Of the same models, float16 itself is up to 0.8 off
#: from float32 and bfloat16 1.2, for a model of random weights doubles a rounding at every layer. Eight such models
#: were 1.2e-6 to 2.7e-6 apart in float32.
BOUND = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 0.01}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the backward pass keeps \d+ intermediates of all tokens of an MLP"
    exact = False


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each MLP that is computed in chunks from now on."""
    found: list[int] = []
    apply = mlp_chunks.apply

    def counting(function: Any, inputs: Any, **options: Any) -> Any:
        if options.get("draws", True):  # norms do not: tests/unit/training/test_norms.py
            found.append(inputs.shape[:-1].numel())
        return apply(function, inputs, **options)

    monkeypatch.setattr(mlp_chunks, "apply", counting)
    return found


def compare(model: Any, given: dict[str, Any], dtype: str = "bfloat16", tokens: int = TOKENS) -> None:
    """A step in chunks against one without, and another without."""
    plain, right = step(model, given)
    assert only(model, mlp=tokens) is model
    with pytest.MonkeyPatch.context() as patched:
        used = counted(patched)
        outputs, found = step(model, given)
    layers = sum(type(module).__name__.endswith("TextMLP") for module in model.modules())
    assert len(used) >= layers > 0
    assert outputs.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6 if dtype == "float32" else 1e-3)
    assert off(right, found) <= BOUND[dtype]
    gemma4_compat.train_fast(model, enabled=False)
    again, same = step(model, given)
    assert again.loss.equal(plain.loss)
    assert off(right, same) == 0


CLASSES = [None, "text", "unified", "unified text", "26B-A4B", "31B"]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(workspace: Any, tmp_path: Any, name: str | None, dtype: str) -> None:
    import torch

    model, text_only, variant = built(workspace, name, tmp_path)
    model = model.to(getattr(torch, dtype))
    compare(model, batch(workspace, text_only=text_only, variant=variant), dtype)


def test_wide_mlps_of_layers_that_share_keys_and_values(workspace: Any) -> None:
    import torch

    model = workspace.load_text()
    widths = {layer.mlp.intermediate_size for layer in model.model.layers}
    if len(widths) == 1:  # the tiny model's are as wide as the others: widen them
        from transformers.models.gemma4 import modeling_gemma4

        config = copy.deepcopy(model.config)
        config.use_double_wide_mlp = True
        torch.manual_seed(0)
        model = modeling_gemma4.Gemma4ForCausalLM(config)
        widths = {layer.mlp.intermediate_size for layer in model.model.layers}
    assert len(widths) == 2
    compare(model.float(), batch(workspace, text_only=True), "float32")


@pytest.mark.parametrize("packed", [False, True])
def test_padding_and_packing(workspace: Any, packed: bool) -> None:
    import torch

    model = workspace.load_text().float()
    given = batch(workspace, text_only=True)
    if packed:
        length = given["input_ids"].shape[1]
        given = {name: torch.cat([value, value], dim=1) for name, value in given.items() if name != "attention_mask"}
        given["position_ids"] = torch.arange(length, device=workspace.main).repeat(2)[None]
    else:
        given = {name: torch.cat([value, value]) for name, value in given.items()}
        given["attention_mask"][1, :7] = 0
        given["labels"][1, :12] = -100
    compare(model, given, "float32")


def adapted(model: Any, dropout: float = 0.0) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, lora_dropout=dropout, target_modules=training_step.TARGETS)
    return get_peft_model(model, config)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_lora(workspace: Any, quantization: str | None, checkpointing: bool) -> None:
    model = adapted(workspace.load(quantization))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    compare(model, batch(workspace))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_the_same_in_what_is_computed_again(workspace: Any, checkpointing: bool) -> None:
    """With one chunk after the other by hand, in a graph of upstream's, for the same random numbers."""
    import torch

    def steps(chunked: bool) -> Any:
        torch.manual_seed(0)
        model = adapted(workspace.load_text().float(), dropout=0.5)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        for module in model.modules():
            if type(module).__name__.endswith("TextMLP") and not chunked:
                module.forward = by_hand(module.forward)
        if chunked:
            only(model, mlp=TOKENS)
        torch.manual_seed(1)
        return step(model, batch(workspace, text_only=True))

    def by_hand(forward: Callable[..., Any]) -> Callable[..., Any]:
        def in_parts(x: Any) -> Any:
            count = -(-x.shape[1] // TOKENS)
            bounds = [index * x.shape[1] // count for index in range(count + 1)]
            return torch.cat([forward(x[:, first:last]) for first, last in itertools.pairwise(bounds)], dim=1)

        return in_parts

    (right, gradients), (found, others) = steps(False), steps(True)
    assert found.loss.item() == pytest.approx(right.loss.item(), rel=1e-5)
    assert off(gradients, others) <= BOUND["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast(workspace: Any, dtype: str) -> None:
    import torch

    model = workspace.load_text().float()
    given = batch(workspace, text_only=True)
    with torch.autocast("cpu", getattr(torch, dtype)):
        compare(model, given, dtype)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_offloaded_layers(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, quantization: str | None, checkpointing: bool, paged: bool
) -> None:
    """The bits of a model on one device; weights are brought in once per pass, however many chunks there are."""
    from peft import PeftModel

    from gemma4_compat._gemma4.accelerate import module_hooks
    from gemma4_compat._offload.transfer import streaming

    def trained(model: Any) -> Any:
        model = PeftModel.from_pretrained(model, workspace.adapter("language"), is_trainable=True)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        return only(model, mlp=TOKENS)

    given = batch(workspace)
    split = workspace.split(quantization)
    if not paged:  # left to accelerate's own hooks
        streaming.uninstall(split)
    whole, parts = trained(workspace.load(quantization)), trained(split)
    right, found = step(whole, given), step(parts, given)
    assert found[0].loss.equal(right[0].loss)
    assert off(right[1], found[1]) == 0
    offloaded = [
        module
        for name, module in parts.named_modules()
        if ".mlp." in name and "tower" not in name and module_hooks.is_offloaded(module)
    ]
    assert offloaded
    hook = offloaded[0]._hf_hook
    brought = []
    original = hook.pre_forward
    monkeypatch.setattr(hook, "pre_forward", lambda *args, **kwargs: brought.append(1) or original(*args, **kwargs))
    step(parts, given)
    tokens = given["input_ids"].shape[1]
    assert tokens > 3 * TOKENS
    assert len(brought) == (0 if paged else 3 if checkpointing else 2)
    assert all(module_hooks.is_offloaded(module) for module in offloaded)


def test_only_training_with_more_tokens_than_a_chunk_is_in_chunks(
    workspace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = only(workspace.load_text(), mlp=TOKENS)
    plain = workspace.load_text()
    given = batch(workspace, text_only=True)
    ids = {name: value for name, value in given.items() if name != "labels"}
    used = counted(monkeypatch)
    assert torch.equal(model(**ids).logits, plain(**ids).logits)
    assert torch.equal(
        model.generate(**ids, max_new_tokens=4, do_sample=False),
        plain.generate(**ids, max_new_tokens=4, do_sample=False),
    )
    model.train()
    with torch.no_grad():
        model(**ids)
    model(input_ids=ids["input_ids"][:, :TOKENS])
    assert not used
    model(**ids)
    assert set(used) == {ids["input_ids"].numel()}


@pytest.mark.full  # 60 s
def test_compiled(workspace: Any) -> None:
    import torch

    model = workspace.load_text()
    given = batch(workspace, text_only=True)
    right, gradients = step(model, given)
    compiled = torch.compile(only(model, mlp=TOKENS), backend="aot_eager")
    model.zero_grad()
    outputs = compiled(**given)
    outputs.loss.backward()
    found = {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}
    assert outputs.loss.item() == pytest.approx(right.loss.item(), rel=1e-3)
    assert off(gradients, found) <= 0.06  # of the compiled model: test_transformers_chunked_loss.py


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "2048"])
def test_a_piece_of_no_tokens_is_one_error(workspace: Any, tokens: Any) -> None:
    model = workspace.load_text()
    with pytest.raises(Gemma4CompatError, match=r"train_fast got mlp=.*; it is .* a number of tokens from 1 on"):
        only(model, mlp=tokens)
    assert not any(mlp.ATTRIBUTE in vars(module) for module in model.modules())


def test_what_has_no_text_layers_is_refused(workspace: Any) -> None:
    from torch import nn

    for model in (nn.Linear(2, 2), workspace.load().model.vision_tower, "E2B"):
        shown = "'E2B'" if model == "E2B" else type(model).__name__
        with pytest.raises(Gemma4CompatError, match=f"requires a Gemma 4 model.*{shown}"):
            only(model, mlp=True)


def test_the_environment(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "TOKENS", TOKENS)
    model = workspace.load_text().train()
    given = batch(workspace, text_only=True)
    used = counted(monkeypatch)
    gemma4_compat.revert(PATCH.id)
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", PATCH.id)
    try:
        model(**given)
        assert not used
    finally:
        gemma4_compat.install()
    model(**given)
    assert len(used) == len(model.model.layers)
    monkeypatch.delenv("GEMMA4_COMPAT_ENABLE")
    other = workspace.load_text().train()
    used.clear()
    other(**given)
    assert not used


def test_undone_it_is_upstreams_again(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = only(workspace.load_text(), mlp=TOKENS).train()
    given = batch(workspace, text_only=True)
    used = counted(monkeypatch)
    gemma4_compat.revert(PATCH.id)
    try:
        model(**given)
        assert not used
        with pytest.raises(Gemma4CompatError, match="the patch transformers-chunked-mlp is off; gemma4_compat"):
            only(model, mlp=True)
    finally:
        gemma4_compat.install()
    model(**given)
    assert used


@pytest.mark.parametrize("when", ["before", "after"])
def test_undoing_it_before_and_after_a_dispatch(workspace: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The forward that accelerate found and keeps computes in chunks no more."""
    model = workspace.load()
    if when == "before":
        only(model, mlp=TOKENS)
    model = workspace.dispatch(model)
    if when == "after":
        only(model, mlp=TOKENS)
    model.train()
    used = counted(monkeypatch)
    model(**batch(workspace))
    assert used
    used.clear()
    gemma4_compat.train_fast(model, enabled=False)
    model(**batch(workspace))
    assert not used
    assert not any("chunked" in item.patch for item in gemma4_compat.statistics(model).attached if item.kind == "mark")


def test_copies_are_in_chunks_and_pickles_are_not(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = only(workspace.load_text(), mlp=TOKENS).train()
    given = batch(workspace, text_only=True)
    used = counted(monkeypatch)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    copied(**given)
    assert len(used) == len(model.model.layers)
    pickled(**given)
    assert len(used) == len(model.model.layers)
    only(pickled, mlp=TOKENS)(**given)
    assert len(used) == 2 * len(model.model.layers)


@pytest.mark.parametrize("attribute", ["_is_fsdp_managed_module", "ds_id", "device_mesh"])
def test_sharded_weights_are_computed_as_a_whole_with_one_warning(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    monkeypatch.setattr(mlp, "_told", set())
    model = only(workspace.load_text(), mlp=TOKENS).train()
    for module in model.modules():
        if type(module).__name__.endswith("TextMLP"):
            setattr(module if attribute.startswith("_") else module.up_proj.weight, attribute, True)
    used = counted(monkeypatch)
    given = batch(workspace, text_only=True)
    with pytest.warns(Gemma4CompatWarning, match="MLPs are not computed in chunks.*shards") as told:
        both = [model(**given).logits is not None for _ in range(2)]
    assert both == [True, True]
    assert not used
    assert len([one for one in told if one.category is Gemma4CompatWarning]) == 1


def test_adapters_that_look_at_whole_sequences(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    monkeypatch.setattr(mlp, "_told", set())
    if "alora_invocation_tokens" not in LoraConfig.__dataclass_fields__:
        pytest.skip("this PEFT has no aLoRA")
    config = LoraConfig(r=4, target_modules=training_step.TARGETS, alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    model = get_peft_model(workspace.load_text(), config).train()
    given = batch(workspace, text_only=True)
    given["input_ids"][0, 10] = 5
    used = counted(monkeypatch)
    only(model, mlp=TOKENS)
    with pytest.warns(Gemma4CompatWarning, match="aLoRA looks for its invocation"):
        model(**given)
    assert not used


def test_data_parallel_processes_get_each_gradient_once(workspace: Any) -> None:
    """DDP counts gradients: of a weight that has two in one backward pass it makes an error."""
    import torch

    model = adapted(workspace.load_text())
    only(model, mlp=TOKENS).train()
    arrived: dict[str, int] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(
                lambda _, name=name: arrived.update({name: arrived.get(name, 0) + 1})
            )
    model(**batch(workspace, text_only=True)).loss.backward()
    assert arrived
    assert set(arrived.values()) == {1}
    assert torch.is_grad_enabled()


def test_fifty_steps_end_where_those_of_whole_mlps_end(workspace: Any) -> None:
    import torch

    def trained(chunked: bool, dtype: Any) -> tuple[list[float], Any]:
        """Losses, and the adapter's weights in float64."""
        model = adapted(workspace.load_text().to(dtype)).train()
        only(model, mlp=chunked and TOKENS)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.SGD(weights, 0.1)
        given = tiny.inputs(workspace.main, text_only=True)
        losses = []
        for _ in range(50):
            loss = model(**given, labels=given["input_ids"], use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, torch.cat([weight.detach().double().flatten() for weight in weights])

    (losses, right), (others, found) = trained(False, torch.float64), trained(True, torch.float64)
    assert losses[-1] < 0.6 * losses[0]
    assert others == pytest.approx(losses, rel=1e-6)  # a loss is in float32
    assert (found - right).norm() <= 1e-12 * right.norm()
    # In float32 a rounding grows from step to step. Chunks end no further from float64 than whole MLPs do.
    away = [(trained(chunked, torch.float32)[1] - right).norm() for chunked in (False, True)]
    assert away[1] <= 1.5 * away[0] <= 0.1 * right.norm()


def test_no_warning_of_torch_and_no_reentrant_checkpoint(workspace: Any) -> None:
    model = adapted(workspace.load_text())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    only(model, mlp=TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, batch(workspace, text_only=True))
