"""The placements that small_card.py measures, and the shapes in which it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemma4_compat._lab import tiny_configs

PER_LAYER_EMBEDDINGS = "model.language_model.embed_tokens_per_layer"
TOWERS = ("model.vision_tower", "model.audio_tower")
LAYER = "model.language_model.layers.{}"
#: What a case may offload: names to a number of decoder layers, spread evenly, a share of all where it is below 1.
LAYERS = {"layers-few": 8, "layers-half": 20, "layers-all": 1.0}


@dataclass(frozen=True)
class Case:
    """One placement.

    Attributes:
        who: "reference" (everything on the GPU), "upstream" (shim off) or "ours".
        what: the placement in words.
        offload: parts of the model that go to ``to``: "table", "towers", and a name of :data:`LAYERS`.
        to: "cpu" or "disk".
        quantize: offloaded decoder layers are quantized as well (``gemma4_compat.quantize(offloaded=True)``).
        adapter: a rank-16 LoRA adapter on every decoder layer is loaded.
        double: quantize the scales, too.
        unquantized: a name of :data:`LAYERS`: layers that stay in bf16 on the GPU.
        budget: ``device_map="auto"`` with the shape's budget of this number.
        reference: the case whose outputs these must equal.
        quantize_towers: the towers and what follows them are quantized, too.
    """

    who: str
    what: str
    offload: tuple[str, ...] = ()
    to: str = "cpu"
    quantize: bool = False
    adapter: bool = False
    double: bool = True
    unquantized: str | None = None
    budget: int | None = None
    reference: str = "all-gpu"
    quantize_towers: bool = False

    @property
    def reference_outputs(self) -> str:
        """Name of the reference outputs that this case must equal."""
        return f"{self.reference}-adapter" if self.adapter else self.reference


EVERYTHING = ("table", "towers", "layers-all")
#: In the order in which they run: with little time left the last ones are missing.
CASES: dict[str, Case] = {
    "all-gpu": Case("reference", "everything on the GPU"),
    "all-gpu-bf16": Case("reference", "the same, some layers not quantized", unquantized="layers-few"),
    "all-gpu-single": Case("reference", "the same, single quantization", double=False),
    "table": Case("ours", "per-layer table on the CPU", ("table",)),
    "table-towers": Case("ours", "table and towers on the CPU", ("table", "towers")),
    "everything": Case("ours", "table, towers and all decoder layers on the CPU", EVERYTHING, quantize=True),
    "upstream-table-towers": Case("upstream", "table and towers on the CPU", ("table", "towers")),
    "layers-few": Case("ours", "some decoder layers on the CPU, 4-bit", ("layers-few",), quantize=True),
    "upstream-layers-few": Case(
        "upstream", "some decoder layers on the CPU, bf16", ("layers-few",), reference="all-gpu-bf16"
    ),
    "layers-half": Case("ours", "about half of the decoder layers on the CPU, 4-bit", ("layers-half",), quantize=True),
    "layers-all": Case("ours", "all decoder layers on the CPU, 4-bit", ("layers-all",), quantize=True),
    "everything-adapter": Case(
        "ours",
        "everything but the embedding on the CPU, adapter on all layers",
        EVERYTHING,
        quantize=True,
        adapter=True,
    ),
    "auto-1": Case("ours", 'device_map="auto", smallest budget', budget=0),
    "auto-2": Case("ours", 'device_map="auto", 2 GiB', budget=1),
    "auto-3": Case("ours", 'device_map="auto", 3 GiB', budget=2),
    "upstream-auto-1": Case("upstream", 'device_map="auto", smallest budget', budget=0),
    "layers-few-bf16": Case("ours", "some decoder layers on the CPU, bf16", ("layers-few",), reference="all-gpu-bf16"),
    "everything-single": Case(
        "ours",
        "table, towers and all decoder layers on the CPU, single quantization",
        EVERYTHING,
        quantize=True,
        double=False,
        reference="all-gpu-single",
    ),
    "table-disk": Case("ours", "per-layer table on disk", ("table",), to="disk"),
    "upstream-table": Case("upstream", "per-layer table on the CPU", ("table",)),
}
#: Cases that are timed in turns with everything on the GPU.
PAIRED = (
    *("table", "table-towers", "layers-few", "layers-half", "layers-all"),
    *("everything", "everything-adapter", "auto-1", "table-disk"),
)
QUICK = ("all-gpu", "table-towers", "everything", "upstream-table-towers")


@dataclass(frozen=True)
class Shape:
    """What is built and how long its prompts are. ``budgets`` are GiB for ``device_map="auto"``."""

    text: dict[str, Any]
    prefill: tuple[int, ...] = (512, 2048, 4096)
    budgets: tuple[float, ...] = ()
    checkpoint_gib: float = 0.1


_COMMON = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
}
SHAPES = {
    "E2B": Shape(
        _COMMON
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "num_key_value_heads": 1,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        budgets=(1.2, 2.0, 3.0),
        checkpoint_gib=11,
    ),
    "E4B": Shape(
        _COMMON
        | {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_kv_shared_layers": 18,
            "num_key_value_heads": 2,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
        },
        budgets=(1.6, 2.0, 3.0),
        checkpoint_gib=17,
    ),
    "tiny": Shape(tiny_configs.text_shape(), prefill=(16, 64)),
}


def layer_names(shape: str, which: str) -> list[str]:
    """Names of that many decoder layers; for the tiny shape a third and two thirds."""
    count, wanted = SHAPES[shape].text["num_hidden_layers"], LAYERS[which]
    if shape == "tiny" and wanted != 1.0:
        wanted = count // 3 if which == "layers-few" else 2 * count // 3
    number = count if wanted == 1.0 else int(wanted)
    return [LAYER.format(index * count // number) for index in range(number)]


def offloaded_names(shape: str, case: Case) -> list[str]:
    names: list[str] = []
    for part in case.offload:
        names += {"table": [PER_LAYER_EMBEDDINGS], "towers": list(TOWERS)}.get(part) or layer_names(shape, part)
    return names


def selected(wanted: list[str], shape: str, gpu: bool) -> list[str]:
    """The cases to run, with the references they need, in the order of :data:`CASES`."""
    names = set(wanted) | {"all-gpu"} | {CASES[name].reference for name in wanted}
    auto = gpu and SHAPES[shape].budgets
    return [name for name in CASES if name in names and (CASES[name].budget is None or auto)]
