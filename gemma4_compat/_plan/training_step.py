"""How many bytes a training step takes in addition to the base's weights: run the step on tensors without memory.

No formula knows what autograd keeps of a release's code, so that code runs: the model's own class with PEFT's own
layers, forward and backward, under ``FakeTensorMode``, which gives every tensor a shape and no memory. Each storage
that an operator makes is counted until it is freed. That takes seconds and no accelerator. It does not see what
kernels use internally; the workspace of attention's gradients is added.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.quantization.experts import all_experts
from gemma4_compat._memory.blueprint import rounded
from gemma4_compat._memory.formulas import TrainingLoad
from gemma4_compat._plan import equal_layers, fake_model
from gemma4_compat._training import chunks, counting, loss, mlp
from gemma4_compat._training.counting import Kept

#: Bytes that an optimizer keeps for a trained float32 weight, and for each of its blocks of 256 weights (float32
#: maxima of bitsandbytes' 8-bit states). "paged": in memory that CUDA moves to the host, which counts as zero.
OPTIMIZERS = {
    "adamw_torch": (8, 0),
    "adamw_torch_fused": (8, 0),
    "adamw_8bit": (2, 8),
    "paged_adamw_32bit": (0, 0),
    "paged_adamw_8bit": (0, 0),
    "sgd": (0, 0),
}
#: bitsandbytes keeps the states of smaller tensors in 32 bits (``min_8bit_size``).
_SMALLEST_8BIT = 4096
_BLOCK = 256
_WIDEST_IN_REGISTERS = 128
#: Keys of a block of that kernel, and how many blocks of all heads it works on at once, at most.
_KEYS, _BLOCKS = 64, 200
NO_GRAPHS = Kept()
#: What QLoRA trains: every linear layer of the decoder, and nothing in the towers.
TARGETS = r"(?!.*tower).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


@dataclass(frozen=True, kw_only=True)
class Step:
    """The settings of a step.

    Attributes:
        max_length: tokens per sequence.
        batch: sequences per micro-batch.
        padding: masks are those of a batch with padding. Without it full attention needs none, except in the 12B.
        r: LoRA rank, on :data:`TARGETS`.
        gradient_checkpointing: compute the activations of a decoder layer again in the backward pass.
        optim: one of :data:`OPTIMIZERS`, as ``TrainingArguments.optim`` names them.
        chunked_loss: the loss is in chunks, as ``train_fast`` computes it.
        activation_offloading: checkpointed activations are in host memory until the backward pass needs it.
        chunked_mlp: MLPs are computed in chunks, as ``train_fast`` does.
        sliding_windows: long texts have their attention by windows and products, as after ``train_fast`` on a GPU.
        train_fast: decoder layers are replayed, as after ``train_fast``, in sequences of one length.
    """

    max_length: int
    batch: int = 1
    padding: bool = True
    r: int = 16
    gradient_checkpointing: bool = True
    optim: str = "adamw_torch"
    chunked_loss: bool = False
    activation_offloading: bool = False
    chunked_mlp: bool = False
    sliding_windows: bool = False
    train_fast: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether products compute attention, as ``train_fast`` has it for texts that are too short for windows."""
        is_called = self.chunked_loss or self.chunked_mlp or self.train_fast
        short = is_called and self.max_length < windows.LEAST_ON_GPU
        return self.sliding_windows or (short and windows.unavailable() is None)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of a training step on the accelerator, in addition to the weights of the base.

    Attributes:
        adapter: LoRA's weights, float32 as PEFT keeps them.
        optimizer: its states.
        forward: the most that the forward pass and the loss use, in addition to adapter and optimizer.
        backward: the same in the backward pass, including gradients.
        sizes: number of weights in each trained tensor.
        graphs: what those of ``train_fast`` keep.
    """

    adapter: int
    optimizer: int
    forward: int
    backward: int
    sizes: tuple[int, ...]
    graphs: Kept = NO_GRAPHS

    @property
    def peak(self) -> int:
        """The largest sum."""
        return self.adapter + self.optimizer + max(self.forward, self.backward) + self.graphs.nbytes

    @property
    def load(self) -> TrainingLoad:
        """What the step asks of a placement."""
        return TrainingLoad(step=self.peak, replayed=bool(self.graphs.captured))

    def with_optimizer(self, optimizer: str) -> StepMemory:
        """The same step with another of the :data:`OPTIMIZERS`."""
        return replace(self, optimizer=optimizer_bytes(optimizer, self.sizes))


def measure(model: Any, quantized: Collection[str], step: Step, *, quantized_experts: bool = False) -> StepMemory:
    """Run one step of a model on meta: see :class:`Steps`.

    Raises:
        Gemma4CompatError: the settings contradict each other, or this model cannot be trained with them.
    """
    check(step)
    return Steps(model, quantized, step.r, quantized_experts=quantized_experts).measure(step)


class Steps:
    """Runs steps of one model: it is built once.

    Args:
        model: from ``_gemma4.models.build.on_meta``, in bfloat16. It is changed and cannot be used again.
        quantized: paths of the linear layers that bitsandbytes stores in 4 bits.
        r: LoRA rank of all steps.
        quantized_experts: whether its experts are stored in 4 bits.
    """

    def __init__(self, model: Any, quantized: Collection[str], r: int, *, quantized_experts: bool = False) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._model, self._mode = model, FakeTensorMode()
        with _quiet():
            self._adapted = _adapted(model, r)
        with self._mode, _quiet():
            self._sizes = fake_model.replace_weights(self._adapted, quantized)
            for module in all_experts(model).values() if quantized_experts else ():
                fake_model.experts_to_4bit(module)

    def measure(self, step: Step) -> StepMemory:
        """Run a step.

        Raises:
            Gemma4CompatError: the settings contradict each other, or this model cannot be trained with them.
        """
        import torch

        check(step)
        if step.sliding_windows and windows.unavailable() is not None:
            raise _off("sliding_windows", windows.ID)
        model, adapted, sizes = self._model, self._adapted, self._sizes
        by_windows = windows.planned() if step.multiplies else contextlib.nullcontext()
        with self._mode, _quiet(), by_windows, chunks.planned(), fake_model.put_back(adapted):
            adapted.train()
            _ask("chunked_loss", step.chunked_loss, loss, adapted)
            _ask("chunked_mlp", step.chunked_mlp, mlp, adapted)
            if step.gradient_checkpointing:
                adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                if step.activation_offloading:
                    _offload_checkpoints(model)
                adapted.enable_input_require_grads()
            tokens = torch.zeros(step.batch, step.max_length, dtype=torch.long)
            inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
            if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                inputs["mm_token_type_ids"] = torch.zeros_like(tokens)
            forward, backward, graphs = _run(adapted, model, step, inputs)
        return StepMemory(
            adapter=sum(rounded(4 * size) for size in sizes),
            optimizer=optimizer_bytes(step.optim, sizes),
            forward=forward,
            backward=backward,
            sizes=tuple(sizes),
            graphs=graphs,
        )


def _ask(name: str, on: bool, part: Any, model: Any) -> None:
    """Turn a part of ``train_fast`` on, or off whatever GEMMA4_COMPAT_ENABLE says."""
    if not on:
        part.leave(model)
    elif part.unavailable(model) is None:
        part.ask(model)
    else:
        raise _off(name, part.ID)


def _off(name: str, patch: str) -> Gemma4CompatError:
    return Gemma4CompatError(
        f"{name} needs the patch {patch}, which is not applied here: gemma4_compat.status()[{patch!r}] says why"
    )


def _run(
    adapted: Any, model: Any, step: Step, inputs: dict[str, Any], *, every: bool = False
) -> tuple[int, int, Kept]:
    """The peaks of forward and backward pass, and what graphs keep: some layers of each kind run, or ``every`` one."""
    import torch

    counted = storage_counter(adapted)
    with equal_layers.few(model.get_decoder().layers, counted, every=every) as tally:
        with counted, torch.autocast("cpu", dtype=torch.bfloat16):
            if not step.padding and not model.config.model_type.startswith("gemma4_unified"):
                inputs = inputs | {"attention_mask": _masks_without_padding(model, step)}
            found = adapted(**inputs, use_cache=False).loss
            tally.loss_is_there()
        tally.autocast_is_over()
        forward = counted.reset_peak()
        with counted:
            found.backward()
        backward, graphs = counted.peak, NO_GRAPHS
        right = tally.holds()
        tally.stop()
        if right and step.train_fast:
            with counted, torch.autocast("cpu", dtype=torch.bfloat16):
                graphs = counting.kept(adapted, lambda: adapted(**inputs, use_cache=False), counted)
    if not right:
        del found
        adapted.zero_grad(set_to_none=True)
        return _run(adapted, model, step, inputs, every=True)
    return forward, backward, graphs


def _masks_without_padding(model: Any, step: Step) -> dict[str, Any]:
    """What a Gemma 4 makes on an accelerator. On tensors without memory it cannot see that nothing is padded."""
    import torch

    window = model.config.get_text_config().sliding_window
    shape = (step.batch, 1, step.max_length, step.max_length)
    sliding = None if step.max_length < window else torch.empty(shape, dtype=torch.bool)
    return {"full_attention": None, "sliding_attention": sliding}


def can_offload() -> bool:
    """Whether this transformers has ``offload`` among the arguments of checkpointing (5.17 or newer)."""
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    return any("offload" in inspect.signature(getattr(kind, name, len)).parameters for name in names)


def _offload_checkpoints(model: Any) -> None:
    """Have a model with checkpointing keep no memory for what transformers' ``offload`` keeps in host memory."""
    import torch

    def leave(tensor: Any) -> Any:
        return tensor.shape, tensor.dtype

    def bring(left: Any) -> Any:
        return torch.empty(left[0], dtype=left[1])

    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None:

            def offloaded(function: Any, *args: Any, below: Any = checkpoint) -> Any:
                with torch.autograd.graph.saved_tensors_hooks(leave, bring):
                    return below(function, *args)

            module._gradient_checkpointing_func = offloaded


def optimizer_bytes(optimizer: str, sizes: Collection[int]) -> int:
    """Bytes of an optimizer's states for tensors of so many float32 weights each."""
    weight, block = OPTIMIZERS[optimizer]
    total = 0
    for size in sizes:
        eight_bit = block and size >= _SMALLEST_8BIT
        each = weight if eight_bit or not block else OPTIMIZERS["adamw_torch"][0]
        total += rounded(each * size) + (block * -(-size // _BLOCK) if eight_bit else 0)
    return total


def storage_counter(model: Any) -> Any:
    """A dispatch mode with ``now`` and ``peak``: bytes of living storages that operators made inside it.

    ``high`` is another peak, since somebody set it, and ``owned`` has the bytes by the ``owner`` at their time.

    Args:
        model: whose parameters and buffers are not counted.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    device = torch.ops.prim.device.default
    attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    class Counter(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = self.high = 0
            self.owner: Any = None
            self.owned = collections.Counter[Any]()
            self._living: dict[int, tuple[int, Any]] = {}
            self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

        def reset_peak(self) -> int:
            """The peak until now; a new one begins."""
            peak, self.peak = self.peak, self.now
            return peak

        def add(self, change: int, needed: int) -> None:
            """Count what did not run: the bytes that it adds, and that it needs while it runs."""
            self._rise(self.now + needed)
            self.now += change

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled here, and PyTorch's guard against it costs a tenth of a plan

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is device:  # two thirds of all calls
                return args[0].fake_device
            result = function(*args, **(kwargs or {}))
            for value in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._see(value.untyped_storage())
            if function is attention_backward:
                self._rise(self.now + _attention_workspace(args[1].shape, args[2].shape))
            return result

        def _see(self, storage: Any) -> None:
            key = storage._cdata
            if key in self._living or key in self._known:
                return
            nbytes = rounded(storage.nbytes())
            self._living[key] = nbytes, self.owner
            self.owned[self.owner] += nbytes
            self.now += nbytes
            self._rise(self.now)
            weakref.finalize(storage, self._gone, key)

        def _rise(self, nbytes: int) -> None:
            self.peak, self.high = max(self.peak, nbytes), max(self.high, nbytes)

        def _gone(self, key: int) -> None:
            nbytes, owner = self._living.pop(key)
            self.owned[owner] -= nbytes
            self.now -= nbytes

    return Counter()


def _attention_workspace(queries: Sequence[int], keys: Sequence[int]) -> int:
    """What CUDA's memory-efficient kernel needs while it computes the gradients of wide heads, in bytes.

    It adds up gradients in float32: of all queries, and of the keys and values that it works on at once
    (``workspace_size`` in PyTorch's kernel_backward.h, ``num_splits_key`` in its attention_backward.cu). Narrower
    heads keep them in registers.

    Args:
        queries: their shape, (batch, heads, tokens, width).
        keys: the shape of keys and of values, with as many heads.
    """
    batch, heads, tokens, width = queries
    if width <= _WIDEST_IN_REGISTERS:
        return 0
    blocks = max(1, min(-(-keys[2] // _KEYS), _BLOCKS // (batch * heads)))
    return 4 * batch * heads * width * (tokens + 2 * blocks * _KEYS)


def check(step: Step) -> None:
    """Refuse settings that contradict each other (`Gemma4CompatError`)."""
    for name in ("max_length", "batch", "r"):
        if getattr(step, name) < 1:
            raise Gemma4CompatError(f"{name} is {getattr(step, name)}; it must be at least 1")
    if step.activation_offloading and not step.gradient_checkpointing:
        raise Gemma4CompatError("activation_offloading moves checkpointed activations; it needs checkpointing")
    if step.optim not in OPTIMIZERS:
        raise Gemma4CompatError(f"optim {step.optim!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    if step.activation_offloading and not can_offload():
        raise Gemma4CompatError("activation_offloading needs transformers 5.17 or newer")


def _adapted(model: Any, r: int) -> Any:
    """``model`` with LoRA on its targets, on meta."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=r, lora_alpha=r, target_modules=TARGETS)
    return get_peft_model(model.requires_grad_(False), config, low_cpu_mem_usage=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the libraries' warnings about training: nothing is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
