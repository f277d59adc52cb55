"""DiffusionGemma and EmbeddingGemma 2, which are made of Gemma 4's parts: the bits of one device wherever they are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import relatives, tiny_adapters, tiny_configs, tiny_models
from gemma4_compat._lab.workspace import MissingPartError, Outputs, Workspace, difference
from tests.helpers import Finished

NAMES = {"diffusion": relatives.DIFFUSION, "embedding": relatives.EMBEDDING}
full = pytest.mark.full
QUANTIZATIONS = (None, "4bit", pytest.param("4bit-double", marks=full), pytest.param("8bit", marks=full))
#: What is on disk, of either model. The layers of the encoder share their weights with those of the decoder.
PLACES = {
    "layers": r".*layers\.[02]",
    "encoder": r"(model\.encoder\.)?language_model\.layers\.\d",
    "decoder": r"(model\.decoder|language_model)\.layers\.\d",
    "towers": r".*(vision_tower|audio_tower|embed_vision|embed_audio)",
    "embeddings": r".*embed_tokens|lm_head",
    "an embedding": r"(model\.decoder\.)?(language_model\.)?embed_tokens",
    "everything": r".*(?<!norm)",  # transformers before 5.13 cannot run a model that is whole on disk
}
#: All of them; those that everybody has first.
ALL = ("layers", *(pytest.param(name, marks=full) for name in PLACES if name != "layers"))


@pytest.fixture(params=list(NAMES))
def checkpoint(request: pytest.FixtureRequest, workspace: Workspace) -> Path:
    try:
        return workspace.cached(relatives.build, name=NAMES[request.param])
    except MissingPartError as error:
        pytest.skip(str(error))


@pytest.fixture
def diffusion(workspace: Workspace) -> Path:
    try:
        return workspace.cached(relatives.build)
    except MissingPartError as error:
        pytest.skip(str(error))


_answers: dict[tuple[Path, str | None], Outputs] = {}


def expected(checkpoint: Path, quantization: str | None) -> Outputs:
    if (checkpoint, quantization) not in _answers:
        _answers[checkpoint, quantization] = relatives.outputs(relatives.load_relative(checkpoint, quantization))
    return _answers[checkpoint, quantization]


def relative_map(model: Any, pattern: str, *, main: Any = "cpu", offloaded: Any = "disk") -> dict[str, Any]:
    """A map over layers, towers and everything else: ``offloaded`` is what the regular expression matches."""
    names: list[str] = []

    def add(prefix: str, module: Any) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if name in ("model", "encoder", "decoder", "language_model", "layers") and "tower" not in path:
                add(f"{path}.", child)
            else:
                names.append(path)

    add("", model)
    return {name: offloaded if re.fullmatch(pattern, name) else main for name in names}


def dispatched(model: Any, workspace: Workspace, place: str) -> Any:
    from accelerate import dispatch_model

    placement = relative_map(model, PLACES[place], offloaded="disk")
    return dispatch_model(model, placement, main_device="cpu", offload_dir=str(workspace.new_folder()))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("place", ALL)
def test_split(workspace: Workspace, checkpoint: Path, quantization: str | None, place: str) -> None:
    model = dispatched(relatives.load_relative(checkpoint, quantization), workspace, place)
    assert difference(expected(checkpoint, quantization), relatives.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
@pytest.mark.parametrize("place", ["layers", pytest.param("encoder", marks=full), pytest.param("decoder", marks=full)])
def test_split_into_host_memory(workspace: Workspace, diffusion: Path, quantization: str, place: str) -> None:
    """On some CPUs bitsandbytes packs weights in their first forward, and accelerate knows tied ones by address."""
    import torch
    from accelerate import dispatch_model

    main, model = torch.device("cpu"), relatives.load_relative(diffusion, quantization)
    placement = relative_map(model, PLACES[place], main=main, offloaded="cpu")
    model = dispatch_model(model, placement, main_device=main)
    for _ in range(2):
        assert difference(expected(diffusion, quantization), relatives.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("place", ALL)
def test_loaded_by_a_map(workspace: Workspace, checkpoint: Path, quantization: str | None, place: str) -> None:
    placement = relative_map(relatives.load_relative(checkpoint), PLACES[place], offloaded="disk")
    folder = str(workspace.new_folder())
    with gemma4_compat.quantize(offloaded=True) if quantization else contextlib.nullcontext():
        model = relatives.load_relative(checkpoint, quantization, device_map=placement, offload_folder=folder)
    assert difference(expected(checkpoint, quantization), relatives.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_split_model_is_saved(workspace: Workspace, checkpoint: Path, quantization: str | None) -> None:
    folder = workspace.new_folder()
    dispatched(relatives.load_relative(checkpoint, quantization), workspace, "layers").save_pretrained(folder)
    assert difference(expected(checkpoint, quantization), relatives.outputs(relatives.load_relative(folder))) == 0.0


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_an_adapter(workspace: Workspace, checkpoint: Path, quantization: str | None, tmp_path: Path) -> None:
    """On text layers and on the clipped linears of the towers."""
    from peft import PeftModel

    tiny_adapters.write_adapter(relatives.load_relative(checkpoint, quantization), ["q_proj", "up_proj"], tmp_path)
    answers = relatives.outputs(
        PeftModel.from_pretrained(relatives.load_relative(checkpoint, quantization), tmp_path).eval()
    )
    assert difference(expected(checkpoint, quantization), answers) > 0.0
    model = dispatched(relatives.load_relative(checkpoint, quantization), workspace, "layers")
    assert difference(answers, relatives.outputs(PeftModel.from_pretrained(model, tmp_path).eval())) == 0.0


@pytest.mark.parametrize("quantization", [None, pytest.param("4bit", marks=full), pytest.param("8bit", marks=full)])
def test_merged_as_with_a_copy_of_each_shared_weight(
    workspace: Workspace, diffusion: Path, quantization: str | None, tmp_path: Path
) -> None:
    """The encoder's layer and the decoder's have adapters of their own, and one weight."""
    from peft import PeftModel

    tiny_adapters.write_adapter(relatives.load_relative(diffusion), ["q_proj", "up_proj"], tmp_path / "adapter")

    def merged(checkpoint: Path) -> Any:
        base = relatives.load_relative(checkpoint, quantization, skip_modules=["lm_head", "router.proj"])
        return PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()

    model = merged(diffusion)
    answers = relatives.outputs(merged(workspace.cached(relatives.build_untied_diffusion)))
    assert difference(answers, relatives.outputs(model)) == 0.0
    model.save_pretrained(tmp_path / "merged")
    assert difference(answers, relatives.outputs(relatives.load_relative(tmp_path / "merged"))) == 0.0


@pytest.mark.parametrize("quantization", [None, pytest.param("4bit", marks=full)])
def test_a_step_of_training(workspace: Workspace, checkpoint: Path, quantization: str | None, tmp_path: Path) -> None:
    """The gradients of an adapter on a split model are those of one device."""
    from peft import PeftModel

    tiny_adapters.write_adapter(relatives.load_relative(checkpoint), ["q_proj", "up_proj"], tmp_path)

    def gradients(base: Any) -> dict[str, Any]:
        model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train()
        answer = model(**relatives.relative_inputs(base))
        answer[next(name for name in ("logits", "last_hidden_state") if name in answer)].float().sum().backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    mine = gradients(dispatched(relatives.load_relative(checkpoint, quantization), workspace, "layers"))
    theirs = gradients(relatives.load_relative(checkpoint, quantization))
    assert mine.keys() == theirs.keys()
    assert mine
    assert [name for name, value in theirs.items() if not value.equal(mine[name])] == []


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_experts_in_4_bits(workspace: Workspace, diffusion: Path, quantization: str) -> None:
    from gemma4_compat.patches.quantization.transformers_quantized_experts import by_hand

    def load(**options: Any) -> Any:
        with gemma4_compat.quantize(experts=True, offloaded=True):
            return relatives.load_relative(diffusion, quantization, **options)

    reference = relatives.outputs(by_hand(relatives.load_relative(diffusion, quantization), quantization))
    model = load()
    assert difference(reference, relatives.outputs(model)) == 0.0
    encoder, decoder = model.model.encoder.language_model.layers[1], model.model.decoder.layers[1]
    assert encoder.experts.gate_up_proj is decoder.experts.gate_up_proj
    folder = workspace.new_folder()
    model.save_pretrained(folder)
    assert difference(reference, relatives.outputs(relatives.load_relative(folder))) == 0.0
    placement = relative_map(model, PLACES["layers"], offloaded="disk")
    split = load(device_map=placement, offload_folder=str(workspace.new_folder()))
    assert difference(reference, relatives.outputs(split)) == 0.0


def test_a_load_says_what_stays_unquantized(
    workspace: Workspace, diffusion: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placement = relative_map(relatives.load_relative(diffusion), PLACES["decoder"], offloaded="disk")
    caplog.clear()
    from transformers import BitsAndBytesConfig

    relatives.load_relative(
        diffusion,
        device_map=placement,
        offload_folder=str(workspace.new_folder()),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, llm_int8_enable_fp32_cpu_offload=True),
    )
    said = "\n".join(caplog.messages)
    assert "gemma4_compat: on disk: bf16" in said
    assert "gemma4_compat: experts:" in said


def test_another_family_is_told_that_its_experts_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(tmp_path)
    with gemma4_compat.quantize(experts=True):
        relatives.load_relative(tmp_path, "4bit")
    assert "gemma4_compat: quantize(experts=True) is not for LlamaForCausalLM" in caplog.messages


def test_routers_stay_in_bf16(diffusion: Path) -> None:
    model = relatives.load_relative(diffusion, "4bit")
    assert type(model.model.decoder.layers[0].router.proj).__name__ == "Linear"
    assert "router.proj" in model.config.quantization_config.llm_int8_skip_modules


@pytest.mark.filterwarnings("ignore:llm_int8_skip_modules names modules by the end of their path")
def test_a_list_without_the_head(diffusion: Path) -> None:
    model = relatives.load_relative(diffusion, "4bit", skip_modules=["model.encoder.vision_tower", "router.proj"])
    assert type(model.lm_head).__name__ == "Linear"
    assert not relatives.plain_linears(model.model.decoder)
    assert relatives.outputs(model).logits[0].isfinite().all()


def test_prepared_for_training(checkpoint: Path) -> None:
    import torch
    from peft import prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(
        relatives.load_relative(checkpoint, "4bit"), use_gradient_checkpointing=False
    )
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert difference(expected(checkpoint, "4bit"), relatives.outputs(model)) == 0.0


def test_what_is_not_for_them_says_so(checkpoint: Path) -> None:
    model = relatives.load_relative(checkpoint)
    kind = type(model).__name__
    for call, what in (
        (lambda: gemma4_compat.decode_fast(model), rf"one token after another, which {kind} does not do"),
        (
            lambda: gemma4_compat.train_fast(model),
            rf"train_fast requires a Gemma 4 model with text layers; got {kind}",
        ),
        (lambda: gemma4_compat.plan_device_map(str(checkpoint), vram="8GiB"), "not a Gemma 4; known are"),
        (lambda: gemma4_compat.quantization_skip_modules(str(checkpoint)), "not a Gemma 4; known are"),
    ):
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=what):
            call()


@full
@pytest.mark.parametrize("name", ["Gemma3", "Gemma3n"])
@pytest.mark.parametrize("place", ["layers", "embeddings"])
def test_older_families_never_differed(workspace: Workspace, name: str, place: str) -> None:
    """No patch for Gemma 4 acts on them, and none is needed."""
    import torch
    import transformers
    from accelerate import dispatch_model

    def load() -> Any:
        torch.manual_seed(0)
        text = tiny_configs.text_shape()
        own = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32, "laurel_rank": 8}
        own["activation_sparsity_pattern"] = [0.0] * text["num_hidden_layers"]
        kept = {key: text[key] for key in text if key not in ("global_head_dim", "num_kv_shared_layers")}
        if name == "Gemma3n":
            kept |= {**own, "num_kv_shared_layers": 2}
        config = getattr(transformers, f"{name}TextConfig")(**kept)
        return tiny_models.randomized(getattr(transformers, f"{name}ForCausalLM")(config)).eval()

    def answers(model: Any) -> Any:
        return workspace.outputs(model, text_only=True)

    placement = relative_map(model := load(), PLACES[place], offloaded="disk")
    split = dispatch_model(model, placement, main_device="cpu", offload_dir=str(workspace.new_folder()))
    assert difference(answers(load()), answers(split)) == 0.0


_TWO_DEVICES = """
import sys
from pathlib import Path

import gemma4_compat
import torch
from accelerate import dispatch_model
from gemma4_compat._lab import relatives
from gemma4_compat._lab.stand_ins import second_device
from gemma4_compat._lab.workspace import difference
from tests.one_device.test_relatives import relative_map

load = lambda: relatives.load_relative(Path(sys.argv[1]))
main = torch.device("cpu")
expected = relatives.outputs(load())
with second_device.second_device():
    model, second = load(), torch.device(second_device.DEVICE)
    placement = relative_map(model, sys.argv[2], main=main, offloaded=second)
    dispatch_model(model, placement, main_device=main, skip_keys=list(model._skip_keys_device_placement))
    assert difference(expected, relatives.outputs(model)) == 0.0
print("as on one device")
"""


@pytest.mark.parametrize("place", [place for place in ALL if "everything" not in str(place)])
def test_on_two_devices(checkpoint: Path, warm_child: Callable[..., Finished], place: str) -> None:
    pytest.importorskip("torch")
    from gemma4_compat._lab.stand_ins import second_device

    if not second_device.available():
        pytest.skip("this PyTorch takes no backend in Python")
    done = warm_child("-c", _TWO_DEVICES, str(checkpoint), PLACES[place])
    assert done.stdout.endswith("as on one device\n"), done.stderr[-3000:]
