"""What a saved adapter is and what it would do on a base: ``gemma4_compat.scan_adapter`` and ``scan``.

Reads headers and configurations; no weights. Without a base nothing upstream is imported. With one, its class is built
on the meta device and PEFT itself says which keys and shapes the adapter must have there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gemma4_compat._adapter_tools.base import build, quantized
from gemma4_compat._adapter_tools.scan import configuration, lora_file
from gemma4_compat._adapter_tools.scan.comparison import Comparison
from gemma4_compat._adapter_tools.scan.lora_file import Ranks
from gemma4_compat._adapter_tools.scan.result import Findings, Scan, count_by_tower, tower_of
from gemma4_compat._engine.io import patterns, shadowed
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import translation
from gemma4_compat._gemma4.adapters.saved import CONFIG, SavedAdapter, module_of, read
from gemma4_compat._gemma4.models import build as models
from gemma4_compat._gemma4.quantization import config


def scan_adapter(
    adapter: str | os.PathLike[str], base: Any = None, *, quantize: str | None = None, renames: bool = True
) -> Scan:
    """What a saved adapter is, and what it would do on ``base``; see :func:`gemma4_compat.scan_adapter`.

    ``renames``: whether keys of another Gemma 4 class are renamed when the adapter is loaded here, which the patch
    ``peft-adapter-keys`` does.
    """
    saved = read(adapter)
    peft_type = configuration.peft_type(saved)
    quantize = None if quantize == "none" else quantize
    if base is None and quantize is not None:
        raise Gemma4CompatError(f"quantize={quantize!r} is about the base, which was not given; give the base as well")
    patterns.refuse_slow(saved.config, map(module_of, saved.tensors), repr(str(saved.folder / CONFIG)))
    ranks = Ranks(saved, peft_type)
    if base is None:
        return _alone(saved, peft_type, ranks)
    models.refuse_unknown(base)
    if quantize is not None:
        config.check(quantize, or_none=True)
    return _against(saved, peft_type, ranks, base, quantize, renames)


def _alone(saved: SavedAdapter, peft_type: str, ranks: Ranks) -> Scan:
    findings = Findings()
    lora_file.check(saved, peft_type, ranks, findings)
    trained_on = saved.config.get("base_model_name_or_path")
    if trained_on:
        findings.notes.append(f"it was trained on {trained_on}; give a base to see what it does there")
    return _scan(saved, peft_type, ranks, findings, keys=count_by_tower(map(module_of, saved.tensors)))


def _against(
    saved: SavedAdapter, peft_type: str, ranks: Ranks, base: Any, quantize: str | None, renames: bool
) -> Scan:
    findings = Findings()
    shadowed.refuse("torch", "transformers", "peft")
    built = build(base)
    findings.notes += filter(None, [built.assumed])
    built = quantized(built, quantize, findings.notes)
    patterns.refuse_slow(saved.config, built.modules, repr(str(saved.folder / CONFIG)))
    comparison = Comparison(saved, peft_type, built, findings)
    # Where PEFT says which shapes it wants, those are compared instead of the ranks.
    lora_file.check(saved, peft_type, None if comparison.knows_shapes else ranks, findings)
    comparison.check(renames=renames)
    findings.problems.sort(key=lambda item: item.id not in ("damaged", "empty", "refused", "unmatched"))
    return _scan(
        saved,
        peft_type,
        ranks,
        findings,
        base=built.name,
        model_class=type(built.model).__name__,
        quantization=built.quantization,
        keys=count_by_tower(comparison.placed.values()),
        hits=comparison.hits(),
        redirected=comparison.redirected,
        remapped={key: name for key, name in comparison.found.names.items() if key != name},
        dead=comparison.found.unused,
    )


def _scan(
    saved: SavedAdapter, peft_type: str, ranks: Ranks, findings: Findings, *, keys: Mapping[str, int], **fields: Any
) -> Scan:
    tensors = saved.tensors
    return Scan(
        adapter=str(saved.folder),
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
        peft_type=peft_type,
        settings=configuration.settings(saved.config),
        saved_from=_saved_from(tensors),
        saved_by=configuration.saved_by(saved.config),
        keys=keys,
        dtypes=dict(sorted(Counter(tensor.dtype for tensor in tensors.values()).items())),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        ranks=dict(sorted(Counter(ranks.in_file().values()).items())),
        **fields,
    )


def _saved_from(keys: Iterable[str]) -> str:
    """The class whose names the keys are, by where the decoder layers are."""
    for key in keys:
        path = key.removeprefix(translation.PREFIX)
        if tower_of(path) in ("vision", "audio", "embedders"):
            names = {"model": "Gemma4ForConditionalGeneration"}
            return names.get(path.partition(".")[0], "Gemma4Model")
        for start, name in (
            ("model.language_model.layers.", "Gemma4ForConditionalGeneration"),
            ("model.layers.", "Gemma4ForCausalLM"),
            ("language_model.model.layers.", "a multimodal class of the old layout (language_model.model)"),
            ("language_model.layers.", "Gemma4Model"),
            ("layers.", "Gemma4TextModel"),
        ):
            if path.startswith(start):
                return name
    return "unknown"
