"""A workspace for reproductions: a tiny checkpoint, its adapters, and ways to load, dispatch and compare them.

The main device is the first GPU if there is one; "cpu" entries of a map are then offloaded to the host. Without a GPU
the main device is the CPU and modules are offloaded to disk: accelerate uses the same hooks and meta weights for both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import FORWARDS
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_adapters, tiny_configs, tiny_models, tiny_qat

ADAPTERS = ("language", "towers", "all")
NEW_TOKENS = 6
#: Loaded models that are not used yet, by checkpoint and quantization.
_preloaded: dict[tuple[Path, str | None], list[Any]] = {}
#: Results of :meth:`Workspace.reference`, by the same.
_references: dict[tuple[Path, str | None], Outputs] = {}


@dataclass(frozen=True)
class Outputs:
    """Logits of :data:`FORWARDS` forwards (float32, on the CPU) and the tokens of one greedy ``generate``."""

    logits: tuple[Any, ...]
    tokens: Any


class MissingPartError(Exception):
    """The variant in the workspace lacks the part that a reproduction needs."""


class Workspace:
    """A folder with the tiny checkpoint and its adapters, and the ways a reproduction uses them.

    ``variant`` is one of :data:`variants.NAMES`, or None for a checkpoint with nearly every part.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "variant"
        self.variant = file.read_text(encoding="utf-8") if file.exists() else None

    @classmethod
    def build(cls, folder: Path, variant: str | None = None) -> Workspace:
        """Write the checkpoint and one adapter for each of :data:`ADAPTERS`.

        Raises:
            Gemma4CompatError: the installed transformers has no such variant.
        """
        if variant is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "variant").write_text(variant, encoding="utf-8")
        workspace = cls(folder)
        tiny_models.build_checkpoint(workspace.checkpoint, variant=variant)
        for targets in ADAPTERS:
            tiny_adapters.build_adapter(workspace.checkpoint, workspace.adapter(targets), targets)
        return workspace

    def copied(self, folder: Path) -> Workspace:
        """Copy it to ``folder``; the copied adapters name the copied checkpoint as their base."""
        copy = Workspace(shutil.copytree(self.folder, folder, dirs_exist_ok=True))
        for name, written in (("adapter_config.json", _quoted), ("README.md", str)):
            for file in folder.glob(f"adapter-*/{name}"):
                text = file.read_text(encoding="utf-8")
                file.write_text(text.replace(written(self.checkpoint), written(copy.checkpoint)), encoding="utf-8")
        return copy

    def needs(self, part: str) -> None:
        """Require ``part``, one of :data:`variants.PARTS`.

        Raises:
            MissingPartError: the variant lacks it, so the reproduction is not applicable.
        """
        if self.variant is not None and part not in variants.parts(self.variant):
            raise MissingPartError(f"the {self.variant} has no {variants.PARTS[part]}")

    def needs_second_device(self) -> None:
        """Require a PyTorch that can emulate a second device.

        Raises:
            MissingPartError: it cannot, so the reproduction is not applicable.
        """
        from gemma4_compat._lab.stand_ins import second_device

        if not second_device.available():
            raise MissingPartError("this PyTorch takes no backend in Python, to be the second device")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def adapter(self, targets: str) -> Path:
        return self.folder / f"adapter-{targets}"

    def cached(self, build: Callable[..., Any], **options: Any) -> Path:
        """A folder that ``build(folder, **options)`` filled on the first request; options are numbers or names.

        A reproduction that runs at the same time gets the complete folder or builds it itself.
        """
        name = "-".join([build.__name__.strip("_"), *(f"{key}-{value}" for key, value in sorted(options.items()))])
        folder = self.folder / name
        if not folder.exists():
            unfinished = self.new_folder()
            build(unfinished, **options)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.exists():  # no other process has built it in the meantime
                    raise
                shutil.rmtree(unfinished)
        return folder

    def mismatched_adapter(self) -> Path:
        """An adapter for a base model of another width (two of its tensors have other shapes)."""
        return self.cached(self._mismatched_adapter)

    def adapter_on(self, name: str, targets: Any) -> Path:
        """An adapter on other modules, PEFT's ``targets``; ``name`` is that of its folder."""

        def adapter(folder: Path, name: str) -> None:
            tiny_adapters.write_adapter(self.load(), targets, folder)

        return self.cached(adapter, name=name)

    def unified(self) -> Workspace | None:
        """A workspace with the 12B; None if the installed transformers has no such model.

        Raises:
            MissingPartError: this workspace has another variant.
        """
        import transformers

        self.needs("unified")
        if not hasattr(transformers, "Gemma4UnifiedConfig"):
            return None
        if self.variant == variants.UNIFIED:
            return self
        return Workspace(self.cached(self._unified))

    def _unified(self, folder: Path) -> None:
        Workspace.build(folder, variants.UNIFIED)

    def larger(self, **options: int) -> Path:
        """The checkpoint with other options of :func:`tiny_models.build_checkpoint`, such as more ``layers``."""
        variant = {} if self.variant is None else {"variant": self.variant}
        return self.cached(tiny_models.build_checkpoint, **options, **variant)

    def qat(self, **options: bool) -> Path:
        """The checkpoint in the format of Google's quantization-aware-trained ones; see
        :func:`tiny_qat.build_qat_checkpoint` for ``options``.

        Raises:
            MissingPartError: the installed transformers cannot read it, so the reproduction is not applicable.
        """
        if importlib.util.find_spec("transformers.integrations.gemma_quant") is None:
            raise MissingPartError("this release of transformers reads no QAT checkpoints")
        return self.cached(self._qat, **options)

    def _qat(self, folder: Path, **options: bool) -> None:
        tiny_qat.build_qat_checkpoint(self.checkpoint, folder, **options)

    def packed(self, **options: Any) -> Path:
        """The checkpoint with packed weights of 4 bits; see :func:`tiny_qat.build_packed_checkpoint` for ``options``.

        Raises:
            MissingPartError: there is no compressed-tensors that reads it, so the reproduction is not applicable.
        """
        if not versions.admits(">=0.15", versions.installed("compressed-tensors") or "0"):
            raise MissingPartError("compressed-tensors 0.15 or newer, which reads such checkpoints, is not installed")
        return self.cached(self._packed, **options)

    def _packed(self, folder: Path, **options: Any) -> None:
        tiny_qat.build_packed_checkpoint(self.checkpoint, folder, **options)

    def inputs(self, *, text_only: bool = False, device: Any = None) -> dict[str, Any]:
        """:func:`tiny.inputs` for the checkpoint at hand, on the main device unless another is given."""
        device = self.main if device is None else device
        return tiny.inputs(device, text_only=text_only, variant=self.variant)

    def load_assistant(self, quantization: str | None = None, *, offloaded: bool = False) -> Any:
        """An assistant model for the model of :meth:`load`: its ``generate`` takes it as ``assistant_model``.

        ``offloaded``: its first module, whose weight its forward looks at, is.

        Raises:
            ImportError: the installed transformers has no assistant for it.
        """
        away: dict[str, Any] = {}
        if offloaded:
            placement = dict.fromkeys(("model", "lm_head", "post_projection"), self.main)
            placement["pre_projection"] = self.offloaded
            away = {"device_map": placement, "offload_folder": self.new_folder()}
        return tiny.load(
            self.cached(self._assistant),
            quantization,
            device=self.main,
            cls=tiny_models.assistant_class(self.checkpoint),
            **away,
        )

    def _assistant(self, folder: Path) -> None:
        tiny_models.build_assistant(self.checkpoint, folder, variant=self.variant)

    def _mismatched_adapter(self, folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        shutil.copytree(self.adapter("language"), folder, dirs_exist_ok=True)
        weights = load_file(folder / "adapter_model.safetensors")
        for end, shape in (("0.mlp.up_proj.lora_A.weight", (4, 96)), ("3.mlp.up_proj.lora_B.weight", (96, 4))):
            (name,) = [name for name in weights if name.endswith(f"language_model.layers.{end}")]
            weights[name] = torch.zeros(shape)
        save_file(weights, folder / "adapter_model.safetensors")

    @property
    def main(self) -> Any:
        """The device the model computes on: GPU 0, or the CPU if there is none."""
        import torch

        return 0 if torch.cuda.is_available() else "cpu"

    @property
    def offloaded(self) -> str:
        """Where a map offloads to: the CPU if there is a GPU, else the disk."""
        return "disk" if self.main == "cpu" else "cpu"

    def load(self, quantization: str | None = None, *, towers: bool = False) -> Any:
        """The base model on the main device, in eval mode; see :func:`tiny.load` for ``towers``."""
        if towers and tiny.plain_towers(tiny_models.class_name(self.checkpoint).startswith("Gemma4Unified")):
            return tiny.load(self.checkpoint, quantization, device=self.main, towers=True)
        ready = _preloaded.get((self.checkpoint, quantization))
        return ready.pop() if ready else tiny.load(self.checkpoint, quantization, device=self.main)

    def load_31b(self) -> Any:
        """A model like that of :meth:`load`, with a language model like the 31B's, whose layers share nothing."""
        return tiny.load(self.cached(tiny_models.build_checkpoint, text_variant="31B"), device=self.main)

    def load_unmarked(self, quantization: str | None = None) -> Any:
        """As :meth:`load`, without the marks at which accelerate before 1.14 fails: F1 would come first."""
        model = self.load(quantization)
        for parameter in model.parameters():
            vars(parameter).pop("_is_hf_initialized", None)
        return model

    def preload(self, quantization: str | None = None, count: int = 1) -> None:
        """Load the base model for the next ``count`` calls of :meth:`load`, in this process or in a fork of it.

        Does not change the random numbers drawn afterwards. If loading fails, :meth:`load` raises the error later.
        """
        if not self.checkpoint.is_dir():
            return
        import torch

        ready = _preloaded.setdefault((self.checkpoint, quantization), [])
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            while len(ready) < count:
                ready.append(tiny.load(self.checkpoint, quantization, device=self.main))

    def reference(self, quantization: str | None = None) -> Outputs:
        """The outputs of an unchanged model of :meth:`load`, or those computed by :meth:`prepare`."""
        ready = _references.get((self.checkpoint, quantization))
        return ready or self.outputs(self.load(quantization))

    def prepare(self, quantization: str | None = None) -> None:
        """Compute the result of :meth:`reference` for this process and its forks; otherwise like :meth:`preload`."""
        if not self.checkpoint.is_dir():
            return
        import torch

        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            model = tiny.load(self.checkpoint, quantization, device=self.main)
            _references[self.checkpoint, quantization] = self.outputs(model)

    def forget(self) -> None:
        """Drop the results of :meth:`preload` and :meth:`prepare`, so that they are loaded and computed again."""
        _preloaded.clear()
        _references.clear()

    def load_text(self) -> Any:
        """The language model of :meth:`load` as a ``Gemma4ForCausalLM`` (or the 12B's class), from a separate
        checkpoint with the same weights.
        """
        checkpoint = self.cached(self._text_copy)
        return tiny.load(checkpoint, device=self.main, cls=tiny_models.class_name(checkpoint, text_only=True))

    def _text_copy(self, folder: Path) -> None:
        tiny_models.build_text_copy(self.checkpoint, folder)

    def text_adapter(self) -> Path:
        """An adapter for the model of :meth:`load_text`, on layers that only a language model has."""
        return self.cached(self._text_adapter)

    def _text_adapter(self, folder: Path) -> None:
        targets: Any = ["per_layer_input_gate", "per_layer_projection"]
        if self.variant is not None and "per_layer_embeddings" not in variants.parts(self.variant):
            targets = r".*\.layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)"
        tiny_adapters.write_adapter(self.load_text(), targets, folder)

    def split(self, quantization: str | None = None, offload: str = "both") -> Any:
        """The base model loaded like :meth:`load`, then dispatched with ``offload`` (see :func:`tiny.device_map`)."""
        return self.dispatch(self.load(quantization), offload)

    def device_map(self, model: Any, offload: str = "both", *names: str) -> dict[str, Any]:
        """:func:`tiny.device_map` for the devices at hand, with the modules ``names`` offloaded too."""
        placement = tiny.device_map(model, offload, main=self.main, offloaded=self.offloaded)
        return placement | dict.fromkeys(names, self.offloaded)

    def dispatch(self, model: Any, offload: str = "both", *names: str) -> Any:
        return self.dispatch_map(model, self.device_map(model, offload, *names))

    def dispatch_map(self, model: Any, placement: dict[str, Any]) -> Any:
        """Dispatch a loaded model with any map; weights on disk go to a new folder."""
        return tiny.dispatch(model, placement, self.new_folder())

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def outputs(self, model: Any, *, text_only: bool = False, device: Any = None) -> Outputs:
        """Three forwards and a greedy generate on a prompt with an image and audio, without gradients."""
        import torch

        batch = self.inputs(text_only=text_only, device=device)
        # Some classes read an image token without an image as padding, others as a word.
        places = [tiny_configs.IMAGE_TOKEN, tiny_configs.AUDIO_TOKEN, tiny_configs.VIDEO_TOKEN]
        options = {} if self.variant is None else {"suppress_tokens": places}
        with torch.no_grad():
            logits = tuple(model(**batch).logits.float().cpu() for _ in range(FORWARDS))
            tokens = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, **options).cpu()
        return Outputs(logits, tokens)

    def difference(self, expected: Outputs, found: Any, *, text_only: bool = False, device: Any = None) -> float:
        """:func:`difference` from ``expected``; ``found`` is :class:`Outputs` too, or the model that gives them."""
        if not isinstance(found, Outputs):
            found = self.outputs(found, text_only=text_only, device=device)
        return difference(expected, found)


def _quoted(path: Path) -> str:
    """A path as written between the quotes of a JSON file: on Windows each backslash is doubled."""
    return json.dumps(str(path))[1:-1]


def never_wait_for_the_disk() -> None:
    """In this process and its forks, no weight that accelerate offloads waits until the disk has it.

    accelerate flushes a mapping for each weight, hundreds for a tiny model, and a disk takes milliseconds for each.
    Linux shows every reader what a mapping holds without that; the files are temporary.
    """
    if sys.platform == "linux":
        import numpy

        numpy.memmap.flush = lambda self: None  # type: ignore[method-assign]


def difference(reference: Outputs, other: Outputs) -> float:
    """The largest absolute logit difference over all forwards; infinite for a NaN or a different token."""
    import torch

    if not torch.equal(reference.tokens, other.tokens):
        return math.inf
    found = [(a - b).abs().max().item() for a, b in zip(reference.logits, other.logits)]
    # Check each value: `max` would skip a NaN that is not the first.
    return max(found) if all(math.isfinite(value) for value in found) else math.inf
