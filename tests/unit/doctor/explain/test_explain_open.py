"""``gemma4-compat explain`` of the errors of failure points F88 and on: their patch, or no verdict.

A patch is found by what its ``Symptom:`` quotes. Where no patch is about a failure point, a patch of another one may
be named as similar or possible; none may be said to be it.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import PatchState, PatchStatus, Reason, cli
from gemma4_compat._doctor.explain import answers, messages, search

PATCHES = gemma4_compat.patches()

AMBIGUOUS = (
    "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers. Access it "
    "via the individual layer configs instead (e.g. config.per_layer_config[i].head_dim). To read the global config "
    "value from config.head_dim anyway, set `allow_global_per_layer_attribute_access` to `True` on the config."
)
#: Failure points, and what is seen.
ERRORS = [
    (
        "",
        "RuntimeError: Error(s) in loading state_dict for Gemma4ForConditionalGeneration: While copying the parameter "
        'named "model.vision_tower.patch_embedder.position_embedding_table", whose dimensions in the model are '
        "torch.Size([2, 16, 64]) and whose dimensions in the checkpoint are torch.Size([2, 16, 64]), an exception "
        "occurred : ('Cannot copy out of meta tensor; no data!',).",
    ),
    ("", "ValueError: Expected a single attention mask, got 2 instead"),
    (
        "",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
        "'/data/adapter'. Use `repo_type` argument if needed.",
    ),
    (
        "F93",
        "RuntimeError: It seems like you tried to call `forward` from `inputs_embeds` without providing `input_ids`, "
        "and that the `inputs_embeds` you provided do not exactly match the embedding weights. Since Gemma4 needs to "
        "reverse the embedding to compute another embedding, make sure you provide exact `inputs_embeds`",
    ),
    (
        "",  # any program runs out of memory
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1690.50 GiB. GPU 0 has a total capacity of 79",
    ),
    (
        "F94",
        "ValueError: You passed `inputs_embeds` to `.generate()`, but the model class Gemma4ForConditionalGeneration "
        "doesn't have its forwarding implemented. See the GPT2 implementation for an example.",
    ),
    ("F95", "NotImplementedError: Cannot copy out of meta tensor; no data!"),
    ("F96 F97", AMBIGUOUS),
    ("F96 F97", AMBIGUOUS.replace("head_dim", "num_key_value_heads")),
    ("F96 F97", "AmbiguousGlobalPerLayerAttributeError: 'head_dim'"),
    ("F96 F97", "transformers.integrations.heterogeneity.AmbiguousGlobalPerLayerAttributeError"),
    ("F96", "AttributeError: 'Gemma4TextConfig' object has no attribute 'global_head_dim'"),
    ("F97", "AttributeError: 'Gemma4Config' object has no attribute 'num_attention_heads'"),
    (
        "F24 F97",
        "RuntimeError: index_copy_(): Source/destination tensor must have same slice shapes. Destination slice shape: "
        "1 32 at dimension 0 and source slice shape: 1 64 at dimension 0.",
    ),
    ("F49 F98", "AttributeError: `input_min` is not an nn.Parameter"),
    (
        "F99",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
        "error indicates that your module has parameters that were not used in producing loss.",
    ),
    ("F100", "UserWarning: MatMul8bitLt: inputs will be cast from torch.bfloat16 to float16 during quantization"),
    ("F101", "RuntimeError: data set to a tensor that requires gradients must be floating point or complex dtype"),
    (
        "F8 F102",
        "ValueError: Gemma4AudioModel does not support an attention implementation through "
        "torch.nn.functional.scaled_dot_product_attention yet. Please request the support for this architecture.",
    ),
]


@pytest.mark.parametrize("points, text", ERRORS, ids=[text[:60] for _, text in ERRORS])
def test_an_error_finds_its_patch_or_no_verdict(points: str, text: str) -> None:
    owners = {patch.id for patch in PATCHES if set(patch.failure_points) & set(points.split())}
    matches = search.search(messages.read(text), PATCHES).matches
    if owners:
        assert matches, f"no Symptom of {', '.join(sorted(owners))} quotes it"
        assert matches[0].patch.id in owners or not matches[0].certain
        assert owners & {match.patch.id for match in matches}
    else:
        assert not any(match.certain for match in matches)


@pytest.mark.parametrize(
    "text",
    [
        "Gemma4CompatError: 112 weights are to be trained and are offloaded",
        "gemma4_compat._errors.Gemma4CompatError: none of its 60 keys belongs to this model",
    ],
)
def test_an_error_of_this_package_is_said_to_be_one(text: str) -> None:
    done = CliRunner().invoke(cli.app, ["explain", text])
    assert done.exit_code == 1
    assert "gemma4_compat itself raises this, before anything is changed." in done.stdout
    assert "No known patch" not in done.stdout


def test_a_patch_that_is_not_needed_here_is_no_verdict_of_an_error_that_is_seen_here() -> None:
    reason = "transformers 5.24.0 is outside <5.18.0"
    status = PatchStatus(id="x", state=PatchState.NOT_NEEDED, reason_code=Reason.OUT_OF_RANGE, reason=reason)
    said = answers.remedy(PATCHES[0], messages.read("KeyError: 1"), status)
    assert said.startswith("if the program runs with the releases installed here, this is not its error")
    assert "not have this defect" not in said


def test_what_is_needed_here_comes_before_what_is_not() -> None:
    statuses = gemma4_compat.status()
    said = messages.read(AMBIGUOUS)
    answer = answers.sorted_answer(search.search(said, PATCHES), said, statuses)
    needed = [statuses[match.patch.id].state is not PatchState.NOT_NEEDED for match in answer.matches if match.certain]
    assert needed == sorted(needed, reverse=True)
    reads = "transformers-config-reads"
    assert answer.matches[0].patch.id == reads or statuses[reads].state is PatchState.NOT_NEEDED
