"""In a child process: a tiny Llama and a tiny Gemma 3 do what people do with split, quantized and adapted models.

Writes as JSON, for each patch: how often its replacements were called, and which of them did anything but call the
original, once, with the same arguments, and return its result. With ``--trace`` also what came out: a digest of
outputs, weights, hooks and attributes after each step, and each warning, log line and error.

    python -m tests.unit.gemma4.models.others_child FOLDER --out docs/other_models.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat import _shim

CALLS: dict[str, int] = {}
ACTED: dict[str, set[str]] = {}
FAILED: dict[str, str] = {}
TRACE: list[str] = []


def spy_on(engine: Any) -> None:
    """Each patch that is not applied yet, with replacements that note what they do."""
    for record in engine._records.values():
        assert not record.is_loaded, f"{record.id} was loaded before anybody looked"
        record._source = record._source._replace(load=lambda load=record._source.load: spied(load()))


def spied(patch: Any) -> Any:
    """The patch, with replacements that note what they do."""
    targets = tuple(dataclasses.replace(one, replacement=_spy(patch.id, one)) for one in patch.targets)
    return dataclasses.replace(patch, targets=targets)


def _spy(patch_id: str, target: Any) -> Callable[..., Any]:
    def replacement(original: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[patch_id] = CALLS.get(patch_id, 0) + 1
        calls: list[Any] = []

        @functools.wraps(original)
        def watched(*given: Any, **named: Any) -> Any:
            calls.append([given, named, None])
            calls[-1][2] = result = original(*given, **named)
            return result

        def acted() -> None:
            ACTED.setdefault(patch_id, set()).add(str(target))

        try:
            result = target.replacement(watched, *args, **kwargs)
        except Exception:
            if len(calls) != 1:
                acted()
            raise
        if len(calls) != 1 or calls[0][2] is not result or not _same(original, (args, kwargs), calls[0]):
            acted()
        return result

    return replacement


def _same(function: Any, given: Any, passed: Any) -> bool:
    if given[0] != passed[0] or given[1].keys() != passed[1].keys():
        signature = inspect.signature(function)
        given, passed = (_bound(signature, *call[:2]) for call in (given, passed))
    else:
        given, passed = [*given[0], *given[1].values()], [*passed[0], *passed[1].values()]
    return len(given) == len(passed) and all(one is other for one, other in zip(given, passed))


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> list[Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return [*bound.args, *bound.kwargs.values()]


@contextlib.contextmanager
def step(name: str) -> Any:
    """A step that may fail with upstream's own error, which is noted."""
    import torch

    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    except Exception as error:  # noqa: BLE001
        FAILED[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        TRACE.append(f"{name}: {type(error).__name__}: {error}")
    TRACE.extend(f"{name}: {one.category.__name__}: {one.message}" for one in caught)


class Lines(logging.Handler):
    """Log lines, in the trace."""

    def emit(self, record: logging.LogRecord) -> None:
        TRACE.append(f"{record.name}: {record.getMessage()}")


def note(name: str, *tensors: Any, model: Any = None) -> None:
    """Put digests of tensors, and of all that a model is, into the trace."""
    TRACE.append(f"{name}: {', '.join(map(_hash, tensors))}")
    if model is not None:
        weights = [*model.named_parameters(), *model.named_buffers()]
        parts = {
            "map": getattr(model, "hf_device_map", None),
            "config": model.config.to_dict() if hasattr(model.config, "to_dict") else model.config,
            "modules": [_described(path, module) for path, module in model.named_modules()],
            "placement": [(path, one.device, one.dtype, one.shape, one.requires_grad) for path, one in weights],
            "values": [(path, _hash(one), _hash(one.grad)) for path, one in weights],
        }
        for part, value in parts.items():
            text = _plain(str(value))
            TRACE.append(f"{name}: {part} {text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()}")


def _plain(text: str) -> str:
    """The text without addresses, and without folders whose names are drawn."""
    return re.sub(r"0x[0-9a-f]+|/tmp/[^\s'\"]+", "?", text)


def _described(path: str, module: Any) -> list[str]:
    hook = vars(module).get("_hf_hook")
    settings = {key: str(vars(hook).get(key)) for key in ("execution_device", "offload", "skip_keys")} if hook else {}
    return [path, str(type(module)), str(type(hook)), str(settings), *sorted(vars(module))]


def _hash(tensor: Any) -> str:
    import torch

    if tensor is None or tensor.device.type == "meta":
        return "-"
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def models() -> dict[str, Any]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32}
    common |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False)),
        "gemma3": Gemma3ForCausalLM(Gemma3TextConfig(**common, sliding_window=8, tie_word_embeddings=True)),
    }


class Run:
    """What is done with one model."""

    def __init__(self, name: str, model: Any, folder: Path) -> None:
        import torch

        self.name, self.folder, self.cls = name, folder, type(model)
        self.ids = torch.arange(3, 15).reshape(1, 12)
        self.embedded = torch.zeros(1, 12, 64, dtype=torch.bfloat16)
        self.checkpoint = folder / "checkpoint"
        model.to(torch.bfloat16).save_pretrained(self.checkpoint)
        self.count = 0

    def load(self, bits: int | None = None, device_map: Any = None, **options: Any) -> Any:
        import torch
        from transformers import BitsAndBytesConfig

        chosen = {4: {"load_in_4bit": True}, 8: {"load_in_8bit": True}}.get(bits or 0)
        if chosen is not None:
            chosen |= {"llm_int8_enable_fp32_cpu_offload": True} if device_map == "disk" else {}
            options["quantization_config"] = BitsAndBytesConfig(**chosen, llm_int8_skip_modules=["lm_head"])
        placement = {"": "cpu"} if device_map is None else device_map
        if placement == "disk":
            placement = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
            placement |= {"model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
            options["offload_folder"] = str(self.place())
        return self.cls.from_pretrained(self.checkpoint, dtype=torch.bfloat16, device_map=placement, **options)

    def split(self, bits: int | None = None, **options: Any) -> Any:
        from accelerate import dispatch_model

        placement = dict.fromkeys(["model.embed_tokens", "lm_head", "model.layers.0", "model.layers.2"], "disk")
        placement |= dict.fromkeys(["model.layers.1", "model.norm", "model.rotary_emb"], "cpu")
        return dispatch_model(self.load(bits), placement, main_device="cpu", offload_dir=str(self.place()), **options)

    def place(self) -> Path:
        self.count += 1
        return self.folder / f"place-{self.count}"

    def use(self, model: Any) -> None:
        import torch

        with torch.no_grad():
            note(self.name, model(input_ids=self.ids).logits, model=model)
            asked = model(input_ids=self.ids, output_attentions=True)
            note(f"{self.name}: output_attentions", asked.logits, *(asked.attentions or ()))
            for options in (
                *({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}),
                *({"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 2}, {"inputs_embeds": self.embedded}),
            ):
                given = {"input_ids": self.ids} | options
                with step(f"{self.name}: generate {sorted(options)}"):
                    made = model.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0)
                    note(f"{self.name}: generate {sorted(options)}", made)

    def tuned(self, model: Any, kind: str = "LoraConfig", **options: Any) -> Any:
        import peft

        targets = {"target_modules": ["q_proj", "up_proj"]} | options
        if kind == "IA3Config":
            targets |= {"feedforward_modules": ["up_proj"]}
        if kind == "AdaLoraConfig":
            targets |= {"total_step": 10}
        return peft.get_peft_model(model, getattr(peft, kind)(**targets))

    def train(self, model: Any, **checkpointing: Any) -> None:
        if checkpointing:
            model.gradient_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        loss = model.train()(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        note(f"{self.name}: train", loss, model=model)

    def plain(self) -> None:
        from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch

        self.use(self.load())
        self.use(self.load(device_map="disk"))
        with step(f"{self.name}: early exit"):
            made = self.load().generate(self.ids, max_new_tokens=3, assistant_early_exit=1, pad_token_id=0)
            note(f"{self.name}: early exit", made)
        with step(f"{self.name}: auto"):
            self.use(self.load(device_map="auto", max_memory={"cpu": 10**6}, offload_folder=str(self.place())))
        model = self.split()
        self.use(model)
        model.load_state_dict({"model.norm.weight": model.state_dict()["model.norm.weight"]}, strict=False)
        model.tie_weights()
        with step(f"{self.name}: move"):
            model.cpu()
        model.half().float()
        with step(f"{self.name}: resize"):
            self.split().resize_token_embeddings(70)
        with step(f"{self.name}: save"):
            self.load(device_map="disk").save_pretrained(folder := self.place())
            note(f"{self.name}: save", *(self.cls.from_pretrained(folder).parameters()))
        with step(f"{self.name}: save state"):
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            accelerator.prepare(self.split().requires_grad_(False).eval())
            accelerator.save_state(str(folder := self.place()))
            accelerator.load_state(str(folder))
        with step(f"{self.name}: trainer"):
            from transformers import Trainer, TrainingArguments

            arguments = TrainingArguments(output_dir=str(self.place()), report_to=[], use_cpu=True, max_steps=1)
            batches = [{"input_ids": self.ids[0], "labels": self.ids[0]}]
            trainer = Trainer(model=self.load(), args=arguments, train_dataset=batches)
            trainer.train()
            note(f"{self.name}: trainer", model=trainer.model)
        with init_empty_weights():
            empty = self.cls(self.load().config)
        TRACE.append(str(infer_auto_device_map(empty, max_memory={"cpu": 10**6})))
        with step(f"{self.name}: load and dispatch"):
            file = self.checkpoint / "model.safetensors"
            placement = {"": "cpu", "model.layers.1": "disk"}
            load_checkpoint_and_dispatch(empty, str(file), device_map=placement, offload_folder=str(self.place()))
        from transformers import pipeline

        split = self.split()
        split.hf_device_map = {"model.embed_tokens": "disk", "": "cpu"}
        for model in (self.load(), split):
            with step(f"{self.name}: pipeline"):
                pipeline("text-generation", model=model, tokenizer=object())
        self.use(split)

    def adapted(self, bits: int | None) -> None:
        from accelerate import Accelerator
        from peft import PeftModel, prepare_model_for_kbit_training

        for load in (self.load, self.split):
            tuned = self.tuned(load(bits))
            self.use(tuned)
            for name, act in {
                "merge": lambda tuned=tuned: (tuned.merge_adapter(), tuned.unmerge_adapter()),
                "train": lambda tuned=tuned: self.train(tuned),
                "checkpointing": lambda tuned=tuned: self.train(tuned, use_reentrant=True),
                "prepare": lambda tuned=tuned: Accelerator(cpu=True).prepare(tuned),
                "merge and unload": lambda tuned=tuned: tuned.merge_and_unload(),
            }.items():
                with step(f"{self.name} {bits} {load.__name__}: {name}"):
                    act()
                    note(f"{self.name} {bits} {load.__name__}: {name}", model=tuned)
        with step(f"{self.name} {bits}: resized"):
            model = self.load(bits)
            model.resize_token_embeddings(70)
            self.tuned(model).save_pretrained(self.place())
        for kind in ("PrefixTuningConfig", "PromptTuningConfig"):
            with step(f"{self.name} {bits}: {kind}"):
                import peft

                config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
                self.use(peft.get_peft_model(self.load(bits), config))
        adapter = self.place()
        self.tuned(self.load(), modules_to_save=["lm_head"]).save_pretrained(adapter)
        with step(f"{self.name} {bits}: loaded adapter"):
            self.use(PeftModel.from_pretrained(self.split(bits), adapter))
        with step(f"{self.name} {bits}: load_adapter"):
            model = self.load(bits, device_map="disk")
            model.load_adapter(str(adapter))
            self.use(model)
        for kind in ("IA3Config", "VeraConfig", "AdaLoraConfig", "RandLoraConfig", "RoadConfig"):
            with step(f"{self.name} {bits}: {kind}"):
                self.train(self.tuned(self.load(bits), kind))
        if bits:
            with step(f"{self.name} {bits}: k-bit training"):
                prepare_model_for_kbit_training(self.load(bits))
            with step(f"{self.name} {bits}: dequantize"):
                self.load(bits).dequantize()
            with step(f"{self.name} {bits}: offloaded, quantized"):
                self.use(self.load(bits, device_map="disk"))


def main(folder: Path, names: list[str]) -> dict[str, Any]:
    spy_on(_shim.engine)
    import torch

    warnings.simplefilter("ignore")
    for library in ("gemma4_compat", "transformers", "accelerate", "peft", "bitsandbytes"):
        logging.getLogger(library).addHandler(Lines())
    # Patches that wait for these modules as well are applied only with them.
    for module in ("modeling_gemma4", "configuration_gemma4"):
        importlib.import_module(f"transformers.models.gemma4.{module}")
    torch.manual_seed(0)
    for name, model in models().items():
        if name not in names:
            continue
        run = Run(name, model, folder / name)
        run.plain()
        for bits in (None, 4, 8):
            run.adapted(bits)
    acted = {key: sorted(value) for key, value in sorted(ACTED.items())}
    found = {"versions": _versions(), "acted": acted, "calls": dict(sorted(CALLS.items())), "upstream_errors": FAILED}
    return found | {"trace": list(map(_plain, TRACE))}


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
    return {name: importlib.metadata.version(name) for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["llama", "gemma3"])
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    result = main(given.folder, given.models)
    if not given.trace:
        del result["trace"]
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
