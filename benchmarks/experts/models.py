"""The mixture of experts that experts.py measures: random 4-bit weights in the real shape, placed in several ways.

The model in bf16 (48.5 GiB) is never built. Experts are built layer by layer as packed bytes: random codes, and the
scales of one matrix that bitsandbytes has quantized, dealt out anew to each expert.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import gemma4_compat  # noqa: F401  (before the libraries)
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card.device import main_device
from gemma4_compat._gemma4.models import variants
from gemma4_compat._gemma4.quantization import expert_storage, experts
from gemma4_compat._lab import tiny, tiny_configs

LANGUAGE = "model.language_model"
#: By name: layers of the 26B-A4B (None: all), and whether experts are bf16; "tiny" runs on a CPU.
SHAPES: dict[str, tuple[int | None, bool]] = {
    "26B-A4B": (None, False),
    "26B-A4B-6": (6, False),
    "26B-A4B-6-bf16": (6, True),
    "tiny": (None, False),
    "tiny-bf16": (None, True),
}
Hosted = dict[str, dict[str, Any]]  # by layer's path and parameter: what experts are made of, on the host


def config(shape: str) -> Any:
    if shape.startswith("tiny"):
        return tiny_configs.moe_config()
    return variants.config("26B-A4B", layers=SHAPES[shape][0])


def hosted_experts(shape: str) -> Hosted:
    """Of every layer, the parameters of its experts on the CPU; made on the GPU, one at a time."""
    import torch

    text = config(shape).get_text_config()
    count, hidden, inner = text.num_experts, text.hidden_size, text.moe_intermediate_size
    generator = torch.Generator(device=main_device()).manual_seed(0)
    found: Hosted = {}
    for number in range(text.num_hidden_layers):
        parameters = {}
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            make = _plain if SHAPES[shape][1] else _packed
            parameters[name] = make(count, rows, columns, generator)
        found[f"{LANGUAGE}.layers.{number}.experts"] = parameters
    return found


def _plain(count: int, rows: int, columns: int, generator: Any) -> Any:
    import torch

    values = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=generator.device)
    return torch.nn.Parameter(values.normal_(0.0, 0.02, generator=generator).cpu(), requires_grad=False)


def _packed(count: int, rows: int, columns: int, generator: Any) -> Any:
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import Params4bit

    device = generator.device
    sample = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=generator)
    _, state = functional.quantize_4bit(sample, blocksize=64, compress_statistics=True, quant_type="nf4")
    joined = copy.copy(state)
    joined.shape = torch.Size((count, rows, columns))
    blocks = state.absmax.numel()
    deal = torch.randint(0, blocks, (count, blocks), generator=generator, device=device)
    joined.absmax = state.absmax[deal]
    joined.offset = state.offset.expand(count, 1).contiguous()
    joined.state2 = copy.copy(state.state2)
    joined.state2.absmax = state.state2.absmax.expand(count, -1).contiguous()
    data = torch.randint(
        0, 256, (count * rows * columns // 2, 1), dtype=torch.uint8, generator=generator, device=device
    )
    joined.to("cpu")
    return Params4bit(
        data.cpu(),
        requires_grad=False,
        quant_state=joined,
        blocksize=64,
        compress_statistics=True,
        quant_type="nf4",
        bnb_quantized=True,
    )


@contextlib.contextmanager
def _without_experts() -> Iterator[None]:
    """Inside, experts are made on meta."""
    import torch
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    make = Gemma4TextExperts.__init__

    def on_meta(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            make(self, *args, **kwargs)

    Gemma4TextExperts.__init__ = on_meta
    try:
        yield
    finally:
        Gemma4TextExperts.__init__ = make


def built(shape: str, hosted: Hosted, on_card: set[int], whole_layers: bool) -> Any:
    """The model: linears of its layers in 4 bits, experts of the layers ``on_card`` there, the others on the CPU.

    With ``whole_layers`` everything of every layer is on the CPU. Without ``hosted`` ones, experts are in bf16 on the
    card.
    """
    import torch
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(main_device()), _without_experts():
            model = Gemma4ForConditionalGeneration._from_config(config(shape), experts_implementation="grouped_mm")
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    for number, layer in enumerate(model.get_decoder().layers):
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if parameter.ndim == 1 and parameter.device.type != "meta" and "router" not in name:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        _quantize_linears(layer)
        if whole_layers:
            for name, child in layer.named_children():
                if name != "experts":
                    child.to("cpu")
        module = layer.experts
        if not hosted:
            for name, parameter in module._parameters.items():
                values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=main_device()).normal_(0.0, 0.02)
                module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
            continue
        for name, parameter in hosted[f"{LANGUAGE}.layers.{number}.experts"].items():
            module._parameters[name] = _on(parameter, main_device() if number in on_card else "cpu")
        if "quant_state" in vars(module._parameters["down_proj"]):
            expert_storage._remember_states(module)
    small_card_device.forget_peak()
    return model


def _quantize_linears(layer: Any) -> None:
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.Linear or experts.is_experts(parent) or "Router" in type(parent).__name__:
                continue
            made = Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            made.weight = Params4bit(child.weight.data.cpu(), requires_grad=False, quant_type="nf4").to(main_device())
            setattr(parent, name, made.eval())


def _on(parameter: Any, device: Any) -> Any:
    """The parameter, of its own, on a device; on the CPU it shares what is hosted."""
    import torch

    if "quant_state" not in vars(parameter):
        return torch.nn.Parameter(parameter.data.to(device), requires_grad=False)
    from bitsandbytes.nn import Params4bit

    state = copy.copy(parameter.quant_state)
    state.state2 = copy.copy(state.state2)
    if device != "cpu":
        state.to(f"cuda:{device}")
    return Params4bit(
        parameter.data.to(device),
        requires_grad=False,
        quant_state=state,
        blocksize=parameter.blocksize,
        compress_statistics=True,
        quant_type="nf4",
        bnb_quantized=True,
    )


def placed(shape: str, hosted: Hosted, where: str) -> Any:
    """A new model, where it says.

    Args:
        shape: of :data:`SHAPES`.
        hosted: of :func:`hosted_experts`; the model takes the memory over in its first forward.
        where: ``"card"``; ``"experts"`` in host memory, or on ``"disk"``; ``"layers"``, whole ones; ``"experts:N"``:
            those of N layers stay on the card; ``"upstream"``: on the card, in bf16.
    """
    import torch
    from accelerate import dispatch_model

    kind, _, kept = where.partition(":")
    layers = config(shape).get_text_config().num_hidden_layers
    if kind == "upstream":
        return built(shape, {}, set(range(layers)), False)
    on_card = set(range(layers)) if kind == "card" else set(range(int(kept or 0)))
    model = built(shape, hosted, on_card, kind == "layers")
    if kind == "card":
        return model
    main = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    entries: dict[str, Any] = {"": main}
    for number in range(layers):
        if number not in on_card:
            name = f"{LANGUAGE}.layers.{number}"
            entries[name if kind == "layers" else f"{name}.experts"] = "disk" if kind == "disk" else "cpu"
    options: dict[str, Any] = {"offload_dir": tempfile.mkdtemp()} if kind == "disk" else {}
    skip = tiny.skip_keys(model)
    model = dispatch_model(model, entries, main_device=main, skip_keys=skip, force_hooks=True, **options)
    if options:
        weakref.finalize(model, shutil.rmtree, options["offload_dir"], ignore_errors=True)
    gc.collect()
    return model
