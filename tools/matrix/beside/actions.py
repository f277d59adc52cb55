"""What a process does with a tiny Gemma 4: each action says a digest of what came out, and whether it is exact.

``own``: it has the bits of the same weights on one device, or without the call, in the same process. ``near``: it
differs from that by rounding only, where no more is promised.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

STEPS = 2
#: The largest relative difference of losses, and of what is trained, where only rounding differs.
NEAR = 2e-2


@dataclass
class Table:
    """What the actions of a process share.

    Attributes:
        workspace: the tiny checkpoint, ``gemma4_compat._lab.workspace.Workspace``.
        short: eight words of text: Triton's interpreter takes minutes for more.
        known: results of earlier actions, for later ones to compare with.
    """

    workspace: Any
    short: bool = False
    known: dict[str, Any] = field(default_factory=dict)

    def outputs(self, model: Any, *, text_only: bool = False) -> Any:
        """Logits of forwards, and the tokens of a greedy ``generate``."""
        import torch

        from gemma4_compat._lab.workspace import Outputs

        if not self.short:
            return self.workspace.outputs(model, text_only=text_only)
        with torch.no_grad():
            logits = model(**self.text()).logits.float()
            return Outputs((logits,), model.generate(**self.text(), max_new_tokens=3, do_sample=False))

    def text(self) -> dict[str, Any]:
        """A prompt without pictures and sounds."""
        batch = self.workspace.inputs(text_only=True)
        return {name: value[:, :8] for name, value in batch.items()} if self.short else batch


def loading(table: Table) -> dict[str, Any]:
    model = table.workspace.load()
    return {"digest": digest(sorted(model.state_dict().items()))}


def forward(table: Table) -> dict[str, Any]:
    """Text, a picture and sound."""
    outputs = table.known["forward"] = table.outputs(table.workspace.load())
    return {"digest": digest(outputs.logits)}


def generating(table: Table) -> dict[str, Any]:
    return {"digest": digest(table.known["forward"].tokens)}


def adapter(table: Table) -> dict[str, Any]:
    outputs = table.known["adapter"] = table.outputs(_adapted(table))
    return {"digest": digest([outputs.logits, outputs.tokens])}


def merging(table: Table) -> dict[str, Any]:
    outputs = table.outputs(_adapted(table).merge_and_unload())
    return {"digest": digest([outputs.logits, outputs.tokens])}


def four_bits(table: Table) -> dict[str, Any]:
    """Text only: a CPU with AVX512-BF16 computes sound wrongly without ``bitsandbytes-cpu-strides``."""
    outputs = table.known["4-bit"] = table.outputs(table.workspace.load("4bit"), text_only=True)
    return {"digest": digest([outputs.logits, outputs.tokens])}


def split(table: Table) -> dict[str, Any]:
    """Layers and towers on disk."""
    return _same(table, "forward", table.outputs(table.workspace.split()))


def split_four_bits(table: Table) -> dict[str, Any]:
    return _same(table, "4-bit", table.outputs(table.workspace.split("4bit"), text_only=True))


def split_adapter(table: Table) -> dict[str, Any]:
    return _same(table, "adapter", table.outputs(_adapted(table, table.workspace.split())))


def training(table: Table) -> dict[str, Any]:
    """Steps of a LoRA adapter by hand, with checkpointing."""
    found = table.known["training"] = _steps(table, lambda model: model)
    return {"digest": digest(found)}


def training_split(table: Table) -> dict[str, Any]:
    found = _steps(table, lambda model: table.workspace.dispatch(model, "layers"))
    return {"digest": digest(found), "own": digest(found) == digest(table.known["training"])}


def trainer(table: Table) -> dict[str, Any]:
    """Transformers' ``Trainer`` with accumulated gradients: the gradients of one batch, up to rounding."""
    accumulated, whole = _trainer(table, 1), _trainer(table, 2)
    near = _distance(accumulated, whole)
    return {"digest": digest(accumulated), "near": near < NEAR, "note": f"{near:.1g} from one batch"}


def _trainer(table: Table, rows: int) -> dict[str, Any]:
    """Losses and the adapter of steps of two rows, so many of them at once."""
    import torch
    import transformers

    transformers.set_seed(0)
    model = _adapted(table, trainable=True)
    batch = table.text()
    row = {key: value[0] for key, value in batch.items() if torch.is_tensor(value)}
    words = row["input_ids"]
    data = [row | {"labels": words}, row | {"labels": torch.where(words % 2 > 0, words, -100)}] * STEPS
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 2 // rows, "max_steps": STEPS}
    options |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd", "use_cpu": True}
    options |= {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    folder = str(table.workspace.new_folder())
    arguments = transformers.TrainingArguments(output_dir=folder, remove_unused_columns=False, **options)

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    made = InOrder(model, arguments, train_dataset=data)
    made.train()
    return {"losses": [entry["loss"] for entry in made.state.log_history if "loss" in entry]} | _trained(model)


def decoding_fast(table: Table) -> dict[str, Any]:
    """``decode_fast``, with a stand-in for CUDA graphs on the CPU: replayed tokens, beside those without it."""
    import gemma4_compat
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape

    model, inputs = table.workspace.load(), table.text()
    tokens = 4 if table.short else 8  # captured in the third step
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    plain = model.generate(**inputs, **options)
    with tape.standing_in(RECORDERS):
        gemma4_compat.decode_fast(model, exact=True)
        fast = model.generate(**inputs, **options)
    shown = digest([fast.sequences, fast.logits])
    replays = gemma4_compat.statistics(model).decoding.replayed
    return {"digest": shown, "own": shown == digest([plain.sequences, plain.logits]), "note": f"{replays} replays"}


def training_fast(table: Table) -> dict[str, Any]:
    """``train_fast`` as it is: its losses are near those without it, and exact with its parts off."""
    import gemma4_compat

    exact = _steps(table, lambda model: gemma4_compat.train_fast(
        model, loss=False, mlp=False, windows=False, products=False))  # fmt: skip
    found = _steps(table, gemma4_compat.train_fast)
    distance = _distance(found, table.known["training"])
    near = digest(exact) == digest(table.known["training"]) and distance < NEAR
    return {"digest": digest(found), "near": near, "note": f"{distance:.1g} from its own training"}


def chunked_loss(table: Table) -> dict[str, Any]:
    """A loss in chunks, asked for by name: it is there, or one error says why not."""
    import gemma4_compat

    found = _steps(table, lambda model: gemma4_compat.train_fast(model, loss=True))
    distance = _distance(found, table.known["training"])
    return {"digest": digest(found), "near": distance < NEAR, "note": f"{distance:.1g} from its own training"}


def reverting(table: Table) -> dict[str, Any]:
    """Everything once more, after ``revert()``: only the other library is left."""
    import gemma4_compat

    gemma4_compat.revert()
    outputs = table.outputs(table.workspace.load())
    return {"digest": digest([outputs.logits, outputs.tokens, _steps(table, lambda model: model)])}


#: In the order in which a process does them: later ones compare with earlier ones, and the last one ends the shim.
ACTIONS: dict[str, Callable[[Table], dict[str, Any]]] = {
    "loading": loading,
    "forward": forward,
    "generate": generating,
    "LoRA": adapter,
    "merging": merging,
    "4-bit": four_bits,
    "split": split,
    "split, 4-bit": split_four_bits,
    "split, LoRA": split_adapter,
    "training": training,
    "training, split": training_split,
    "Trainer": trainer,
    "decode_fast": decoding_fast,
    "train_fast": training_fast,
    "train_fast(loss=True)": chunked_loss,
    "revert()": reverting,
}
#: What needs the shim.
OF_THE_SHIM = ("decode_fast", "train_fast", "train_fast(loss=True)")


def done(table: Table, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each action and what came of it; an error is what came, too."""
    for name in names:
        try:
            found = ACTIONS[name](table)
        except Exception as error:  # noqa: BLE001  # a result like any other
            found = {
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                "kind": type(error).__name__,
            }
        yield name, found


def digest(value: Any) -> str:
    """Of tensors and numbers in lists, tuples and mappings.

    Raises:
        ArithmeticError: one is not a number: two of these are alike whatever they come from.
    """
    import torch

    found = hashlib.sha256()

    def add(part: Any) -> None:
        if torch.is_tensor(part):
            part = part.detach().cpu().contiguous()
            if part.isnan().any():
                raise ArithmeticError("an answer is not a number")
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(part.flatten().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        elif isinstance(part, dict):
            add(sorted(part.items()))
        elif isinstance(part, (list, tuple)):
            found.update(f"{len(part)}:".encode())
            for one in part:
                add(one)
        else:
            if isinstance(part, float) and math.isnan(part):
                raise ArithmeticError("an answer is not a number")
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()[:12]


def _same(table: Table, of: str, outputs: Any) -> dict[str, Any]:
    from gemma4_compat._lab.workspace import difference

    shown = digest([outputs.logits, outputs.tokens])
    return {"digest": shown, "own": difference(table.known[of], outputs) == 0.0}


def _adapted(table: Table, model: Any = None, *, trainable: bool = False) -> Any:
    from peft import PeftModel

    model = table.workspace.load() if model is None else model
    return PeftModel.from_pretrained(model, table.workspace.adapter("language"), is_trainable=trainable).eval()


def _steps(table: Table, prepared: Callable[[Any], Any]) -> dict[str, Any]:
    """Losses and the adapter of some steps; ``prepared``: the model before it gets its adapter."""
    import torch

    torch.manual_seed(0)
    model = _adapted(table, prepared(table.workspace.load()), trainable=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    batch = table.text()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return {"losses": losses} | _trained(model)


def _trained(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def _distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference of the losses, or of all that is trained."""
    import torch

    def joined(values: dict[str, Any]) -> Any:
        return torch.cat([value.double().flatten() for name, value in values.items() if name != "losses"])

    pairs = [(torch.tensor(one["losses"]).double(), joined(one)) for one in (found, expected)]
    return max(float((one - other).norm() / other.norm()) for one, other in zip(*pairs))
