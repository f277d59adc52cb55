"""What a user with a small card does, one scenario a process: ``python -m tests.gpu.scenarios NAME FOLDER [SHAPE]``.

Each prints one line of JSON. ``build`` comes first; ``all_gpu`` writes the answers the others are compared with.
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (first, as a user would; GEMMA4_COMPAT_DISABLE=all gives the unpatched stack)

import json
import sys
import time
from pathlib import Path
from typing import Any

from gemma4_compat import _tiny
from gemma4_compat._repro import Answers, difference

GIB = 2**30
TOWERS = ("model.vision_tower", "model.audio_tower")
PER_LAYER = "model.language_model.embed_tokens_per_layer"
ADAPTER = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)(\.linear)?"


def e2b_config() -> Any:
    """E2B's text shape; the towers at the configuration classes' defaults with clipped linears."""
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    text = gemma4.Gemma4TextConfig(
        vocab_size=262144,
        hidden_size=1536,
        intermediate_size=6144,
        use_double_wide_mlp=True,
        num_hidden_layers=35,
        num_kv_shared_layers=20,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        final_logit_softcapping=30.0,
    )
    return gemma4.Gemma4Config(
        text_config=text,
        vision_config=gemma4.Gemma4VisionConfig(use_clipped_linears=True),
        audio_config=gemma4.Gemma4AudioConfig(use_clipped_linears=True),
    )


def build(folder: Path) -> dict[str, Any]:
    """Random weights in E2B's shape, and a rank-16 adapter on the language model and both towers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Gemma4ForConditionalGeneration(e2b_config())
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "checkpoint", max_shard_size="4GB")
    wrappers = {name for name, module in model.named_modules() if type(module).__name__ == "Gemma4ClippableLinear"}
    import re

    names = [name for name, _ in model.named_modules() if re.fullmatch(ADAPTER, name) and name not in wrappers]
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)
    adapted.save_pretrained(folder / "adapter")
    return {"parameters": sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)}


def base(folder: Path, placement: Any, **kwargs: Any) -> Any:
    """4-bit (double quantization) language model, towers in bf16, as the thread's users load it."""
    import torch
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_enable_fp32_cpu_offload=True,
        llm_int8_skip_modules=[*TOWERS, "model.embed_vision", "model.embed_audio", "lm_head"],
    )
    return Gemma4ForConditionalGeneration.from_pretrained(
        folder / "checkpoint", dtype=torch.bfloat16, quantization_config=quantization, device_map=placement, **kwargs
    ).eval()


def answers(model: Any) -> Answers:
    """Three forwards and a generate on a text prompt of 64 tokens, and the features of an image in the tower."""
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 250_000, (1, 64), generator=generator).to(0)
    side = torch.arange(12)
    positions = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, 144, 2).to(0)
    pixels = torch.rand(1, 144, 3 * 16 * 16, generator=generator).to(0)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits.float().cpu() for _ in range(3)]
        tower = model.get_base_model() if hasattr(model, "get_base_model") else model
        features = tower.get_image_features(pixels, positions).pooler_output
        logits.append((features[0] if isinstance(features, (list, tuple)) else features).float().cpu())
        tokens = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False).cpu()
    return Answers(tuple(logits), tokens)


def with_adapter(folder: Path, model: Any, *, free: float | None = None) -> dict[str, Any]:
    """Load the adapter and measure; with ``free`` GiB left on the card by a ballast tensor."""
    import torch
    from peft import PeftModel

    result: dict[str, Any] = {"base_gib": torch.cuda.memory_allocated() / GIB}
    ballast = None
    if free is not None:
        torch.cuda.empty_cache()
        ballast = torch.empty(max(0, int(torch.cuda.mem_get_info()[0] - free * GIB)), dtype=torch.uint8, device=0)
    held = 0 if ballast is None else ballast.numel() / GIB
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    adapted = PeftModel.from_pretrained(model, folder / "adapter")
    torch.cuda.synchronize()
    result["adapter_load_s"] = time.perf_counter() - started
    result["adapter_gib"] = torch.cuda.memory_allocated() / GIB - held
    result["adapter_load_peak_gib"] = torch.cuda.max_memory_allocated() / GIB - held
    result["map_entries"] = len(adapted.hf_device_map)
    devices = {
        str(parameter.device.type)
        for name, parameter in adapted.named_parameters()
        if any(tower.split(".")[1] in name for tower in TOWERS) and "lora_" not in name
    }
    result["towers_on"] = sorted(devices)
    seen = answers(adapted)
    result["resident_gib"] = torch.cuda.memory_allocated() / GIB - held
    result["parity"] = difference(torch.load(folder / "answers.pt", weights_only=False), seen)
    return result


def all_gpu(folder: Path) -> dict[str, Any]:
    import torch
    from peft import PeftModel

    model = base(folder, {"": 0})
    before = torch.cuda.memory_allocated() / GIB
    adapted = PeftModel.from_pretrained(model, folder / "adapter")
    after = torch.cuda.memory_allocated() / GIB
    torch.save(answers(adapted), folder / "answers.pt")
    return {"base_gib": before, "adapter_gib": after}


def split_towers(folder: Path) -> dict[str, Any]:
    return with_adapter(folder, base(folder, {**dict.fromkeys(TOWERS, "cpu"), "": 0}))


def split_towers_pressure(folder: Path) -> dict[str, Any]:
    return with_adapter(folder, base(folder, {**dict.fromkeys(TOWERS, "cpu"), "": 0}), free=3.0)


def catch_all(folder: Path) -> dict[str, Any]:
    """Everything on the GPU but the towers and the per-layer table, by a catch-all entry: what loading peaks at."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    model = base(folder, {"": 0, **dict.fromkeys(TOWERS, "cpu"), PER_LAYER: "cpu"})
    torch.cuda.synchronize()
    return {
        "resident_gib": torch.cuda.memory_allocated() / GIB,
        "load_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "largest_block_gib": largest_block(model) / GIB,
        "table_gib": model.get_submodule(PER_LAYER).weight.nbytes / GIB,
    }


def largest_block(model: Any) -> int:
    """Bytes of the largest thing that is loaded at once: a parameter in bf16, before it is quantized."""
    return max(
        2 * parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
        for name, parameter in model.named_parameters()
        if parameter.device.type == "cuda"
    )


def max_memory(folder: Path) -> dict[str, Any]:
    """A budget below the model with ``device_map="auto"``, tiny checkpoint: 4-bit modules go to the CPU.

    bitsandbytes quantizes on the device a module is meant for, and its CPU and CUDA kernels do not agree on every
    scale. So the reference, everything on the GPU, gets for these modules the 4-bit weights of a model that was
    quantized on the CPU and never offloaded; how many differ is reported. The budget is the largest of a few that
    offloads anything. Offloaded embeddings are another defect (F11).
    """
    from accelerate.utils import compute_module_sizes
    from peft import PeftModel

    from gemma4_compat import _placement
    from gemma4_compat._repro import Workspace

    workspace = Workspace.build(folder / "tiny")
    whole = workspace.load("4bit-double")
    sizes = compute_module_sizes(whole)
    tried = []
    for share in (0.9, 0.85, 0.8, 0.75, 0.7):
        budget = {0: int(sizes[""] * share / 0.9), "cpu": "8GiB"}
        model = _tiny.load(workspace.checkpoint, "4bit-double", device_map="auto", max_memory=budget)
        placement = dict(getattr(model, "hf_device_map", {}))
        offloaded = sorted(name for name, device in placement.items() if device == "cpu")
        if not offloaded or any("language_model" in name for name in offloaded):
            tried.append({"share": share, "offloaded": offloaded})
            continue
        names = [
            name
            for name, module in model.named_modules()
            if _placement.is_offloaded(module) and type(getattr(module, "weight", None)).__name__ == "Params4bit"
        ]
        differ = take_weights(whole, _tiny.load(workspace.checkpoint, "4bit-double", device="cpu"), names)
        reference = workspace.answers(PeftModel.from_pretrained(whole, workspace.adapter("all")))
        model = PeftModel.from_pretrained(model, workspace.adapter("all"))
        return {
            "share": share,
            "offloaded": offloaded,
            "parity": difference(reference, workspace.answers(model)),
            "kept": model.hf_device_map == placement,
            "offloaded_4bit_weights": len(names),
            "quantized_differently_on_the_cpu": differ,
        }
    raise RuntimeError(f"no budget offloaded something and kept the language model on the GPU: {tried}")


def take_weights(model: Any, source: Any, names: list[str]) -> int:
    """Give ``model`` the 4-bit weights of ``source`` for these modules; how many of them differed, scales included."""
    import torch

    differed = 0
    for name in names:
        target, new = model.get_submodule(name), source.get_submodule(name).weight
        before, after = target.weight.quant_state.as_dict(packed=True), new.quant_state.as_dict(packed=True)
        same = all(torch.equal(before[key].cpu(), after[key].cpu()) for key in before)
        differed += not (same and torch.equal(target.weight.data.cpu(), new.data.cpu()))
        target.weight = new.to(target.weight.device)
    return differed


def main(argv: list[str]) -> int:
    name, folder = argv[0], Path(argv[1])
    try:
        result = {"error": None, **globals()[name](folder)}
    except Exception as error:  # noqa: BLE001  (the user's crash is the result)
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    result["patches"] = {patch_id: str(status.state) for patch_id, status in gemma4_compat.status().items()}
    print("\n" + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
