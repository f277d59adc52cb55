"""Found by tests.search. From the repository: python -m tests.regressions.NAME"""

# transformers matches keys without a boundary: layers.1 takes layers.10 along, embed_tokens embed_tokens_per_layer

from tests.search.case import Case
from tests.search.run import repeat

CASE = Case(
    seed=None,
    model="causal",
    layers=12,
    period=2,
    kv_shared=0,
    per_layer=True,
    experts=False,
    keys_are_values=False,
    wide_mlp=False,
    vision=False,
    audio=False,
    quantization=None,
    adapter=None,
    prompt="text",
    load="from_pretrained",
    skip_keys="own",
    offloaded_to="disk",
    placement=(
        ("", "main"),
        ("model.layers.1", "offloaded"),
    ),
)

if __name__ == "__main__":
    repeat(CASE)
