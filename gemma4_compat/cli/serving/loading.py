"""The model to serve: placed by its plan, with its adapters by name, an assistant and a processor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters.saved import CONFIG, PICKLE, WEIGHTS
from gemma4_compat._generation.prefix_cache.parked import Conversations
from gemma4_compat._offload import host_room
from gemma4_compat._plan import assistants, budgets, requests
from gemma4_compat._plan.result import Plan

#: The releases of transformers whose server this is: from 5.15 on it parses what a model writes.
RELEASES = ">=5.15,<6"
#: Tokens that an assistant drafts whose checkpoint does not say so; transformers has no other default for it.
_DRAFTS = 4


@dataclass(frozen=True)
class Wanted:
    """What a command asks for.

    Attributes:
        model: as for ``plan_device_map``.
        adapters: each a folder, or ``NAME=FOLDER``.
        assistant: a model that drafts, as ``from_pretrained`` takes it.
        conversations: bytes of host memory for conversations other than the last one.
        exact: PyTorch's bits, and no conversation is kept.
        device_map: where modules go, in place of the plan's.
        plan: arguments of ``plan_device_map``; ``quantize`` and ``vram`` may be None.
    """

    model: str
    adapters: Sequence[str] = ()
    assistant: str | None = None
    conversations: int = 1 << 31
    exact: bool = False
    device_map: dict[str, Any] | None = None
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass
class Served:
    """A loaded model.

    Attributes:
        model: of transformers, or a PEFT model around it.
        base: the one of transformers.
        processor: of text, images and sounds, or only a tokenizer.
        names: by the name that a request gives, an adapter; None: the base.
        plan: where its weights are, and for how long a context.
        conversations: that prompts continue; None if none is kept.
        assistant: drafts tokens.
    """

    model: Any
    base: Any
    processor: Any
    names: dict[str, str | None]
    plan: Plan
    conversations: Conversations | None = None
    assistant: Any = None

    @property
    def tokenizer(self) -> Any:
        """Reads and writes text."""
        return getattr(self.processor, "tokenizer", self.processor)

    def generate(self, adapter: str | None, inputs: dict[str, Any], **options: Any) -> None:
        """Run ``generate`` with an adapter or without any, after the conversation that the prompt continues."""
        with self.speaking(adapter):
            self.read(adapter, inputs, **options)

    def read(self, adapter: str | None, inputs: dict[str, Any], **options: Any) -> None:
        """The same, while this adapter speaks."""
        import torch

        if self.assistant is not None:
            options["assistant_model"] = self.assistant
        device = self.base.device
        inputs = {name: value.to(device) if hasattr(value, "to") else value for name, value in inputs.items()}
        if self.conversations is not None:
            self.conversations.turn_to(adapter, inputs)
        with torch.no_grad():
            self.model.generate(**inputs, **options)

    @contextlib.contextmanager
    def speaking(self, adapter: str | None) -> Iterator[None]:
        """Inside, the model answers with an adapter, or without any; it stays so, as PEFT takes long to switch."""
        if self.model is self.base:
            yield
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        layer = next((module for module in self.model.modules() if isinstance(module, BaseTunerLayer)), None)
        if adapter is None and layer is None:  # virtual tokens
            with self.model.disable_adapter():
                yield
            return
        if layer is not None and layer.disable_adapters != (adapter is None):
            tuner = self.model.base_model
            tuner.disable_adapter_layers() if adapter is None else tuner.enable_adapter_layers()
        if adapter is not None and self.model.active_adapter != adapter:
            self.model.set_adapter(adapter)
        yield


def load(wanted: Wanted, folder: str) -> Served:
    """Plan, load and prepare a model.

    Args:
        wanted: the model, and how.
        folder: for weights that are offloaded to disk.

    Raises:
        Gemma4CompatError: transformers has another server, nothing fits, or two names are the same.
    """
    refuse_release()
    named = dict(map(_named, wanted.adapters))
    if len(set(map(_in_peft, named))) < len(wanted.adapters):
        raise Gemma4CompatError(
            "two adapters have the same name (. and - are alike); name one yourself: --adapter NAME=FOLDER"
        )
    plan = _planned(wanted, list(named.values()))
    base_name = Path(plan.model).name if Path(plan.model).is_dir() else plan.model
    if base_name in named:
        raise Gemma4CompatError(f"an adapter and the model are both named {base_name!r}; use --adapter NAME=FOLDER")
    base = _base(plan, wanted.device_map or plan.device_map, folder)
    model = _with_adapters(base, named)
    fast = plan.fast or (wanted.device_map is not None and base.device.type == "cuda")
    keeps = not wanted.exact and wanted.assistant is None
    gemma4_compat.decode_fast(
        model,
        graphs=fast,
        exact=wanted.exact and fast,
        any_length=fast and not wanted.exact,
        assistants=fast and not wanted.exact and wanted.assistant is not None,
        reuse_prefix=keeps,
    )
    return Served(
        model=model,
        base=base,
        processor=_processor(plan.model),
        names={base_name: None, **{name: _in_peft(name) for name in named}},
        plan=plan,
        conversations=Conversations(base, wanted.conversations, plan.context) if keeps else None,
        assistant=None if wanted.assistant is None else _assistant(plan, wanted.assistant),
    )


def refuse(wanted: Wanted) -> None:
    """Refuse what can be refused before torch is imported.

    Raises:
        Gemma4CompatError: transformers has another server, something is not there, or a value is impossible.
    """
    refuse_release()
    for adapter in wanted.adapters:
        _named(adapter)
    requests.refuse(requests.Request(model=wanted.model, assistant=wanted.assistant is not None, **wanted.plan))


def refuse_release() -> None:
    """Raise an error unless the installed transformers has the server that this one is made of."""
    found = versions.installed("transformers")
    if found is not None and not versions.admits(RELEASES, found):
        raise Gemma4CompatError(
            f"transformers {found} is installed, and serve and chat are made of the server of transformers 5.15 and "
            "newer. Upgrade it, or serve a merged model: gemma4-compat run transformers serve FOLDER (docs/SERVE.md)"
        )


def _named(adapter: str) -> tuple[str, Path]:
    name, given, folder = adapter.partition("=")
    if not given or Path(adapter).is_dir():
        name, folder = Path(adapter).resolve().name, adapter
    if not (Path(folder) / CONFIG).is_file():
        raise Gemma4CompatError(f"there is no {CONFIG} in the folder {folder!r}; give the folder of an adapter")
    return name, Path(folder)


def _planned(wanted: Wanted, adapters: list[Path]) -> Plan:
    """The plan: with the largest adapter that it can read, and the others in less memory."""
    options = dict(wanted.plan)
    sizes = sorted(((folder / WEIGHTS).stat().st_size, folder) for folder in adapters if (folder / WEIGHTS).exists())
    pickled = [folder / PICKLE for folder in adapters if not (folder / WEIGHTS).exists()]
    others = sum(size for size, _ in sizes[:-1]) + sum(file.stat().st_size for file in pickled if file.exists())
    if sizes:
        options["adapter"] = sizes[-1][1]
    asked = options.get("vram") is not None or options.get("card") is not None
    if wanted.device_map is not None or not (asked or budgets.machine()):
        free = 1 << 50 if wanted.device_map is not None else host_room.available() or 1 << 40
        options |= {"vram": {"cpu": free}, "card": None, "quantize": options.get("quantize") or "none"}
    options["quantize"] = options.get("quantize") or "4bit"
    if others:
        given = budgets.of(options.get("vram"), options.get("card"))
        options["vram"] = {device: size - 2 * others for device, size in given.items()}  # PEFT loads them in float32
    return gemma4_compat.plan_device_map(wanted.model, assistant=wanted.assistant is not None, **options)


def _base(plan: Plan, device_map: dict[str, Any], folder: str) -> Any:
    import torch
    import transformers

    dtype = getattr(torch, plan.source.dtype)
    options: dict[str, Any] = {"dtype": dtype, "device_map": device_map, "local_files_only": True}
    source, places = plan.source, set(device_map.values())
    if source.quantization is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_8bit=source.quantization == "8bit",
            load_in_4bit=source.quantization != "8bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=source.quantization == "4bit-double",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=list(source.skip),
        )
    if "disk" in places:
        options["offload_folder"] = folder
    away = source.quantization is not None and len(places) > 1 and not places.isdisjoint(("cpu", "disk"))
    more = {"offloaded": away, "experts": source.experts is not None and not source.stored_experts}
    with gemma4_compat.quantize(**more) if any(more.values()) else contextlib.nullcontext():
        return _cached(getattr(transformers, plan.model_class), plan.model, **options).eval()


def _cached(made: Any, name: str, **options: Any) -> Any:
    """What ``from_pretrained`` loads; nothing is downloaded."""
    try:
        return made.from_pretrained(name, **options)
    except OSError as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise Gemma4CompatError(
            f"{name!r} cannot be loaded: {said} Nothing is downloaded here; `hf download {name}` fetches a model"
        ) from error


def _with_adapters(base: Any, named: dict[str, Path]) -> Any:
    if not named:
        return base
    from peft import PeftModel

    (first, folder), *others = named.items()
    model = PeftModel.from_pretrained(base, str(folder), adapter_name=_in_peft(first))
    for name, folder in others:
        model.load_adapter(str(folder), adapter_name=_in_peft(name))
    return model.eval()


def _in_peft(name: str) -> str:
    """The name of an adapter in PEFT, where it is a module's."""
    return name.replace(".", "-")


def _assistant(plan: Plan, name: str) -> Any:
    import torch
    import transformers

    made = getattr(transformers, assistants.class_of(plan.model_class))
    options = {
        "dtype": getattr(torch, plan.source.dtype),
        "device_map": {"": next(iter(plan.use))},
        "local_files_only": True,
    }
    found = _cached(made, name, **options).eval()
    found.generation_config.num_assistant_tokens = found.generation_config.num_assistant_tokens or _DRAFTS
    return found


def _processor(model: str) -> Any:
    """The processor, or, where images and sounds cannot be prepared, the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    try:
        return AutoProcessor.from_pretrained(model, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return _cached(AutoTokenizer, model, local_files_only=True)
