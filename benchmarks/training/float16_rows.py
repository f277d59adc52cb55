"""A repair of F63 that was tried: rows of an MLP's product divided by a power of two before the projection, and after.

`float16.py --parts rows` measures it. The product of gate and up is computed in float32. A row (a token) whose largest
product rounds to infinity in float16 is divided by a power of two, and the output of ``down_proj``, which must be
linear and without a bias, multiplied by it. Other rows are divided by one. All of it is computed on the device, for
every row, so nothing waits for the GPU.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: From here on a number rounds to infinity in float16.
INFINITE = 65520.0
#: By how many times the limit the product is beyond it, in the released widths.
BEYOND = (2.0, 8.0, 16.0)
BASES = ("plain", "lora", "4bit", "8bit")


def forward(mlp: Any, x: Any) -> Any:
    """The forward of a text model's MLP, (..., hidden) -> (..., hidden), of any dtype."""
    import torch

    gate, up = mlp.act_fn(mlp.gate_proj(x)), mlp.up_proj(x)
    if gate.dtype is not torch.float16:
        return mlp.down_proj(gate * up)
    product = gate.float() * up.float()  # exact
    largest = torch.linalg.vector_norm(product.detach(), torch.inf, -1, keepdim=True)
    exponent = torch.frexp(largest)[1] - 15  # below 2^15 afterwards
    scale = torch.ldexp(torch.ones_like(largest), torch.where(largest < INFINITE, 0, exponent))
    found = mlp.down_proj((product / scale).half())
    return (found.float() * scale).to(found.dtype)


@contextmanager
def by_rows(model: Any) -> Iterator[None]:
    """Inside, the MLPs of the text layers of ``model`` compute so."""
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith("TextMLP")}
    before = {kind: kind.forward for kind in kinds}
    for kind in kinds:
        kind.forward = forward
    try:
        yield
    finally:
        for kind, original in before.items():
            kind.forward = original


def measured(limit: Callable[[Any, Any, str, str], dict[str, Any]]) -> dict[str, Any]:
    """The bits where nothing overflows, the new limits, the released widths, and what it costs.

    ``limit``: of a model, a batch, a rescaling and a way, where float16 ends (``float16._limit``).
    """
    from benchmarks.training import magnitudes
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny, tiny_models

    found: dict[str, Any] = {"bits": [], "limits": [], "widths": widths(), "cost": cost()}
    with tempfile.TemporaryDirectory() as folder:
        for variant in (name for name in variants.NAMES if name != "E4B"):
            checkpoint = tiny_models.build_checkpoint(Path(folder) / variant, variant=variant)
            batch = tiny.inputs(variant=variant, text_only=True)
            found["bits"] += [{"variant": variant, "base": base, **_bits(checkpoint, base, batch)} for base in BASES]
            plain = tiny.load(checkpoint).float()
            for name in ("MLP: product", "MLP: gate and up"):
                if magnitudes.applies(name, plain):
                    with by_rows(plain):
                        row = limit(plain, batch, name, "float16")
                    kept = ("finite_to", "first", "error", "error_there")
                    before = limit(plain, batch, name, "float16")["finite_to"]
                    given = {"variant": variant, "scaled": name, "upstream_finite_to": before}
                    given["loss_scale_power"] = row["gradients"]["loss_scale_power"]
                    found["limits"].append(given | {key: row.get(key) for key in kept})
    return found


def _bits(checkpoint: Path, base: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Whether logits, and the gradients of an adapter, are upstream's where nothing overflows."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._lab import tiny_models

    options: dict[str, Any] = {}
    if base == "4bit":
        options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float16}
    elif base == "8bit":
        options = {"load_in_8bit": True}
    kind = getattr(transformers, tiny_models.class_name(checkpoint))
    quantization = {"quantization_config": transformers.BitsAndBytesConfig(**options)} if options else {}
    model = kind.from_pretrained(checkpoint, dtype=torch.float16, device_map={"": "cpu"}, **quantization)
    adapted = base == "lora"
    if adapted:
        torch.manual_seed(0)
        targets = r".*language_model.*\.(gate_proj|up_proj|down_proj)"
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))

    def step() -> list[Any]:
        model.zero_grad()
        with torch.set_grad_enabled(adapted):
            outputs = model(**batch, labels=batch["input_ids"])
        if adapted:
            outputs.loss.backward()
        return [outputs.logits, *(one.grad for one in model.parameters() if one.grad is not None)]

    expected = step()
    with by_rows(model):
        found = step()
    same = len(expected) == len(found) and all(map(torch.equal, expected, found))
    return {"same": same, "finite": all(bool(one.isfinite().all()) for one in expected), "compared": len(found)}


def widths() -> list[dict[str, Any]]:
    """Random MLPs of the released widths, in which gate and up of one neuron point along one token's input.

    That token's product exceeds the limit, as an outlier in a trained model does. Errors are those of its output,
    relative to float32; "unscaled" is the error in float16 before anything exceeds the limit.
    """
    import torch

    from gemma4_compat._gemma4.models import variants

    rows = []
    for variant in ("E2B", "E4B", "12B"):
        shape = variants.shape(variant)["text"]
        mlp, x = _mlp(shape["hidden_size"], shape["intermediate_size"])
        row: dict[str, Any] = {"variant": variant, "unscaled": _error(mlp, x, forward)["error"], "beyond": {}}
        for beyond in BEYOND:
            outlier = copy.deepcopy(mlp)
            with torch.no_grad():
                direction = x[0, 3] / x[0, 3].norm() ** 2
                for linear in (outlier.gate_proj, outlier.up_proj):
                    linear.weight[7] = direction * (beyond * 65504.0) ** 0.5
            row["beyond"][f"{beyond:g}"] = {
                "upstream_finite": _error(outlier, x, type(outlier).forward)["finite"],
                **_error(outlier, x, forward),
            }
        rows.append(row)
    return rows


def _mlp(hidden: int, inner: int) -> tuple[Any, Any]:
    import torch
    from transformers.models.gemma4 import modeling_gemma4

    from gemma4_compat._lab import tiny_configs

    text = {**tiny_configs.text_shape(3), "num_kv_shared_layers": 0}
    text |= {"hidden_size": hidden, "intermediate_size": inner}
    torch.manual_seed(0)
    mlp = modeling_gemma4.Gemma4TextMLP(modeling_gemma4.Gemma4TextConfig(**text), 0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0.0, 0.02)
    return mlp, torch.randn(1, 8, hidden).half().float()


def _error(mlp: Any, x: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """Of the output of every token, relative to float32; the largest. And of the one token that is beyond it."""
    import torch

    half = copy.deepcopy(mlp).half()
    with torch.no_grad():
        expected = half.float()(x)
        found = function(half.half(), x.half()).float()
    finite = bool(found.isfinite().all())
    error = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return {"finite": finite, "error": error, "largest_output": float(expected.abs().max())}


def cost() -> dict[str, Any]:
    """Operations of an MLP beside its matrix products, and the bytes that these write for each neuron and token."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    mlp, x = _mlp(64, 256)
    counted = {"operations": 0, "bytes": 0}

    class Count(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outputs = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if name not in ("t", "view", "_unsafe_view", "detach", "mm", "expand", "permute"):
                counted["operations"] += 1
                counted["bytes"] += sum(one.nbytes for one in torch.utils._pytree.tree_leaves(outputs))
            return outputs

    found = {}
    half, given = mlp.half(), x[:1].half()
    for name, function in (("upstream", type(half).forward), ("rows", forward)):
        counted.update(operations=0, bytes=0)
        with torch.no_grad(), Count():
            function(half, given)
        found[name] = {"operations": counted["operations"], "bytes": counted["bytes"] / (8 * 256)}
    return found
