"""F97: continuous batching gives the tokens of ``generate``, or one error before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_paged_cache import PATCH
from tests.patches.promise import Promise

#: Longer than the sliding window, as long as another one, and shorter.
PROMPTS = [list(range(3, 23)), list(range(40, 60)), [5, 6, 7]]
works = versions.admits(">=5.18.0", versions.installed("transformers") or "0")
repaired = pytest.mark.skipif(not works, reason="this transformers has one tensor for the keys of all layers")
refused = pytest.mark.skipif(works, reason="this transformers has a part of the cache for each kind of attention")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = (
        r"AmbiguousGlobalPerLayerAttributeError: '(head_dim|num_key_value_heads)' is a per-layer attribute"
        r"|num_key_value_heads or num_attention_heads could not be found in the config"
        r"|'Gemma4Config' object has no attribute 'num_attention_heads'"
    )
    exact = False  # tokens are compared


def generation(**options: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=1, **options)


def batched(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    options = {"num_blocks": 8, "max_batch_tokens": 64} | options
    answers = model.generate_batch(
        prompts, generation_config=generation(), continuous_batching_config=ContinuousBatchingConfig(**options)
    )
    return [list(answers[name].generated_tokens) for name in sorted(answers)]


def expected(model: Any) -> list[list[int]]:
    import torch

    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        found.append(model.generate(ids, generation_config=generation())[0, len(prompt) :].tolist())
    return found


def text_model(folder: Path, variant: str) -> Any:
    tiny_models.build_checkpoint(folder / "whole", variant=variant)
    tiny_models.build_text_copy(folder / "whole", folder / "text")
    cls = tiny_models.class_name(folder / "text", text_only=True)
    return tiny.load(folder / "text", device="cpu", cls=cls).float()


@repaired
@pytest.mark.parametrize("variant", variants.NAMES)
def test_every_variant_gives_the_tokens_of_generate(tmp_path: Path, variant: str) -> None:
    tiny_models.build_checkpoint(tmp_path / "whole", variant=variant)
    model = tiny.load(tmp_path / "whole", device="cpu").float()
    assert batched(model) == expected(model)


@repaired
@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_a_text_model_and_prompts_in_pieces(tmp_path: Path, variant: str) -> None:
    """A prompt of 20 tokens is read in three forwards, and the others wait for room."""
    model = text_model(tmp_path, variant)
    assert batched(model, max_batch_tokens=8) == expected(model)


@repaired
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_stays_what_it_was(workspace: Any, attention: str) -> None:
    model = workspace.load().float()
    model.set_attn_implementation(attention)
    assert batched(model) == expected(model)
    assert model.config._attn_implementation == attention
    assert "_supports_flash_attn" not in vars(model)


@repaired
def test_an_adapter_and_a_split_model(workspace: Any) -> None:
    from peft import PeftModel

    split, whole = (
        PeftModel.from_pretrained(model, workspace.adapter("language"))
        for model in (workspace.dispatch(workspace.load().float()), workspace.load().float())
    )
    found = batched(split)
    assert found == expected(split)
    assert found == expected(whole)


@repaired
def test_the_cache_has_the_shapes_of_its_layers(workspace: Any) -> None:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = workspace.load().float()
    config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    manager = model.init_continuous_batching(generation(), continuous_batching_config=config)
    cache = manager._create_batch_processor().cache
    text = model.config.get_text_config()
    assert {kind: part.head_dim for kind, part in cache.cache_allocators.items()} == {
        kind: text.per_layer_config[kind].head_dim for kind in set(text.layer_types)
    }
    assert cache.config is text


@repaired
def test_flash_attention_is_refused_before_anything_starts(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma4_compat._gemma4.attention import flash

    model = workspace.load().float()
    monkeypatch.setattr(flash, "is_split", lambda config: True)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"are wider than 256. Use model.set_attn_impl"):
        batched(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")


@refused
@pytest.mark.parametrize("how", ["batch", "paged"])
def test_before_5_18_it_is_one_error(tmp_path: Path, how: str) -> None:
    import torch

    model = text_model(tmp_path, "E2B")
    paged = {"generation_config": generation(), "cache_implementation": "paged"}
    ways = {"batch": lambda: batched(model), "paged": lambda: model.generate(torch.tensor(PROMPTS[:1]), **paged)}
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"Use generate, with a batch of padded prompts, or"):
        ways[how]()


@repaired
def test_paged_in_generate_is_the_same(workspace: Any) -> None:
    import torch
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = workspace.load().float()
    prompt = torch.tensor(PROMPTS[:1], device=model.device)
    config = generation()
    config.continuous_batching_config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate(prompt, generation_config=config, cache_implementation="paged")
    assert found.flatten().tolist() == model.generate(prompt, generation_config=generation()).flatten().tolist()


@repaired
def test_a_llama_is_left_to_upstream() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**common, num_attention_heads=2)).eval()
    assert batched(model) == expected(model)
