"""Found by tests.search. From the repository: python -m tests.regressions.NAME"""

# Seed 1: ValueError: weight is on the meta device (from_pretrained, disk)

from tests.search.case import Case
from tests.search.run import repeat

CASE = Case(
    seed=None,
    model="causal",
    layers=2,
    period=2,
    kv_shared=0,
    per_layer=False,
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
        ("model", "offloaded"),
        ("lm_head", "main"),
    ),
)

if __name__ == "__main__":
    repeat(CASE)
