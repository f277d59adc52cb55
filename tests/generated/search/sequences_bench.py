"""What sequences are run with: a model on one device or split, adapters of every kind, prompts.

:class:`World` is what the user has at a moment; operations change it. There are two for each sequence, one with the
model on one device and one with it split, and every operation is written once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny, tiny_configs
from tests.generated.search import run
from tests.generated.search.case import MAIN, Case, Map

#: The rank of every adapter: hot swapping and linear combination want equal ones.
RANK = 4


class SequenceBench(run.Bench):
    """A bench that also has an adapter of every kind, and host memory beside a main device that is the CPU."""

    def adapter_of(self, case: Case, kind: str, number: int) -> Path:
        key = ("adapter", kind, number, *case.config_key)
        return self._once(key, lambda: self._build(case, kind, number))

    def place(self, case: Case, offloaded_to: str, placement: Map) -> dict[str, Any]:
        """The map for ``dispatch_model``. Where the main device is the CPU, ``"cpu"`` is what leaves it for host
        memory, and ``torch.device("cpu")`` what stays.
        """
        import torch

        main = torch.device("cpu") if self.main == "cpu" else self.main
        return {name: main if place == MAIN else offloaded_to for name, place in placement}

    def dispatch(self, model: Any, case: Case, offloaded_to: str, placement: Map, folder: Path) -> Any:
        """The model, dispatched as transformers does it."""
        import torch
        from accelerate import dispatch_model

        asked = self.place(case, offloaded_to, placement)
        main = torch.device("cpu") if self.main == "cpu" else self.main
        skip = {"none": None, "own": getattr(model, "_skip_keys_device_placement", None)}[case.skip_keys]
        return dispatch_model(model, asked, main_device=main, offload_dir=str(folder), skip_keys=skip)

    def load(self, case: Case, folder: Path, *, split: bool, checkpoint: Path | None = None) -> Any:
        """A new model, of the case's checkpoint or another one."""
        self_checkpoint = checkpoint or self.checkpoint(case)
        load = functools.partial(self._from, case, self_checkpoint)
        if not split:
            return load({"": self.main})
        if case.load == "from_pretrained":
            return load(self.device_map(case), offload_folder=str(folder))
        return self.dispatch(load({"": self.main}), case, case.offloaded_to, case.placement, folder)

    def _from(self, case: Case, checkpoint: Path, device_map: dict[str, Any], **kwargs: Any) -> Any:
        import torch

        if checkpoint == self._known.get(("checkpoint", *case.config_key)):
            kwargs["quantization_config"] = tiny.quantization_config(case.quantization)  # a saved model knows its own
            kwargs["dtype"] = torch.bfloat16
        else:
            kwargs["dtype"] = "auto"
        return run.model_class(case).from_pretrained(checkpoint, device_map=device_map, **kwargs).eval()

    def adapter_config(self, case: Case, kind: str) -> Any:
        """The configuration of a new adapter whose weights are drawn, not zero."""
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(self.adapter_of(case, kind, 0))
        config.inference_mode = False
        config.init_lora_weights = False
        return config

    def _build(self, case: Case, kind: str, number: int) -> Path:
        import torch
        from peft import get_peft_model

        model = run.model_class(case).from_pretrained(self.checkpoint(case), dtype=torch.bfloat16)
        peft_model = get_peft_model(model, _config(model, kind))
        generator = torch.Generator().manual_seed(1 + number)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "lora_" in name and "magnitude" not in name:
                    parameter.copy_(0.2 * noise)
                elif parameter.requires_grad:
                    parameter.add_((0.1 * noise).to(parameter.dtype))
        folder = self._folder(f"adapter-{kind}-{number}")
        peft_model.save_pretrained(folder)
        return folder


def _config(model: Any, kind: str) -> Any:
    import re

    from peft import LoraConfig

    modules = dict(model.named_modules())
    targets = run.TARGETS.get(kind, run.TARGETS["text"])
    matched = [name for name in modules if re.fullmatch(targets, name)]
    # Clipped linears the way adapters in the wild have them, on the inner layer; that needs no patch.
    names = [f"{name}.linear" if f"{name}.linear" in modules else name for name in matched]
    options: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": names}
    embedding = next(name for name in modules if name.endswith("embed_tokens"))
    if kind == "dora":
        options |= {"use_dora": True}
    elif kind == "head":
        options |= {"target_modules": [*names[:2], embedding, "lm_head"]}
    elif kind == "save-head":
        options |= {"modules_to_save": ["lm_head"]}
    elif kind == "save-embedding":
        options |= {"modules_to_save": ["embed_tokens"]}
    elif kind == "tokens":
        options |= {"trainable_token_indices": {"embed_tokens": [3, 7, 11]}}
    return LoraConfig(**options)


class World:
    """A model and what belongs to it, on one device or split.

    Attributes:
        bench: checkpoints and adapters.
        case: of the sequence.
        split: whether the model is.
        model: what the user calls: a transformers model, or a PeftModel.
        handles: what ``remove_user_hooks`` undoes, callables.
        kept: models and other things that must stay alive.
        placement: the map in force; on one device the one that a split model would have.
    """

    def __init__(self, bench: SequenceBench, case: Case, *, split: bool) -> None:
        self.bench = bench
        self.case = case
        self.split = split
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=bench.folder))
        self.handles: list[Any] = []
        self.kept: list[Any] = []
        self.placement = case.placement
        self.model: Any = bench.load(case, self.new_folder("offload"), split=split)

    def new_folder(self, prefix: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=self.folder))

    def close(self) -> None:
        self.model = None
        self.handles.clear()
        self.kept.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def main(self) -> Any:
        return self.bench.main

    @property
    def is_peft(self) -> bool:
        return (
            hasattr(self.model, "peft_config")
            and hasattr(self.model, "base_model")
            and "Peft" in str(type(self.model))
        )

    @property
    def base(self) -> Any:
        """The transformers model."""
        return self.model.get_base_model() if self.is_peft else self.model

    @property
    def text(self) -> Any:
        """The text model of :attr:`base`."""
        inner = self.base.model
        return inner.language_model if hasattr(inner, "language_model") else inner

    def inputs(self, prompt: str, batch: str | None = None) -> dict[str, Any]:
        """A prompt of 24 tokens, on the main device; ``batch``: two of them, or ``"padded"``, two of other lengths."""
        import torch

        one = run.inputs(dataclasses.replace(self.case, prompt=prompt), self.main)
        if batch is None:
            return one
        two = {name: torch.cat([value, value]) for name, value in one.items()}
        two["input_ids"][1, 17:] = two["input_ids"][1, 17:].flip(0)
        if batch == "padded":
            two["input_ids"][1, :3] = 0
            two["attention_mask"][1, :3] = 0
        return two

    def tokens(self) -> int:
        """Of the vocabulary."""
        return tiny_configs.VOCABULARY

    @contextlib.contextmanager
    def autocast(self, dtype: str | None) -> Any:
        import torch

        if dtype in (None, "none"):
            yield
            return
        device = "cpu" if self.main == "cpu" else "cuda"
        with torch.autocast(device, dtype=getattr(torch, str(dtype))):
            yield
