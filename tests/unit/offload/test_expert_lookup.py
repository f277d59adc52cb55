"""Experts of offloaded layers: a token reads those that it is sent to, where they are, with the bits of one device."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import expert_lookup, read_ahead, streaming
from tests.unit.generation import calls

LAYERS = "model.language_model.layers"
#: What is off the device, in which words; "nested" is an entry beside one that covers it.
WHERE = ["experts", "one layer's", "nested", "layers"]
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]
SKIPPED = ["router.proj", "lm_head", "model.vision_tower", "model.embed_vision"]


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


def loaded(workspace: Any, checkpoint: Path, quantization: str | None, **options: Any) -> Any:
    with gemma4_compat.quantize(experts=True) if quantization else contextlib.nullcontext():
        options |= {"skip_modules": SKIPPED} if quantization else {}
        return tiny.load(checkpoint, quantization, device=workspace.main, **options).eval()


def device_map(model: Any, where: str, main: Any, away: str) -> dict[str, Any]:
    """Experts, or whole layers, on ``away``."""
    placement = tiny.device_map(model, "none", main=main, offloaded=away)
    for number, layer in enumerate(model.get_decoder().layers):
        name = f"{LAYERS}.{number}"
        if where == "layers":
            placement[name] = away
        elif where == "nested":
            placement[f"{name}.experts"] = away
        elif where == "experts" or number == 1:
            del placement[name]
            placement |= dict.fromkeys((f"{name}.{part}" for part, _ in layer.named_children()), main)
            placement |= {f"{name}.layer_scalar": main, f"{name}.experts": away}
    return placement


def placed(workspace: Any, model: Any, where: str, store: str) -> Any:
    """The model, dispatched; ``store`` is ``"memory"`` or ``"disk"``."""
    import torch
    from accelerate import dispatch_model

    if store == "disk":
        return workspace.dispatch_map(model, device_map(model, where, workspace.main, "disk"))
    main = torch.device(workspace.main)
    skip = tiny.skip_keys(model)
    return dispatch_model(model, device_map(model, where, main, "cpu"), main_device=main, skip_keys=skip)


def answers(model: Any) -> list[Any]:
    """Logits of prompts, of single tokens and of a few, and of a ``generate``."""
    import torch

    ids = torch.randint(3, 240, (2, 20), generator=torch.Generator().manual_seed(1)).to(model.device)
    found = []
    with torch.no_grad():
        for given in (ids, ids[:1, :1], ids[1:, :1], ids[:1, :5], ids[:, :3]):
            found.append(model(input_ids=given).logits)
    said = calls.generate(model, calls.text(model, 5), new=5, cache_implementation=None)
    found += said.logits
    found.append(model(input_ids=ids[:1, :1]).logits.detach())  # with gradients: all experts
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    import torch

    return len(one) == len(other) > 0 and all(torch.equal(*pair) for pair in zip(one, other))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the numbers of experts in each lookup."""
    shapes: list[tuple[int, ...]] = []
    compute = expert_lookup.ExpertLookup._compute_with_rows

    def spy(self: Any, hidden_states: Any, top_k_index: Any, *rest: Any) -> Any:
        shapes.append(tuple(top_k_index.shape))
        return compute(self, hidden_states, top_k_index, *rest)

    monkeypatch.setattr(expert_lookup.ExpertLookup, "_compute_with_rows", spy)
    return shapes


@pytest.fixture(scope="module")
def references(workspace: Any, checkpoint: Path) -> Any:
    """``references(quantization, implementation)``: the answers with everything on the device."""
    known: dict[Any, list[Any]] = {}

    def found(quantization: str | None, implementation: str) -> list[Any]:
        key = quantization, implementation
        if key not in known:
            known[key] = answers(loaded(workspace, checkpoint, quantization, experts_implementation=implementation))
        return known[key]

    return found


CASES = [
    (None, "eager", "experts", "memory"),
    (None, "grouped_mm", "layers", "disk"),
    (None, "batched_mm", "nested", "memory"),
    ("4bit", "eager", "layers", "memory"),
    ("4bit", "grouped_mm", "nested", "disk"),
    ("4bit", "batched_mm", "one layer's", "memory"),
    ("4bit-double", "eager", "nested", "disk"),
    ("4bit-double", "grouped_mm", "experts", "memory"),
    ("4bit-double", "batched_mm", "layers", "memory"),
]
EVERY = [
    (quantization, implementation, where, store)
    for quantization in (None, "4bit", "4bit-double")
    for implementation in IMPLEMENTATIONS
    for where in WHERE
    for store in ("memory", "disk")
]


@pytest.mark.parametrize(
    ("quantization", "implementation", "where", "store"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in EVERY if case not in CASES)],
)
def test_the_same_bits(
    workspace: Any,
    checkpoint: Path,
    references: Any,
    looked_up: list[Any],
    quantization: str | None,
    implementation: str,
    where: str,
    store: str,
) -> None:
    model = loaded(workspace, checkpoint, quantization, experts_implementation=implementation)
    layers = 1 if where == "one layer's" else len(model.get_decoder().layers)
    model = placed(workspace, model, where, store)
    assert same(answers(model), references(quantization, implementation))
    # One token or a few, 2 of 32 experts each: not the prompts of 40 and the call with gradients.
    assert sorted(set(looked_up)) == [(1, 2), (5, 2), (6, 2)]
    assert len(looked_up) == layers * (2 + 2 + 1 + 4)


def test_a_token_copies_nothing_else(workspace: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a layer travels, and of its experts the rows of those that are hit."""
    import torch

    model = placed(workspace, loaded(workspace, checkpoint, "4bit-double"), "layers", "memory")
    rows: list[tuple[int, ...]] = []
    take = expert_storage.rows_of

    def spy(tensor: Any, chosen: Any) -> Any:
        rows.append((len(tensor), len(chosen)))
        return take(tensor, chosen)

    monkeypatch.setattr(expert_storage, "rows_of", spy)
    token = torch.tensor([[5]], device=model.device)
    with torch.no_grad():
        model(input_ids=token)
        model(input_ids=token)
    (streamer,) = streaming.streamers(model)
    assert rows
    assert set(rows) == {(32, 2)}
    for group in streamer.groups():
        assert group.in_part
        assert 0 < group.size_without_experts < group.size / 2
        assert group._buffer.untyped_storage().nbytes() in (
            0,
            max(one.size_without_experts for one in streamer.groups()),
        )


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_of_experts_on_disk_those_that_are_hit_are_announced(
    workspace: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """With all their values, scales included, before any is copied."""
    import torch

    model = placed(workspace, loaded(workspace, checkpoint, quantization), "layers", "disk")
    events: list[tuple[str, Any]] = []
    rows, take = read_ahead.rows, expert_storage.in_words
    monkeypatch.setattr(
        read_ahead,
        "rows",
        lambda tensor, numbers: (events.append(("announced", (len(tensor), list(numbers)))), rows(tensor, numbers)),
    )
    monkeypatch.setattr(
        expert_storage, "in_words", lambda tensor: (events.append(("copied", len(tensor))), take(tensor))[1]
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]], device=model.device))
    copied = [index for index, (kind, _) in enumerate(events) if kind == "copied"]
    announced = [index for index, (kind, _) in enumerate(events) if kind == "announced"]
    layers = len(model.get_decoder().layers)
    assert len(announced) == len(copied)  # each tensor, or each of a weight's: bytes, scales, nested scales, offsets
    assert len(announced) == layers * (2 if quantization is None else 8)
    assert announced[0] < copied[0]
    assert announced[len(announced) // layers - 1] < copied[0]
    for index in announced:
        count, numbers = events[index][1]
        assert count == 32
        assert len(numbers) == 2


def test_the_host_keeps_the_values(workspace: Any, checkpoint: Path) -> None:
    """Also where a layer is packed for a lookup, before any of it is copied."""
    import torch

    state = loaded(workspace, checkpoint, "4bit-double").state_dict()
    model = placed(workspace, loaded(workspace, checkpoint, "4bit-double"), "layers", "memory")
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]], device=model.device))
    for name, module in model.named_modules():
        hook = module_hooks.offload_hook(module)
        for key in [key for key, value in module._parameters.items() if hook is not None and value is not None]:
            assert torch.equal(hook.weights_map[key].cpu(), state[f"{name}.{key}"].cpu()), name


@pytest.mark.parametrize("where", ["experts", "layers"])
def test_experts_alone_take_nothing_on_the_device(workspace: Any, checkpoint: Path, where: str) -> None:
    import torch

    model = placed(workspace, loaded(workspace, checkpoint, None), where, "memory")
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]], device=model.device))
    (streamer,) = streaming.streamers(model)
    assert [group.size_without_experts == 0 for group in streamer.groups()] == [where == "experts"] * 3


def test_after_a_prompt_no_layer_is_left_on_the_device(workspace: Any, checkpoint: Path) -> None:
    """The layer that is fetched ahead is for a token: without experts."""
    import torch

    model = placed(workspace, loaded(workspace, checkpoint, None), "layers", "memory")
    with torch.no_grad():
        model(input_ids=torch.arange(3, 43, device=model.device)[None])
    (streamer,) = streaming.streamers(model)
    left = [group for group in streamer.groups() if group.on_device]
    assert [(group.in_part, group is streamer.groups()[0]) for group in left] == [(True, True)]


def test_a_prompt_after_a_token(workspace: Any, checkpoint: Path, references: Any) -> None:
    """What was fetched ahead for a token is not enough."""
    import torch

    ids = torch.arange(3, 43, device=workspace.main)[None]
    model = placed(workspace, loaded(workspace, checkpoint, "4bit"), "layers", "memory")
    plain = loaded(workspace, checkpoint, "4bit")
    with torch.no_grad():
        for given in (ids[:, :1], ids, ids[:, :1], ids[:, :4], ids):
            assert torch.equal(model(input_ids=given).logits, plain(input_ids=given).logits)


def test_weights_that_were_changed_are_looked_up_anew(workspace: Any, checkpoint: Path) -> None:
    import torch

    from gemma4_compat._offload.weights import stored_weights

    model = placed(workspace, loaded(workspace, checkpoint, None), "experts", "memory")
    plain = loaded(workspace, checkpoint, None)
    token = torch.tensor([[5]], device=model.device)
    with torch.no_grad():
        before = model(input_ids=token).logits
        path = f"{LAYERS}.1.experts"
        value = plain.get_submodule(path).down_proj.detach().flip(0)
        plain.get_submodule(path).down_proj.copy_(value)
        stored_weights.write(model.get_submodule(path), "down_proj", value)
        after = model(input_ids=token).logits
        assert torch.equal(after, plain(input_ids=token).logits)
    assert not torch.equal(before, after)


def test_a_hook_on_the_experts_still_runs(workspace: Any, checkpoint: Path) -> None:
    import torch

    model = placed(workspace, loaded(workspace, checkpoint, "4bit"), "layers", "memory")
    seen: list[Any] = []
    model.get_submodule(f"{LAYERS}.1.experts").register_forward_hook(lambda *given: seen.append(given[2].shape))
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]], device=model.device))
    assert seen == [(1, model.config.get_text_config().hidden_size)]


@pytest.fixture(scope="module")
def adapters(workspace: Any, checkpoint: Path) -> dict[str, Path]:
    """LoRA on attention, and on the experts themselves, which need all of them."""
    import torch
    from peft import LoraConfig, get_peft_model

    found = {}
    for name, options in {
        "attention": {"target_modules": r".*language_model.*\.(q_proj|o_proj)"},
        "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    }.items():
        torch.manual_seed(0)
        model = get_peft_model(
            loaded(workspace, checkpoint, None), LoraConfig(r=2, init_lora_weights=False, **options)
        )
        found[name] = Path(tempfile.mkdtemp(prefix="adapter-", dir=workspace.folder))
        model.save_pretrained(found[name])
    return found


@pytest.mark.parametrize("adapter", ["attention", "experts"])
@pytest.mark.parametrize("where", ["nested", "layers"])
def test_adapters(
    workspace: Any, checkpoint: Path, adapters: dict[str, Path], looked_up: list[Any], adapter: str, where: str
) -> None:
    import torch
    from peft import PeftModel

    token = torch.tensor([[5]], device=workspace.main)
    plain = PeftModel.from_pretrained(loaded(workspace, checkpoint, "4bit-double"), adapters[adapter]).eval()
    base = placed(workspace, loaded(workspace, checkpoint, "4bit-double"), where, "memory")
    with torch.no_grad():
        base(input_ids=token)  # what is known of the bare layers must not be used for the adapted ones
        model = PeftModel.from_pretrained(base, adapters[adapter]).eval()
        assert torch.equal(model(input_ids=token).logits, plain(input_ids=token).logits)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(input_ids=token).logits, plain(input_ids=token).logits)
    assert len(looked_up) == 9  # also with the adapter on the experts


def test_an_adapter_on_bf16_experts(workspace: Any, checkpoint: Path, adapters: dict[str, Path]) -> None:
    """PEFT puts its own in the place of their parameters: all of them are brought."""
    import torch
    from peft import PeftModel

    token = torch.tensor([[5]], device=workspace.main)
    plain = PeftModel.from_pretrained(loaded(workspace, checkpoint, None), adapters["experts"]).eval()
    base = placed(workspace, loaded(workspace, checkpoint, None), "layers", "memory")
    with torch.no_grad():
        base(input_ids=token)
        model = PeftModel.from_pretrained(base, adapters["experts"]).eval()
        assert torch.equal(model(input_ids=token).logits, plain(input_ids=token).logits)


def test_an_adapter_adds_to_the_experts_that_are_hit(
    workspace: Any, checkpoint: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of adding to all of them."""
    import torch
    from peft import PeftModel

    token = torch.tensor([[5]], device=workspace.main)
    model = PeftModel.from_pretrained(loaded(workspace, checkpoint, "4bit-double"), adapters["experts"]).eval()
    numbers: list[int | None] = []
    values_of = expert_forward.values_of

    def spy(parameter: Any, chosen: Any, *rest: Any) -> Any:
        numbers.append(None if chosen is None else len(chosen))
        return values_of(parameter, chosen, *rest)

    monkeypatch.setattr(expert_forward, "values_of", spy)
    with torch.no_grad():
        some = model(input_ids=token).logits
        assert set(numbers) == {2}
        monkeypatch.setattr(expert_forward, "can_choose", lambda _: False)
        assert torch.equal(some, model(input_ids=token).logits)
    assert None in numbers


def test_training_needs_all_experts(workspace: Any, checkpoint: Path, adapters: dict[str, Path]) -> None:
    import torch
    from peft import PeftModel

    ids = torch.tensor([[5, 6]], device=workspace.main)
    gradients = []
    for where in (None, "nested", "layers"):
        model = loaded(workspace, checkpoint, "4bit-double")
        if where is not None:
            model = placed(workspace, model, where, "memory")
        model = PeftModel.from_pretrained(model, adapters["attention"], is_trainable=True).eval()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.requires_grad])
    assert same(gradients[0], gradients[1])
    assert same(gradients[0], gradients[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("where", [None, "layers"])
def test_tokens_that_are_sent_to_the_same_experts(
    workspace: Any, checkpoint: Path, implementation: str, where: str | None
) -> None:
    """Their numbers are there twice."""
    import torch

    model = loaded(workspace, checkpoint, "4bit-double", experts_implementation=implementation)
    if where is not None:
        model = placed(workspace, model, where, "memory")
    ids = torch.tensor([[5], [5], [7]], device=workspace.main)
    plain = loaded(workspace, checkpoint, "4bit-double", experts_implementation=implementation)
    for module in plain.modules():
        if hasattr(module, "num_experts"):
            expert_storage.dequantize_module(module)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 40])
def test_rows_are_the_rows(dtype: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(host_memory, "staging", lambda shape, dtype: torch.empty(shape, dtype=dtype))  # not pinned

    values = torch.randint(0, 200, (6, width), generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    odd = torch.empty(6 * width + 1, dtype=values.dtype)[1:].view(6, width).copy_(values)
    chosen = torch.tensor([4, 0, 5])
    for tensor in (values, odd, values.view(6, 1, width)):
        found = expert_storage.rows_of(tensor, chosen)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor[chosen])
    assert torch.equal(expert_lookup.fetched(values, chosen, device="cpu"), values[chosen])


def test_words_are_as_wide_as_they_can_be() -> None:
    import torch

    bytes_ = torch.zeros(4, 24, dtype=torch.uint8)
    assert expert_storage.in_words(bytes_).dtype == torch.int64
    assert expert_storage.in_words(bytes_[:, :12].contiguous()).dtype == torch.int32
    assert expert_storage.in_words(torch.zeros(4, 3, dtype=torch.uint8)).dtype == torch.uint8


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("away", ["cpu", "disk"])
def test_from_pretrained_with_entries_for_experts(
    workspace: Any, checkpoint: Path, tmp_path: Path, looked_up: list[Any], quantization: str | None, away: str
) -> None:
    import torch
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    def load(placement: dict[str, Any], **options: Any) -> Any:
        if quantization is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
                llm_int8_enable_fp32_cpu_offload=len(placement) > 1,
                llm_int8_skip_modules=SKIPPED,
            )
        with gemma4_compat.quantize(offloaded=True, experts=True):
            return Gemma4ForConditionalGeneration.from_pretrained(
                checkpoint, dtype=torch.bfloat16, device_map=placement, **options
            ).eval()

    main = torch.device(workspace.main)
    placement: dict[str, Any] = {"": main, **{f"{LAYERS}.{number}.experts": away for number in range(3)}}
    model = load(placement, offload_folder=str(tmp_path))
    assert {name: str(device) for name, device in model.hf_device_map.items()} == {
        name: str(device) for name, device in placement.items()
    }
    plain = load({"": main})
    ids = torch.tensor([[5, 6, 7]], device=main)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert len(looked_up) == 3


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("where", ["experts", "layers"])
@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_a_prompt_in_chunks(
    workspace: Any, checkpoint: Path, quantization: str | None, where: str, cache: str | None
) -> None:
    """As the code of a plan sets it: each chunk is a forward, and several generates have the bits of one device."""

    def said(model: Any) -> tuple[list[Any], list[int]]:
        lengths: list[int] = []
        hook = (
            model.get_decoder().layers[0].register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
        )
        model.generation_config.prefill_chunk_size = 7
        found = [
            logits
            for seed in (1, 2, 3)
            for logits in calls.generate(
                model, calls.text(model, 20, seed=seed), new=5, cache_implementation=cache
            ).logits
        ]
        hook.remove()
        return found, lengths

    expected, lengths = said(loaded(workspace, checkpoint, quantization))
    assert lengths[:3] == [7, 7, 6]
    found, others = said(placed(workspace, loaded(workspace, checkpoint, quantization), where, "memory"))
    assert others == lengths
    assert same(found, expected)
