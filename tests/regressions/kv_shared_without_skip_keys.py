"""Found by tests.search. From the repository: python -m tests.regressions.NAME"""

# Seed 4 (thread stack): KeyError: 5 in attention

from tests.search.case import Case
from tests.search.run import repeat

CASE = Case(
    seed=None,
    model="causal",
    layers=4,
    period=2,
    kv_shared=1,
    per_layer=True,
    experts=False,
    keys_are_values=False,
    wide_mlp=False,
    vision=False,
    audio=False,
    quantization=None,
    adapter=None,
    prompt="text",
    load="dispatch_model",
    skip_keys="none",
    offloaded_to="cpu",
    placement=(
        ("model", "main"),
        ("lm_head", "offloaded"),
    ),
)

if __name__ == "__main__":
    repeat(CASE)
