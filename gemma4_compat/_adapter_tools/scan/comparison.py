"""An adapter compared with a base: where its keys go, and what PEFT would miss, refuse or drop.

PEFT itself says which keys and shapes the adapter must have: it makes the adapter on the meta device, from the same
configuration as when it loads it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gemma4_compat._adapter_tools.base import Base
from gemma4_compat._adapter_tools.scan import configuration, lora_file
from gemma4_compat._adapter_tools.scan.result import TOWERS, Findings, Hit, tower_of
from gemma4_compat._errors import Gemma4CompatWarning
from gemma4_compat._gemma4.adapters import clipped, fitting, translation
from gemma4_compat._gemma4.adapters.saved import REFUSALS, SavedAdapter, first_line, module_of


class Comparison:
    """One adapter on one base. Creating it lets PEFT make the adapter, and adds what PEFT says to ``findings``.

    Attributes:
        found: where the keys of the file go.
        redirected: the clipped wrappers that the targets name.
        placed: the module of each key: the base's, or as the key names it.
        knows_shapes: whether PEFT said which keys and shapes it wants. It does not where it refuses the adapter, and
            is not consulted about one that adapts no module.
    """

    def __init__(self, saved: SavedAdapter, peft_type: str, base: Base, findings: Findings) -> None:
        self._saved = saved
        self._peft_type = peft_type
        self._base = base
        self._findings = findings
        self._expected: dict[str, tuple[int, ...]] | None = None
        # Weights of the base itself, which PEFT saves with a resized vocabulary and loads over the base's.
        self._whole: dict[str, tuple[int, ...]] = {}
        self.redirected: tuple[str, ...] = ()
        translated = translation.translate(saved.tensors, [path for path in base.modules if path])
        if peft_type not in configuration.PROMPTS:
            self._expect()
        else:
            findings.notes.append(f"{peft_type} adapts no module, so its keys are not compared with the base")
        self.knows_shapes = self._expected is not None
        self.found = _with_expected(translated, self._expected or {}, base.modules)
        self.placed = {
            key: self.found.modules[key][1] if key in self.found.modules else module_of(key) for key in saved.tensors
        }

    def hits(self) -> tuple[Hit, ...]:
        """The modules of the base that the file has weights for, by tower and kind."""
        kinds: dict[str, str] = {}
        for key, (_, path) in self.found.modules.items():
            kind = self._base.kind(path)
            if self.found.names[key] not in (f"{translation.PREFIX}{path}.weight", f"{translation.PREFIX}{path}.bias"):
                kinds[path] = kind
            else:
                kinds.setdefault(path, f"full weight of {kind}")
        counts = Counter((tower_of(path), kind) for path, kind in kinds.items())
        ordered = sorted(counts.items(), key=lambda item: (TOWERS.index(item[0][0]), item[0][1]))
        return tuple(Hit(tower, kind, count) for (tower, kind), count in ordered)

    def check(self, *, renames: bool) -> None:
        """Add what does not fit. ``renames``: keys of another class get their names here when they are loaded."""
        unmatched = list(self.found.unmatched)
        if self._expected is not None:
            known = self._expected.keys() | self._whole.keys()
            unknown = [key for key, name in self.found.names.items() if name not in known]
            unmatched += [key for key in unknown if key not in self.found.modules]
            self._check_shapes(self._expected)
            self._check_quantized()
            self._findings.add(
                "untargeted",
                "{count} keys belong to modules that the targets in adapter_config.json leave out, such as {first}: "
                "PEFT drops their weights without an error",
                [key for key in unknown if key in self.found.modules],
            )
            self._check_missing(self._expected)
        every = self._saved.tensors and len(unmatched) == len(self._saved.tensors)
        self._findings.add(
            "unmatched",
            f"{'all' if every else '{count}'} keys belong to modules that this base lacks, such as {{first}}: the "
            "adapter was made for another model",
            unmatched,
        )
        if not renames:
            self._findings.add(
                "renamed",
                "{count} keys need another name in this base, such as {first}, and the patch that gives it to them is "
                "off: PEFT drops their weights with a warning. Leave the patch on (gemma4-compat explain "
                "peft-adapter-keys)",
                [key for key, name in self.found.names.items() if key != name],
            )
        if self.found.unused:
            self._findings.notes.append(
                f"{len(self.found.unused)} keys adapt keys and values of layers that share those of another layer and "
                "have none to adapt in this base; nothing is lost without them"
            )

    def _expect(self) -> None:
        """Ask PEFT for the keys and shapes of the adapter on this base, and note what it says."""
        import peft

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                config = _peft_config(self._saved, self._peft_type)
                redirected: tuple[str, ...] = ()
                if getattr(config, "target_modules", None):
                    redirected = tuple(clipped.matched_wrappers(config, self._base.model))
                with fitting.loading(self._saved.folder, tuple(self._saved.tensors)):
                    adapted = peft.get_peft_model(self._base.model, config, low_cpu_mem_usage=True)
            except REFUSALS as error:
                self._findings.add("refused", f"PEFT {peft.__version__} refuses it: {first_line(error)}", ())
                return
            own = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        self._findings.notes += [
            str(item.message)[:1000]
            for item in caught
            if "keyword arguments" in str(item.message)  # settings this PEFT does not know and ignores
            or issubclass(item.category, Gemma4CompatWarning)
        ]
        self.redirected = redirected
        self._expected = {key: tuple(tensor.shape) for key, tensor in own.items()}
        whole = {key: tuple(tensor.shape) for key, tensor in adapted.state_dict().items()}
        self._whole = {key: shape for key, shape in whole.items() if key not in self._expected}

    def _check_quantized(self) -> None:
        found = self.found
        self._findings.add(
            "quantized",
            "{count} keys replace a weight that is quantized in this base, such as {first}: PEFT cannot load them "
            "over it (KeyError or a size mismatch). Name the module in llm_int8_skip_modules",
            [
                key
                for key, (_, path) in found.modules.items()
                if path in self._base.quantized and found.names[key] == f"{translation.PREFIX}{path}.weight"
            ],
        )

    def _check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        if self._peft_type == "ADALORA" and self._saved.config.get("rank_pattern"):
            return  # it resizes its layers to the weights
        wanted = {**self._whole, **expected}
        ranks, shapes = [], []
        for key, name in self.found.names.items():
            shape = self._saved.tensors[key].shape
            if name not in wanted or wanted[name] == shape:
                continue
            half = lora_file.HALF.match(name)
            inner = (1 if half[2] == "A" else 0) if half else None
            if inner is not None and len(shape) == len(wanted[name]) == 2 and shape[inner] == wanted[name][inner]:
                ranks.append(key)
            else:
                shapes.append(key)
        for id, keys, reason in (
            ("rank", ranks, "a rank that differs from adapter_config.json: that file belongs to another adapter"),
            ("shape", shapes, "a shape that differs from this base's: the adapter was made for another model"),
        ):
            if keys:
                here = lora_file.shape_text(wanted[self.found.names[keys[0]]])
                example = f"{keys[0]} is {lora_file.shape_text(self._saved.tensors[keys[0]].shape)} instead of {here}"
                self._findings.add(id, f"{{count}} weights have {reason}. {example}", keys)

    def _check_missing(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in expected if name not in set(self.found.names.values())]
        if not missing or not self._saved.tensors:
            return
        # A name such as q_proj also reaches towers that the model did not have when the adapter was trained.
        trained = {tower_of(path) for path in self.placed.values()}
        lost = [name for name in missing if tower_of(module_of(name)) in trained]
        new = Counter(tower_of(module_of(name)) for name in missing if name not in lost)
        self._findings.add(
            "missing",
            "the file lacks {count} weights that its own targets ask for in this base, such as {first}: these layers "
            "keep their first values, an adapter that does nothing or noise",
            lost,
        )
        for tower, count in new.items():
            self._findings.notes.append(
                f"the targets also reach {tower}, for which the file has nothing ({count} weights): these layers keep "
                "their first values, which for LoRA do not change the outputs"
            )


def _with_expected(
    found: translation.Translation, expected: Collection[str], modules: Collection[str]
) -> translation.Translation:
    """``found``, with the keys that PEFT itself expects left as they are."""
    same = [key for key in found.unmatched if key in expected]
    owners = {key: module_of(key) for key in same}
    return replace(
        found,
        names={**found.names, **dict(zip(same, same))},
        unmatched=tuple(key for key in found.unmatched if key not in expected),
        modules={**found.modules, **{key: (path, path) for key, path in owners.items() if path in modules}},
    )


def _peft_config(saved: SavedAdapter, peft_type: str) -> Any:
    import peft

    if peft_type not in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ValueError(f"it has no {peft_type}; a newer PEFT may")
    config = peft.PeftConfig.from_pretrained(str(saved.folder))
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False  # some are computed from the base's weights, which are not there
    return config
