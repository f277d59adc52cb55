"""Compare the outputs of a merged model with those of the base with the adapter loaded, against a measured bound.

Merging rounds each weight once more, which shows in the logits; how much depends on the model and the prompt. So the
bound is measured on the model itself. The adapter-loaded model runs again with noise, one rounding of its dtype, on
the output of every adapted module: rounding their weights has that effect. Every 4-bit layer gets noise as well,
because the merged model computes it with another kernel. A difference of more than a few times that noise is not due
to rounding.

Both models are never in memory at once.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.models import random_inputs

#: Bounds as multiples of the noise: for the largest difference, and for the root mean square, which varies less.
BOUND, BOUND_RMS = 3.0, 2.0
#: The same for a 4-bit result, against the same quantization of the base: here many values matter, not few.
OF_QUANTIZATION = (2.0, 1.5)
#: Draws of the noise; the largest counts.
DRAWS = 2
NEW_TOKENS = 16
_PROMPT_TOKENS = 32

_TEXTS = (
    "The capital of France is",
    "Write a short poem about the sea and the people who live from it.",
    'def fibonacci(n):\n    """The n-th Fibonacci number."""\n',
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nAnswer:",
    "Liebe Kolleginnen und Kollegen, hiermit lade ich Sie herzlich ein",
    "Summarize: the same weights must give the same answer wherever they live.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to Spanish: I would like a table for two by the window.",
)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How the merged model's outputs compare with those of the base with the adapter loaded.

    Differences are those of logits over every position of every prompt: the largest, and the root mean square.

    Attributes:
        prompts: the prompts.
        reference: what the merged model was compared with.
        positions: how many rows of logits were compared.
        difference: merged against adapter-loaded.
        difference_rms: its root mean square.
        noise: adapter-loaded against itself with one rounding of noise on the adapted modules.
        noise_rms: its root mean square.
        effect: adapter-loaded against the base without the adapter.
        effect_rms: its root mean square.
        bound: the largest allowed ``difference``.
        bound_rms: the largest allowed ``difference_rms``; None when a tolerance was given.
        kl_mean: Kullback-Leibler divergence of the merged model's next token from the adapter-loaded one's, in nats.
        kl_max: its maximum over all positions.
        greedy_equal: for each prompt, up to which new token greedy decoding agrees.
        greedy_tokens: new tokens decoded.
        noise_of: what was compared with the adapter-loaded model to get ``noise``.
        notes: what the comparison cannot tell.
    """

    prompts: tuple[str, ...]
    reference: str
    positions: int
    difference: float
    difference_rms: float
    noise: float
    noise_rms: float
    effect: float
    effect_rms: float
    bound: float
    bound_rms: float | None
    kl_mean: float
    kl_max: float
    greedy_equal: tuple[int, ...]
    greedy_tokens: int
    noise_of: str = "one rounding in the adapter-loaded model"
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the difference is within bounds; NaN is not."""
        return self.difference <= self.bound and (self.bound_rms is None or self.difference_rms <= self.bound_rms)


@dataclass(frozen=True)
class Prompt:
    """One prompt of the comparison: ``batch`` is what the forward takes."""

    title: str
    batch: Mapping[str, Any]


@dataclass
class _Spread:
    """The maximum and the mean square of differences that arrive one prompt at a time."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, one: Any, other: Any) -> None:
        difference = (one - other).abs()
        largest = difference.max().item()
        self.largest = largest if math.isnan(largest) else max(self.largest, largest)
        self.squares += difference.double().square().sum().item()
        self.count += difference.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass
class Reference:
    """The outputs of the base with the adapter, its noise, and the adapter's effect."""

    logits: list[Any] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    noise: _Spread = field(default_factory=_Spread)
    effect: _Spread = field(default_factory=_Spread)
    title: str = ""


def prompts(folder: Path, model: Any, count: int, adapted: Sequence[str]) -> tuple[list[Prompt], list[str]]:
    """``count`` prompts, one more with an image and audio if the model has towers, and notes about them.

    Args:
        folder: of the base; its tokenizer is used if it has one.
        model: the model on meta.
        count: how many.
        adapted: modules the adapter changes.
    """
    import torch

    config = model.config
    notes: list[str] = []
    tokenizer, why = _tokenizer(folder)
    if tokenizer is None:
        notes.append(f"no tokenizer ({why}): the prompts are pseudo-random token ids")
    generator = torch.Generator().manual_seed(7)
    plain = random_inputs.plain_tokens(config)
    found: list[Prompt] = []
    for index in range(count):
        if tokenizer is not None and index < len(_TEXTS):
            ids, title = (
                tokenizer(_TEXTS[index], return_tensors="pt")["input_ids"][:, : 4 * _PROMPT_TOKENS],
                _TEXTS[index],
            )
        else:
            chosen = torch.randint(len(plain), (1, _PROMPT_TOKENS), generator=generator)
            ids, title = plain[chosen], f"{_PROMPT_TOKENS} token ids"
        found.append(Prompt(title, random_inputs.text_batch(config, ids)))
    media = _media(config, plain, generator)
    if media is not None and count:
        found.append(media)
    towers = [path for path in adapted if _is_for_media(path)]
    if towers and media is None:
        notes.append(
            f"no prompt has an image or audio: {len(towers)} adapted modules, {towers[0]} among them, are not run"
        )
    return found, notes


def _is_for_media(path: str) -> bool:
    """Whether a module processes image or audio inputs only."""
    return any(part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio") for part in path.split("."))


def _tokenizer(folder: Path) -> tuple[Any, str]:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None, "the base has none"
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True), ""
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        return None, " ".join(str(error).split())[:200]


def _media(config: Any, plain: Any, generator: Any) -> Prompt | None:
    """A prompt with a small image and a short audio clip of random values, four soft tokens each."""
    import torch

    if config.model_type != "gemma4":
        return None
    batch = random_inputs.text_batch(config, plain[torch.randint(len(plain), (1, 24), generator=generator)])
    names = []
    if getattr(config, "vision_config", None) is not None:
        random_inputs.add_image(config, batch, slice(4, 8), generator)
        names.append("an image")
    if getattr(config, "audio_config", None) is not None:
        random_inputs.add_sound(config, batch, slice(12, 16), generator)
        names.append("audio")
    return Prompt(f"{' and '.join(names)} of random values", batch) if names else None


def reference_outputs(
    load: Callable[[], Any], prompts: Sequence[Prompt], adapted: Sequence[str], title: str
) -> Reference:
    """The outputs of the adapter-loaded model that ``load`` returns; the model is freed afterwards."""
    import torch

    reference = Reference(title=title)
    model = load()
    with torch.no_grad():
        for number, prompt in enumerate(prompts):
            logits = _logits(model, prompt)
            reference.logits.append(logits)
            with model.disable_adapter():
                reference.effect.add(logits, _logits(model, prompt))
            for draw in range(DRAWS):
                with _noise(model, adapted, seed=DRAWS * number + draw):
                    reference.noise.add(logits, _logits(model, prompt))
            reference.tokens.append(_greedy(model, prompt))
    del model
    gc.collect()
    _empty_cache()
    return reference


def difference(load: Callable[[], Any], prompts: Sequence[Prompt], reference: Reference) -> Any:
    """How the logits of the model that ``load`` returns differ from the reference's; the model is freed afterwards."""
    import torch

    spread = _Spread()
    model = load()
    with torch.no_grad():
        for prompt, wanted in zip(prompts, reference.logits):
            spread.add(wanted, _logits(model, prompt))
    del model
    gc.collect()
    _empty_cache()
    return spread


def compare(
    load: Callable[[], Any],
    prompts: Sequence[Prompt],
    reference: Reference,
    *,
    tolerance: float | None,
    notes: Sequence[str] = (),
    noise_of: str = Parity.noise_of,
    factors: tuple[float, float] = (BOUND, BOUND_RMS),
) -> Parity:
    """Compare the outputs of the merged model that ``load`` returns with the reference's.

    Args:
        load: returns the model, which is freed afterwards.
        prompts: the same as for the reference.
        reference: of the adapter-loaded model.
        tolerance: largest difference of logits, instead of the measured bound.
        notes: what the comparison cannot tell.
        noise_of: see :class:`Parity`.
        factors: bounds as multiples of the reference's noise, for the largest difference and the root mean square.
    """
    import torch

    spread = _Spread()
    kl_sum, kl_max, positions = 0.0, 0.0, 0
    equal = []
    model = load()
    with torch.no_grad():
        for prompt, wanted, tokens in zip(prompts, reference.logits, reference.tokens):
            logits = _logits(model, prompt)
            spread.add(wanted, logits)
            right, found = wanted.double().log_softmax(-1), logits.double().log_softmax(-1)
            divergence = (right.exp() * (right - found)).sum(-1).clamp_min(0)
            kl_sum, kl_max = kl_sum + divergence.sum().item(), max(kl_max, divergence.max().item())
            positions += divergence.numel()
            same = (_greedy(model, prompt) == tokens).long()
            equal.append(int(same.cumprod(0).sum()))
    del model
    gc.collect()
    _empty_cache()
    all_notes = list(notes)
    noise = reference.noise
    if reference.effect.largest == 0.0:
        all_notes.append("the adapter has no effect on these prompts")
    elif factors[1] * noise.rms >= reference.effect.rms and noise is not reference.effect:
        all_notes.append(
            "the adapter's effect on these prompts is not larger than the bound: they cannot detect a lost adapter"
        )
    return Parity(
        prompts=tuple(prompt.title for prompt in prompts),
        reference=reference.title,
        positions=positions,
        difference=spread.largest,
        difference_rms=spread.rms,
        noise=noise.largest,
        noise_rms=noise.rms,
        effect=reference.effect.largest,
        effect_rms=reference.effect.rms,
        bound=factors[0] * noise.largest if tolerance is None else tolerance,
        bound_rms=factors[1] * noise.rms if tolerance is None else None,
        kl_mean=kl_sum / positions,
        kl_max=kl_max,
        greedy_equal=tuple(equal),
        greedy_tokens=NEW_TOKENS,
        noise_of=noise_of,
        notes=tuple(all_notes),
    )


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _logits(model: Any, prompt: Prompt) -> Any:
    return model(**random_inputs.on(model, prompt.batch)).logits[0].float().cpu()


def _greedy(model: Any, prompt: Prompt) -> Any:
    """The new tokens, always :data:`NEW_TOKENS` of them: a model that ends early in both agrees to the end."""
    import torch

    out = model.generate(
        **random_inputs.on(model, prompt.batch), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    tokens = out[0, prompt.batch["input_ids"].shape[1] :].cpu()
    return torch.nn.functional.pad(tokens, (0, NEW_TOKENS - len(tokens)), value=-1)


@contextlib.contextmanager
def _noise(model: Any, paths: Sequence[str], *, seed: int) -> Iterator[None]:
    """Inside, the outputs of these modules carry noise of one rounding in their dtype.

    The noise is relative to the larger of the value and its row's root mean square: rounding a weight matrix perturbs
    a row's sum, however small the sum.
    """
    import torch

    generators: dict[Any, Any] = {}

    def perturb(_module: Any, _arguments: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(seed))
        sign = torch.randint(0, 2, output.shape, generator=generator, device=output.device, dtype=torch.int8) * 2 - 1
        values = output.float()
        scale = torch.maximum(values.abs(), values.square().mean(-1, keepdim=True).sqrt())
        return (values + sign * scale * rounding(output.dtype)).to(output.dtype)

    chosen = {model.base_model.model.get_submodule(path) for path in paths}
    # These compute with another kernel than the merged model's linears.
    quantized = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    inside = {part for module in chosen for part in module.modules()}
    handles = [module.register_forward_hook(perturb) for module in chosen | (set(quantized) - inside)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rounding(dtype: Any) -> float:
    """The relative error of one rounding: half a unit in the last place of a 16-bit dtype.

    In float32 the steps of a sum are rounded like its result, and their order differs: four times that.
    """
    import torch

    return float(torch.finfo(dtype).eps) * (2.0 if dtype is torch.float32 else 0.5)
