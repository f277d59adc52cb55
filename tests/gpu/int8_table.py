"""Row F28 on a real GPU: offloaded Linear8bitLt, shim off and on. Run it in the root of a checkout:

    python tests/gpu/int8_table.py            prints a table; writes $OUT/int8.json (./int8.json without OUT)

Two child processes, one with GEMMA4_COMPAT_DISABLE=all. Every check is on its own: an error is a result, kept as is.
Without a GPU the main device is the CPU and only "disk" is measured (a smoke test of this file).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="int8-"))
    call(
        [
            sys.executable,
            "-c",
            f"import gemma4_compat; from pathlib import Path; "
            f"from gemma4_compat._reproduction.workspace import Workspace; Workspace.build(Path({str(folder)!r}))",
        ],
        "",
    )
    results = {}
    for shim in ("off", "on"):
        out = folder / f"{shim}.json"
        code = call(
            [sys.executable, __file__, "child", str(folder), str(out)], "all" if shim == "off" else "", check=False
        )
        results[shim] = json.loads(out.read_text()) if out.is_file() else {"died": code}
        results[shim]["rc"] = code
    target = Path(os.environ.get("OUT", ".")) / "int8.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{'check':58} {'off':42} on")
    names = dict.fromkeys(n for r in results.values() for n in r.get("checks", {}))
    for name in names:
        row = [short(results[shim].get("checks", {}).get(name)) for shim in ("off", "on")]
        print(f"{name:58} {row[0]:42} {row[1]}")
    print(
        {shim: r.get("rc") for shim, r in results.items()}, results["on"].get("versions"), results["on"].get("patches")
    )
    return 0


def call(command, disable, check=True):
    env = {
        **os.environ,
        "GEMMA4_COMPAT_DISABLE": disable,
        "PYTHONPATH": f"{Path.cwd()}{os.pathsep}" + os.environ.get("PYTHONPATH", ""),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(command, env=env, check=check).returncode


def short(result):
    if result is None:
        return "-"
    if "error" in result:
        return result["error"][:41]
    return str(result.get("short", result))[:120]


def child(folder: Path, out: Path) -> None:
    import accelerate
    import bitsandbytes
    import peft
    import torch
    import transformers
    from accelerate.hooks import remove_hook_from_submodules
    from peft import LoraConfig, PeftModel, get_peft_model

    import gemma4_compat  # first, as a user would
    from gemma4_compat._reproduction import tiny, tiny_adapters
    from gemma4_compat._reproduction.workspace import Workspace, difference

    workspace = Workspace(folder)
    cuda = torch.cuda.is_available()
    main = workspace.main
    checks = {}
    results = {
        "checks": checks,
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, accelerate, peft, bitsandbytes)},
    }

    def allocated():
        gc.collect()
        if not cuda:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def census():
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        held = {
            (str(t.device), t.untyped_storage().data_ptr()): t.untyped_storage().nbytes()
            for t in tensors
            if t.device.type != "meta"
        }
        return len(tensors), sum(held.values()), allocated()

    def eight_bit(model):
        return [
            m for m in model.modules() if type(m).__module__.startswith("bitsandbytes")
        ]  # PEFT has a Linear8bitLt too

    def held_by_states(model):
        """Bytes that states of layers whose weight is on meta keep on the main device."""
        return sum(
            t.numel() * t.element_size()
            for m in eight_bit(model)
            if m.weight.device.type == "meta"
            for t in vars(m.state).values()
            if isinstance(t, torch.Tensor) and t.device.type != "meta"
        )

    def on_meta(model):
        return sum(p.device.type == "meta" for p in model.parameters())

    def load():
        return tiny.load(workspace.checkpoint, "8bit", device=main)

    def strip(model):
        for parameter in model.parameters():  # F1's crash on accelerate 1.12/1.13 is not the question here
            vars(parameter).pop("_is_hf_initialized", None)
        return model

    def dispatch(model, offloaded, what="both", device=None):
        placement = tiny.device_map(model, what, main=main if device is None else device, offloaded=offloaded)
        return tiny.dispatch(strip(model), placement, Path(tempfile.mkdtemp(dir=folder)))

    def with_adapter(model, adapter, **kw):
        return PeftModel.from_pretrained(model, workspace.adapter(adapter), **kw) if adapter else model

    references = {}

    def reference(adapter):
        if adapter not in references:
            references[adapter] = workspace.outputs(with_adapter(load(), adapter))
        return references[adapter]

    def per_forward(a, b):
        return [
            (x - y).abs().max().item() if torch.isfinite(y).all() else math.inf for x, y in zip(a.logits, b.logits)
        ]

    def check(name, function):
        started = time.perf_counter()
        try:
            found = function()
        except Exception as error:  # noqa: BLE001  (the user's crash is the result)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            found = {
                "error": f"{type(error).__name__}: {error}",
                "at": f"{frame.filename}:{frame.lineno}",
                "traceback": traceback.format_exc()[-3000:],
            }
        found["seconds"] = round(time.perf_counter() - started, 2)
        checks[name] = found
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        print(f"  {name}: {short(found)}", flush=True)
        out.write_text(json.dumps(results, indent=1))

    def parity(offloaded, adapter, before):
        expected = reference(adapter)
        model = load()
        loaded = allocated()
        if before:
            workspace.outputs(model)
        used = allocated()
        model = dispatch(model, offloaded)
        dispatched, kept = allocated(), held_by_states(model)
        model = with_adapter(model, adapter)
        meta = on_meta(model)
        found = workspace.outputs(model)
        after, kept_after = allocated(), held_by_states(model)
        worst = difference(expected, found)
        return {
            "parity": worst,
            "per_forward": per_forward(expected, found),
            "on_meta": meta,
            "bytes": {"loaded": loaded, "used": used, "dispatched": dispatched, "answered": after},
            "state_bytes_of_offloaded": {"dispatched": kept, "answered": kept_after},
            "weights_map_device": sorted(
                {
                    str(m._hf_hook.weights_map["weight"].device)
                    for m in eight_bit(model)
                    if getattr(getattr(m, "_hf_hook", None), "offload", False)
                }
            ),
            "short": f"{worst} meta={meta} held={kept}/{kept_after}",
        }

    def fifty(offloaded, adapter):
        model = with_adapter(dispatch(load(), offloaded), adapter)
        batch = tiny.inputs(main)
        with torch.no_grad():
            for _ in range(2):
                model(**batch)
            before = census()
            for _ in range(50):
                model(**batch)
            after = census()
        return {
            "before": before,
            "after": after,
            "state_bytes_of_offloaded": held_by_states(model),
            "short": f"delta={[b - a for a, b in zip(before, after)]} held={held_by_states(model)}",
        }

    def training(offloaded, checkpointing):
        def step(base):
            model = with_adapter(base, "all", is_trainable=True).train()
            if checkpointing:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            batch = tiny.inputs(main)
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
            return loss.item(), grads, f"{on_meta(model)} held={held_by_states(model)}"

        (a, ga, _), (b, gb, meta) = step(load()), step(dispatch(load(), offloaded))
        wrong = [n for n in ga if n not in gb or not torch.equal(ga[n], gb[n])]
        return {
            "losses": [a, b],
            "gradients": len(ga),
            "different": wrong,
            "on_meta": meta,
            "short": f"loss {'equal' if a == b else 'DIFFERS'}, {len(wrong)}/{len(ga)} grads differ, meta={meta}",
        }

    def base_gradient(offloaded):
        """Without PEFT: the gradient of a norm below offloaded layers."""
        grads = []
        for model in (load(), dispatch(load(), offloaded)):
            weight = model.model.language_model.layers[1].input_layernorm.weight.requires_grad_(True)
            model(**tiny.inputs(main)).logits.float().square().mean().backward()
            grads.append(weight.grad.cpu())
        return {"equal": bool(torch.equal(*grads)), "short": f"equal={torch.equal(*grads)}"}

    def worst(function, offloaded):
        found = difference(
            workspace.outputs(function(load())), workspace.outputs(function(dispatch(load(), offloaded)))
        )
        return {"parity": found, "short": str(found)}

    def saved(offloaded, used):
        model = dispatch(load(), offloaded)
        if used:
            workspace.outputs(model)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            model.save_pretrained(name)
            again = type(model).from_pretrained(name, device_map={"": main}).eval()
            found = difference(reference(None), workspace.outputs(again))
        return {"parity": found, "short": str(found)}

    def unhooked(offloaded, used):
        model = dispatch(load(), offloaded)
        if used:
            workspace.outputs(model)
        remove_hook_from_submodules(model)
        first = difference(reference(None), workspace.outputs(model))
        model.to(main)
        second = difference(reference(None), workspace.outputs(model))
        return {"parity": max(first, second), "short": f"{first} {second}"}

    def merged(model):
        return with_adapter(model, "all").merge_and_unload()

    def dora(model):
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["language"], use_dora=True))
        batch = tiny.inputs(main)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for _ in range(2):
            model.train()(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    def threshold(model):
        for layer in eight_bit(model):
            layer.state.threshold = 0.5
        return model

    def main_is_the_cpu():
        """A GPU is there, but the model computes on the CPU and offloads to disk: upstream goes through GPU 0."""
        cpu = {k: v.cpu() for k, v in tiny.inputs("cpu").items()}
        whole = tiny.load(workspace.checkpoint, "8bit", device="cpu")
        split = dispatch(tiny.load(workspace.checkpoint, "8bit", device="cpu"), "disk", device="cpu")
        peak = 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            peak = torch.cuda.max_memory_allocated()
        with torch.no_grad():
            pairs = [(whole(**cpu).logits.float(), split(**cpu).logits.float()) for _ in range(3)]
        found = max((a - b).abs().max().item() for a, b in pairs)
        grown = torch.cuda.max_memory_allocated() - peak if cuda else 0
        return {"parity": found, "gpu_bytes_touched": grown, "short": f"{found} gpu bytes touched={grown}"}

    def there_and_back(used):
        """Nothing offloaded: a quantized model moved to the CPU and back (is that upstream's own defect?)."""
        model = load()
        if used:
            workspace.outputs(model)
        model = torch.nn.Module.to(torch.nn.Module.to(model, "cpu"), main)
        found = difference(reference(None), workspace.outputs(model))
        return {"parity": found, "short": str(found)}

    offloads = ("cpu", "disk") if cuda else ("disk",)
    check("one device twice", lambda: {"short": str(difference(reference(None), workspace.outputs(load())))})
    for offloaded, adapter, before in itertools.product(offloads, (None, "all"), (False, True)):
        name = f"parity {offloaded} adapter={adapter} forward-before={before}"
        check(name, lambda o=offloaded, a=adapter, b=before: parity(o, a, b))
    for o in offloads:
        for adapter in (None, "all"):
            check(f"50 forwards {o} adapter={adapter}", lambda o=o, a=adapter: fifty(o, a))
        check(f"gradient through the base {o}", lambda o=o: base_gradient(o))
        for c in (False, True):
            check(f"training step {o} checkpointing={c}", lambda o=o, c=c: training(o, c))
        for used in (False, True):
            check(f"save_pretrained and reload {o} used={used}", lambda o=o, u=used: saved(o, u))
            check(f"remove_hook_from_submodules, .to {o} used={used}", lambda o=o, u=used: unhooked(o, u))
        check(f"deepcopy {o}", lambda o=o: worst(copy.deepcopy, o))
        check(f"merge_and_unload {o}", lambda o=o: worst(merged, o))
        check(f"DoRA, two steps {o}", lambda o=o: worst(dora, o))
        check(f"threshold 0.5 (outliers) {o}", lambda o=o: worst(threshold, o))
    check("main device cpu, disk", main_is_the_cpu)
    for used in (False, True):
        check(f"no offload: .to(cpu).to(main) used={used}", lambda u=used: there_and_back(u))
    results["patches"] = {i: str(s.state) for i, s in gemma4_compat.status().items()}
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        with contextlib.suppress(BrokenPipeError):
            child(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit(0)
    sys.exit(main())
