"""transformers-fp16-logits: who generates from NaN is told so, once, and told what to do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._gemma4.models import variants
from gemma4_compat._generation.prompts import overflow
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.stand_ins import tape
from gemma4_compat.patches.generation.transformers_fp16_logits import PATCH, build_overflowing
from tests.patches.promise import Promise
from tests.unit.kernels.by_rows import ByRows

NEW = 4
ERROR = "probability tensor contains either `inf`, `nan` or element < 0"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the logits are NaN in float16, the tokens are .*, and nothing is said"
    exact = False  # nothing is computed differently


def saved(folder: Any, *, variant: str | None = None) -> None:
    import torch

    model = tiny.load(tiny_models.build_checkpoint(folder, variant=variant), dtype=torch.float32)
    build_overflowing(model).save_pretrained(folder)


def load(workspace: Any, dtype: str = "float16", *, variant: str | None = None, **options: Any) -> Any:
    import torch

    given = {} if variant is None else {"variant": variant}
    folder = workspace.cached(saved, **given)
    return tiny.load(folder, device=workspace.main, dtype=getattr(torch, dtype), **options)


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What is said inside."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            said += [str(one.message) for one in caught if one.category is Gemma4CompatWarning]


def ask(model: Any, **options: Any) -> list[str]:
    """What a ``generate`` says."""
    batch = tiny.inputs(model.device, text_only=True)
    with told() as said:
        model.generate(**batch, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return said


@pytest.fixture(scope="module")
def overflowing(workspace: Any) -> Any:
    return load(workspace)


@pytest.fixture
def half(overflowing: Any) -> Any:
    """A model in float16 that overflows, and whose user was not told."""
    vars(overflowing).pop(overflow._WARNED, None)
    return overflowing


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "chunks": {"prefill_chunk_size": 5},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_generate_says_it_once(half: Any, way: str) -> None:
    (said,) = ask(half, **WAYS[way])
    assert "the logits of this prompt are NaN or infinite" in said
    assert "computes in float16 (its weights)" in said
    assert "dtype=torch.bfloat16 or torch.float32 to from_pretrained (docs/FLOAT16.md)" in said
    assert ask(half, **WAYS[way]) == []


def test_undone_it_is_silent_again(half: Any) -> None:
    gemma4_compat.revert(PATCH.id)
    try:
        assert all(ask(half, **way) == [] for way in WAYS.values())
    finally:
        gemma4_compat.install()
    assert len(ask(half)) == 1


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_who_samples_is_told_before_the_error(half: Any, way: dict[str, Any]) -> None:
    with told() as said, contextlib.suppress(RuntimeError):  # beams do not draw from these logits on every release
        half.generate(**tiny.inputs(half.device, text_only=True), max_new_tokens=NEW, do_sample=True, **way)
    assert len(said) == 1
    if not way:
        with pytest.raises(RuntimeError, match=ERROR):
            ask(half, do_sample=True)


def test_with_an_assistant(half: Any, workspace: Any) -> None:
    try:
        assistant = workspace.load_assistant()
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    assert len(ask(half, assistant_model=assistant.half())) == 1


@pytest.mark.parametrize(
    ("options", "counted"),
    [({}, "replayed"), ({"any_length": True}, "prompts_captured"), ({"assistants": True}, "rounds")],
)
def test_prompts_and_tokens_that_are_replayed(
    workspace: Any, options: dict[str, bool], counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options:  # without a GPU there are no kernels, and other arithmetic stands in
        monkeypatch.setattr(custom, "CustomKernels", ByRows)
        monkeypatch.setattr(custom, "unsupported_reason", lambda _device: None)
    model = load(workspace)
    lookup = {"prompt_lookup_num_tokens": 2} if options.get("assistants") else {}
    with tape.standing_in(RECORDERS):
        gemma4_compat.decode_fast(model, **options)
        for _ in range(3):
            vars(model).pop(overflow._WARNED, None)
            assert len(ask(model, **lookup)) == 1
    assert getattr(decoder.of(model).statistics, counted)


@pytest.mark.parametrize("variant", [name for name in variants.NAMES if name != "E2B"])
def test_the_other_variants(workspace: Any, variant: str) -> None:
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
    assert len(ask(load(workspace, variant=variant))) == 1


def test_text_only_models_and_adapters(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = load(workspace, cls="Gemma4ForCausalLM")
    assert len(ask(model)) == 1
    adapted = get_peft_model(load(workspace), LoraConfig(r=2, target_modules=["q_proj"]))
    assert len(ask(adapted)) == 1


def test_autocast(workspace: Any) -> None:
    import torch

    model = load(workspace, "bfloat16")
    with torch.autocast(model.device.type, dtype=torch.float16):
        (said,) = ask(model)
    assert "float16 (torch.autocast)" in said
    assert "dtype=torch.bfloat16 to torch.autocast" in said


@pytest.mark.parametrize(("bits", "remedy"), [(4, "bnb_4bit_compute_dtype"), (8, "load in 4 bits")])
def test_quantized_layers_that_compute_in_float16(workspace: Any, bits: int, remedy: str) -> None:
    """The weights between them are in bfloat16."""
    import torch
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_compute_dtype=torch.float16,
        llm_int8_threshold=0.0,  # nothing is left out of 8 bits
        llm_int8_skip_modules=["lm_head", *tiny.plain_towers()],
    )
    model = AutoModelForImageTextToText.from_pretrained(
        workspace.cached(saved),
        dtype=torch.bfloat16,
        device_map={"": workspace.main},
        quantization_config=config,
    )
    (said,) = ask(model)
    assert f"float16 (its {bits}-bit layers)" in said
    assert remedy in said


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes_are_not_looked_at(workspace: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(overflow, "Watch")
    model = load(workspace, dtype)
    assert all(ask(model, **way) == [] for way in WAYS.values())


def test_where_nothing_overflows_nothing_is_said_and_nothing_changes(workspace: Any) -> None:
    """With a processor that forbids tokens, and everything that is returned."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forbids(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, _ids: Any, scores: Any) -> Any:
            scores[:, ::2] = -torch.inf
            return scores

    model = workspace.load().half()
    batch = tiny.inputs(model.device, text_only=True)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    for way in (*WAYS.values(), {"do_sample": True}):
        found = []
        for disabled in (False, True):
            if disabled:
                gemma4_compat.revert(PATCH.id)
            try:
                torch.manual_seed(0)
                with told() as said:
                    forbids = LogitsProcessorList([Forbids()])
                    found.append(model.generate(**batch, **{**options, **way}, logits_processor=forbids))
                assert said == []
            finally:
                gemma4_compat.install()
        for name in ("sequences", "logits", "scores"):
            assert all(map(torch.equal, *(list(one[name]) for one in found)))


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        ("1 2 3", False),
        ("-inf 2 -inf", False),
        ("1 nan 3", True),
        ("-inf nan -inf", True),
        ("1 inf 3", True),
        ("-inf -inf -inf", True),
    ],
)
def test_what_counts(row: str, counts: bool) -> None:
    import torch

    model = SimpleNamespace(config=object())
    logits = torch.tensor([[1.0, 2.0, 3.0], [float(value) for value in row.split()]], dtype=torch.float16)
    with overflow.watching(model, []) as watch:
        # A chunk that is not the last has none.
        overflow.check(model, SimpleNamespace(logits=None), SimpleNamespace(do_sample=False))
        assert watch.overflowed is None
        overflow.check(model, SimpleNamespace(logits=logits[:, None]), SimpleNamespace(do_sample=False))
    assert bool(watch.overflowed) is counts


def test_greedy_decoding_waits_for_nothing_before_its_end(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is read when the last token is there; while sampling, before the first one is drawn."""
    seen: list[int] = []

    class Streamer:
        tokens = -1  # the prompt comes first

        def put(self, _tokens: Any) -> None:
            self.tokens += 1

        def end(self) -> None:
            seen.append(self.tokens)

    say = overflow.Watch.say
    streamer = Streamer()
    monkeypatch.setattr(overflow.Watch, "say", lambda self: (seen.append(-streamer.tokens), say(self)))
    assert len(ask(half, streamer=streamer, eos_token_id=None)) == 1
    assert seen == [NEW, -NEW]
    vars(half).pop(overflow._WARNED)
    with pytest.raises(RuntimeError, match=ERROR):
        ask(half, do_sample=True)
    assert len(seen) == 3


def test_an_assistant_in_float16_is_no_reason_to_doubt_the_model(workspace: Any) -> None:
    """Each of two models that generate in one another is looked at by itself."""
    right, wrong = workspace.load().half(), load(workspace)
    (said,) = ask(right, assistant_model=wrong)
    assert "computes in float16" in said
    assert overflow._WARNED in vars(wrong)
    assert overflow._WARNED not in vars(right)


def test_a_compiled_model(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(half, "forward", torch.compile(half.forward, backend="eager"), raising=True)
    assert len(ask(half)) == 1


def test_explain_knows_the_error_of_sampling() -> None:
    found = gemma4_compat.explain(f"RuntimeError: {ERROR}")
    assert [patch.id for patch in found.patches] == [PATCH.id]
    assert not found.certain  # any program can draw from NaN
