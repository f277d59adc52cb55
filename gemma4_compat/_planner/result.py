"""What :func:`gemma4_compat.plan_device_map` and :func:`gemma4_compat.plan_training` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._planner.use import Use


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A device map that fits, and what it will use.

    Attributes:
        model: what was asked for, as ``from_pretrained`` takes it.
        model_class: the class in ``transformers`` whose modules the map names.
        device_map: for ``from_pretrained``; the first accelerator in it computes what is offloaded.
        quantization: "4bit", "4bit-double", "8bit", or None.
        quantize_offloaded: whether offloaded modules must be loaded inside ``gemma4_compat.quantize_offloaded()``.
        experts: how the experts are stored, as ``quantization`` says; None: in bf16, or there are none.
        use: expected bytes by accelerator (peaks ``loading``, ``prefill``, ``decode``; what they hold).
        cpu: bytes in host memory.
        disk: bytes on disk.
        paged: decoder layers that are streamed: copied to the accelerator while the ones before them compute.
        looked_up: decoder layers whose experts alone are offloaded; a token reads those that it hits.
        brought: bytes that each token brings over the bus: of streamed layers, and of the experts that it hits.
        bus: bytes a second of the bus, if it was given; else 0.
        modelled: tokens a second by card, from a model (``gemma4_compat/_planner/speed.py``); empty where it has none.
        not_modelled: why it has none; else empty.
        fast: whether the code calls ``gemma4_compat.decode_fast``, and ``use`` has room for its cache and graphs.
        slow_because: why it does not; empty where it does.
        context: tokens of a sequence it was made for; ``batch``, ``vision`` and ``audio`` likewise.
        longest_context: the longest that fits this map, at most what the model was made for.
        prefill_chunk: tokens of the prompt that one forward takes in; None: all.
        chunked_prefill: peak of the prefill with the prompt in chunks of 1,024 tokens, where that is less; else 0.
        assumed: what was taken for granted; empty for a checkpoint.
        code: Python that loads the model.
    """

    model: str
    model_class: str
    device_map: dict[str, int | str]
    quantization: str | None
    quantize_offloaded: bool
    experts: str | None
    use: dict[int | str, Use]
    cpu: int
    disk: int
    paged: tuple[str, ...]
    looked_up: tuple[str, ...]
    brought: int
    bus: int
    fast: bool
    slow_because: str
    context: int
    batch: int
    vision: bool
    audio: bool
    longest_context: int
    prefill_chunk: int | None = None
    chunked_prefill: int = 0
    modelled: dict[str, float] = field(default_factory=dict)
    not_modelled: str = ""
    assumed: str
    code: str = field(repr=False)

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data: bytes are integers, the map's keys in order."""
        names = ("weights", "pages", "adapter", "kv", "graph", "loading", "prefill", "decode", "peak", "budget")
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "use"}
        data |= {"paged": list(self.paged), "looked_up": list(self.looked_up)}
        data["use"] = {str(device): {name: getattr(use, name) for name in names} for device, use in self.use.items()}
        return data


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A placement in which a training step fits, and what it will use; sizes are bytes.

    Attributes:
        model: what was asked for, as ``from_pretrained`` takes it.
        model_class: the class in ``transformers`` whose modules the map names.
        device_map: for ``from_pretrained``.
        quantization: of the base: "4bit", "4bit-double", or None.
        sequence: tokens of a sequence; ``batch``, ``rank``, ``checkpointing``, ``optimizer`` and ``chunked_loss``
            likewise.
        trained: weights of the adapter.
        weights: of the base that stay on the accelerator.
        buffers: for streamed layers.
        adapter: LoRA's weights, in float32.
        optimizer_states: of the optimizer that stay on the accelerator.
        activations: what the step has in use at its peak beside these, gradients included.
        peak: expected, of a step.
        loading: expected, while loading.
        budget: what it may use.
        cpu: bytes in host memory.
        streamed: names of the decoder layers that are streamed.
        changes: by option of the command line: what it would add to the step, negative where it saves.
        assumed: what was taken for granted; empty for a checkpoint.
        code: Python that loads the model and trains it.
    """

    model: str
    model_class: str
    device_map: dict[str, int | str]
    quantization: str | None
    sequence: int
    batch: int
    rank: int
    checkpointing: bool
    optimizer: str
    chunked_loss: bool
    trained: int
    weights: int
    buffers: int
    adapter: int
    optimizer_states: int
    activations: int
    peak: int
    loading: int
    budget: int
    cpu: int
    streamed: tuple[str, ...]
    changes: dict[str, int]
    assumed: str
    code: str = field(repr=False)

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {"streamed": list(self.streamed)}
