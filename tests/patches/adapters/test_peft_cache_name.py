"""peft-cache-name: virtual tokens and prefixes in a generate, where a cache has its new name."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.adapters.peft_cache_name import BOUND, PATCH
from tests.conftest import is_affected
from tests.helpers import without
from tests.patches.promise import Promise

affected = pytest.mark.skipif(not is_affected(PATCH), reason="this transformers calls a cache as PEFT does")
NEW, VIRTUAL = 5, 3


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"of all tokens that a generate gives the logits are [\d.]+ off those of a forward"
    exact = False


def tuned(workspace: Any, kind: str, *, text: bool = False, offload: str | None = None) -> Any:
    """A model whose layers have no embeddings of their own, with virtual tokens or a prefix; split by ``offload``."""
    import peft
    import torch

    build = tiny_models.build_text_checkpoint if text else tiny_models.build_checkpoint
    folder = workspace.cached(build, text_variant="31B")
    model = tiny.load(folder, cls="Gemma4ForCausalLM" if text else "Gemma4ForConditionalGeneration").float()
    if offload is not None:
        model = workspace.dispatch(model, offload)
    torch.manual_seed(0)
    more = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, **more)
    return peft.get_peft_model(model, config).eval()


def prompt(batch: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(3, 40, (batch, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    import torch

    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    with torch.no_grad():
        return model.generate(**batch, **{**asked, "output_logits": True, **options})


def off_a_forward(model: Any, found: Any) -> float:
    """The largest difference of its logits from those of one forward, of the largest."""
    import torch

    with torch.no_grad():
        whole = model(input_ids=found.sequences).logits[:, -NEW - 1 : -1]
    return float((torch.stack(found.logits, dim=1) - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_tokens_are_those_of_forwards(workspace: Any, kind: str, batch: int, text: bool) -> None:
    model = tuned(workspace, kind, text=text)
    assert off_a_forward(model, generated(model, prompt(batch))) <= BOUND
    assert off_a_forward(model, generated(model, prompt(batch), use_cache=False)) <= BOUND


@affected
def test_a_prefix_is_in_the_cache_that_is_read(workspace: Any) -> None:
    """Without the patch the first token is that of a model without a prefix."""
    import torch

    model, batch = tuned(workspace, "PrefixTuningConfig"), prompt(1)
    with torch.no_grad():
        forward = model(**batch).logits[:, -1]
        plain = model.get_base_model()(**batch).logits[:, -1]
    assert (forward - plain).abs().max() > 0.01
    assert (generated(model, batch).logits[0] - forward).abs().max() <= BOUND * forward.abs().max()
    with without(PATCH.id):
        lost = generated(model, batch).logits[0]
    assert (lost - forward).abs().max() > 0.01


@affected
@pytest.mark.parametrize("name", cache_names.NAMES)
def test_a_cache_of_the_users_own(workspace: Any, name: str) -> None:
    from transformers import DynamicCache

    model, batch = tuned(workspace, "PromptTuningConfig"), prompt(1)
    expected = generated(model, batch)
    found = generated(model, batch, **{name: DynamicCache(config=model.config)})
    assert (found.sequences == expected.sequences).all()


@affected
def test_other_adapters_are_asked_nothing(workspace: Any) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language")).eval()
    batch = {name: value[:1] for name, value in workspace.inputs(text_only=True).items()}
    expected = generated(model, batch)
    with without(PATCH.id):
        found = generated(model, batch)
    assert (found.sequences == expected.sequences).all()
    assert all((one == other).all() for one, other in zip(found.logits, expected.logits, strict=True))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("offload", ["layers", "both"])
def test_a_split_model_has_the_bits_of_one_device(workspace: Any, kind: str, offload: str) -> None:
    """Forwards, and generates of a batch, with a cache of the user's own, too."""
    import torch
    from transformers import DynamicCache

    whole, split = tuned(workspace, kind), tuned(workspace, kind, offload=offload)
    batch = prompt(2)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(split(**batch).logits, whole(**batch).logits)
    for own in (False, True):
        expected, found = (
            generated(model, batch, **({cache_names.OLD: DynamicCache(config=model.config)} if own else {}))
            for model in (whole, split)
        )
        assert torch.equal(found.sequences, expected.sequences)
        assert all(map(torch.equal, found.logits, expected.logits))


def test_two_models_at_once(workspace: Any) -> None:
    """Nothing of a call is kept on the class."""
    models = [tuned(workspace, kind) for kind in ("PromptTuningConfig", "PromptEncoderConfig")]
    expected = [generated(model, prompt(1)).sequences for model in models]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: generated(models[number], prompt(1))}))
        for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all((found[number].sequences == expected[number]).all() for number in range(2))
