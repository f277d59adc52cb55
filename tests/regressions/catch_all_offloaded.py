"""Found by tests.search. From the repository: python -m tests.regressions.NAME"""

# Seed 61: FileNotFoundError: index.json: the entry "" covers nothing that accelerate offloads

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
    offloaded_to="disk",
    placement=(
        ("", "offloaded"),
        ("model.layers.0.self_attn.q_norm", "main"),
    ),
)

if __name__ == "__main__":
    repeat(CASE)
