"""What a call is given: a model of a kind in a place, and what belongs to it."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import Workspace
from tests.generated.search.differential.table import KINDS, NotHereError


def prepare(folder: Path, kind: str) -> Workspace:
    """The workspace of a kind, with all that its calls read; kinds of one variant share it."""
    variant = KINDS[kind][0]
    place = folder / (variant or "tiny")
    if not place.exists():
        Workspace.build(place, variant)
    workspace = Workspace(place)
    if "-text" in kind:
        workspace.text_adapter()
    return workspace


def load(workspace: Workspace, kind: str) -> Any:
    """The base model of a kind on one device."""
    quantization = KINDS[kind][1]
    if "-text" in kind:
        return workspace.load_text()
    return tiny.load(workspace.checkpoint, quantization)


class World:
    """A kind of model in a place.

    Attributes:
        kind: a key of ``table.KINDS``.
        place: one of ``table.EVERYWHERE``.
        on: whether the package is.
        adapter_first: whether the model is dispatched with its adapter, by upstream alone.
        whole: whether no weight is offloaded, once :attr:`model` is there.
        quantization: of the kind.
        adapter_kind: of the kind.
        folder: an empty one.
    """

    def __init__(self, workspace: Workspace, kind: str, place: str, loaded: Any, adapter_first: bool = False) -> None:
        self.workspace = workspace
        self.kind = kind
        self.place = place
        self.on = "GEMMA4_COMPAT_DISABLE" not in os.environ
        self.adapter_first = adapter_first
        self.whole = False
        self.ready = False  # whether the model is there: an error before that is not the call's
        _, self.quantization, self.adapter_kind = KINDS[kind]
        self.folder = Path(tempfile.mkdtemp(prefix="call-"))
        self._loaded = loaded

    @property
    def split(self) -> bool:
        return self.place != "one"

    @property
    def text_class(self) -> bool:
        return "-text" in self.kind

    @property
    def checkpoint(self) -> Path:
        return self.workspace.cached(self.workspace._text_copy) if self.text_class else self.workspace.checkpoint

    @functools.cached_property
    def model(self) -> Any:
        """What the user calls: the model, dispatched to the place, with the kind's adapter."""
        base = self.fresh() if self.adapter_first else self.dispatch(self.fresh())
        model = base if self.adapter_kind is None else self.with_adapter(base)
        if self.adapter_first:
            self.dispatch(base)
        self.whole = not any(parameter.is_meta for parameter in model.parameters())
        self.ready = True
        return model

    @property
    def base(self) -> Any:
        """The transformers model of :attr:`model`."""
        return self.model if self.adapter_kind is None else self.model.get_base_model()

    @property
    def text(self) -> Any:
        """The text model of :attr:`base`."""
        inner = self.base.model
        return getattr(inner, "language_model", inner)

    def fresh(self, **options: Any) -> Any:
        """Another base model on one device."""
        ready, self._loaded = self._loaded, None
        if ready is not None and not options:
            return ready
        if self.text_class:
            return self.cls.from_pretrained(self.checkpoint, **options).eval()
        return tiny.load(self.checkpoint, self.quantization, **options)

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, tiny_models.class_name(self.checkpoint, text_only=self.text_class))

    def with_adapter(self, model: Any, folder: Any = None, **options: Any) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, folder or self.adapter(), **options).eval()

    def adapter(self, targets: str | None = None) -> Path:
        """The folder of an adapter; of the kind's own, or of the language model, unless ``targets`` names it."""
        targets = targets or self.adapter_kind or ("text" if self.text_class else "language")
        return self.workspace.text_adapter() if targets == "text" else self.workspace.adapter(targets)

    def map(self, model: Any, place: str | None = None) -> dict[str, Any]:
        """The map of a place, for ``dispatch_model``."""
        import torch

        place = place or self.place
        ram = place in ("ram", "embeddings")
        main: Any = torch.device("cpu") if ram else "cpu"
        away = "cpu" if ram else "disk"
        inner = model.model
        text = getattr(inner, "language_model", inner)
        before = "model." if text is inner else "model.language_model."
        last = len(text.layers) - 1
        names: list[str] = []
        for name, child in text.named_children():
            names += [f"layers.{index}" for index in range(len(child))] if name == "layers" else [name]
        parts = [f"{before}{name}" for name in names]
        parts += [f"model.{name}" for name, child in inner.named_children() if text is not inner and child is not text]
        if place == "embeddings":
            chosen = {f"{before}embed_tokens", f"{before}embed_tokens_per_layer", "lm_head", f"{before}layers.1"}
        else:
            chosen = {f"{before}layers.{index}" for index in (0, 2, last)}
            chosen |= set() if text is inner else {f"model.{name}" for name in tiny.towers(model)}
        return {name: away if name in chosen else main for name in [*parts, "lm_head"]}

    def dispatch(self, model: Any, place: str | None = None, **options: Any) -> Any:
        """``dispatch_model`` as transformers calls it; nothing for one device."""
        from accelerate import dispatch_model

        place = place or self.place
        if place == "one":
            return model
        placement = self.map(model, place)
        import torch

        if place == "disk":
            options["offload_dir"] = self.new_folder("offload")
        else:
            options["main_device"] = torch.device("cpu")
        return dispatch_model(model, placement, skip_keys=tiny.skip_keys(model), **options)

    def new_folder(self, prefix: str = "new") -> str:
        return tempfile.mkdtemp(prefix=f"{prefix}-", dir=self.folder)

    def inputs(self, *, media: bool = True, batch: int = 1, padded: bool = False) -> dict[str, Any]:
        """A prompt of 24 tokens, with an image and a sound where the model takes them; ``padded``: on the left."""
        import torch

        one = self.workspace.inputs(text_only=self.text_class or not media, device="cpu")
        found = {name: torch.cat([value] * batch) for name, value in one.items()}
        for row in range(1, batch):
            found["input_ids"][row, 17:] = found["input_ids"][row, 17:].flip(0)
            if padded:
                found["input_ids"][row, :3] = 0
                found["attention_mask"][row, :3] = 0
        return found

    def logits(self, model: Any = None, *, media: bool = True) -> Any:
        """What most calls end with: does the model still answer as it should?"""
        import torch

        model = self.model if model is None else model
        with torch.no_grad():
            return model(**self.inputs(media=media)).logits

    def tokens(self, model: Any = None, *, media: bool = True, **options: Any) -> Any:
        """The tokens of a ``generate``: greedy, four of them, unless ``options`` say otherwise."""
        import torch

        model = self.model if model is None else model
        given = {"max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4} | options
        with torch.no_grad():
            return model.generate(**self.inputs(media=media), **given)

    def needs(self, condition: Any, what: str) -> None:
        """Leave the entry out where something does not exist.

        Raises:
            NotHereError: it does not.
        """
        if not condition:
            raise NotHereError(what)

    def train_step(self, model: Any = None, *, media: bool = True, learning_rate: float = 0.05) -> dict[str, Any]:
        """A loss, its gradients, and the loss after a step of SGD."""
        import torch

        model = self.model if model is None else model
        batch = self.inputs(media=media)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=learning_rate)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        # PEFT's AdaLoRA counts its ranks in parameters that no one means to train.
        with_grad = {n: value for n, value in trained.items() if value.grad is not None and "ranknum" not in n}
        norm = {name: value.grad.float().norm() for name, value in with_grad.items()}
        optimizer.step()
        optimizer.zero_grad()
        after = model(**batch, labels=batch["input_ids"]).loss
        return {"loss": loss, "gradients": norm, "after": after}
