"""Every cache with every model: the tokens of the default cache on one device, and its logits but for rounding.

docs/CACHES.md shows the table of tools/pages/caches.py.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from tools.pages import caches
from tools.pages.caches import KINDS, WAYS, Kind

MODELS = ("E2B", "E2B text", "31B", "26B-A4B", "12B")
#: Largest logit difference in float32; what is measured is below 4e-5, with logits up to 30 and wrong ones off by 0.1.
ROUNDING = 2e-4
NEW = 10
#: What differs between the caches' layers: the prompt is three times the window of 8.
PROMPT, WINDOW = 24, 8


class Models:
    """Each model, on one device and split, loaded once."""

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace
        self.known: dict[tuple[str, bool], Any] = {}
        self.outputs: dict[tuple[str, str], Any] = {}

    def __call__(self, name: str, split: bool = False) -> Any:
        if (name, split) not in self.known:
            model = self.load(name)
            model.generation_config.eos_token_id = tiny_configs.VOCABULARY - 1
            self.known[name, split] = self.split(model) if split else model
        return self.known[name, split]

    def load(self, name: str) -> Any:
        if name == "12B":
            try:
                return tiny_models.unified_model().to(self.workspace.main)
            except ImportError:
                pytest.skip("this release has no gemma4_unified")
        variant, _, text = name.partition(" ")
        build = tiny_models.build_text_checkpoint if text else tiny_models.build_checkpoint
        folder = self.workspace.cached(build, text_variant=variant)
        cls = "Gemma4ForCausalLM" if text else "Gemma4ForConditionalGeneration"
        return tiny.load(folder, device=self.workspace.main, cls=cls).float()

    def split(self, model: Any) -> Any:
        main, offloaded = self.workspace.main, self.workspace.offloaded
        text = next(
            name for name, module in model.named_modules() if hasattr(module, "layers") and "tower" not in name
        )
        placement = {f"{text}.{name}": main for name, _ in model.get_submodule(text).named_children()}
        del placement[f"{text}.layers"]
        for index in range(6):
            placement[f"{text}.layers.{index}"] = offloaded if index in (0, 2, 5) else main
        for name, _ in model.model.named_children():
            if not any(key.startswith(f"model.{name}") for key in placement):
                placement[f"model.{name}"] = main
        placement["lm_head"] = main
        return tiny.dispatch(model, placement, Path(tempfile.mkdtemp(dir=self.workspace.folder)))


@pytest.fixture(scope="module")
def models(workspace: Any) -> Models:
    return Models(workspace)


def prompt(model: Any, kind: str) -> dict[str, Any]:
    import torch

    if kind == "image":
        batch = tiny.inputs(model.device, text_only=type(model).__name__.startswith("Gemma4Unified"))
        if "pixel_values" not in batch:  # no tower, but tokens that see each other as those of an image do
            batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
            batch["mm_token_type_ids"][0, 4:8] = 1
        return batch
    ids = torch.randint(3, 240, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if kind == "padded":
        ids[1, :9], mask[1, :9] = 0, 0
        return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    length = 5 if kind == "short" else PROMPT
    return {"input_ids": ids[:1, :length].to(model.device), "attention_mask": mask[:1, :length].to(model.device)}


def generate(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    asked = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**batch, **asked, **options)


def second_turn(model: Any, first: Any, **options: Any) -> Any:
    import torch

    ids = torch.cat([first.sequences, first.sequences[:, :7]], dim=-1)
    return generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options)


def assert_same(expected: Any, found: Any) -> None:
    import torch

    assert torch.equal(expected.sequences, found.sequences)
    assert len(expected.logits) == len(found.logits)
    for one, other in zip(expected.logits, found.logits):
        assert (one - other).abs().max() < ROUNDING


def run(model: Any, kind: Kind, way: str, prompted: str = "long") -> Any:
    options = kind.options(model.config)
    if way == "turn":
        first = generate(model, prompt(model, prompted), **options)
        if first.past_key_values is None:
            return second_turn(model, first, **options)
        return second_turn(model, first, past_key_values=first.past_key_values)
    extra = {"chunks": {"prefill_chunk_size": 5}, "lookup": {"prompt_lookup_num_tokens": 3}}.get(way, {})
    extra = {"num_beams": 3} if prompted == "beams" else extra
    return generate(model, prompt(model, "long" if prompted == "beams" else prompted), **options, **extra)


def expected(models: Models, name: str, way: str, prompted: str) -> Any:
    """The default cache's answer on one device; computed anew in one piece for what is fed in parts or guessed."""
    key = (name, "turn" if way == "turn" else prompted)
    if key not in models.outputs:
        model = models(name)
        if way == "turn":
            models.outputs[key] = second_turn(model, generate(model, prompt(model, prompted)))
        else:
            models.outputs[key] = run(model, KINDS[0], "plain", prompted)
    return models.outputs[key]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", MODELS)
def test_a_cell_of_the_table(models: Models, name: str, kind: Kind, way: str) -> None:
    model = models(name)
    if way == "image" and name.endswith("text"):
        pytest.skip("it sees no images")
    if way in kind.refused:
        with pytest.raises((ValueError, IndexError, RuntimeError), match=kind.refused[way][1]):
            run(model, kind, way)
        return
    if way == "lookup" and "static" in kind.name:
        pytest.skip("refused by some releases, the default cache by others")
    for prompted in {"plain": ("short", "long", "padded", "beams"), "image": ("image",)}.get(way, ("long",)):
        assert_same(expected(models, name, way, prompted), run(model, kind, way, prompted))
    if way == "plain":
        found = run(models(name, split=True), kind, way)
        assert_same(expected(models, name, way, "long"), found)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_caches_hold(models: Models, name: str) -> None:
    model = models(name)
    kinds = model.config.get_text_config().layer_types
    for kind in KINDS[:-1]:
        cache = run(model, kind, "plain").past_key_values
        layers = [(layer, of) for layer, of in zip(cache.layers, kinds) if getattr(layer, "keys", None) is not None]
        assert len(layers) == (4 if name.startswith("E2B") else 6)
        for layer, of in layers:
            held = layer.keys.shape[-2]
            bounded = of == "sliding_attention" and kind.name != "`DynamicCache()`"
            assert held <= WINDOW if bounded else held >= PROMPT


def test_a_compiled_static_cache(models: Models) -> None:
    import torch
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    model = models("31B")
    found = generate(model, prompt(model, "long"), cache_implementation="static", compile_config=config)
    assert_same(expected(models, "31B", "plain", "long"), found)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["E2B", "31B"])
@pytest.mark.parametrize("make", ["DynamicCache", "StaticCache"])
def test_what_an_offloaded_cache_took_away_is_not_read(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str, make: str
) -> None:
    """A GPU's streams are stood in for; a layer that is offloaded is overwritten until it is fetched again."""
    import torch
    import transformers
    from transformers.cache_utils import CacheLayerMixin

    kept: dict[int, tuple[Any, Any]] = {}

    def offload(layer: Any) -> None:
        if layer.is_initialized and id(layer) not in kept:
            kept[id(layer)] = layer.keys, layer.values
            layer.keys, layer.values = (torch.full_like(value, torch.nan) for value in kept[id(layer)])

    def prefetch(layer: Any) -> None:
        if id(layer) in kept:
            layer.keys, layer.values = kept.pop(id(layer))

    class Stream(contextlib.nullcontext[None]):
        def wait_stream(self, other: Any) -> None:
            """Nothing to wait for."""

    monkeypatch.setattr(CacheLayerMixin, "offload", offload)
    monkeypatch.setattr(CacheLayerMixin, "prefetch", prefetch)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    model = models(name)
    sizes = {} if make == "DynamicCache" else {"max_cache_len": 64}
    with monkeypatch.context() as without_a_gpu:
        without_a_gpu.setattr(torch, "Stream", Stream)  # a torch built for CUDA makes none without a GPU
        cache = getattr(transformers, make)(
            config=model.config, offloading=True, offload_only_non_sliding=False, **sizes
        )
    found = generate(model, prompt(model, "long"), past_key_values=cache)
    assert kept
    assert_same(expected(models, name, "plain", "long"), found)


def test_a_quantized_cache_is_refused(models: Models) -> None:
    model = models("E2B")
    try:
        import optimum.quanto  # noqa: F401
    except ImportError:
        missing = "optimum-quanto"
    else:
        pytest.skip("optimum-quanto is installed")
    with pytest.raises(
        (ImportError, ValueError), match=f"{missing}|only supported for models with only full attention"
    ):
        generate(model, prompt(model, "long"), cache_implementation="quantized")


def test_the_page_shows_this_table() -> None:
    text = caches.PAGE.read_text(encoding="utf-8")
    assert caches.page(text) == text, "python -m tools.pages.caches"
