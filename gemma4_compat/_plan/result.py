"""What :func:`gemma4_compat.plan_device_map` and :func:`gemma4_compat.plan_training` return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._memory import formulas
from gemma4_compat._memory.formulas import Load
from gemma4_compat._memory.layout import Layout
from gemma4_compat._memory.use import Use
from gemma4_compat._plan import speed


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is loaded, and how it is stored.

    Attributes:
        model: the requested model, as ``from_pretrained`` takes it.
        model_class: the class in ``transformers`` whose modules the map names.
        quantization: "4bit", "4bit-double", "8bit", or None.
        skip: ``llm_int8_skip_modules``.
        adapter: folder of a PEFT adapter to load onto it, or None.
        assistant: what drafts for it, as ``from_pretrained`` takes it, or None.
        speculative: whether texts with it are replayed (``decode_fast(assistants=True)``).
        experts: how the experts are stored, as for ``quantization``; None: in bf16, or the model has no experts.
        stored_experts: the checkpoint already has its experts in 4 bits.
        chosen_experts: nobody asked for experts in 4 bits, but in bf16 they would not all stay on the accelerator.
        assumed: what the plan assumes about the model; empty for a checkpoint.
        capability: the compute capability of the card; None: not known.
    """

    model: str
    model_class: str
    quantization: str | None
    skip: tuple[str, ...] = ()
    adapter: str | None = None
    assistant: str | None = None
    speculative: bool = False
    experts: str | None = None
    stored_experts: bool = False
    chosen_experts: bool = False
    assumed: str = ""
    capability: tuple[int, int] | None = None

    @property
    def dtype(self) -> str:
        """What it computes in: "bfloat16", or "float16" on a card without that."""
        return "float16" if self.capability is not None and self.capability < speed.BFLOAT16 else "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast it decodes.

    Attributes:
        slow_because: why the code does not call ``gemma4_compat.decode_fast``; empty if it does.
        bus: bandwidth of the bus in bytes per second, if it was given; else 0.
        modelled: tokens per second by card, from a model (``gemma4_compat/_plan/speed.py``); empty without one.
        not_modelled: why there is no model; else empty.
        measured: by card that is not modelled, because this placement was measured on it: tokens per second, and the
            tokens of the prompt before them (``gemma4_compat/_plan/cards/measured.py``).
    """

    slow_because: str = ""
    bus: int = 0
    modelled: Mapping[str, float] = field(default_factory=dict)
    not_modelled: str = ""
    measured: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A device map that fits, and what it will use.

    Attributes:
        source: what is loaded, and how it is stored.
        layout: which block goes where, and the memory that takes.
        load: what it was made for: context, batch, prompt, modalities.
        rate: how fast it decodes.
        longest_context: the longest context that fits this map, in tokens, up to the model's own limit.
        chunked_prefill: peak of the prefill with the prompt in chunks of 1,024 tokens, if that is less; else 0.
        longest_chunked: the longest context that fits this map with the prompt in such chunks, if the prompt is read
            at once and that is more; else 0.
        chosen_chunk: nobody asked for chunks, but at once the prompt would not fit, or would stream more layers.
        copies_because: why ``use`` has the copies that PyTorch's attention makes while a prompt is read; empty if it
            has none, or if they change nothing.
        code: Python that loads the model.
    """

    source: Source
    layout: Layout
    load: Load
    rate: Rate
    longest_context: int
    chunked_prefill: int = 0
    longest_chunked: int = 0
    chosen_chunk: bool = False
    copies_because: str = ""
    code: str = field(default="", repr=False)

    @property
    def model(self) -> str:
        """The requested model, as ``from_pretrained`` takes it."""
        return self.source.model

    @property
    def model_class(self) -> str:
        """The class in ``transformers`` whose modules the map names."""
        return self.source.model_class

    @property
    def device_map(self) -> dict[str, int | str]:
        """For ``from_pretrained``; the first accelerator in it computes what is offloaded."""
        return self.layout.device_map

    @property
    def quantization(self) -> str | None:
        """How weights are stored: "4bit", "4bit-double", "8bit", or None (bf16)."""
        return self.source.quantization

    @property
    def quantize_offloaded(self) -> bool:
        """Whether offloaded modules must be loaded inside ``gemma4_compat.quantize(offloaded=True)``."""
        return self.source.quantization is not None and self.layout.offloads

    @property
    def experts(self) -> str | None:
        """How the experts are stored, as for ``quantization``; None: in bf16, or the model has no experts."""
        return self.source.experts

    @property
    def use(self) -> dict[int | str, Use]:
        """Expected bytes by accelerator: peaks ``loading``, ``prefill``, ``decode``, and their parts."""
        return self.layout.use

    @property
    def cpu(self) -> int:
        """Bytes in host memory."""
        return self.layout.cpu

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.layout.disk

    @property
    def streamed(self) -> tuple[str, ...]:
        """Streamed decoder layers: copied to the accelerator while the layers before them compute."""
        return self.layout.streamed

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Decoder layers with only their experts offloaded; each token fetches the experts it is routed to."""
        return self.layout.looked_up

    @property
    def brought(self) -> int:
        """Bytes that each token copies over the bus: streamed layers, and the experts that it is routed to."""
        return self.layout.brought

    @property
    def bus(self) -> int:
        """Bandwidth of the bus in bytes per second, if it was given; else 0."""
        return self.rate.bus

    @property
    def fast(self) -> bool:
        """Whether the code calls ``gemma4_compat.decode_fast``, and ``use`` has room for its cache and graphs."""
        return self.load.fast

    @property
    def own_attention(self) -> bool:
        """Whether chunks of prompts are counted as this package's attention reads them, without PyTorch's copies."""
        return formulas.is_own(self.load)

    @property
    def slow_because(self) -> str:
        """Why it does not; empty if it does."""
        return self.rate.slow_because

    @property
    def context(self) -> int:
        """The number of tokens per sequence that it was made for."""
        return self.load.context

    @property
    def batch(self) -> int:
        """The number of sequences per batch that it was made for."""
        return self.load.batch

    @property
    def vision(self) -> bool:
        """Whether it was made for inputs with images."""
        return self.load.vision

    @property
    def audio(self) -> bool:
        """Whether it was made for inputs with audio."""
        return self.load.audio

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens of the prompt that one forward reads; None: all."""
        return self.load.prefill_chunk

    @property
    def modelled(self) -> dict[str, float]:
        """Tokens per second by card, from a model (``gemma4_compat/_plan/speed.py``); empty without one."""
        return dict(self.rate.modelled)

    @property
    def not_modelled(self) -> str:
        """Why there is no model; else empty."""
        return self.rate.not_modelled

    @property
    def measured(self) -> dict[str, float]:
        """Tokens per second by card on which this placement was measured; such a card is not in ``modelled``."""
        return {name: rate for name, (rate, _) in self.rate.measured.items()}

    @property
    def assumed(self) -> str:
        """What the plan assumes about the model; empty for a checkpoint."""
        return self.source.assumed

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data: bytes are integers, the map's keys in order."""
        data = {key: getattr(self, _ATTRIBUTES.get(key, key)) for key in _DATA.split()}
        data |= {"paged": list(self.streamed), "looked_up": list(self.looked_up)}
        keys = _USE.split()
        data["use"] = {
            str(device): {key: getattr(use, _ATTRIBUTES.get(key, key)) for key in keys}
            for device, use in self.use.items()
        }
        return data


#: The keys of a plan as data, in order, and those of an accelerator's use.
_DATA = """
model model_class device_map quantization quantize_offloaded experts cpu disk paged looked_up brought bus fast
slow_because own_attention copies_because context batch vision audio longest_context prefill_chunk chunked_prefill
longest_chunked modelled not_modelled measured assumed code
"""
_USE = "weights pages adapter kv graph head experts assistant loading prefill decode peak budget"
#: Attributes whose keys are other names.
_ATTRIBUTES = {"paged": "streamed", "pages": "stream_buffers"}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A placement in which a training step fits, and what it will use; sizes are bytes.

    Attributes:
        model: the requested model, as ``from_pretrained`` takes it.
        model_class: the class in ``transformers`` whose modules the map names.
        device_map: for ``from_pretrained``.
        quantization: how the base is stored: "4bit", "4bit-double", or None.
        experts: how its experts are stored; None if they are in bf16, or it has none.
        max_length: tokens per sequence.
        batch: sequences per micro-batch.
        padding: whether masks of padded sequences are counted.
        r: LoRA rank.
        gradient_checkpointing: whether activations are computed again in the backward pass.
        optim: the optimizer, as ``TrainingArguments.optim`` names it.
        chunked_loss: whether the loss is in chunks (``gemma4_compat.train_fast``).
        chunked_mlp: whether MLPs are computed in chunks (``gemma4_compat.train_fast``).
        sliding_windows: whether sliding layers are computed by windows, and full ones by matrix products.
        train_fast: whether decoder layers are replayed, as with ``gemma4_compat.train_fast``.
        activation_offloading: whether checkpointed activations are in host memory.
        trained: number of the adapter's weights.
        weights: the part of the base that stays on the accelerator.
        buffers: for streamed layers.
        adapter: LoRA's weights, in float32.
        optimizer_states: the optimizer's states that stay on the accelerator.
        activations: what the step uses at its peak in addition to these, including gradients.
        graphs: what those of ``train_fast`` keep.
        peak: expected in a step.
        loading: expected while loading.
        budget: what it may use.
        cpu: bytes in host memory.
        streamed: names of the streamed decoder layers.
        changes: by option of the command line, what it would add to the step; negative if it saves memory.
        reasons: by switch ("chunked_loss", "chunked_mlp", "sliding_windows" and "train_fast" if the plan chose
            them, "gradient_checkpointing", "activation_offloading", "padding"), why it is on or off.
        warning: that less than 0.5 GiB is left; empty otherwise.
        assumed: what the plan assumes about the model; empty for a checkpoint.
        code: Python that loads the model and trains it.
    """

    model: str
    model_class: str
    device_map: dict[str, int | str]
    quantization: str | None
    experts: str | None
    max_length: int
    batch: int
    padding: bool
    r: int
    gradient_checkpointing: bool
    optim: str
    chunked_loss: bool
    chunked_mlp: bool
    sliding_windows: bool
    train_fast: bool
    activation_offloading: bool
    trained: int
    weights: int
    buffers: int
    adapter: int
    optimizer_states: int
    activations: int
    graphs: int
    peak: int
    loading: int
    budget: int
    cpu: int
    streamed: tuple[str, ...]
    changes: dict[str, int]
    reasons: dict[str, str]
    warning: str
    assumed: str
    code: str = field(repr=False)

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data."""
        data = {_TRAINING_DATA.get(name, name): getattr(self, name) for name in self.__dataclass_fields__}
        return data | {"streamed": list(self.streamed)}


#: Attributes of a training plan whose keys in JSON are other names.
_TRAINING_DATA = {
    "max_length": "sequence",
    "r": "rank",
    "gradient_checkpointing": "checkpointing",
    "optim": "optimizer",
}
