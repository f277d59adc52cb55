"""Found by tests.search. From the repository: python -m tests.regressions.NAME"""

# Seed 24: RuntimeError: Tensor on device meta is not on the expected device cpu!

from tests.search.case import Case
from tests.search.run import repeat

CASE = Case(
    seed=None,
    model="conditional",
    layers=2,
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
    load="dispatch_model",
    skip_keys="own",
    offloaded_to="cpu",
    placement=(
        ("model", "offloaded"),
        ("lm_head", "main"),
    ),
)

if __name__ == "__main__":
    repeat(CASE)
