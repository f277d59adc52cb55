"""Replay sequences that a release of this package got wrong, found by the search or written as it would.

``python -m tests.generated.search.replays --regression ID`` runs one: exit 0 when it holds, 1 with what is wrong.
"""

from __future__ import annotations

import pytest

from tests.generated.search.case import Case
from tests.generated.search.sequence import Sequence, operation

REGRESSIONS = [
    # LN tuning: its layers have a flag once they were switched.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("new_adapter", adapter="a", seed=1, tuner="ln"),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("disable_layers"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="ln-disabled",
    ),
    # Seed 76: turns after hook.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("hook", kind="everywhere", layer=1),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="hook-on-all-modules",
    ),
    # Seed 43: generate after module.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("module", by="class", layer=1),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="class-of-a-module",
    ),
    # The same address, and other strides.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("weight", by="reshaped", layer=1, part="self_attn.o_proj"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="strides-of-a-weight",
    ),
    # Seed 16: generate after attribute.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("attribute", layer=0, what="config"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="another-configuration",
    ),
    # Seed 40: generate after function.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("function", of="call"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="method-a-class-had-not",
    ),
    # Seed 38: an illegal memory access, for the replay reads memory that was freed.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("own_forward", layer=0),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("own_attribute", layer=0, what="tensor"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="tensor-in-an-attribute",
    ),
    # What is in a list.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("own_forward", layer=0),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("own_attribute", layer=0, what="list"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="item-of-a-list",
    ),
    # What is in a list in a tuple.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("own_forward", layer=0),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("own_attribute", layer=0, what="nested"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="item-of-a-list-in-a-tuple",
    ),
    # A key that was not there.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("own_forward", layer=0),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("own_attribute", layer=0, what="dict"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="key-of-a-dictionary",
    ),
    # Seed 116: the user"s forward reads an attribute that it had not.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("own_forward", layer=0),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("own_attribute", layer=0, what="switch"),
                operation("generate", cache="static", mode="greedy", seed=1),
            ),
        ),
        id="attribute-that-was-not-there",
    ),
    # Seed 230: on the older stack SHiRA copies a base weight; the stand-in took that weight for the graph's.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("decode_fast", enabled=True),
                operation("generate", cache="static", mode="greedy", seed=1),
                operation("new_adapter", adapter="a", seed=30, tuner="shira"),
                operation("generate", cache="fast", mode="beams", rows=2, seed=11),
            ),
        ),
        id="capture-that-copies-a-weight",
    ),
    # Seed 633: on a CPU, DoRA moves its 4-bit weight to where it is. That unpacked it, also in a capture.
    pytest.param(
        Sequence(
            case=Case(
                quantization="4bit",
                placement=(("", "main"),),
            ),
            operations=(
                operation("new_adapter", adapter="a", seed=33, tuner="dora"),
                operation("threads", seed=26),
                operation("generate", cache="static", mode="greedy", new=4, seed=26),
            ),
        ),
        id="dora-that-unpacks-a-weight",
    ),
    # Seed 4230: the originals of a parametrized weight that was offloaded had no values, and a CPU computed with them.
    pytest.param(
        Sequence(
            case=Case(
                layers=3,
                placement=(
                    ("", "main"),
                    ("model.layers.1", "offloaded"),
                ),
            ),
            operations=(
                operation("generate", cache="static", mode="greedy", new=4, seed=56),
                operation("weight", by="parametrized", layer=1, part="self_attn.o_proj"),
                operation("generate", cache="static", mode="greedy", new=4, seed=56),
            ),
        ),
        id="parametrized-and-streamed",
    ),
    # Seed 910148: turns and threads were not seeded, and the dropout of a new adapter is in training mode.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("turns", seed=46),
                operation("new_adapter", adapter="a", seed=62, tuner="lora-dropout"),
                operation("add_weighted_adapter", adapters=("a",), combination="linear"),
                operation("turns", seed=46),
            ),
        ),
        id="dropout-of-a-new-adapter",
    ),
]
