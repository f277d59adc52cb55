"""Placements that a release of this package got wrong, found by the search and shrunk by it.

``python -m tests.generated.search --regression ID`` runs one: exit 0 when it holds, 1 with what is wrong. A case
stays when its defect is repaired; that is what it is for. It is deleted only when the search no longer generates such
cases, with the reason in the commit. The comments say which seed it was found with, and the error.
"""

from __future__ import annotations

import pytest

from tests.generated.search.case import Case

REGRESSIONS = [
    # Seed 61: FileNotFoundError: index.json: the entry "" covers nothing that accelerate offloads
    pytest.param(
        Case(
            offloaded_to="disk",
            placement=(
                ("", "offloaded"),
                ("model.layers.0.self_attn.q_norm", "main"),
            ),
        ),
        id="catch-all-offloaded",
    ),
    # Seed 24: RuntimeError: Tensor on device meta is not on the expected device cpu!
    pytest.param(
        Case(
            model="conditional",
            per_layer=True,
            placement=(
                ("model", "offloaded"),
                ("lm_head", "main"),
            ),
        ),
        id="embedding-read-outside-its-hook",
    ),
    # Seed 10: RuntimeError: Cannot access accelerator device when none is available.
    pytest.param(
        Case(
            quantization="8bit",
            placement=(
                ("model", "offloaded"),
                ("lm_head", "main"),
            ),
        ),
        id="int8-offloaded-to-disk-or-cpu",
    ),
    # transformers matches keys without a boundary: layers.1 takes layers.10 along, embed_tokens embed_tokens_per_layer
    pytest.param(
        Case(
            layers=12,
            per_layer=True,
            load="from_pretrained",
            offloaded_to="disk",
            placement=(
                ("", "main"),
                ("model.layers.1", "offloaded"),
            ),
        ),
        id="key-that-is-the-beginning-of-another-name",
    ),
    # Seed 11: as above, inside a layer of experts
    pytest.param(
        Case(
            experts=True,
            load="from_pretrained",
            offloaded_to="disk",
            placement=(
                ("", "main"),
                ("model.layers.0.post_feedforward_layernorm", "offloaded"),
            ),
        ),
        id="key-that-is-the-beginning-of-another-name-in-a-layer",
    ),
    # Seed 4 (thread stack): KeyError: 5 in attention
    pytest.param(
        Case(
            layers=4,
            kv_shared=1,
            per_layer=True,
            skip_keys="none",
            placement=(
                ("model", "main"),
                ("lm_head", "offloaded"),
            ),
        ),
        id="kv-shared-without-skip-keys",
    ),
    # Seed 241: ValueError: weight is on the meta device
    pytest.param(
        Case(
            placement=(
                ("", "offloaded"),
                ("model.layers", "main"),
                ("model.layers.1.self_attn", "offloaded"),
            ),
        ),
        id="nested-both-ways",
    ),
    # Seed 0: ValueError: weight is on the meta device (accelerate dispatch_model)
    pytest.param(
        Case(
            placement=(
                ("model.embed_tokens", "main"),
                ("model.layers", "offloaded"),
                ("model.layers.0.mlp", "main"),
                ("model.norm", "main"),
                ("lm_head", "main"),
            ),
        ),
        id="nested-main-below-offloaded",
    ),
    # Seed 5: ValueError: weight is on the meta device (from_pretrained, disk)
    pytest.param(
        Case(
            load="from_pretrained",
            offloaded_to="disk",
            placement=(
                ("model", "main"),
                ("model.layers.0", "offloaded"),
                ("lm_head", "main"),
            ),
        ),
        id="nested-offloaded-below-main",
    ),
    # Seed 1: ValueError: weight is on the meta device (from_pretrained, disk)
    pytest.param(
        Case(
            load="from_pretrained",
            offloaded_to="disk",
            placement=(
                ("model", "offloaded"),
                ("lm_head", "main"),
            ),
        ),
        id="tied-embedding-offloaded",
    ),
    # Seed 6: KeyError: "lm_head.weight"
    pytest.param(
        Case(
            load="from_pretrained",
            offloaded_to="disk",
            placement=(
                ("model", "main"),
                ("lm_head", "offloaded"),
            ),
        ),
        id="tied-head-offloaded",
    ),
]
