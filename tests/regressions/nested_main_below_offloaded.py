"""Found by tests.search. From the repository: python -m tests.regressions.NAME"""

# Seed 0: ValueError: weight is on the meta device (accelerate dispatch_model)

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
    load="dispatch_model",
    skip_keys="own",
    offloaded_to="cpu",
    placement=(
        ("model.embed_tokens", "main"),
        ("model.layers", "offloaded"),
        ("model.layers.0.mlp", "main"),
        ("model.norm", "main"),
        ("lm_head", "main"),
    ),
)

if __name__ == "__main__":
    repeat(CASE)
