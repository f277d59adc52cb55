"""How a ``generate`` is shown: replayed, and with ``disable_compile=True``, which must be the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from tests.generated.search.replay_world import ReplayWorld

EAGER = {"disable_compile": True}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "temperature": 0.9, "top_k": 40},
    "beams": {"num_beams": 2},
    "beam sample": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
}
FAILURES = {"error": RuntimeError, "interrupt": KeyboardInterrupt}
Shown = dict[str, Any]


def generate(world: ReplayWorld, seed: int, **options: Any) -> tuple[Shown, Shown]:
    """Both ways of a ``generate``; see :func:`_arguments` for the options."""
    return _shown(world, seed, {}, **options), _shown(world, seed, EAGER, **options)


def turns(world: ReplayWorld, seed: int) -> tuple[Shown, Shown]:
    """Two turns on one static cache of the user's."""

    def asked(way: dict[str, Any]) -> Shown:
        import torch

        torch.manual_seed(seed)  # an adapter that was just added may still drop something at random
        cache, found = _static_cache(world), {}
        ids = _prompt(world, seed, 1, 3)["input_ids"]
        for turn in range(2):
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), _cache_name(world): cache}
            output = world.model.generate(**batch, do_sample=False, min_new_tokens=3, max_new_tokens=3, **way)
            found[f"turn {turn}"] = output
            ids = torch.cat([output, _prompt(world, turn, 1, 2)["input_ids"]], dim=-1)
        return found

    return _outcome(lambda: asked({})), _outcome(lambda: asked(EAGER))


def on_the_returned_cache(world: ReplayWorld, seed: int, cache: str) -> tuple[Shown, Shown]:
    """A second turn on the cache that the first one returned."""

    def asked(way: dict[str, Any]) -> Shown:
        import torch

        for module in world.model.modules():
            # Up to 5.6 a call that fails leaves an empty static cache there, and the next one fails at that.
            vars(module).pop("_cache", None)
        torch.manual_seed(seed)
        given = {"do_sample": False, "min_new_tokens": 3, "max_new_tokens": 3, "pad_token_id": 0, **way}
        first = world.model.generate(
            **_prompt(world, seed, 1, 3), **given, cache_implementation=cache, return_dict_in_generate=True
        )
        ids = torch.cat([first.sequences, _prompt(world, seed + 1, 1, 2)["input_ids"]], dim=-1)
        name = _cache_name(world)
        again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), name: getattr(first, name)}
        return {"first": first.sequences, "second": world.model.generate(**again, **given)}

    return _outcome(lambda: asked({})), _outcome(lambda: asked(EAGER))


def threads(world: ReplayWorld, seed: int) -> tuple[Shown, Shown]:
    """Two threads at once, each with a cache of its own; then one after the other.

    Upstream's threads are inexact where bitsandbytes packs weights in a first forward, or unpacks experts in place,
    and where PEFT puts methods or hooks on the model for one call. There they come one after the other, too.
    """
    from tests.unit.offload.threads import run_together

    def one(number: int, way: dict[str, Any]) -> Shown:
        import torch

        torch.manual_seed(seed)
        batch = {**_prompt(world, seed + number, 1, 4), _cache_name(world): _static_cache(world)}
        return {f"{number}": world.model.generate(**batch, do_sample=False, min_new_tokens=4, max_new_tokens=4, **way)}

    found: Shown = {}

    def work(number: int) -> None:
        found.update(_outcome(lambda: one(number, {}), f" {number}"))

    works = [lambda: work(0), lambda: work(1)]
    if world.is_peft or world.case.quantization is not None:
        raised = [error for each in works for error in run_together([each], limit=60)]
    else:
        raised = run_together(works, limit=60)
    found |= {f"raised {number}": repr(error) for number, error in enumerate(raised) if error is not None}
    expected = _outcome(lambda: one(0, EAGER), " 0") | _outcome(lambda: one(1, EAGER), " 1")
    return found, expected


SHOWING: dict[str, Callable[..., tuple[Shown, Shown]]] = {
    "generate": generate,
    "turns": turns,
    "threads": threads,
    "on_the_returned_cache": on_the_returned_cache,
}


def _outcome(asked: Callable[[], Shown], name: str = "") -> Shown:
    try:
        return asked()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (whatever is raised must be, both ways)
        return {f"error{name}": f"{type(error).__name__}: {str(error)[:120]}"}


def _shown(world: ReplayWorld, seed: int, way: dict[str, Any], inside: str | None = None, **options: Any) -> Shown:
    import torch

    # Before transformers 5.15 a call that failed may leave a cache over which the next one stumbles, whichever it is.
    left = vars(world.base).get("_cache")
    if left is not None and not all(layer.is_initialized for layer in left.layers):
        del vars(world.base)["_cache"]

    def asked() -> Shown:
        with _inside(world, inside):
            torch.manual_seed(seed)
            calls: list[int] = []
            found = world.model.generate(**_arguments(world, seed, calls, **options), **way)
        kept = {name: value for name, value in found.items() if name not in cache_names.NAMES}
        shown = {name: tensor for name, value in kept.items() for name, tensor in _flat(name, value)}
        return {**shown, "calls": len(calls), "random": torch.rand(1)}

    return _outcome(asked)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _flat(f"{name} {index}", part)
    elif value is not None:
        yield name, value


@contextlib.contextmanager
def _inside(world: ReplayWorld, inside: str | None) -> Iterator[None]:
    import torch

    contexts = {
        None: contextlib.nullcontext,
        "disabled": lambda: world.model.disable_adapter(),
        "inference": torch.inference_mode,
        "gradients": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    with contexts[inside]():
        yield


def _arguments(
    world: ReplayWorld,
    seed: int,
    calls: list[int],
    *,
    mode: str,
    cache: str = "static",
    rows: int = 1,
    length: int = 4,
    new: int = 3,
    extra: str | None = None,
    fails: str | None = None,
    names: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Of ``generate``.

    Args:
        world: whose model it is.
        seed: of the prompt.
        calls: gets a number for each call of a function of the user's.
        mode: of :data:`MODES`.
        cache: ``"static"``, ``"own"``, ``"dynamic"``, ``"none"``; or ``"fast"``: not named.
        rows: of the prompt; the second of two is padded.
        length: of the prompt.
        new: tokens.
        extra: an option more.
        fails: of :data:`FAILURES`: raised after the third token.
        names: of adapters, one for each row.
    """
    from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

    class Own(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            calls.append(input_ids.shape[1])
            if fails is not None and len(calls) == 3:
                raise FAILURES[fails]("in the middle")
            return scores * 0.5 if extra == "processor" else scores

    class Stops(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            import torch

            calls.append(input_ids.shape[1])
            return torch.full((input_ids.shape[0],), input_ids.shape[1] > length + 1, dtype=torch.bool)

    extras: dict[str | None, dict[str, Any]] = {
        "eos": {"eos_token_id": list(range(3, 120)), "min_new_tokens": 0},
        "max_length": {"max_length": length + new, "max_new_tokens": None, "min_new_tokens": None},
        "criteria": {"stopping_criteria": StoppingCriteriaList([Stops()])},
        "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        "hidden": {"output_hidden_states": True},
        "scores": {"output_scores": True, "renormalize_logits": True},
        "chunks": {"prefill_chunk_size": 2},
        "constraint": {"prefix_allowed_tokens_fn": lambda _row, ids: list(range(3, 50 + int(ids.shape[0])))},
    }
    caches: dict[str, Callable[[], dict[str, Any]]] = {
        "static": lambda: {"cache_implementation": "static"},
        "dynamic": lambda: {"cache_implementation": "dynamic"},
        "own": lambda: {_cache_name(world): _static_cache(world)},
        "none": lambda: {"use_cache": False},
        "fast": dict,
    }
    own = [Own()] if fails is not None or extra == "processor" else []
    return {
        **_prompt(world, seed, rows, length),
        **{"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0},
        **{"return_dict_in_generate": True, "output_logits": True, "logits_processor": own},
        **MODES[mode],
        **caches[cache](),
        **extras.get(extra, {}),
        **({} if names is None else {"adapter_names": list(names)}),
    }


def _prompt(world: ReplayWorld, seed: int, rows: int, length: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[1::2, : length // 3], mask[1::2, : length // 3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _static_cache(world: ReplayWorld) -> Any:
    from transformers import StaticCache

    return StaticCache(config=world.base.config.get_text_config(decoder=True), max_cache_len=24)


def _cache_name(world: ReplayWorld) -> str:
    return cache_names.of(type(world.base).forward)
