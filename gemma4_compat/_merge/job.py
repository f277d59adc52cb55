"""An adapter merged into its base layer by layer, and the merged model's answers compared before it gets its name.

Memory: the tensors of the adapter, and for the module at hand its weights in float32 three times (the base's, the
adapter's difference, their sum); what is not adapted is copied in pieces of 64 MiB. Neither the model nor a shard is
ever in memory. The check afterwards loads the model, twice, one after the other.

Everything is written into a folder beside the final one, which is renamed when parity is within bounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._checkpoint.shards import Output
from gemma4_compat._engine import versions
from gemma4_compat._engine.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._merge import adapter as _merge_adapter
from gemma4_compat._merge import check as _merge_check
from gemma4_compat._merge import text, weights
from gemma4_compat._merge.adapter import Adapter
from gemma4_compat._merge.check import Parity
from gemma4_compat._merge.result import MergeParityError, MergeReport
from gemma4_compat._merge.weights import Base
from gemma4_compat._models import build
from gemma4_compat._quantization import config as quantization_config

BASES = ("original", "dequantized")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: What "dequantized" takes for granted where nothing says how the base was quantized.
ASSUMED = "4bit-double"
REPORT, REPORT_TEXT = "merge_report.json", "merge_report.txt"
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")

#: Beside the weights of a base, but not of the merged model.
_LEFT = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_LEFT_NAMES = ("config.json", "README.md", ".gitattributes", REPORT, REPORT_TEXT)


@dataclass(frozen=True)
class _Start:
    """How the base is taken: ``settings`` are those of a ``BitsAndBytesConfig``."""

    kind: str
    quantize: str | None = None
    assumed: bool = False
    stored: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    start: str = "original",
    quantize: Any = None,
    skip_modules: Sequence[str] | None = None,
    dtype: str | None = None,
    device_map: Any = None,
    max_shard_size: int | str = "5GB",
    check: int = 4,
    tolerance: float | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
) -> MergeReport:
    """Merge ``adapter`` into ``base`` and write the result to ``out``; see :func:`gemma4_compat.merge_adapter`."""
    if start not in BASES:
        raise Gemma4CompatError(f"base {start!r} is unknown; it is one of {', '.join(BASES)}")
    if dtype is not None and dtype not in DTYPES:
        raise Gemma4CompatError(f"dtype {dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
    if check < 0:
        raise Gemma4CompatError(f"check is a number of prompts, 0 for none, not {check}")
    if tolerance is not None and not tolerance >= 0:
        raise Gemma4CompatError(f"tolerance is a difference of logits, 0 or more, not {tolerance}")
    largest = parse_size(max_shard_size)
    if not largest:
        raise Gemma4CompatError("max_shard_size must be more than 0; write it as 5GB")
    out = Path(out)
    _refuse_existing(out)
    base_folder, adapter_folder = local(base, "base"), local(adapter, "adapter")
    model = _on_meta(base_folder)
    how = _start_of(model, start, quantize, skip_modules)
    entries = shards.checkpoint(base_folder)
    kind = dtype or _stored_dtype(model, entries, how)
    with _staging(out) as staging, tempfile.TemporaryDirectory(dir=staging, prefix=".adapter-") as scratch:
        began = time.perf_counter()
        opened = _merge_adapter.open_adapter(adapter_folder, model, Path(scratch), allow_pickle=allow_pickle)
        found = weights.find_base(entries, model)
        _dequantize(found, model, how, kind)
        job = _Job(model, found, opened, DTYPES[kind], _sources(model, base_folder))
        job.untie()
        job.refuse_misfits()
        outputs = job.outputs()
        files = shards.shards(outputs, largest)
        _refuse_without_room(staging, sum(output.nbytes for output in outputs))
        names = shards.write(staging, files, job.values(progress))
        _copy_rest(base_folder, staging)
        _write_config(base_folder, staging, DTYPES[kind], job.untied)
        merged_in = time.perf_counter() - began
        began = time.perf_counter()
        parity = None
        if check:
            parity = _check(staging, base_folder, job, how, kind, device_map, check, tolerance)
        report = MergeReport(
            out=str(out),
            base=str(base),
            adapter=str(adapter),
            model_class=type(model).__name__,
            start=start,
            quantization=how.quantize,
            assumed=how.assumed,
            dtype=kind,
            peft_type=opened.config.peft_type.value,
            modules=len(opened.modules),
            replaced=len(opened.replaced),
            dequantized=len(found.quantized),
            dead=opened.dead,
            absent=opened.absent,
            untied=job.untied,
            files=tuple(names),
            nbytes=sum(output.nbytes for output in outputs),
            seconds={"merge": round(merged_in, 2), "check": round(time.perf_counter() - began, 2)},
            versions={name: version for name in _LIBRARIES if (version := versions.installed(name))},
            parity=parity,
        )
        if parity is not None and not parity.ok:
            raise MergeParityError(f"{text.verdict(parity)}; nothing was written to {str(out)!r}", report)
        shards.write_text(staging / REPORT, json.dumps(report.as_data(), indent=2) + "\n")
        shards.write_text(staging / REPORT_TEXT, text.report_text(report) + "\n")
    return report


# ------------------------------------------------------------------------------------------------------------- places


def _on_meta(folder: Path) -> Any:
    try:
        return build.on_meta(str(folder))[0]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        line = " ".join(str(error).split())
        raise Gemma4CompatError(f"no model can be built from config.json in {str(folder)!r}: {line}") from error


def local(given: str | Path, what: str) -> Path:
    """The folder that is meant: a folder, or the id of something cached.

    Raises:
        Gemma4CompatError: it is neither.
    """
    folder = Path(given)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise Gemma4CompatError(f"{str(given)!r} is a file; give the folder of the {what}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(given), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, FileNotFoundError) as error:
        raise Gemma4CompatError(
            f"the {what} {str(given)!r} is no folder and not in the cache of the hub; fetch it with: "
            f"hf download {given}"
        ) from error


def _refuse_existing(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise Gemma4CompatError(f"{str(out)!r} exists; nothing is overwritten. Give a new folder, or remove that one")


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes it at the end, or is removed, whatever ends the merge."""
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=parent))
    except OSError as error:
        raise Gemma4CompatError(f"{str(parent)!r} cannot be written: {error.strerror or error}") from error
    try:
        with _terminable():
            yield staging
            staging.chmod(0o777 & ~_umask())
            try:
                if out.is_dir():
                    out.rmdir()  # empty, or this raises
                staging.rename(out)
            except OSError as error:
                raise Gemma4CompatError(f"{str(out)!r} cannot be written: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(staging)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what runs inside as an exception does, where nobody else has taken it."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _refuse_without_room(staging: Path, nbytes: int) -> None:
    free = shutil.disk_usage(staging).free
    if free < nbytes:
        raise Gemma4CompatError(
            f"{str(staging.parent)!r} has {free} bytes free and the merged model needs {nbytes}. Free some space, or "
            "merge to another disk"
        )


def _copy_rest(base: Path, staging: Path) -> None:
    """Everything beside the weights that belongs to the model: tokenizer, processor, templates, licence."""
    for file in sorted(base.iterdir()):
        name = file.name
        if name in _LEFT_NAMES or name.endswith(_LEFT) or name.startswith("."):
            continue
        target = staging / name
        try:
            if file.is_file():
                shutil.copyfile(file, target)
            elif name == "additional_chat_templates":
                shutil.copytree(file, target)
        except OSError as error:
            raise shards.unwritable(error, target, file.stat().st_size) from error


def _write_config(base: Path, staging: Path, dtype: str, untied: bool) -> None:
    """The base's config.json with what has changed, and nothing else."""
    data = json.loads((base / "config.json").read_text(encoding="utf-8"))
    data.pop("quantization_config", None)
    parts = [data, *(part for name, part in data.items() if name.endswith("_config") and isinstance(part, dict))]
    for part in parts:
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
        if untied and (part is data or "vocab_size" in part):
            part["tie_word_embeddings"] = False
    if not {"dtype", "torch_dtype"} & set(data):
        data["dtype"] = dtype
    shards.write_text(staging / "config.json", json.dumps(data, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------------- the start


def _start_of(model: Any, start: str, quantize: Any, skip_modules: Sequence[str] | None) -> _Start:
    given = quantize if quantize is None or isinstance(quantize, str) else quantize.to_dict()
    if isinstance(given, str):
        quantization_config.check(given)
    stored = getattr(model.config, "quantization_config", None)
    if start == "original":
        if stored is not None:
            raise Gemma4CompatError(
                "the base is quantized on disk: there are no high-precision weights in it. Give the checkpoint it was "
                "made from, or take what the adapter was trained on: --base dequantized (start='dequantized')"
            )
        if given is not None or skip_modules is not None:
            raise Gemma4CompatError("quantize and skip_modules are for --base dequantized (start='dequantized')")
        return _Start(start)
    if not versions.installed("bitsandbytes"):
        raise Gemma4CompatError("--base dequantized needs bitsandbytes: pip install 'gemma4-compat[stack]'")
    if stored is not None:
        settings = stored if isinstance(stored, dict) else stored.to_dict()
        kind = _kind_of(settings)
        if given is not None and given != kind and (isinstance(given, str) or _kind_of(given) != kind):
            raise Gemma4CompatError(f"the base is quantized on disk, as {kind}; leave --quantize out")
        return _Start(start, kind, stored=True, settings=settings)
    if isinstance(given, dict):
        skip = given.get("llm_int8_skip_modules") if skip_modules is None else skip_modules
        settings, kind = given, _kind_of(given)
    else:
        skip, settings, kind = skip_modules, {"bnb_4bit_quant_type": "nf4"}, given or ASSUMED
    chosen = quantization_config.default_skip_modules(model) if skip is None else list(skip)
    return _Start(start, kind, given is None, False, settings, tuple(chosen))


def _kind_of(settings: Mapping[str, Any]) -> str:
    if (name := quantization_config.name_of(settings)) is not None:
        return name
    raise Gemma4CompatError(
        f"the quantization {settings.get('quant_method')!r} is not bitsandbytes' 4-bit or 8-bit; give the checkpoint "
        "the base was made from, with --base original"
    )


def _stored_dtype(model: Any, entries: Mapping[str, shards.Entry], how: _Start) -> str:
    """The dtype most of the base's values have; bf16 for a quantized one that does not say."""
    import torch

    names = {value: key for key, value in DTYPES.items()}
    if how.stored:
        said = str(getattr(model.config, "dtype", None) or torch.bfloat16).removeprefix("torch.")
        return names.get(said, "bf16")
    sizes: dict[str, int] = {}
    for entry in entries.values():
        if entry.dtype in names:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return names[max(sizes, key=lambda name: sizes[name])] if sizes else "bf16"


def _dequantize(base: Base, model: Any, how: _Start, kind: str) -> None:
    """Tell ``base`` which of its weights are, or would be, quantized, and how."""
    import torch

    if how.kind == "original":
        if base.stored:
            raise Gemma4CompatError(
                "the base's weights are quantized on disk, though its config.json does not say so; give the "
                "checkpoint they were made from"
            )
        return
    if how.stored:
        if not base.stored:
            raise Gemma4CompatError("config.json says that the base is quantized, but none of its weights are")
        return
    assert how.quantize is not None
    names = quantization_config.linear_names(model, how.skip)
    base.quantized = frozenset(f"{name}.weight" for name in names if f"{name}.weight" in base.disk)
    base.round_trip = weights.quantizer(how.quantize, how.settings, getattr(torch, DTYPES[kind]))


def _sources(model: Any, base: Path) -> dict[str, str]:
    """Tied parameters -> the one whose values they have."""
    data = json.loads((base / "config.json").read_text(encoding="utf-8"))
    tied = model.config.get_text_config().tie_word_embeddings if "text_config" not in data else None
    if not (model.config.tie_word_embeddings if tied is None else tied):
        return {}
    keys = model._tied_weights_keys or {}
    return dict(keys) if isinstance(keys, dict) else {}


# ----------------------------------------------------------------------------------------------------------- the merge


class _Job:
    """One merge: which tensors come out, and their values."""

    def __init__(self, model: Any, base: Base, adapter: Adapter, dtype: str, sources: dict[str, str]) -> None:
        self.model = model
        self.base = base
        self.adapter = adapter
        self.dtype = dtype
        self.sources = sources
        self.untied = False
        self._owned: dict[str, str] = {}
        for path in adapter.modules:
            for name, _ in model.get_submodule(path).named_parameters():
                self._owned[f"{path}.{name}"] = path
        self._waiting: dict[str, Any] = {}

    def touched(self, name: str) -> bool:
        return name in self._owned or name in self.adapter.replaced

    def untie(self) -> None:
        """Decide whether the head and its embedding, which shared their values, still can."""
        for target, source in self.sources.items():
            if not self.touched(target) and not self.touched(source):
                continue
            if self._stays_tied(target, source):
                self._owned.pop(target, None)
                self.adapter.replaced.pop(target, None)
                self.base.disk.pop(target, None)  # some checkpoints hold it twice, and one would be stale
                self.base.keys.pop(target, None)
            else:
                self.untied = True

    def _stays_tied(self, target: str, source: str) -> bool:
        if not self.touched(target):
            path = source.rpartition(".")[0]
            keys = self.adapter.modules.get(path, [])
            by_token = bool(keys) and _merge_adapter.kind_of(keys, self.adapter.config, path) == "tokens"
            # PEFT hands both of these on to the head by itself, and saves one of them.
            return by_token or bool(getattr(self.adapter.config, "ensure_weight_tying", False))
        if not self.touched(source):
            return False
        return self._digest(target) == self._digest(source)

    def _digest(self, name: str) -> str:
        found = hashlib.sha256()
        for piece in self._pieces(name):
            found.update(shards._bytes(piece))
        return found.hexdigest()

    def refuse_misfits(self) -> None:
        """Values that the adapter replaces as a whole must have the shape they replace."""
        for name, key in self.adapter.replaced.items():
            entry = self.adapter.entries[key]
            known = self.model.get_parameter(name) if name in self._parameters() else self.model.get_buffer(name)
            if tuple(known.shape) != entry.shape:
                raise Gemma4CompatError(
                    f"the adapter's {key!r} is {list(entry.shape)}, the base's {name} {list(known.shape)}: the "
                    "adapter was made for a base of another size (a resized vocabulary?); give that one"
                )
        for name in self._owned:
            if self.sources.get(name, name) not in self.base.disk:
                raise Gemma4CompatError(f"the base has no weight {name!r}, which the adapter changes")

    def _parameters(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def outputs(self) -> list[Output]:
        """Every tensor of the merged model, in the base's order."""
        found = []
        names = {key: name for name, key in self.base.keys.items()}
        for key, entry in self._on_disk().items():
            name = names.get(key)
            shape = entry.shape if name is None else self.base.shape(name)
            found.append(Output(key, self._dtype(name, entry.dtype), tuple(shape)))
        if self.untied:
            for target, source in self.sources.items():
                if target not in self.base.disk:
                    entry = self.base.disk[source]
                    found.append(Output(target, self._dtype(target, entry.dtype), tuple(self.base.shape(source))))
        return found

    def _on_disk(self) -> dict[str, shards.Entry]:
        all_of_them = {self.base.keys[name]: entry for name, entry in self.base.disk.items()} | self.base.rest
        return dict(sorted(all_of_them.items(), key=lambda item: (str(item[1].file), item[1].start)))

    def _dtype(self, name: str | None, dtype: str) -> str:
        if name is not None and (name in self.base.stored or self.touched(name)):
            return self.dtype
        return self.dtype if shards.dtype_of(dtype).is_floating_point else dtype

    def values(self, progress: bool | None) -> dict[str, Callable[[], Iterator[Any]]]:
        """For each output, what gives its pieces."""
        bar = _bar(len(self.outputs()), progress)
        names = {key: name for name, key in self.base.keys.items()}

        def value(key: str) -> Callable[[], Iterator[Any]]:
            def pieces() -> Iterator[Any]:
                name = names.get(key, key)
                yield from self._cast(name, self._pieces(name), key)
                bar.update()

            return pieces

        return {output.name: value(output.name) for output in self.outputs()}

    def _pieces(self, name: str) -> Iterator[Any]:
        if name in self._owned:
            if name not in self._waiting:
                path = self._owned[name]
                self._waiting |= weights.merged(path, self.model, self.base, self.adapter, self.sources)
            yield self._waiting.pop(name)
        elif name in self.adapter.replaced:
            yield from shards.pieces(self.adapter.entries[self.adapter.replaced[name]])
        elif name in self.base.rest:
            yield from shards.pieces(self.base.rest[name])
        else:
            yield from self.base.pieces(name if name in self.base.disk else self.sources[name])

    def _cast(self, name: str, pieces: Iterator[Any], key: str) -> Iterator[Any]:
        import torch

        wanted = shards.dtype_of(self.dtype)
        for piece in pieces:
            if not piece.is_floating_point() or piece.dtype == wanted:
                yield piece
                continue
            cast = piece.to(wanted)
            if piece.numel() > 1 and not torch.isfinite(cast).all() and torch.isfinite(piece).all():
                raise Gemma4CompatError(f"{key} has values that {self.dtype} cannot hold; merge to bf16 or fp32")
            yield cast


def _bar(total: int, progress: bool | None) -> Any:
    from tqdm import tqdm

    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc="merging", unit="tensor", disable=not shown, leave=False)


# ----------------------------------------------------------------------------------------------------------- the check


def _check(
    staging: Path,
    base: Path,
    job: _Job,
    how: _Start,
    kind: str,
    device_map: Any,
    count: int,
    tolerance: float | None,
) -> Parity:
    import torch
    import transformers

    wanted = getattr(transformers, type(job.model).__name__)
    dtype = getattr(torch, DTYPES[kind])
    placement = _placement(device_map)
    adapted = [*job.adapter.modules, *dict.fromkeys(name.rpartition(".")[0] for name in job.adapter.replaced)]
    asked, notes = _merge_check.prompts(base, job.model, count, adapted)

    arguments: dict[str, Any] = {"dtype": dtype, "device_map": placement}
    title = "the base with the adapter loaded"
    exact = how.quantize is not None and not _runs_in_4bit(job, how)
    if exact:
        title = f"the base as {how.quantize} has its weights, with the adapter loaded, computed in {kind}"
    elif how.quantize is not None:
        title = f"the {how.quantize} base with the adapter loaded"
        if not how.stored:
            arguments["quantization_config"] = _quantization_config(how, dtype)

    def load_base() -> Any:
        from peft import PeftModel

        from gemma4_compat._quantization import opt_in

        if exact:
            values = {job.base.keys[name]: job.base.read(name).to(dtype) for name in job.base.disk}
            config = type(job.model.config).from_pretrained(str(staging))
            config.tie_word_embeddings = bool(job.sources)
            config.get_text_config().tie_word_embeddings = bool(job.sources)
            model = wanted.from_pretrained(None, config=config, state_dict=values, **arguments)
        else:
            with opt_in.OFFLOADED.enabled():
                model = wanted.from_pretrained(str(base), **arguments)
        loaded = PeftModel.from_pretrained(model, str(job.adapter.folder)).eval()
        for module in loaded.modules():
            if type(module).__name__ == "Linear4bit":
                # The kernel for inference on CPUs rounds the scales of the weights; that of training does not.
                module.training = True
        return loaded

    def load_merged() -> Any:
        return wanted.from_pretrained(str(staging), dtype=dtype, device_map=placement).eval()

    reference = _merge_check.ask_reference(load_base, asked, adapted, title)
    return _merge_check.compare(load_merged, asked, reference, tolerance=tolerance, notes=notes)


def _runs_in_4bit(job: _Job, how: _Start) -> bool:
    """Whether bitsandbytes computes with exactly the weights that were merged into.

    8-bit layers round what goes into them, too, by more than the merge changes; 4-bit blocks must fill rows.
    """
    return how.quantize != "8bit" and all(job.base.shape(name)[-1] % 64 == 0 for name in job.base.quantized)


def _placement(device_map: Any) -> Any:
    import torch

    if device_map is None:
        return {"": 0} if torch.cuda.is_available() else {"": "cpu"}
    return (
        {"": device_map}
        if isinstance(device_map, str) and device_map.partition(":")[0] in ("cpu", "cuda")
        else device_map
    )


def _quantization_config(how: _Start, dtype: Any) -> Any:
    from transformers import BitsAndBytesConfig

    skip = list(how.skip)
    if how.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip, llm_int8_enable_fp32_cpu_offload=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=how.settings.get("bnb_4bit_quant_type", "nf4"),
        bnb_4bit_use_double_quant=how.quantize == "4bit-double",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skip,
        llm_int8_enable_fp32_cpu_offload=True,
    )
