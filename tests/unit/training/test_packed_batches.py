"""train_fast with several texts in a row: one graph for any boundaries, and no mask of all pairs of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.modeling_layers")
import gemma4_compat
from gemma4_compat._gemma4.attention import block_layout, products, windows
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._graphs import recording
from gemma4_compat._lab import tiny_models
from gemma4_compat._lab.stand_ins import flash
from gemma4_compat._lab.stand_ins.tape import standing_in
from gemma4_compat._training.captured import layers
from gemma4_compat._training.captured.graphs import Graph
from tests.helpers import without
from tests.patches.training.parts import only
from tests.unit.gemma4.attention.test_products import deterministic
from tests.unit.training.test_train_fast import SETTLED, adapted, gradients, same, spied

__all__ = ["deterministic"]

TOKENS, PADDING = 320, 30
#: The lengths of the texts of each batch, all of so many tokens.
BATCHES = ((100, 100, 120), (1, 250, 69), (64, 64, 64, 64, 64))
#: Distance from float64 of one call's, in the norm of all gradients: docs/TRAINING.md.
TIMES = 1.4


@pytest.fixture
def tapes() -> Iterator[None]:
    with standing_in(recording.RECORDERS):
        yield


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is lent the products of a GPU, and a few hundred tokens have several blocks."""
    for module, name in ((windows, "ROUNDED"), (windows, "UNIT"), (block_layout, "UNIT")):
        monkeypatch.setattr(module, name, 64)
    for name in ("_MOST", "_WINDOW", "UNIT"):
        monkeypatch.setattr(products, name, 64)
    monkeypatch.setattr(windows, "MULTIPLYING", ("cpu",))


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., Any]:
    """A model of bf16 with wide heads and an adapter."""

    def model(variant: str = "E2B", kind: str = "AutoModelForCausalLM") -> Any:
        import torch
        import transformers

        if variant == "12B":
            pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
        folder = tiny_models.build_checkpoint(tmp_path / variant, variant=variant, full_width=512)
        found = getattr(transformers, kind).from_pretrained(folder, dtype=torch.bfloat16)
        return adapted(found)

    return model


def texts(lengths: Sequence[int]) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(len(lengths))
    return [{"input_ids": torch.randint(3, 90, (length,), generator=generator).tolist()} for length in lengths]


def packed(lengths: Sequence[int], way: str = "") -> dict[str, Any]:
    """These texts as a collator gives them: transformers' with an option, with a mask of ones, or with padding.

    "types DTYPE NAME": with what a processor says of the tokens of a text, and a mask of ones.
    """
    import torch
    from transformers import DataCollatorWithFlattening

    if way in ("left", "right"):
        row = packed(lengths)
        sides = (PADDING, 0) if way == "left" else (0, PADDING)
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        fill = {"labels": -100, "position_ids": 1}
        return {name: torch.nn.functional.pad(one, sides, value=fill.get(name, 0)) for name, one in row.items()}
    found: dict[str, Any] = dict(
        DataCollatorWithFlattening(**({way: True} if way.startswith("return") else {}))(texts(lengths))
    )
    if way.startswith("types"):
        _, dtype, name = way.split()
        found[name] = torch.zeros(found["input_ids"].shape, dtype=getattr(torch, dtype))
    if way == "ones" or way.startswith("types"):
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    if way == "two rows":
        other = packed(BATCHES[1])
        return {name: torch.cat([one, other[name]]) for name, one in found.items()}
    return found


def step(model: Any, given: dict[str, Any], **named: Any) -> list[Any]:
    """The loss, and each gradient."""
    model.zero_grad()
    loss = model(**{"use_cache": False, **given, **named}).loss
    loss.backward()
    return [loss.detach(), *gradients(model)]


def masks(model: Any, run: Callable[[], Any]) -> dict[str, set[tuple[Any, ...]]]:
    """Dtype and shape of the masks that layers of each kind get."""
    seen: dict[str, set[tuple[Any, ...]]] = {}

    def note(layer: Any, _given: Any, named: dict[str, Any]) -> None:
        mask = named["attention_mask"]
        kind = "sliding" if layer.self_attn.is_sliding else "full"
        seen.setdefault(kind, set()).add(None if mask is None else (str(mask.dtype), *mask.shape))

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in layers.decoder_layers(model)]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def by_text(rows: int = 1, tokens: int = TOKENS) -> dict[str, set[tuple[Any, ...]]]:
    return {kind: {("torch.int32", rows, 2, 1, tokens)} for kind in ("sliding", "full")}


WAYS = ("", "ones", "left", "right", "two rows", "return_seq_idx", "return_flash_attn_kwargs")
#: Of these, tokens of an image see each other; masks are made from ``mm_token_type_ids``.
IN_BOTH_DIRECTIONS = ("12B", "31B", "26B-A4B")
TYPES = "types int64 mm_token_type_ids"


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize(
    "variant, kind, way",
    [
        *(("E2B", "AutoModelForCausalLM", way) for way in WAYS),
        ("E2B", "Gemma4ForCausalLM", "ones"),
        ("12B", "AutoModelForCausalLM", ""),
        ("31B", "AutoModelForCausalLM", "ones"),
        ("26B-A4B", "AutoModelForCausalLM", ""),
        *((variant, "AutoModelForCausalLM", TYPES) for variant in ("E2B", *IN_BOTH_DIRECTIONS)),
        ("E2B", "Gemma4ForCausalLM", TYPES),
        ("31B", "AutoModelForCausalLM", "types int64 token_type_ids"),
        *(("31B", "AutoModelForCausalLM", TYPES.replace("int64", dtype)) for dtype in ("int32", "bool", "float32")),
    ],
)
def test_one_graph_serves_any_boundaries(built: Callable[..., Any], variant: str, kind: str, way: str) -> None:
    """And a replay has the bits of a step without a graph."""
    model, batches = built(variant, kind), [packed(lengths, way) for lengths in BATCHES]
    only(model, graphs=True, windows=True, products=True)
    shape = batches[0]["input_ids"].shape
    right: list[Any] = []
    assert masks(model, lambda: right.extend(step(model, given) for given in batches)) == by_text(*shape)
    for _ in range(SETTLED):
        step(model, batches[0])
    counted = gemma4_compat.statistics(model).training
    found = [step(model, given) for given in batches]
    again = gemma4_compat.statistics(model).training
    number = len(layers.decoder_layers(model))
    assert again.reasons == ()
    assert (again.captured, again.eager) == (number, counted.eager)
    assert again.replayed == counted.replayed + len(batches) * number
    assert all(map(same, right, found))


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("options", [{}, {"graphs": True, "max_tokens": TOKENS - 1}, {"graphs": True}], ids=str)
def test_bits_without_graphs(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Those of a step that gets a mask of all pairs: the same keys, of batches and layers that no graph serves."""
    model = only(built(), windows=True, products=True, **options)
    if options == {"graphs": True}:
        for layer in layers.decoder_layers(model):
            layer.mlp.register_forward_hook(lambda *_: None)  # it has to run in each step
    batches = [
        packed(lengths, way)
        for lengths, way in zip((*BATCHES, BATCHES[0]), ("", "two rows", "left", "right"), strict=True)
    ]
    found = [step(model, given) for given in batches]
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    seen = masks(model, lambda: step(model, batches[0]))
    assert seen["full"] == seen["sliding"] == {("torch.bool", 1, 1, TOKENS, TOKENS)}
    assert all(same(step(model, given), one) for given, one in zip(batches, found, strict=True))


@pytest.mark.parametrize("named", [{}, {"use_cache": True}], ids=str)
@pytest.mark.parametrize("least", [0, TOKENS + 1], ids=["by windows", "too short for windows"])
@pytest.mark.parametrize("variant", IN_BOTH_DIRECTIONS)
def test_types_of_texts_change_nothing(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variant: str, least: int, named: dict[str, Any]
) -> None:
    """Nor does what they would be read as: the bits of a step that gets a mask of all pairs made from them."""
    monkeypatch.setattr(windows, "LEAST", {"cpu": least})
    monkeypatch.setattr(windows, "MULTIPLYING", ("cpu",) if not least else ())
    model, given = only(built(variant), windows=True, products=True), packed(BATCHES[0], TYPES)
    model.gradient_checkpointing_disable()
    found, right = step(model, given, **named), step(model, packed(BATCHES[0], "ones"), **named)
    assert same(right, found)
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    with without("transformers-image-types"):
        assert same(step(model, given, **named), found)


def test_types_stay_where_training_needs_them(built: Callable[..., Any]) -> None:
    """Before transformers 5.6, if another patch is off."""
    needed, model = "transformers-text-training", built("31B")
    if gemma4_compat.status()[needed].state is not gemma4_compat.PatchState.APPLIED:
        pytest.skip("this transformers trains on texts without types")
    model, given = only(model, windows=True, products=True), packed(BATCHES[0], TYPES)
    right = step(model, given)
    with without(needed):
        assert same(step(model, given), right)


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("variant", ["E2B", "12B"])
def test_each_text_is_as_by_itself(built: Callable[..., Any], variant: str, graphs: bool) -> None:
    """Measured from each text's own gradients in float64, the error is that of upstream's packed step."""
    import torch

    model = built(variant)
    lengths = BATCHES[0]
    plain = step(model, packed(lengths))
    only(model, windows=True, products=True, graphs=graphs)
    for _ in range(SETTLED if graphs else 1):
        found = step(model, packed(lengths))
    gemma4_compat.train_fast(model, enabled=False)
    model.double().zero_grad()
    trained = sum(length - 1 for length in lengths)
    for text in texts(lengths):
        ids = torch.tensor([text["input_ids"]])
        (model(input_ids=ids, labels=ids, use_cache=False).loss * (len(ids[0]) - 1) / trained).backward()
    right = gradients(model)

    def off(steps: list[Any]) -> float:
        return (
            sum(float((one.double() - other).norm()) ** 2 for one, other in zip(steps[1:], right, strict=True)) ** 0.5
        )

    assert off(found) <= TIMES * off(plain)


@pytest.mark.usefixtures("tapes", "deterministic")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("window", [64, TOKENS], ids=["windows", "too short for windows"])
def test_each_text_where_algorithms_are_deterministic(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, window: int, graphs: bool
) -> None:
    """Products compute all layers, and a graph has no kernels that fill new memory."""
    import torch

    ran: list[Any] = []
    filled: set[bool] = set()
    run = Graph._run_forward

    def captured(graph: Any, call: Any) -> None:
        filled.add(torch.utils.deterministic.fill_uninitialized_memory)
        run(graph, call)

    monkeypatch.setattr(Graph, "_run_forward", captured)
    monkeypatch.setattr(products, "_WINDOW", window)
    monkeypatch.setattr(windows, "_by_windows", spied(ran, "_by_windows", windows._by_windows))
    monkeypatch.setattr(products, "attention", spied(ran, "attention", products.attention))
    test_each_text_is_as_by_itself(built, "E2B", graphs)
    model = only(built("31B"), windows=True, products=True)
    assert masks(model, lambda: step(model, packed(BATCHES[0]))) == by_text(1, TOKENS)
    assert set(ran) == {"attention"}
    assert len(ran) > 2 * len(layers.decoder_layers(model))
    assert filled == ({False} if graphs else set())
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.usefixtures("tapes", "deterministic")
@pytest.mark.parametrize("variant, way", [("E2B", ""), ("E2B", "left"), ("E2B", "two rows"), ("31B", TYPES)])
def test_one_graph_where_algorithms_are_deterministic(built: Callable[..., Any], variant: str, way: str) -> None:
    test_one_graph_serves_any_boundaries(built, variant, "AutoModelForCausalLM", way)


@pytest.mark.usefixtures("tapes", "deterministic")
def test_bits_without_graphs_where_algorithms_are_deterministic(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    test_bits_without_graphs(built, monkeypatch, {})


@pytest.fixture
def large_tensors() -> Any:
    """A mode that notes operations whose result has an element for each pair of so many tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Noting(TorchDispatchMode):
        def __init__(self, tokens: int) -> None:
            super().__init__()
            self.pairs, self.found = tokens * tokens, set[str]()

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operation(*args, **(kwargs or {}))
            if any(getattr(one, "nbytes", 0) and one.numel() >= self.pairs for one in tree_leaves(result)):
                self.found.add(str(operation))
            return result

    return Noting


@pytest.mark.parametrize("variant, way", [("E2B", ""), ("E2B", "left"), ("31B", TYPES)])
def test_no_tensor_of_all_pairs(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, large_tensors: Any, variant: str, way: str
) -> None:
    tokens = 4096
    for module, name in ((windows, "UNIT"), (block_layout, "UNIT"), (products, "_MOST")):
        monkeypatch.setattr(module, name, 512)
    monkeypatch.setattr(windows, "ROUNDED", 512)
    model = built(variant)
    model.config.get_text_config().max_position_embeddings = 2 * tokens
    only(model, windows=True, products=True, loss=True)
    given = packed((1000, 96, 3000 - (PADDING if way == "left" else 0)), way)
    with large_tensors(tokens) as mode:
        step(model, given)
    assert mode.found == set()
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    with large_tensors(tokens) as mode:
        step(model, given)
    assert mode.found, "a mask of all pairs is noticed"


def _four_dimensions(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    return {**given, "attention_mask": causal}


def _images(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    kinds = torch.zeros_like(given["input_ids"])
    kinds[:, 90:99] = kinds[:, 101:120] = 1
    return {**given, "mm_token_type_ids": kinds}


def _one_text(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {**given, "position_ids": torch.arange(TOKENS)[None]}


def _groups(given: dict[str, Any]) -> dict[str, Any]:
    """Positions that are no texts, with a mask: upstream separates nothing."""
    import torch

    ids = given["input_ids"]
    return {**given, "position_ids": torch.arange(TOKENS)[None] // 2, "attention_mask": torch.ones_like(ids)}


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize(
    "variant, change",
    [("E2B", _four_dimensions), ("31B", _images), ("12B", _images), ("E2B", _one_text), ("E2B", _groups)],
)
def test_other_masks_are_as_before(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variant: str, change: Callable[..., Any]
) -> None:
    if not checkpointing.is_in_forward():
        pytest.skip(
            "older releases take no mask of four dimensions beside labels, and mask images by the layer's kind"
        )
    model, given = built(variant), change(packed(BATCHES[0]))
    only(model, graphs=True, windows=True, products=True)
    found: list[Any] = []
    seen = masks(model, lambda: found.extend(step(model, given) for _ in range(SETTLED)))
    assert {shape[0] for each in seen.values() for shape in each if shape is not None} <= {"torch.bool"}
    assert gemma4_compat.statistics(model).training.reasons == ()
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    right = step(only(model, windows=True, products=True), given)
    assert all(same(right, one) for one in found)


def _registered(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Another library has its own function for ``sdpa``."""
    from transformers.integrations import sdpa_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention.sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attention)


def _eager(_monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    model.set_attn_implementation("eager")


def _flash(_monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    model.set_attn_implementation({"text_config": "flash_attention_2"})


def _evaluated(_monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    model.eval()


def _off(_monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    only(model, graphs=True)


def _undone(_monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    gemma4_compat.train_fast(model, enabled=False)


@pytest.mark.parametrize("change", [_registered, _eager, _evaluated, _off, _undone])
def test_models_that_have_no_use_for_it(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]
) -> None:
    """The bits of before, also after windows and products were on."""
    model, given = only(built(), windows=True, products=True), packed(BATCHES[0])
    step(model, given)
    change(monkeypatch, model)
    found: list[Any] = []
    seen = masks(model, lambda: found.extend(step(model, given)))
    assert not any(shape[0] == "torch.int32" for each in seen.values() for shape in each)
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    assert same(step(model, given), found)


@pytest.mark.parametrize("change", [_registered, _eager, _flash, _evaluated, _off, _undone])
def test_types_change_nothing_there(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]
) -> None:
    """Without them flash kernels would compute the sliding layers, and round differently."""
    with flash.kernel() as (_, dtype):
        model, given = only(built("31B"), windows=True, products=True), packed(BATCHES[0], TYPES)
        change(monkeypatch, model.to(dtype))
        found = step(model, given)
        with without("transformers-image-types"):
            assert same(step(model, given), found)


@pytest.mark.parametrize("named", [{"output_attentions": True}, {"output_hidden_states": True}, {"use_cache": True}])
def test_other_outputs(built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, named: dict[str, bool]) -> None:
    import torch

    model, given = only(built(), windows=True, products=True), packed(BATCHES[0])
    model.gradient_checkpointing_disable()

    def outputs() -> list[Any]:
        found = model(**given, **{"use_cache": False, **named})
        return [found.loss, found.logits, *(found.attentions or ()), *(found.hidden_states or ())]

    found = outputs()
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    assert all(map(torch.equal, outputs(), found))


def test_logits_of_the_last_tokens(built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share keys then compute queries for these tokens only."""
    import torch

    model, given = only(built(), windows=True, products=True), packed(BATCHES[0])
    del given["labels"]
    found = model(**given, use_cache=False, logits_to_keep=90).logits
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    right = model(**given, use_cache=False, logits_to_keep=90).logits
    assert found.shape[1] == 90
    assert torch.allclose(right, found, atol=0.02 * float(right.abs().max()))


@pytest.mark.parametrize("part", ["a layer", "the text model"])
def test_compiled_parts(built: Callable[..., Any], part: str) -> None:
    """A compiled layer runs upstream's attention with the mask of the texts."""
    import torch

    model, given = built(), packed(BATCHES[0])
    right = step(model, given)
    only(model, windows=True, products=True)
    found = layers.decoder_layers(model)
    full = next(one for one in found if not one.self_attn.is_sliding)
    text = next(one for one in model.modules() if type(one).__name__ in windows._TEXT_MODELS)
    torch.compiler.reset()
    try:
        for one in (found[0], full) if part == "a layer" else (text,):
            one.compile(backend="eager")
        compiled = step(model, given)
    finally:
        torch.compiler.reset()
    assert (compiled[0] - right[0]).abs() <= 0.01 * right[0].abs()


def test_copies_train_as_before(built: Callable[..., Any]) -> None:
    model, given = only(built(), windows=True, products=True), packed(BATCHES[0])
    right = step(model, given)
    other = copy.deepcopy(model)
    seen = masks(other, lambda: None)
    assert same(right, step(other, given))
    assert seen == {}


@pytest.mark.usefixtures("tapes")
def test_trainer_with_a_collator_that_packs(built: Callable[..., Any], tmp_path: Path) -> None:
    """Batches of one length, with any boundaries: the losses are those without train_fast, of one capture."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    rows = [(150, 170), (20, 300), (319, 1), (160, 160), (200, 120), (31, 289), (260, 60), (90, 230)]
    data = [text for lengths in rows for text in texts(lengths)]

    def losses(model: Any) -> list[float]:
        arguments = TrainingArguments(
            str(tmp_path / "trainer"),
            per_device_train_batch_size=2,
            gradient_checkpointing=checkpointing.is_in_forward(),
            gradient_checkpointing_kwargs={"use_reentrant": False},
            learning_rate=0.01,
            max_steps=len(rows),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorWithFlattening())
        trainer._get_train_sampler = lambda *_: range(len(data))  # in this order: each batch has as many tokens
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = built()
    other = gemma4_compat.train_fast(copy.deepcopy(model))
    right, found = losses(model), losses(other)
    assert found == pytest.approx(right, rel=0.02)
    counted, number = gemma4_compat.statistics(other).training, len(layers.decoder_layers(other))
    assert counted.reasons == ()
    assert counted.captured == number
    assert counted.replayed == (len(rows) - layers.CAPTURED_AT + 1) * number


def test_windows_without_products(built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers read the numbers of texts, and full layers a mask. The bits are those of a step with masks."""
    ran: list[str] = []
    for module, name in ((windows, "_by_windows"), (products, "attention")):
        monkeypatch.setattr(module, name, spied(ran, name, getattr(module, name)))
    model, found = only(built(), windows=True), list[Any]()
    assert masks(model, lambda: found.extend(step(model, packed(BATCHES[0]))))["sliding"] == by_text()["sliding"]
    assert set(ran) == {"_by_windows"}
    monkeypatch.setattr(windows, "instead_of_mask", lambda *_: None)
    assert same(step(model, packed(BATCHES[0])), found)
