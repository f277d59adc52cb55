"""Which part of a Gemma 4 goes where while an adapter is trained on it: ``gemma4_compat.plan_training``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from gemma4_compat._engine.io import shadowed
from gemma4_compat._engine.io.text import parse_size, size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization import config, qat
from gemma4_compat._memory import blueprint, layout
from gemma4_compat._memory.blueprint import Blueprint
from gemma4_compat._memory.layout import Layout
from gemma4_compat._plan import budgets, code, prompt_kernels, switches, training_step
from gemma4_compat._plan.result import Source, TrainingPlan
from gemma4_compat._plan.training_step import Step, StepMemory
from gemma4_compat._training.parts import MARGIN

_SWITCHES = ("chunked_loss", "chunked_mlp", "sliding_windows", "train_fast")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned: the arguments of :func:`plan_training`, and their defaults."""

    model: Any
    vram: float | str | Mapping[int | str, float | str] | None = None
    max_length: int = 2048
    batch: int = 1
    padding: bool | None = None
    r: int = 16
    gradient_checkpointing: bool = True
    optim: str = "adamw_torch"
    chunked_loss: bool | None = None
    chunked_mlp: bool | None = None
    sliding_windows: bool | None = None
    train_fast: bool | None = None
    activation_offloading: bool = False
    quantize: str | None = "4bit"
    quantize_experts: bool | None = None
    cpu: float | str | None = None
    card: str | None = None

    @property
    def step(self) -> Step:
        """The step, with the switches off that nobody asked for."""
        found = {field.name: getattr(self, field.name) for field in fields(Step)}
        found["padding"] = self.batch > 1 if self.padding is None else self.padding
        return Step(**found | {switch: bool(found[switch]) for switch in _SWITCHES})


def plan_training(
    model: Any,
    vram: float | str | Mapping[int | str, float | str] | None = None,
    *,
    max_length: int = 2048,
    batch: int = 1,
    padding: bool | None = None,
    r: int = 16,
    gradient_checkpointing: bool = True,
    optim: str = "adamw_torch",
    chunked_loss: bool | None = None,
    chunked_mlp: bool | None = None,
    sliding_windows: bool | None = None,
    train_fast: bool | None = None,
    activation_offloading: bool = False,
    quantize: str | None = "4bit",
    quantize_experts: bool | None = None,
    cpu: float | str | None = None,
    card: str | None = None,
) -> TrainingPlan:
    """A placement of ``model`` in which a QLoRA step on text stays inside ``vram``, and what the step takes.

    The installed releases' own code runs the step on tensors without memory (``FakeTensorMode``), and every storage it
    makes is counted. That takes half a minute, or more than one for a long text, no weights and no accelerator.
    Arguments have the names of TRL's ``SFTConfig``, ``TrainingArguments`` and ``LoraConfig``.

    Args:
        model: as for :func:`gemma4_compat.plan_device_map`, but not with quantized weights.
        vram: what PyTorch may allocate on the accelerator: bytes or a size ("12GiB"), or a mapping of its value in the
            map to one. Default: the memory of ``card`` less 1 GiB, or else the free memory of this machine's GPU less
            0.5 GiB. The step leaves 0.5 GiB of it free for what is not counted. Where it fits only with less left, it
            is planned all the same, and the plan has a ``warning``.
        max_length: tokens per sequence.
        batch: sequences per micro-batch (``per_device_train_batch_size``). Gradient accumulation takes up to the
            adapter's bytes more, for the gradients of the micro-batches before.
        padding: whether sequences are padded, which takes masks: 3 GiB for 32,768 tokens. None: in a batch of several.
        r: LoRA rank, on all linear layers of the decoder.
        gradient_checkpointing: compute the activations of a layer again in the backward pass.
        optim: the optimizer: adamw_torch, adamw_torch_fused, adamw_8bit, paged_adamw_32bit, paged_adamw_8bit or sgd.
        chunked_loss: whether the loss is in chunks, as :func:`gemma4_compat.train_fast` computes it. None: only if the
            step otherwise does not fit, leaves less than 0.5 GiB, or has more decoder layers streamed; ``reasons``
            says which.
        chunked_mlp: whether MLPs are in chunks, as ``train_fast`` computes them. None: only if the step otherwise does
            not fit or leaves less than 0.5 GiB, with all decoder layers streamed; ``reasons`` says which.
        sliding_windows: whether attention is by windows and matrix products (``transformers-sliding-windows``) from
            4,096 tokens on; shorter texts have products wherever ``train_fast`` is called. It takes less time, and
            rounds gradients otherwise. None: only if the step otherwise does not fit, leaves less than 0.5 GiB, or has
            more decoder layers streamed.
        train_fast: whether decoder layers are replayed, as after ``train_fast``; graphs are counted for
            sequences of one length. None: in steps of up to 2,048 tokens whose layers can be replayed, if the graphs
            fit, with all decoder layers streamed if need be. A step in which no layer can be replayed goes without;
            ``reasons`` says why.
        activation_offloading: checkpointed activations are in host memory until the backward pass needs it
            (transformers' ``offload``, from 5.17 on).
        quantize: how the base is stored: "4bit", "4bit-double" or None.
        quantize_experts: store experts in 4 bits; False: in bf16, as upstream does. None: in 4 bits if the base is,
            and weights with experts in bf16 would not fit on the accelerator.
        cpu: host memory for what is offloaded; default: as much as it takes.
        card: a card by its name, such as "RTX 3060", whose memory counts without ``vram``.

    Raises:
        Gemma4CompatError: it does not fit (the message says what each option would save), or an argument cannot be
            understood.
    """
    return planned(Request(**locals()))


def planned(request: Request) -> TrainingPlan:
    """The plan for a request: see :func:`plan_training`."""
    shadowed.refuse("torch", "transformers", "peft")
    training_step.check(request.step)
    model, experts = request.model, request.quantize_experts
    device, budget = _budget(request.vram, request.card)
    capability = prompt_kernels.capability(request.vram, request.card)
    quantization = None if request.quantize == "none" else request.quantize
    if quantization not in (None, "4bit", "4bit-double"):
        raise Gemma4CompatError(f"quantize is {quantization!r}; training plans know 4bit, 4bit-double and none")
    step = request.step
    if experts and quantization is None:
        raise Gemma4CompatError("quantize_experts quantizes to 4 bits, and quantize is 'none'; use '4bit'")
    host = None if request.cpu is None else parse_size(request.cpu)
    build.refuse_unknown(model)
    cut, source = _described(model, quantization, experts=bool(experts))
    if experts is None and quantization is not None and _experts_leave(cut, budget):
        cut, source = _described(model, quantization, experts=True)
    source = replace(source, capability=capability)
    built = _Built(model)
    measure: Callable[[Step], StepMemory] = functools.partial(_measure, built, quantization)
    if source.experts is not None:
        measure = functools.partial(_measure, built, quantization, quantized_experts=True)
    measured = _measured(measure, step, replayed=request.train_fast is not False)
    free = [switch for switch in _SWITCHES if getattr(request, switch) is None]
    step, reasons = switches.chosen((cut, device, budget), step, free, measured)
    memory, changes = measured(step), _changes(step, measured)
    placed = _placed(cut, device, budget, memory, changes, cpu=host)
    use = placed.use[device]
    return TrainingPlan(
        model=source.model,
        model_class=source.model_class,
        device_map=placed.device_map,
        quantization=quantization,
        experts=source.experts,
        **vars(step),
        trained=sum(memory.sizes),
        weights=use.weights,
        buffers=use.stream_buffers,
        adapter=memory.adapter,
        optimizer_states=memory.optimizer,
        activations=max(memory.forward, memory.backward),
        graphs=memory.graphs.nbytes,
        peak=use.prefill,
        loading=use.loading,
        budget=budget,
        cpu=placed.cpu,
        streamed=placed.streamed,
        changes=changes,
        reasons=reasons | switches.others(step) | ({"fp16": why} if (why := code.without_bfloat16(source)) else {}),
        warning=switches.warning(use),
        assumed=source.assumed,
        code=code.training_code(source, placed, step),
    )


def _budget(vram: Any, card: str | None) -> tuple[int | str, int]:
    found = budgets.of(vram, card)
    if vram is not None and len(found) != 1:
        raise Gemma4CompatError(f"vram is {vram!r}; a training plan covers one accelerator")
    return max(found.items(), key=lambda item: item[1])


def _experts_leave(cut: Blueprint, budget: int) -> bool:
    """Whether there are experts, and not all of them fit beside the other weights."""
    return cut.experts is not None and sum(block.stored.allocated for block in cut.blocks) > budget


def _described(model: Any, quantization: str | None, *, experts: bool = False) -> tuple[Blueprint, Source]:
    built, name, assumed = build.on_meta(model)
    skip = config.default_skip_modules(built)
    settings = config.stored_settings(built.config)
    if settings is not None:
        qat.refuse_plan(settings)
        raise Gemma4CompatError(
            "the checkpoint is quantized already; give the checkpoint it was made from, or its variant, and quantize"
        )
    names = config.linear_names(built, skip) if quantization else None
    cut = blueprint.describe(built, quantization, names, experts=experts)
    source = Source(
        model=name,
        model_class=cut.model_class,
        quantization=quantization,
        skip=tuple(skip),
        experts=quantization if any(block.experts for block in cut.blocks) else None,
        assumed=assumed,
    )
    return cut, source


class _Built:
    """Steps of the model of one plan."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.steps = functools.cache(self._steps)

    def _steps(self, quantization: str | None, r: int, quantized_experts: bool) -> training_step.Steps:
        built = build.on_meta(self._model)[0]
        names = config.linear_names(built, config.default_skip_modules(built)) if quantization else ()
        return training_step.Steps(built, names, r, quantized_experts=quantized_experts)


def _measure(model: Any, quantization: str | None, step: Step, *, quantized_experts: bool = False) -> StepMemory:
    built = model if isinstance(model, _Built) else _Built(model)
    return built.steps(quantization, step.r, quantized_experts).measure(step)


def _measured(measure: Callable[[Step], StepMemory], first: Step, *, replayed: bool) -> Callable[[Step], StepMemory]:
    """``measure``, which runs no pass twice.

    Args:
        measure: runs a step, and captures its graphs if it has any.
        first: the step that is asked for, with no switch on.
        replayed: whether it will also be asked for with graphs.
    """
    kept = first.gradient_checkpointing, first.activation_offloading

    @functools.cache
    def measured(step: Step) -> StepMemory:
        if not replayed or kept != (step.gradient_checkpointing, step.activation_offloading):
            return measure(step)
        with_graphs = step if step.train_fast else switches.turned(step, "train_fast")
        if step.train_fast and step.chunked_loss:  # the loss comes after the layers
            graphs = measured(replace(step, chunked_loss=False)).graphs
            return replace(measured(replace(step, train_fast=False)), graphs=graphs)
        if with_graphs != step and not step.chunked_loss:
            return replace(measured(with_graphs), graphs=training_step.NO_GRAPHS)
        return measure(step)

    return measured


def _changes(step: Step, measured: Callable[[Step], StepMemory]) -> dict[str, int]:
    """How much more memory the step would take, by the option that changes it."""
    memory = measured(step)
    checkpointing = step.gradient_checkpointing
    turned = replace(step, gradient_checkpointing=not checkpointing, activation_offloading=False)
    found = {f"--{'no-' if checkpointing else ''}gradient-checkpointing": measured(turned).peak - memory.peak}
    for switch in (*_SWITCHES, "activation_offloading"):
        if not getattr(step, switch) and switches.unsupported_reason(step, switch):
            continue
        if switch == "train_fast" and switches.capture_reason(measured(replace(step, train_fast=True))):
            continue
        if switch == "activation_offloading" and not (checkpointing and training_step.can_offload()):
            continue
        option = f"--{'no-' if getattr(step, switch) else ''}{switch.replace('_', '-')}"
        found[option] = measured(switches.turned(step, switch)).peak - memory.peak
    for optim in ("adamw_8bit", "paged_adamw_8bit"):
        if optim != step.optim:
            found[f"--optim {optim}"] = memory.with_optimizer(optim).peak - memory.peak
    return found


def _placed(
    cut: Blueprint, device: int | str, budget: int, memory: StepMemory, changes: Mapping[str, int], *, cpu: int | None
) -> Layout:
    load = memory.load
    needed = layout.smallest_budget(cut, load)
    if needed > budget:
        remedies = [f"{option} saves {size_text(-more)}" for option, more in changes.items() if more < 0]
        said = f" {'; '.join(remedies)}." if remedies else ""
        switched = {
            "--no-chunked-loss": "the loss in chunks",
            "--no-chunked-mlp": "MLPs in chunks",
            "--no-sliding-windows": "sliding layers by windows",
        }
        ways = "".join(f" and {what}" for option, what in switched.items() if option in changes)
        raise Gemma4CompatError(
            f"a step of {cut.model_class} takes {size_text(needed, up=True)} with all decoder layers streamed"
            f"{ways}, {size_text(memory.peak)} of it for the step itself, and there are {size_text(budget)}.{said} "
            "A shorter sequence or a smaller batch takes less"
        )
    found = layout.layout(cut, {device: max(budget - MARGIN, needed)}, load, cpu=cpu)
    return replace(found, use={device: replace(use, budget=budget) for device, use in found.use.items()})
