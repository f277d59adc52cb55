"""F57: the loss in chunks is upstream's loss, for every class with labels, wherever the head is and whatever it is."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat.patches.training.transformers_chunked_loss import PATCH
from tests.patches.promise import Promise
from tests.patches.training.parts import only

#: Of the norm of all gradients: how far the two losses' are apart. In bfloat16 those of the plain loss are 0.49 off
#: from those in float32, for so deep a model of random weights doubles a rounding at every layer.
BOUND = {"float32": 1e-5, "bfloat16": 0.06}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the backward pass keeps \d\.\d+ times the bytes of all logits"
    exact = False


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few tokens."""
    from gemma4_compat._training import chunks

    monkeypatch.setattr(chunks, "LOGITS_BYTES", tiny_configs.VOCABULARY * 2 * 5)
    monkeypatch.setattr(chunks, "BLOCK_BYTES", tiny_configs.VOCABULARY * 4 * 2)


def batch(workspace: Any, *, text_only: bool = False, variant: str | None = None) -> dict[str, Any]:
    """A prompt; its first labels, and some inside, are ignored."""
    found = tiny.inputs(workspace.main, text_only=text_only, variant=variant)
    labels = found["input_ids"].clone()
    labels[:, :6] = -100
    labels[:, 15] = -100
    return {**found, "labels": labels}


def step(model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Outputs, and gradients of whatever is trained."""
    model.train()
    model.zero_grad()
    outputs = model(**given)
    outputs.loss.backward()
    return outputs, {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}


def off(right: dict[str, Any], found: dict[str, Any]) -> float:
    """How far gradients are apart, of the norm of all of them together."""
    assert right
    assert right.keys() == found.keys()
    total = sum(gradient.norm() ** 2 for gradient in right.values())
    return float((sum((right[name] - found[name]).norm() ** 2 for name in right) / total) ** 0.5)


def compare(model: Any, given: dict[str, Any], dtype: str = "bfloat16") -> Any:
    """A step in chunks against one without."""
    plain, right = step(model, given)
    assert only(model, loss=True) is model
    outputs, found = step(model, given)
    assert plain.logits is not None
    assert outputs.logits is None
    assert outputs.loss.dtype == plain.loss.dtype
    assert outputs.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert off(right, found) <= BOUND[dtype]
    gemma4_compat.train_fast(model, enabled=False)
    again, _ = step(model, given)
    assert again.logits is not None
    return outputs


CLASSES = [None, "text", "unified", "unified text", "26B-A4B", "31B"]


def built(workspace: Any, name: str | None, tmp_path: Path) -> tuple[Any, bool, str | None]:
    """A model, whether it takes text only, and the variant for its inputs."""
    try:
        if name == "unified":
            unified = workspace.unified()
            if unified is None:
                pytest.skip("this transformers has no gemma4_unified")
            return unified.load(), False, unified.variant
        if name == "unified text":
            return tiny_models.unified_text_model().to(workspace.main), True, None
    except ImportError:
        pytest.skip("this transformers has no gemma4_unified")
    if name == "text":
        return workspace.load_text(), True, None
    if name is None:
        return workspace.load(), False, None
    tiny_models.build_checkpoint(tmp_path / "variant", variant=name)
    return tiny.load(tmp_path / "variant", device=workspace.main), False, name


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(workspace: Any, tmp_path: Path, name: str | None, dtype: str) -> None:
    import torch

    model, text_only, variant = built(workspace, name, tmp_path)
    model = model.to(getattr(torch, dtype))
    outputs = compare(model, batch(workspace, text_only=text_only, variant=variant), dtype)
    assert type(outputs).__name__.endswith("CausalLMOutputWithPast")


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": "tensor"},
        {"ignore_index": 7},
        {"return_dict": False},
        {"output_hidden_states": True},
        {"use_cache": False},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_upstream(workspace: Any, options: dict[str, Any]) -> None:
    import torch

    if options.get("num_items_in_batch") == "tensor":
        options = {"num_items_in_batch": torch.tensor(40)}
    model = workspace.load_text().train()
    given = batch(workspace, text_only=True)
    if "ignore_index" in options:
        given["labels"] = given["labels"].masked_fill(given["labels"] == -100, options["ignore_index"])
    plain = model(**given, **options)
    found = only(model, loss=True)(**given, **options)
    assert type(found) is type(plain)
    assert found[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    if options.get("return_dict", True):
        assert found.keys() == plain.keys() - {"logits"}
    else:
        assert len(found) == len(plain) - 1


def test_shifted_labels_and_padding(workspace: Any) -> None:
    import torch

    model = workspace.load().train()
    given = batch(workspace, text_only=True)
    two = {name: torch.cat([value, value]) for name, value in given.items()}
    two["attention_mask"][1, :7] = 0
    two["labels"][1, :12] = -100
    compare(model, two)
    shifted = torch.nn.functional.pad(two["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    text = workspace.load_text().train()
    compare(text, {**two, "shift_labels": shifted, "labels": two["labels"]})


def test_arguments_by_position(workspace: Any) -> None:
    model = only(workspace.load_text(), loss=True).train()
    given = batch(workspace, text_only=True)
    by_name = model(**given)
    ids, mask, labels = (given[name] for name in ("input_ids", "attention_mask", "labels"))
    outputs = model(ids, mask, None, None, None, labels)
    assert outputs.logits is None
    assert outputs.loss == by_name.loss


def test_what_asks_for_logits_gets_them(workspace: Any) -> None:
    import torch

    model = workspace.load()
    given = batch(workspace, text_only=True)
    ids = {name: value for name, value in given.items() if name != "labels"}
    with torch.no_grad():
        right = model(**ids).logits
        tokens = model.generate(**ids, max_new_tokens=4, do_sample=False)
        only(model, loss=True)
        assert torch.equal(model(**ids).logits, right)
        assert torch.equal(model(**given).logits, right)  # in evaluation mode
        assert torch.equal(model.generate(**ids, max_new_tokens=4, do_sample=False), tokens)
        model.train()
        assert torch.equal(model(**ids).logits, right)
        assert model(**given).logits is None
        last = model(**ids, labels=ids["input_ids"][:, -3:], logits_to_keep=3)
        assert last.logits.shape[1] == 3


def test_in_evaluation_mode_where_that_is_asked_for(workspace: Any) -> None:
    import torch

    model = workspace.load()
    given = batch(workspace)
    with torch.no_grad():
        right = model(**given).loss
        outputs = only(model, loss="always")(**given)
    assert outputs.logits is None
    assert outputs.loss.item() == pytest.approx(right.item(), rel=1e-6)


def test_a_training_forward_without_labels_is_told_once(workspace: Any) -> None:
    model = only(workspace.load(), loss=True).train()
    given = batch(workspace, text_only=True)
    del given["labels"]
    with pytest.warns(Gemma4CompatWarning, match="not computed in chunks.*no labels were given") as told:
        given_logits = [model(**given).logits is not None for _ in range(2)]
    assert all(given_logits)
    assert len([one for one in told if one.category is Gemma4CompatWarning]) == 1
    assert told[0].filename == __file__


def test_a_loss_function_of_ones_own_is_used(workspace: Any) -> None:
    model = only(workspace.load_text(), loss=True).train()
    model.loss_function = lambda logits, labels, vocabulary, **_: logits.float().sum()
    with pytest.warns(Gemma4CompatWarning, match="its own loss function"):
        outputs = model(**batch(workspace, text_only=True))
    assert outputs.loss == outputs.logits.float().sum()


@pytest.mark.parametrize("offload", ["head", "layers", "everything"])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_offloaded_models(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, quantization: str | None, offload: str
) -> None:
    from peft import PeftModel

    def adapted(model: Any) -> Any:
        return PeftModel.from_pretrained(model, workspace.adapter("language"), is_trainable=True)

    def split() -> Any:
        model = workspace.load(quantization)
        placement = tiny.device_map(model, "layers", main=workspace.main, offloaded=workspace.offloaded)
        if offload == "head":
            placement = {name: workspace.main for name in placement}
        if offload != "layers":
            placement["lm_head"] = placement["model.language_model.embed_tokens"] = workspace.offloaded
        return workspace.dispatch_map(model, placement)

    given = batch(workspace)
    whole, parts = (only(adapted(model), loss=True) for model in (workspace.load(quantization), split()))
    right, found = step(whole, given), step(parts, given)
    assert found[0].loss == right[0].loss
    assert found[0].logits is None
    assert off(right[1], found[1]) == 0
    head = parts.get_base_model().lm_head
    assert (head.weight.device.type == "meta") == (offload != "layers")
    with pytest.MonkeyPatch.context() as patched:
        counted = []
        if offload != "layers":
            hook = head._hf_hook
            original = hook.pre_forward
            patched.setattr(hook, "pre_forward", lambda *args, **kw: counted.append(1) or original(*args, **kw))
            step(parts, given)
            assert len(counted) == 1  # not once a chunk


@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_checkpointing(workspace: Any, kwargs: dict[str, Any]) -> None:
    right = step(only(workspace.load(), loss=True), batch(workspace))
    model = only(workspace.load(), loss=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Gemma4CompatWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    found = step(model, batch(workspace))
    assert found[0].loss == right[0].loss
    assert off(right[1], found[1]) <= BOUND["bfloat16"]


def _lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*language_model\.layers\.\d\.mlp\.up_proj|lm_head"},
        {"target_modules": ["up_proj", "lm_head"], "exclude_modules": r".*tower.*", "use_dora": True},
        {"target_modules": r".*language_model.*up_proj", "modules_to_save": ["lm_head"]},
        {"target_modules": r".*language_model.*up_proj", "modules_to_save": ["lm_head", "embed_tokens"]},
    ],
    ids=["lora", "dora", "saved", "saved and embedding"],
)
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_adapted_and_trained_heads(workspace: Any, quantization: str | None, options: dict[str, Any]) -> None:
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(workspace.load(quantization), _lora(**options))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and "lm_head" in name]
    assert trained
    compare(model, batch(workspace))
    _, found = step(only(model, loss=True), batch(workspace))
    assert all(found[name].abs().max() > 0 for name in trained)


def test_a_quantized_head(workspace: Any, tmp_path: Path) -> None:
    """Untied, for a tied head is never quantized."""
    import bitsandbytes
    import torch
    from peft import get_peft_model

    model = workspace.load("4bit")
    head = bitsandbytes.nn.Linear4bit(
        *reversed(model.lm_head.weight.shape), bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    head.load_state_dict({"weight": model.lm_head.weight.detach().clone()})
    model.lm_head = head.to("cpu").requires_grad_(False)
    assert model.lm_head.weight.dtype == torch.uint8
    compare(get_peft_model(model, _lora(target_modules=r".*language_model.*up_proj")), batch(workspace))


def test_under_autocast(workspace: Any) -> None:
    import torch

    model = workspace.load().float()
    with torch.autocast("cpu", torch.bfloat16):
        compare(model, batch(workspace))


@pytest.mark.full  # 90 s
def test_compiled(workspace: Any) -> None:
    import torch

    model = workspace.load_text()
    given = batch(workspace, text_only=True)
    right = step(only(model, loss=True), given)
    compiled = torch.compile(model, backend="aot_eager")
    outputs = compiled(**given)
    assert outputs.logits is None
    model.zero_grad()
    outputs.loss.backward()
    found = {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}
    assert outputs.loss.item() == pytest.approx(right[0].loss.item(), rel=1e-3)
    assert off(right[1], found) <= BOUND["bfloat16"]


HEADS: dict[str, Any] = {
    "full": None,
    "lora": {"target_modules": r".*language_model\.layers\.\d\.mlp\.up_proj|lm_head"},
    "saved": {"target_modules": r".*language_model.*up_proj", "modules_to_save": ["lm_head"]},
    "frozen": {"target_modules": r".*language_model.*up_proj"},
}
EMPTY = [{}, {"num_items_in_batch": 3}, {"num_items_in_batch": 0}, {"ignore_index": 7}]


@pytest.mark.parametrize("options", EMPTY, ids=str)
@pytest.mark.parametrize("trained", HEADS)
def test_no_label_at_all(workspace: Any, trained: str, options: dict[str, Any]) -> None:
    """Upstream's: a mean over nothing, and gradients that are zeros."""
    import torch
    from peft import get_peft_model

    model = workspace.load()
    if HEADS[trained] is not None:
        model = get_peft_model(model, _lora(**HEADS[trained]))
    given = batch(workspace)
    given["labels"] = torch.full_like(given["labels"], options.get("ignore_index", -100))
    plain, right = step(model, {**given, **options})
    outputs, found = step(only(model, loss=True), {**given, **options})
    assert outputs.logits is None
    assert torch.equal(outputs.loss.isnan(), plain.loss.isnan())
    assert outputs.loss.nan_to_num() == plain.loss.nan_to_num() == 0
    assert found.keys() == right.keys()
    for gradients in (right, found):
        assert not any(gradient.isnan().any() or gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_of_accumulation_without_labels(workspace: Any, clipped: bool) -> None:
    """It adds nothing to the gradients of the others, and clips none of them to NaN."""
    import torch

    model = only(workspace.load(), loss=True)
    _, right = step(model, batch(workspace))
    empty = batch(workspace)
    empty["labels"] = torch.full_like(empty["labels"], -100)
    model(**empty).loss.backward()
    if clipped:
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).isfinite()
    found = {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}
    assert off(right, found) == 0


@contextlib.contextmanager
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("GEMMA4_COMPAT_ENABLE", PATCH.id)
        yield


def test_the_environment(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = workspace.load().train()
    given = batch(workspace)
    with enabled(monkeypatch):
        assert model(**given).logits is None
        assert model.eval()(**given).logits is not None
    assert model.train()(**given).logits is not None


def test_copies_and_pickles_do_as_the_model(workspace: Any) -> None:
    model = only(workspace.load(), loss=True).train()
    given = batch(workspace)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(**given).logits is None
        assert gemma4_compat.train_fast(other, enabled=False)(**given).logits is not None
    assert model(**given).logits is None


def test_wrappers(workspace: Any) -> None:
    from peft import get_peft_model
    from torch import nn

    class Wrapper(nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    model = workspace.load().train()
    wrapped = Wrapper(get_peft_model(model, _lora(target_modules=r".*language_model.*up_proj")))
    only(wrapped, loss=True)
    assert model(**batch(workspace)).logits is None


def test_undone_it_is_upstreams_again(workspace: Any) -> None:
    model = only(workspace.load(), loss=True).train()
    given = batch(workspace)
    gemma4_compat.revert(PATCH.id)
    try:
        assert model(**given).logits is not None
        with pytest.raises(Gemma4CompatError, match="the patch transformers-chunked-loss is not applied to Gemma4For"):
            only(model, loss=True)
    finally:
        gemma4_compat.install()
    assert model(**given).logits is None


def test_what_has_no_loss(workspace: Any) -> None:
    """Asked for by name it is refused; by itself ``train_fast`` leaves it out, and says why."""
    model = workspace.load().model
    with pytest.raises(Gemma4CompatError, match="loss=True, but the model has no language modeling head"):
        only(model, loss=True)
    assert only(model, loss="auto") is model
    assert not any(item.name.endswith("chunked_loss") for item in gemma4_compat.statistics(model).attached)
    assert only(workspace.load_text(), loss=True) is not None


def trainer(workspace: Any, model: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {name: value.cpu()[0] for name, value in batch(workspace).items()}
    longer = {**given, "labels": given["input_ids"]}
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "learning_rate": 1e-3,  # small enough that rounding does not grow from step to step
            "per_device_train_batch_size": 1,
            "disable_tqdm": True,
            "optim": "sgd",  # Adam's first steps are signs of gradients, of those near zero, too
            "use_cpu": workspace.main == "cpu",
            **options,
        },
    )
    return Trainer(model, arguments, train_dataset=[given, longer], eval_dataset=[given])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer(workspace: Any, tmp_path: Path, accumulation: int) -> None:
    import torch

    def losses(chunked: bool) -> list[float]:
        torch.manual_seed(0)
        model = workspace.load().float()
        training = trainer(
            workspace,
            only(model, loss=chunked and "always"),
            tmp_path,
            gradient_accumulation_steps=accumulation,
        )
        training.train()
        evaluated = training.evaluate()["eval_loss"]
        return [entry["loss"] for entry in training.state.log_history if "loss" in entry] + [evaluated]

    right, found = losses(False), losses(True)
    assert len(right) == 5
    assert found == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}], ids=str)
def test_a_trainer_that_takes_the_labels_away(workspace: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    import torch

    def run(chunked: bool) -> float:
        torch.manual_seed(0)
        model = workspace.load_text()
        given = {name: value.cpu()[0] for name, value in batch(workspace, text_only=True).items()}
        training = trainer(workspace, only(model, loss=chunked), tmp_path, max_steps=1)
        training = type(training)(
            model, _with(training.args, **options), train_dataset=[given], data_collator=training.data_collator
        )
        return float(training.train().training_loss)

    right = run(False)
    with pytest.warns(Gemma4CompatWarning, match="label_smoothing_factor"):
        assert run(True) == right


def _with(arguments: Any, **options: Any) -> Any:
    changed = copy.copy(arguments)
    for name, value in options.items():
        setattr(changed, name, value)
    return changed
