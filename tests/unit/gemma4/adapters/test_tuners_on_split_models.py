"""Every tuner of PEFT that works on one device: made, trained, saved, loaded, merged on a split model, bit for bit."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.tiny_adapters import SOME_LINEARS as LINEARS
from gemma4_compat._lab.workspace import difference

pytestmark = pytest.mark.full

#: What PEFT calls them -> what their configuration needs beside target modules. Those of the newest release; what is
#: not here cannot be used with a Gemma 4, or needs more than a model (task ids, a classifier, another library).
TUNERS: dict[str, dict[str, Any]] = {
    "LORA": {},
    "ADALORA": {"total_step": 10},
    "BEFT": {},
    "BOFT": {},
    "C3A": {"block_size": 8, "init_weights": True},  # zeros: a GPU draws random numbers of its own
    "DEFT": {},
    "DELORA": {},
    "FOURIERFT": {"n_frequency": 32},
    "FROD": {},
    "GLORA": {},
    "GRALORA": {},
    "HIRA": {},
    "HRA": {},
    "IA3": {"feedforward_modules": r".*up_proj"},
    "LILY": {},
    "LN_TUNING": {"target_modules": r".*language_model\.layers\.\d+\.input_layernorm"},
    "LOHA": {"r": 4},
    "LOKR": {},
    "MISS": {},
    "OFT": {"r": 0, "oft_block_size": 8},
    "OSF": {},
    "PEANUT": {},
    "PSOFT": {},
    "PVERA": {},
    "RANDLORA": {},
    "ROAD": {},
    "SHIRA": {"r": 4},
    "SUPERTUNING": {},
    "TINYLORA": {},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5]},
    "UNILORA": {},
    "VBLORA": {"vector_length": 32, "num_vectors": 16},
    "VERA": {},
    "WAVEFT": {"n_frequency": 32},
}
#: Adapters on what is in no layer, whose input may come from another device: LoRA's configuration.
OUTSIDE_LAYERS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "head, DoRA": {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding, DoRA": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "embedding and head, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "per-layer embedding": {"target_modules": ["embed_tokens_per_layer", "per_layer_model_projection"]},
    "tokens": {"target_modules": LINEARS, "trainable_token_indices": [3, 4, 5]},
    "tokens of a per-layer embedding": {
        "target_modules": LINEARS,
        "trainable_token_indices": {"embed_tokens_per_layer": [3, 4, 5]},
    },
    "copy": {"target_modules": LINEARS, "modules_to_save": ["lm_head"]},
    "copies, tied": {"target_modules": LINEARS, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}
#: What goes to the second device, so that an embedding or the head gets its input from the other one.
APART = (
    ["model.language_model.norm"],
    ["model.language_model.embed_tokens", "lm_head"],
    ["model.language_model.embed_tokens_per_layer"],
)
#: Of PEFT's names, configurations of prompts that each layer has a part of.
PREFIXES = ("PrefixTuningConfig", "CartridgeConfig")
VIRTUAL_TOKENS = 3
#: All layers share what is trained: its gradient is a sum, on several devices in the order in which they are done.
SUMMED = dict.fromkeys(("UNILORA", "VBLORA"), 1e-6)
#: The one needs layers with a bias, the other has no merge: on one device, too.
UNMERGEABLE = ("BEFT", "LILY")


def configuration(tuner: str) -> Any:
    """``tuner``: of :data:`TUNERS` or :data:`OUTSIDE_LAYERS`."""
    from peft import LoraConfig, PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if options := OUTSIDE_LAYERS.get(tuner):
        if missing := options.keys() - inspect.signature(LoraConfig).parameters.keys():
            pytest.skip(f"LoRA of this release of PEFT has no {missing}")
        return LoraConfig(task_type="CAUSAL_LM", **options)
    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(getattr(PeftType, tuner, None))
    if kind is None:
        pytest.skip(f"this release of PEFT has no {tuner}")
    targets = {"target_modules": LINEARS} if "target_modules" in inspect.signature(kind).parameters else {}
    return kind(task_type="CAUSAL_LM", **{**targets, **TUNERS[tuner]})


def tuned(model: Any, tuner: str) -> Any:
    """The model with such an adapter, whose weights are moved by random numbers that depend on their names alone."""
    import peft
    import torch

    torch.manual_seed(0)
    model = peft.get_peft_model(model, configuration(tuner)).eval()
    for name, value in model.named_parameters():
        if value.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value.data.add_(0.02 * torch.randn(value.shape, generator=generator).to(value))
    return model


def answers(model: Any, workspace: Any) -> tuple[list[Any], list[Any]]:
    """Logits of three forwards with generated tokens, and the gradients of what is trained, in the order of names."""
    import torch

    batch = tiny.inputs(workspace.main, text_only=True)
    found = workspace.outputs(model, text_only=True)
    model.zero_grad()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    trained = sorted((name, value) for name, value in model.named_parameters() if value.requires_grad)
    gradients = [torch.zeros(()) if value.grad is None else value.grad.clone() for _, value in trained]
    assert any(gradient.any() for gradient in gradients)
    return [*found.logits, found.tokens], [gradient.cpu() for gradient in gradients]


def assert_same(found: list[Any], expected: list[Any], *, within: float = 0.0) -> None:
    """``within``: of the largest value of each tensor."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= within * theirs.abs().max()


def assert_tuned_as_on_one_device(
    workspace: Any, folder: Path, tuner: str, split: Callable[[], Any], *, gradients_within: float = 0.0
) -> None:
    """``split`` makes the model of ``workspace.load()`` on several devices; ``folder`` gets the adapter."""
    from peft import PeftModel

    def compare(expected: tuple[list[Any], list[Any]], found: tuple[list[Any], list[Any]]) -> None:
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1], within=gradients_within)

    whole = tuned(workspace.load(), tuner)
    compare(answers(whole, workspace), answers(tuned(split(), tuner), workspace))

    whole.save_pretrained(folder)
    loaded = [
        PeftModel.from_pretrained(model, folder, is_trainable=True).eval() for model in (workspace.load(), split())
    ]
    compare(*(answers(model, workspace) for model in loaded))

    if tuner not in UNMERGEABLE:
        checked = tuner == "OSF"  # else PEFT 0.19 merges it into float32 weights, which a bf16 model cannot use
        merged = [workspace.outputs(model.merge_and_unload(safe_merge=checked), text_only=True) for model in loaded]
        assert_same([*merged[1].logits, merged[1].tokens], [*merged[0].logits, merged[0].tokens])


def assert_prefixed_as_on_one_device(workspace: Any, kind: str, split: Callable[[], Any], device: Any) -> None:
    """``kind``: of :data:`PREFIXES`; ``device``: that of inputs."""
    import peft
    import torch

    found = []
    batch = tiny.inputs(device, text_only=True)
    for model in (workspace.load(), split()):
        torch.manual_seed(0)
        prefixed = peft.get_peft_model(
            model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL_TOKENS)
        ).eval()
        outputs = workspace.outputs(prefixed, text_only=True, device=device)
        prefixed(**batch, labels=batch["input_ids"]).loss.backward()
        found.append((outputs, [value.grad.cpu() for value in prefixed.parameters() if value.requires_grad]))
    (expected, gradients), (outputs, others) = found
    assert difference(expected, outputs) == 0.0
    assert gradients
    assert all(gradient.any() for gradient in gradients)
    assert_same(others, gradients)


@pytest.mark.parametrize("offload", ["layers", "both"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_split_model_is_tuned_as_one_device(workspace: Any, tmp_path: Path, tuner: str, offload: str) -> None:
    assert_tuned_as_on_one_device(workspace, tmp_path, tuner, lambda: workspace.split(offload=offload))


def test_nothing_that_works_is_missing_here() -> None:
    """Try what a newer PEFT brings, then add it above or here."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    others = {
        *(
            "ADAMSS",
            "ADAPTION_PROMPT",
            "CPT",
            "MULTITASK_PROMPT_TUNING",
            "POLY",
            "PROMPT_TUNING",
            "P_TUNING",
            "SHADOW",
        ),
        *("XLORA", "PREFIX_TUNING", "CARTRIDGE"),  # the last two: tests of peft-prefix-placement
        "BONE",  # before it was called MISS
    }
    assert {str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING} <= {*TUNERS, *others}
