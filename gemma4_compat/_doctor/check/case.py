"""One placement: load the model so, ask it, decode fast, time it, all without the adapter and with it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.check import answers, errors, prompts, speeds
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.quantization import config
from gemma4_compat._generation.fast import decode_fast
from gemma4_compat._graphs import decoder, fused_steps

Say = Callable[[dict[str, Any]], None]

#: Tokens of an answer; of one that shows replayed steps on a GPU, enough to have them fused.
_TOKENS, _QUICK_TOKENS, _FUSED_TOKENS = 16, 8, fused_steps.Progress.after + 8
#: Tokens without fast decoding that are timed.
_EAGER_TOKENS = 16
LOAD, ADAPTER = "load", "load the adapter"


@dataclass(frozen=True)
class Step:
    """A part of the check: it says its result, or the crash that it ended in.

    Attributes:
        name: what people and reports call it.
        run: does it; what it returns is its result.
        needs: the step without which it is left out.
        optional: it is left out when the time is over.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    needs: str | None = LOAD
    optional: bool = False


class Case:
    """The steps of one placement.

    Args:
        order: a placement of :mod:`placements`, and ``folder``, ``adapter``, ``kinds``, ``contexts``, ``longest``,
            ``quick``, ``image``, ``store``, ``work``, ``tape`` (a stand-in for CUDA graphs on the CPU), ``limit``
            (bytes that PyTorch may allocate, or None) and ``seconds``.
        say: takes each event.
    """

    def __init__(self, order: dict[str, Any], say: Say) -> None:
        self._order, self._say = order, say
        self._store = answers.Store(Path(order["store"]))
        self._model: Any = None
        self._asked: dict[str, prompts.Prompt] = {}
        self._plain: dict[str, Any] = {}  # answers without the adapter, by prompt
        self._new = _QUICK_TOKENS if order["quick"] else _TOKENS

    def steps(self) -> list[Step]:
        """Those of this order."""
        found = [Step(LOAD, self._load, needs=None)]
        found += self._steps_of(adapter=False)
        if self._order["adapter"] is not None:
            found += [Step(ADAPTER, self._load_adapter), *self._steps_of(adapter=True)]
        return [*found, Step("peak", lambda: {"peak": speeds.peak()})]

    def run(self) -> None:
        """Run them all. A crash ends only its step, and those that need it."""
        steps = self.steps()
        self._say({"steps": [step.name for step in steps]})
        began, missing = time.monotonic(), set()
        for step in steps:
            if step.needs in missing:
                missing.add(step.name)
                continue
            if step.optional and time.monotonic() - began > self._order["seconds"]:
                self._say({"skipped": step.name})
                continue
            self._say({"step": step.name})
            try:
                found = step.run()
            except Exception as error:
                missing.add(step.name)
                self._say({"failed": step.name, "error": errors.described(error)})
                error.__traceback__ = None  # its frames hold the model's tensors
            else:
                self._say({"done": step.name, "found": found})

    def _steps_of(self, *, adapter: bool) -> list[Step]:
        after, needs = (" with the adapter", ADAPTER) if adapter else ("", LOAD)
        found = [Step(f"{kind}{after}", self._asking(kind, adapter), needs) for kind in self._order["kinds"]]
        found.append(Step(f"fast decoding{after}", lambda: self._fast(adapter), needs))
        contexts = self._order["contexts"]
        for context in contexts[:1] if adapter else contexts:
            found.append(Step(f"speed at {context} tokens{after}", self._timing(context), needs, optional=True))
        return found

    # Steps

    def _load(self) -> dict[str, Any]:
        import torch

        order = self._order
        if order["limit"] is not None and torch.cuda.is_available():
            total = torch.cuda.mem_get_info(0)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, order["limit"] / total))
        speeds.forget_peak()
        started = time.perf_counter()
        self._model = load(order)
        found = {"seconds": round(time.perf_counter() - started, 2), "peak": speeds.peak()}
        speeds.forget_peak()
        return found

    def _load_adapter(self) -> dict[str, Any]:
        from peft import PeftModel

        decode_fast(self._model, enabled=False)  # the graphs of the model without it
        started = time.perf_counter()
        self._model = PeftModel.from_pretrained(self._model, self._order["adapter"]).eval()
        return {"seconds": round(time.perf_counter() - started, 2)}

    def _prompt(self, kind: str) -> prompts.Prompt:
        if kind not in self._asked:
            order = self._order
            image = None if order["image"] is None else Path(order["image"])
            longest = order["longest"] - self._new
            self._asked[kind] = prompts.build(
                kind, self._base.config, Path(order["folder"]), longest=longest, image=image
            )
        return self._asked[kind]

    def _asking(self, kind: str, adapter: bool) -> Callable[[], dict[str, Any]]:
        def ask() -> dict[str, Any]:
            answer = answers.of(self._model, self._prompt(kind), self._new, self._suppressed)
            found = self._compared("eager", kind, adapter, answer)
            if not adapter:
                self._plain[kind] = answer
            elif kind in self._plain:
                found["changed"] = not answers.compared(self._plain[kind], answer)["equal"]
            return found

        return ask

    def _compared(self, way: str, kind: str, adapter: bool, answer: dict[str, Any]) -> dict[str, Any]:
        key = f"{self._order['label']} {way} {kind} {'adapter' if adapter else 'plain'}"
        against = self._store.compare(key, answer)
        return {"against": against, "finite": answers.finite(answer), "digest": answers.digest(answer)}

    def _fast(self, adapter: bool) -> dict[str, Any]:
        """Replayed steps against the same call without replays, in PyTorch's bits; own kernels across placements."""
        decode_fast(self._model, exact=True)
        new = self._fast_tokens
        prompt, before = self._prompt("text"), decoder.statistics(self._base).replayed
        eager = answers.generated(self._model, prompt, new, self._suppressed, disable_compile=True)
        replayed = answers.generated(self._model, prompt, new, self._suppressed)
        done = decoder.statistics(self._base)
        found: dict[str, Any] = {
            "against_eager": answers.compared(eager, replayed),
            "replayed": done.replayed - before,
            "fused": done.fused,
            "reasons": list(done.reasons),
            **self._compared("fast", "text", adapter, replayed),
        }
        decode_fast(self._model)
        own = answers.generated(self._model, prompt, new, self._suppressed)
        found["own"] = self._compared("own", "text", adapter, own)
        return found

    def _timing(self, context: int) -> Callable[[], dict[str, Any]]:
        def time_it() -> dict[str, Any]:
            few = min(_EAGER_TOKENS, self._order["longest"] - context)
            found: dict[str, Any] = {"context": context, "eager": None, "fast": None}
            if self._replays:
                found["fast"] = speeds.of(
                    self._model, context, min(self._fast_tokens, self._order["longest"] - context)
                )
                options = {"disable_compile": True}
            else:
                options = {}
            found["eager"] = speeds.of(self._model, context, few, **options)
            return found

        return time_it

    # What they share

    @property
    def _base(self) -> Any:
        model = self._model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def _suppressed(self) -> list[int]:
        return prompts.placeholders(self._base.config)

    @property
    def _replays(self) -> bool:
        return decoder.statistics(self._base).replayed > 0

    @property
    def _fast_tokens(self) -> int:
        on_gpu = str(self._base.device.type) == "cuda" and not self._order["quick"]
        return min(_FUSED_TOKENS if on_gpu else self._new, int(self._order["longest"]) // 2)


def load(order: dict[str, Any]) -> Any:
    """The model as the code of its plan loads it, in eval mode.

    Without a GPU it is loaded onto the CPU, which then stands for the card: what the map offloads leaves it through
    the same hooks.
    """
    import torch
    import transformers

    cls = getattr(transformers, order["model_class"])
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    offloads = any(device in ("cpu", "disk") for device in order["device_map"].values())
    if order["quantization"] is not None:
        options["quantization_config"] = config.bitsandbytes(
            order["quantization"], torch.bfloat16, order["skip"], offloads=offloads
        )
    on_gpu = torch.cuda.is_available()
    options["device_map"] = order["device_map"] if on_gpu else {"": "cpu"}
    if "disk" in order["device_map"].values():
        options["offload_folder"] = tempfile.mkdtemp(prefix="offload-", dir=order["work"])
    with _contexts(order, offloads=offloads):
        model = cls.from_pretrained(order["folder"], local_files_only=True, **options).eval()
    return model if on_gpu or not offloads else _dispatched(model, order)


@contextlib.contextmanager
def _contexts(order: dict[str, Any], *, offloads: bool) -> Iterator[None]:
    from gemma4_compat._gemma4.quantization import opt_in

    with contextlib.ExitStack() as entered:
        if order["quantize_experts"]:
            entered.enter_context(opt_in.EXPERTS.enabled())
        if order["quantization"] is not None and offloads:
            entered.enter_context(opt_in.OFFLOADED.enabled())
        yield


def _dispatched(model: Any, order: dict[str, Any]) -> Any:
    import torch
    from accelerate import dispatch_model

    cpu = torch.device("cpu")
    placement = {name: device if device in ("cpu", "disk") else cpu for name, device in order["device_map"].items()}
    if not any(device is cpu for device in placement.values()):
        raise Gemma4CompatError("nothing of this placement is on the card")
    return dispatch_model(
        model,
        placement,
        main_device=cpu,
        offload_dir=tempfile.mkdtemp(prefix="offload-", dir=order["work"]),
        skip_keys=list(model._skip_keys_device_placement),
    )
