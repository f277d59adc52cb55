"""An adapter trained on a split base by a Trainer has the losses of one device, resumed ones too; docs/TRAINING.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab import tiny, tiny_adapters, tiny_configs
from tests.helpers import ROOT

pytestmark = pytest.mark.full

STEPS = 10
LORA = {"r": 4, "lora_alpha": 8}


@functools.cache
def examples() -> list[dict[str, Any]]:
    """Twenty prompts with an image and a sound."""
    import torch

    generator = torch.Generator().manual_seed(3)
    first = tiny.inputs()
    found = []
    for _ in range(20):
        ids = torch.randint(3, 240, (24,), generator=generator)
        for token in (tiny_configs.IMAGE_TOKEN, tiny_configs.AUDIO_TOKEN):
            ids = torch.where(first["input_ids"][0] == token, token, ids)
        rest = {name: value[0] for name, value in first.items() if name != "input_ids"}
        found.append({**rest, "input_ids": ids, "labels": ids})
    return found


def arguments(workspace: Any, folder: Path, **kwargs: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "per_device_train_batch_size": 1,
        "learning_rate": 5e-3,
        "seed": 1,
        "optim": "adamw_torch",
        "disable_tqdm": True,
        "use_cpu": workspace.main == "cpu",
        **kwargs,
    }


def prepared(base: Any, *, checkpointing: bool = False, targets: str = "all") -> Any:
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if getattr(base, "is_quantized", False):
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpointing)
    else:
        base.enable_input_require_grads()
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(target_modules=tiny_adapters.TARGETS[targets], **LORA))


def trainer(workspace: Any, base: Any, folder: Path, *, checkpointing: bool = False, **kwargs: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    model = prepared(base, checkpointing=checkpointing)
    return Trainer(
        model,
        TrainingArguments(**arguments(workspace, folder, gradient_checkpointing=checkpointing, **kwargs)),
        train_dataset=examples(),
        eval_dataset=examples()[:2],
    )


def losses(training: Any) -> list[float]:
    return [entry["loss"] for entry in training.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def right(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """``right(quantization, bf16)``: the losses on one device without checkpointing, computed once."""

    @functools.cache
    def of(quantization: str | None, bf16: bool = False) -> list[float]:
        one = trainer(workspace, workspace.load(quantization), tmp_path_factory.mktemp("right"), bf16=bf16)
        one.train()
        assert len(losses(one)) == STEPS
        return losses(one)

    return of


def is_unused(model: Any, name: str) -> bool:
    """Whether this belongs to a projection that a KV-shared layer has before transformers 5.5.2, and never calls."""
    owner, found, _ = re.split(r"\.([kv]_proj)\.", name) if re.search(r"\.[kv]_proj\.", name) else (name, "", "")
    return bool(found) and bool(getattr(model.get_submodule(owner), "is_kv_shared_layer", False))


def base_weights(model: Any) -> dict[str, Any]:
    return {name: weight for name, weight in model.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize(
    "quantization, checkpointing, bf16",
    [
        *[(None, False, False), ("4bit", False, False), ("4bit", True, False)],
        *[("4bit", True, True), ("8bit", False, False), ("8bit", True, False)],
    ],
)
def test_ten_steps_have_the_losses_of_one_device(
    workspace: Any,
    right: Callable[..., list[float]],
    tmp_path: Path,
    quantization: str | None,
    checkpointing: bool,
    bf16: bool,
) -> None:
    split = trainer(workspace, workspace.split(quantization), tmp_path, checkpointing=checkpointing, bf16=bf16)
    model = split.model
    placement = dict(model.hf_device_map)
    before = {name: (weight.device, weight.data_ptr()) for name, weight in base_weights(model).items()}
    adapter = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    split.train()
    assert losses(split) == right(quantization, bf16)
    assert model.hf_device_map == placement
    assert {name: (weight.device, weight.data_ptr()) for name, weight in base_weights(model).items()} == before
    unchanged = [
        name
        for name, weight in model.named_parameters()
        if name in adapter and weight.equal(adapter[name]) and not is_unused(model, name)
    ]
    assert not unchanged, "adapters that never learned"


def test_a_training_that_was_stopped_and_resumed(
    workspace: Any, right: Callable[..., list[float]], tmp_path: Path
) -> None:
    def start(**kwargs: Any) -> Any:
        base = workspace.split("4bit")
        kwargs = {"save_strategy": "steps", "save_steps": 5, "lr_scheduler_type": "constant", **kwargs}
        return trainer(workspace, base, tmp_path, checkpointing=True, **kwargs)

    whole = trainer(workspace, workspace.load("4bit"), tmp_path, lr_scheduler_type="constant")
    whole.train()
    start(max_steps=5).train()
    assert (tmp_path / "checkpoint-5" / "adapter_model.safetensors").is_file()
    resumed = start()
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    assert losses(whole)[5:] != right("4bit")[5:], "another schedule: these are not the losses of the other test"


def test_evaluation_and_the_best_checkpoint(workspace: Any, tmp_path: Path) -> None:
    found = []
    for base in (workspace.load("4bit"), workspace.split("4bit")):
        one = trainer(
            workspace,
            base,
            tmp_path,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
        )
        before = one.evaluate()["eval_loss"]
        one.train()
        found.append((before, one.state.best_metric, one.evaluate()["eval_loss"]))
    assert found[0] == found[1]
    before, best, after = found[0]
    assert before != best == after


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_offloaded_weights_that_would_be_trained_are_refused(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str | None
) -> None:
    from gemma4_compat._lab.workspace import difference

    model = workspace.split(quantization)
    one = trainer(workspace, model, tmp_path)
    norm = "model.language_model.layers.0.input_layernorm.weight"
    model.get_parameter(norm).requires_grad_(True)
    with pytest.raises(Gemma4CompatError, match=rf"1 weights are to be trained and are offloaded, '.*{norm}'"):
        one.train()
    model.get_parameter(norm).requires_grad_(False)
    one.model.unload()
    assert difference(one_device(quantization, None), workspace.outputs(model.eval())) == 0.0


def test_a_module_to_save_is_trained_where_its_layer_computes(workspace: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import Trainer, TrainingArguments

    def run(base: Any) -> list[float]:
        import torch

        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        torch.manual_seed(0)
        config = LoraConfig(
            target_modules=tiny_adapters.TARGETS["language"], modules_to_save=["layers.0.input_layernorm"], **LORA
        )
        one = Trainer(
            get_peft_model(base, config),
            TrainingArguments(**arguments(workspace, tmp_path, max_steps=3)),
            train_dataset=examples(),
        )
        one.train()
        return losses(one)

    assert run(workspace.split("4bit")) == run(workspace.load("4bit"))


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_optimizers_of_bitsandbytes_end_in_the_same_adapter(
    workspace: Any, tmp_path: Path, optimizer: str, quantization: str | None
) -> None:
    """With gradient accumulation. The rank is so large that no state is too small to be in 8 bits, or to be paged."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import Trainer, TrainingArguments

    on_cpu = workspace.main == "cpu"
    workspace.load(quantization)  # imports bitsandbytes
    if on_cpu and not torch._C._dispatch_has_kernel_for_dispatch_key(
        "bitsandbytes::optimizer_update_8bit_blockwise", "CPU"
    ):
        pytest.skip("this bitsandbytes has no optimizers for the CPU")
    options = {"optim": optimizer, "max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}

    def run(base: Any) -> tuple[dict[str, Any], Any]:
        if quantization:
            base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=True)
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=1600, target_modules=r".*language_model.*\.(q_proj|down_proj)"))
        one = Trainer(model, TrainingArguments(**arguments(workspace, tmp_path, **options)), train_dataset=examples())
        one.train()
        optimizer = one.optimizer
        return {name: each.detach().cpu() for name, each in model.named_parameters() if each.requires_grad}, (
            getattr(optimizer, "optimizer", optimizer).state
        )

    whole, _ = run(workspace.load(quantization))
    split, states = run(workspace.split(quantization))
    assert len(whole) > 20
    assert split.keys() == whole.keys()
    assert not [name for name, weight in split.items() if not torch.equal(weight, whole[name])]
    assert all(weight.any() for weight in split.values()), "adapters that never learned"
    kept = [state[name] for state in states.values() for name in ("state1", "state2")]
    assert {each.dtype for each in kept} == {torch.float32 if "32bit" in optimizer else torch.uint8}
    if not on_cpu:
        assert {getattr(each, "is_paged", False) for each in kept} == {"paged" in optimizer}


def test_trls_trainer(workspace: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "</s>": 1, "<s>": 2, "<unk>": 3}
    words = {**special, **{f"t{number}": number for number in range(4, tiny_configs.VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(4, 240, (20,), generator=generator).tolist() for _ in range(20)]
    dataset = Dataset.from_list([{"text": " ".join(f"t{token}" for token in text)} for text in texts])

    def run(base: Any, *, checkpointing: bool) -> list[float]:
        options = arguments(workspace, tmp_path, gradient_checkpointing=checkpointing, max_length=64, bf16=False)
        torch.manual_seed(0)
        one = trl.SFTTrainer(
            base,
            args=trl.SFTConfig(**options),
            train_dataset=dataset,
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
            ),
            peft_config=LoraConfig(target_modules=tiny_adapters.TARGETS["all"], **LORA),
        )
        one.train()
        return losses(one)

    whole = run(workspace.load("4bit"), checkpointing=False)
    assert len(whole) == STEPS
    for checkpointing in (False, True):
        assert run(workspace.split("4bit"), checkpointing=checkpointing) == whole


def test_the_documentations_example(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiny checkpoint, which is dispatched after loading: on a CPU a quantized load takes no disk entries."""
    import torch
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration, TrainingArguments

    page = (ROOT / "docs" / "TRAINING.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    block = re.sub(r"^MODEL = .*?\n\n(?=with )", "", block, flags=re.S | re.M)  # the reader's own data
    block = block.replace("gradient_accumulation_steps=4", "gradient_accumulation_steps=1")  # in less time
    asked: dict[str, Any] = {}
    again = workspace.load("4bit")
    bases = [workspace.split("4bit"), workspace.load("4bit")]

    def load(folder: Path, **kwargs: Any) -> Any:
        asked.update(kwargs)
        assert folder == workspace.checkpoint
        return bases.pop()

    monkeypatch.setattr(Gemma4ForConditionalGeneration, "from_pretrained", load)
    if workspace.main == "cpu":
        monkeypatch.setattr(TrainingArguments, "__post_init__", _on_the_cpu(TrainingArguments.__post_init__))
    found = []
    names: dict[str, Any] = {}
    for _ in range(2):
        torch.manual_seed(0)
        names = {"MODEL": workspace.checkpoint, "FOLDER": str(tmp_path), "dataset": examples()}
        exec(compile(block, "TRAINING.md", "exec"), names)
        found.append(losses(names["trainer"]))
    assert asked["quantization_config"].load_in_4bit
    assert len(found[0]) == STEPS
    assert found[0] == found[1]
    assert (tmp_path / "checkpoint-10").is_dir()
    monkeypatch.undo()
    weights = {name: weight for name, weight in names["model"].named_parameters() if "lora_" in name}
    loaded = dict(PeftModel.from_pretrained(again, tmp_path).named_parameters())
    assert len(weights) > 50
    assert all(weight.any() for weight in weights.values()), "adapters that never learned"
    assert all(loaded[name].cpu().equal(weight.detach().cpu()) for name, weight in weights.items())


def _on_the_cpu(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def post_init(self: Any) -> None:
        self.use_cpu = True
        original(self)

    return post_init
