"""Reproductions: the situation a patch is for, built through public API on a tiny checkpoint, in a process of its own.

``python -m gemma4_compat._repro ID FOLDER`` runs one and prints one line of JSON; ``doctor`` runs it twice, with the
shim off and on. ``build FOLDER [VARIANT]`` instead makes the folder. The main device is the first GPU where there is
one; then "cpu" entries are offloaded to the host. Without a GPU the main device is the CPU and modules are offloaded
to disk: accelerate uses the same hooks and meta weights for both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat import _tiny, _variants

ADAPTERS = ("language", "towers", "all")
#: A parity figure is the largest absolute logit difference over this many forwards; tokens of a generate must agree.
FORWARDS = 3
NEW_TOKENS = 6


@dataclass(frozen=True)
class Outcome:
    """What a reproduction found.

    Attributes:
        defect: the defect was seen.
        detail: what was seen, with the measured value.
        parity: largest absolute difference from the same weights on one device (0.0 is bit-exact); None where the
            reproduction compares something else than logits.
        applicable: the situation can exist here; False where this release lacks the model class, say, or this CPU the
            instructions (then ``defect`` is False and ``detail`` says what is missing).
    """

    defect: bool
    detail: str
    parity: float | None = None
    applicable: bool = True

    @classmethod
    def of_parity(cls, found: float, what: str) -> Outcome:
        """Any difference from the same weights on one device is a defect."""
        if found == 0.0:
            return cls(False, f"{what}: {FORWARDS} forwards and generate bit-exact", 0.0)
        return cls(True, f"{what}: logits differ by {found:.3g} from the same weights on one device", found)


@dataclass(frozen=True)
class Answers:
    """Logits of :data:`FORWARDS` forwards (float32, on the CPU) and the tokens of one greedy ``generate``."""

    logits: tuple[Any, ...]
    tokens: Any


class LackingError(Exception):
    """The variant in the workspace has nothing of what a reproduction is about; says what it lacks."""


class Workspace:
    """A folder with the tiny checkpoint and its adapters, and the ways a reproduction uses them.

    Its ``variant`` is None for the checkpoint that has nearly everything, or one of :data:`_variants.NAMES`.
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
        _tiny.build_checkpoint(workspace.checkpoint, variant=variant)
        for targets in ADAPTERS:
            _tiny.build_adapter(workspace.checkpoint, workspace.adapter(targets), targets)
        return workspace

    def needs(self, part: str) -> None:
        """Say that a reproduction is about ``part``, one of :data:`_variants.PARTS`.

        Raises:
            LackingError: the variant at hand has none; the reproduction is then not applicable.
        """
        if self.variant is not None and part not in _variants.parts(self.variant):
            raise LackingError(f"the {self.variant} has no {_variants.PARTS[part]}")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def adapter(self, targets: str) -> Path:
        return self.folder / f"adapter-{targets}"

    def made(self, build: Callable[..., Any], **options: Any) -> Path:
        """A folder that ``build(folder, **options)`` filled, the first time it is asked for; options are numbers or
        names. Another reproduction that runs at the same time gets the complete folder or makes it itself.
        """
        name = "-".join([build.__name__.strip("_"), *(f"{key}-{value}" for key, value in sorted(options.items()))])
        folder = self.folder / name
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self.folder))
            build(unfinished, **options)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.exists():  # nobody else was faster
                    raise
                shutil.rmtree(unfinished)
        return folder

    def misfit(self) -> Path:
        """An adapter that was made for a base model of another width (two of its tensors are)."""
        return self.made(self._misfit)

    def unified(self) -> Workspace | None:
        """A workspace with the 12B in it; None where the installed transformers has no such model.

        Raises:
            LackingError: another variant is in this one.
        """
        import transformers

        self.needs("unified")
        if not hasattr(transformers, "Gemma4UnifiedConfig"):
            return None
        if self.variant == _variants.UNIFIED:
            return self
        return Workspace(self.made(self._unified))

    def _unified(self, folder: Path) -> None:
        Workspace.build(folder, _variants.UNIFIED)

    def larger(self, **options: int) -> Path:
        """The checkpoint with more ``layers``, or another ``table``, see :func:`_tiny.build_checkpoint`."""
        variant = {} if self.variant is None else {"variant": self.variant}
        return self.made(_tiny.build_checkpoint, **options, **variant)

    def inputs(self, *, text_only: bool = False) -> dict[str, Any]:
        """:func:`_tiny.inputs` for the checkpoint at hand, on the main device."""
        return _tiny.inputs(self.main, text_only=text_only, variant=self.variant)

    def load_assistant(self, quantization: str | None = None) -> Any:
        """An assistant model for :meth:`load`'s, to be given to its ``generate`` as ``assistant_model``.

        Raises:
            ImportError: the installed transformers has none for it.
        """
        return _tiny.load(
            self.made(self._assistant), quantization, device=self.main, cls=_tiny.assistant_class(self.checkpoint)
        )

    def _assistant(self, folder: Path) -> None:
        _tiny.build_assistant(self.checkpoint, folder, variant=self.variant)

    def _misfit(self, folder: Path) -> None:
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
        """Where the model computes: GPU 0, or the CPU where there is none."""
        import torch

        return 0 if torch.cuda.is_available() else "cpu"

    @property
    def offloaded(self) -> str:
        """Where a map puts what does not fit: the CPU beside a GPU, else the disk."""
        return "disk" if self.main == "cpu" else "cpu"

    def load(self, quantization: str | None = None) -> Any:
        """The base model, everything on the main device, eval mode."""
        return _tiny.load(self.checkpoint, quantization, device=self.main)

    def load_text(self) -> Any:
        """:meth:`load`'s language model as a ``Gemma4ForCausalLM`` (or the 12B's): the same weights, from a checkpoint
        of its own.
        """
        twin = self.made(self._text_twin)
        return _tiny.load(twin, device=self.main, cls=_tiny.class_name(twin, text_only=True))

    def _text_twin(self, folder: Path) -> None:
        _tiny.build_text_twin(self.checkpoint, folder)

    def text_adapter(self) -> Path:
        """An adapter made with :meth:`load_text`, for layers that only a language model has."""
        return self.made(self._text_adapter)

    def _text_adapter(self, folder: Path) -> None:
        targets: Any = ["per_layer_input_gate", "per_layer_projection"]
        if self.variant is not None and "per_layer_embeddings" not in _variants.parts(self.variant):
            targets = r".*\.layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)"
        _tiny.write_adapter(self.load_text(), targets, folder)

    def split(self, quantization: str | None = None, offload: str = "both") -> Any:
        """The base model loaded like :meth:`load`, then dispatched with ``offload`` (see :func:`_tiny.device_map`)."""
        return self.dispatch(self.load(quantization), offload)

    def dispatch(self, model: Any, offload: str = "both") -> Any:
        return self.dispatch_map(model, _tiny.device_map(model, offload, main=self.main, offloaded=self.offloaded))

    def dispatch_map(self, model: Any, placement: dict[str, Any]) -> Any:
        """Dispatch a loaded model with any map; weights on disk go to a new folder."""
        return _tiny.dispatch(model, placement, Path(tempfile.mkdtemp(prefix="offload-", dir=self.folder)))

    def answers(self, model: Any, *, text_only: bool = False) -> Answers:
        """Three forwards and a greedy generate on a prompt with an image and a sound, without gradients."""
        import torch

        batch = self.inputs(text_only=text_only)
        # A place for an image that is not there is read by some classes as padding, by others as a word.
        places = [_tiny.IMAGE_TOKEN, _tiny.AUDIO_TOKEN, _tiny.VIDEO_TOKEN]
        options = {} if self.variant is None else {"suppress_tokens": places}
        with torch.no_grad():
            logits = tuple(model(**batch).logits.float().cpu() for _ in range(FORWARDS))
            tokens = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, **options).cpu()
        return Answers(logits, tokens)


def difference(reference: Answers, other: Answers) -> float:
    """The largest absolute logit difference over all forwards; infinite for a NaN or another token."""
    import torch

    if not torch.equal(reference.tokens, other.tokens):
        return math.inf
    found = [(a - b).abs().max().item() for a, b in zip(reference.logits, other.logits)]
    # Each one is looked at: `max` would pass over a NaN that is not the first.
    return max(found) if all(math.isfinite(value) for value in found) else math.inf


def assisted(workspace: Workspace, *, without_arguments: bool = False) -> Outcome:
    """Whether generating with an assistant model gives the tokens that it gives without.

    ``without_arguments``: the crash that transformers-assistant-arguments repairs is raised: it is in question.
    """
    import torch

    model, batch = workspace.load(), workspace.inputs()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    alone = model.generate(**batch, **options)
    try:
        assistant = workspace.load_assistant()
    except ImportError as error:
        return Outcome(False, str(error), applicable=False)
    try:
        helped = model.generate(**batch, **options, assistant_model=assistant)
    except ValueError as error:
        if "Cannot `crop`" not in str(error):
            raise
        return Outcome(False, "this release cannot take tokens back from a sliding cache", applicable=False)
    except TypeError as error:
        if without_arguments or "CandidateGenerator.__init__" not in str(error):
            raise
        return Outcome(False, "this release cannot call the assistant it makes", applicable=False)
    if torch.equal(alone, helped):
        return Outcome(False, f"{NEW_TOKENS} tokens with an assistant model are those without")
    return Outcome(True, "with an assistant model other tokens are generated")


def transposed(layer: Any) -> Outcome:
    """Whether a linear has the same outputs for a transposed input, (1, 8, in_features) in bfloat16, and its copy."""
    import torch

    columns = torch.randn(1, layer.in_features, 8, generator=torch.Generator().manual_seed(0))
    columns = columns.to(layer.weight.device, torch.bfloat16)
    with torch.no_grad():
        found, expected = layer(columns.transpose(1, 2)), layer(columns.transpose(1, 2).contiguous())
    worst = (found - expected).abs().max().item()
    scale = expected.abs().max().item()
    if worst:
        return Outcome(True, f"a transposed input's outputs, of up to {scale:.2g}, are off by up to {worst:.2g}")
    return Outcome(False, "a transposed input and its contiguous copy have bit-equal outputs", 0.0)


def promised_states(model: Any, batch: dict[str, Any]) -> list[str]:
    """Of which kinds of layers a model returns the keys and values that an assistant model asks for."""
    import torch

    with torch.no_grad():
        outputs = model(**batch, return_shared_kv_states=True)
    return sorted(getattr(outputs, "shared_kv_states", None) or {})


def features(model: Any, batch: dict[str, Any], sense: str) -> Any:
    """What the language model gets of the image (``sense`` "vision") or the sound ("audio") in ``batch``; float32,
    a row a soft token.
    """
    import torch

    inner = model.model  # not every release has these on the outer class
    with torch.no_grad():
        if sense == "vision":
            found = inner.get_image_features(batch["pixel_values"], batch["image_position_ids"], return_dict=True)
            parts = found.pooler_output
            pooled = torch.cat(list(parts)) if isinstance(parts, (list, tuple)) else parts
        else:
            found = inner.get_audio_features(batch["input_features"], batch["input_features_mask"], return_dict=True)
            pooled = found.pooler_output[found.attention_mask]
    return pooled.float().cpu()


def sensed(workspace: Workspace, quantization: str, sense: str) -> tuple[float, float]:
    """How a tower quantized with everything else compares: with the same weights, dequantized; and with itself for a
    quite different image or sound. Relative differences of its features, so 0 and about 1.4 are perfect.
    """
    batch = workspace.inputs()
    other = dict(batch, pixel_values=1 - batch["pixel_values"])
    if sense == "audio":
        other["input_features"] = -batch["input_features"]
    model = _tiny.load(workspace.checkpoint, quantization, device=workspace.main, towers=True)
    found, another = features(model, batch, sense), features(model, other, sense)
    plain = _tiny.dequantize(_tiny.load(workspace.checkpoint, quantization, device=workspace.main, towers=True))
    return relative(found, features(plain, batch, sense)), relative(another, found)


def relative(found: Any, reference: Any) -> float:
    """The size of the difference as a share of the size of ``reference`` (2-norms)."""
    return float((found - reference).norm() / reference.norm())


def stored_bytes(module: Any) -> int:
    """Bytes of a module's parameters and of what quantized ones keep beside them: scales, code books, offsets.

    As they were loaded: in a forward bitsandbytes repacks 4-bit weights for some CPUs, and may move 8-bit scales.
    """
    total = 0
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        parts = [parameter, getattr(parameter, "SCB", None), getattr(state, "offset", None)]
        for part in filter(None, (state, getattr(state, "state2", None))):
            parts += [part.absmax, part.code]
        total += sum(part.numel() * part.element_size() for part in parts if part is not None)
    return total


def run(patch_id: str, folder: Path) -> dict[str, Any]:
    """Run one reproduction here and describe what happened as JSON-able data; no exception escapes it but Ctrl-C.

    ``ID:reverted`` undoes every patch first, after the libraries were imported with them; ``ID:alone`` this one.
    """
    import gemma4_compat

    patch_id, _, mode = patch_id.partition(":")
    patch = {patch.id: patch for patch in gemma4_compat.patches()}[patch_id]
    if mode:
        for target in patch.targets:
            with contextlib.suppress(ModuleNotFoundError):  # of another release; the patch waits for it in vain
                importlib.import_module(target.module)
        gemma4_compat.revert(*([patch_id] if mode == "alone" else []))
    started = time.perf_counter()
    try:
        result: dict[str, Any] = dataclasses.asdict(patch.reproduce(Workspace(folder)))
    except LackingError as error:
        result = dataclasses.asdict(Outcome(False, str(error), applicable=False))
    except Exception as error:  # the user's crash is the result here
        message = " ".join(str(error).split())
        result = dataclasses.asdict(Outcome(True, f"{type(error).__name__}: {message}"))
    result["seconds"] = round(time.perf_counter() - started, 2)
    status = gemma4_compat.status()[patch_id]
    result["state"], result["reason"], result["detection"] = status.state, status.reason, status.detection
    return result


def main(argv: list[str]) -> int:
    command, folder = argv[0], Path(argv[1])
    if command == "build":
        workspace = Workspace.build(folder, argv[2] if len(argv) > 2 else None)
        # Beside a GPU a fork is not safe, and where a system's own libraries start threads.
        forks = sys.platform == "linux" and workspace.main == "cpu"
        result: dict[str, Any] = {"built": str(folder), "forks": forks}
    else:
        result = run(command, folder)
    print("\n" + json.dumps(result, allow_nan=True), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
