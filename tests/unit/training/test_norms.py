"""Norms in chunks have upstream's bits, in every class and kind of training, and autograd keeps only their inputs."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._plan.training_step import storage_counter
from gemma4_compat._training import mlp_chunks, norms
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import batch, built, off, step
from tests.patches.training.test_transformers_chunked_mlp import CLASSES, TOKENS, adapted

ROWS = 5


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows."""
    monkeypatch.setattr(norms, "BYTES", 4 * 64 * ROWS)


def compare(model: Any, given: dict[str, Any]) -> list[Any]:
    """The shapes of what norms computed in chunks, in a step that must have the bits of one without."""
    plain, right = step(model, given)
    used: list[Any] = []
    apply = mlp_chunks.apply

    def counting(function: Any, inputs: Any, **options: Any) -> Any:
        used.append(inputs.shape)
        return apply(function, inputs, **options)

    norms.ask(model, TOKENS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mlp_chunks, "apply", counting)
        outputs, found = step(model, given)
    norms.leave(model)
    assert outputs.loss.equal(plain.loss)
    assert off(right, found) == 0
    return used


def checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(workspace: Any, tmp_path: Any, name: str | None, dtype: str) -> None:
    """All linear layers trained; float32 norms keep their inputs anyway, and stay whole."""
    import torch

    model, text_only, variant = built(workspace, name, tmp_path)
    model = adapted(model.to(getattr(torch, dtype)))
    used = compare(model, batch(workspace, text_only=text_only, variant=variant))
    layers = sum(type(module).__name__.endswith("TextDecoderLayer") for module in model.modules())
    assert (not used) if dtype == "float32" else (len(used) >= 5 * layers > 0)


@pytest.mark.parametrize("kind", [None, "4bit", "reentrant"])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_padding_and_packing(workspace: Any, tmp_path: Any, packed: bool, kind: str | None) -> None:
    import torch

    if kind == "reentrant":  # models whose layers share keys and values are never checkpointed so
        model = checkpointed(adapted(built(workspace, "31B", tmp_path)[0]), True)
    else:
        model = checkpointed(adapted(workspace.load(kind)), False)
    given = batch(workspace, text_only=True, variant="31B" if kind == "reentrant" else None)
    if packed:
        length = given["input_ids"].shape[1]
        given = {name: torch.cat([value, value], dim=1) for name, value in given.items() if name != "attention_mask"}
        given["position_ids"] = torch.arange(length, device=workspace.main).repeat(2)[None]
    else:
        given = {name: torch.cat([value, value]) for name, value in given.items()}
        given["attention_mask"][1, :7] = 0
        given["labels"][1, :12] = -100
    assert compare(model, given)


@pytest.mark.parametrize("paged", [True, False])
def test_offloaded_layers(workspace: Any, paged: bool) -> None:
    from peft import PeftModel

    from gemma4_compat._offload.transfer import streaming

    def trained(model: Any) -> Any:
        model = PeftModel.from_pretrained(model, workspace.adapter("language"), is_trainable=True)
        return checkpointed(model, False)

    given = batch(workspace)
    split = workspace.split()
    if not paged:  # left to accelerate's own hooks
        streaming.uninstall(split)
    whole, parts = trained(workspace.load()), trained(split)
    (plain, right), used = step(whole, given), compare(parts, given)
    norms.ask(parts, TOKENS)
    outputs, found = step(parts, given)
    assert used
    assert outputs.loss.equal(plain.loss)
    assert off(right, found) == 0


def test_autocast(workspace: Any) -> None:
    import torch

    model = checkpointed(adapted(workspace.load_text()), False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compare(model, batch(workspace, text_only=True))


def test_what_is_left_whole(workspace: Any) -> None:
    """Trained norms, whose gradient is a sum over rows; few tokens; a model that is no longer asked."""
    model = workspace.load_text()
    given = batch(workspace, text_only=True)
    without_weights = sum(not norm.with_scale for norm in norms.found(model))
    assert len(compare(model, given)) == without_weights
    model = adapted(model)
    assert compare(model, given)
    assert not compare(model, {name: value[:, :TOKENS] for name, value in given.items()})
    only(model, mlp=TOKENS)
    assert all(norms.ATTRIBUTE in vars(norm) for norm in norms.found(model))
    gemma4_compat.train_fast(model, enabled=False)
    assert any(True for _ in norms.found(model))
    assert not any("forward" in vars(norm) or norms.ATTRIBUTE in vars(norm) for norm in norms.found(model))


@pytest.mark.parametrize("name", ["text", "unified text"])
def test_only_the_inputs_are_kept(workspace: Any, tmp_path: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live bytes after the forward of a norm: its 16-bit outputs. Upstream's also keeps float32. And of a backward."""
    import torch

    monkeypatch.setattr(norms, "BYTES", 1 << 18)
    model = built(workspace, name, tmp_path)[0].to(torch.bfloat16).requires_grad_(False).train()
    norm = model.model.norm
    inputs = torch.randn(1, 1 << 15, norm.weight.numel(), dtype=torch.bfloat16).requires_grad_()
    taken = {}
    for whole in (True, False):
        if not whole:
            norms.ask(model, TOKENS)
        counted = storage_counter(model)
        counted._known.add(inputs.untyped_storage()._cdata)
        with counted:
            outputs = norm(inputs)
        kept = counted.now
        with counted:
            outputs.backward(inputs.detach())
        taken[whole] = kept / inputs.nbytes, counted.peak / inputs.nbytes
        del outputs
        inputs.grad = None
    assert taken[True][0] > 3
    assert taken[False][0] == pytest.approx(1, abs=0.01)
    assert taken[False][1] < 3 < taken[True][1] / 2
