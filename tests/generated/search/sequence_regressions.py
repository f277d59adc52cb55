"""Sequences of operations that a release of this package got wrong, found by the search and shrunk by it.

``python -m tests.generated.search --sequences --regression ID`` runs one: exit 0 when it holds, 1 with what is wrong.
What holds for the table of ``regressions.py`` holds here, too.
"""

from __future__ import annotations

import pytest

from tests.generated.search.case import Case
from tests.generated.search.sequence import Sequence, operation

REGRESSIONS = [
    # Seed 1012: RuntimeError: Tensor on device meta is not on the expected device cpu!
    pytest.param(
        Sequence(
            case=Case(
                model="conditional",
                per_layer=True,
                placement=(
                    ("", "main"),
                    ("model.language_model.embed_tokens", "offloaded"),
                ),
            ),
            operations=(
                operation("undo_and_install"),
                operation("forward", prompt="text"),
            ),
        ),
        id="revert-and-install",
    ),
    # Seed 409: RuntimeError: Tensor on device meta is not on the expected device cpu!
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="head", number=0, trainable=False, way="peft"),
                operation("redispatch", offloaded_to="disk", placement=(("", "main"), ("model", "offloaded"))),
                operation("forward", prompt="text"),
            ),
        ),
        id="dispatched-lora-on-embedding",
    ),
    # Seed 151: NotImplementedError: Cannot copy out of meta tensor; no data!
    pytest.param(
        Sequence(
            case=Case(
                load="from_pretrained",
                placement=(
                    ("", "main"),
                    ("model.embed_tokens", "offloaded"),
                    ("model.layers.1", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="tokens", number=0, trainable=False, way="peft"),
                operation("redispatch", offloaded_to="disk", placement=(("lm_head", "offloaded"), ("model", "main"))),
                operation("forward", prompt="text"),
            ),
        ),
        id="dispatched-tokens",
    ),
    # Seed 156: ValueError: a is on the meta device, we need a `value` to put in on cpu.
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="tokens", number=0, trainable=False, way="peft"),
                operation("redispatch", offloaded_to="cpu", placement=(("", "main"), ("model", "offloaded"))),
            ),
        ),
        id="dispatched-tokens-tied",
    ),
    # Seed 448: AttributeError: Gemma4TextModel has no attribute `model`
    pytest.param(
        Sequence(
            case=Case(
                placement=(("", "main"),),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="text", number=0, trainable=False, way="transformers"),
                operation("redispatch", offloaded_to="cpu", placement=(("", "main"), ("model", "offloaded"))),
                operation("reload"),
            ),
        ),
        id="dispatched-adapter-saved",
    ),
    # Seed 367: NotImplementedError: Cannot copy out of meta tensor; no data!
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="head", number=0, trainable=False, way="peft"),
                operation("unmerge_adapter"),
                operation("reload"),
            ),
        ),
        id="lora-on-head-saved",
    ),
    # Seed 109: RuntimeError: Tensor on device cpu is not on the expected device meta!
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("model.embed_tokens", "offloaded"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="tokens", number=0, trainable=False, way="peft"),
                operation("mixed_batch", adapters=("a", "__base__")),
            ),
        ),
        id="tokens-in-a-mixed-batch",
    ),
    # Seed 1341: model.embed_vision.embedding_projection.weight: torch.bfloat16, on one device torch.float32
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("model.layers.1", "offloaded"),
                ),
            ),
            operations=(
                operation("to_dtype", how="to float32"),
                operation("save"),
            ),
        ),
        id="cast-and-saved",
    ),
    # Seed 1211: what is shown: missing [], added ['lm_head.weight']
    pytest.param(
        Sequence(
            case=Case(
                load="from_pretrained",
                placement=(
                    ("", "main"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation("remove_hooks"),
                operation("reload"),
            ),
        ),
        id="saved-without-hooks",
    ),
    # Seed 1244: forward: logits differs
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="save-embedding", number=1, trainable=True, way="peft"),
                operation("tie_weights"),
                operation("forward", prompt="text"),
            ),
        ),
        id="tied-to-a-copy",
    ),
    # Seed 855: train: what is shown differs
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("model.embed_tokens", "offloaded"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation(
                    "load_adapter", adapter="a", kind="save-embedding", number=1, trainable=True, way="transformers"
                ),
                operation("tie_weights"),
                operation("load_adapter", adapter="b", kind="text", number=0, trainable=True, way="transformers"),
                operation("train", prompt="text", accumulate=1, mode="train"),
            ),
        ),
        id="trained-with-a-copy",
    ),
    # Seed 1921: forward: logits differs
    pytest.param(
        Sequence(
            case=Case(
                placement=(
                    ("", "main"),
                    ("model.embed_tokens", "offloaded"),
                    ("lm_head", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="save-embedding", number=1, trainable=True, way="peft"),
                operation("resize_token_embeddings", tokens=256, mean=True),
                operation("forward", prompt="text"),
            ),
        ),
        id="resized-with-a-copy",
    ),
    # Seed 246: logits off by 0.34
    pytest.param(
        Sequence(
            case=Case(
                model="conditional",
                layers=4,
                kv_shared=1,
                per_layer=True,
                quantization="4bit",
                placement=(
                    ("", "main"),
                    ("model.language_model.embed_tokens", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="head", number=0, trainable=True, way="transformers"),
                operation("load_adapter", adapter="b", kind="text", number=0, trainable=True, way="transformers"),
                operation("forward", prompt="text"),
                operation("forward", gradients=True, prompt="text"),
            ),
        ),
        id="embeddings-of-an-adapter",
    ),
    # Seed 498, with bitsandbytes before 0.50: logits off by 2.64
    pytest.param(
        Sequence(
            case=Case(
                layers=5,
                quantization="4bit-double",
                placement=(
                    ("", "main"),
                    ("model.layers.0", "offloaded"),
                    ("model.layers.2", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="text", number=0, trainable=False, way="peft"),
                operation("merge_and_unload"),
                operation("new_adapter", adapter="a", kind="dora"),
                operation("forward", prompt="text"),
            ),
        ),
        id="dora-after-a-merge",
    ),
    # Seeds 498 and 1816, with bitsandbytes before 0.50: logits off by 1.29
    pytest.param(
        Sequence(
            case=Case(
                layers=5,
                quantization="4bit",
                placement=(
                    ("", "main"),
                    ("model.layers.0", "offloaded"),
                    ("model.layers.2", "offloaded"),
                ),
            ),
            operations=(
                operation("load_adapter", adapter="a", kind="text", number=0, trainable=True, way="peft"),
                operation("merge_and_unload"),
                operation("failing_backward", layer=4),
                operation("new_adapter", adapter="a", kind="dora"),
                operation("forward", prompt="text"),
            ),
        ),
        id="dora-after-a-merge-and-a-backward",
    ),
]
