"""The host does not wait for each token that a replayed step (a CUDA graph) decodes.

Symptom: silent: between two replayed steps the GPU idles until ``generate`` has read the last token and run its Python
code for the next: 2 to 4 ms with the E2B and the 12B on an H200, as much as half of a step.

Cause: ``StopCheck`` reads on the host, after every token, whether the text is finished. transformers has a
``DeferredStopCheck`` that reads it while the next step is running, but uses it only on Apple's ``mps``. And
``generate`` builds positions and masks anew for every token, with some thirty small operations.

Fix: If steps of a Gemma 4 are replayed as a CUDA graph, transformers' own deferred check is also used on CUDA. A text
that ends before its limit runs one extra step; its token is discarded and the RNG state restored. So the first steps
wait as before, until waiting has cost this text as much as a step. ``generate`` also waits if anything could notice
the extra step: logits processors and stopping criteria that are not transformers' own or call a function of the
user's, a cache of the user's, ``return_dict_in_generate``, ``synced_gpus``. A streamer gets the same tokens, each one
step later. Where processors and criteria are transformers' own, the graph's inputs are advanced on the device instead
of built; the first of them are compared with those that ``generate`` builds. A streamer of the user's may change
anything, so the model, its cache and its methods are looked at after each token, while the GPU computes the next one.

Remove when: ``DeferredStopCheck.is_supported`` is True on CUDA.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation import call, expert_slots
from gemma4_compat._generation.sampling import best_words, fast_processors
from gemma4_compat._graphs import deferred_stop, step_inputs
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F52", kind="speed", severity="speed", affected=">=5.17", needs="transformers-graph-decoding")

_TOKENS = 16


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._sample")
def sample(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    functions = [*(kwargs.get("logits_processor") or ()), *(kwargs.get("stopping_criteria") or ())]
    model, config, streamer = self, kwargs["generation_config"], kwargs.get("streamer")
    samples = bool(config.do_sample)
    synced = bool(kwargs.get("synced_gpus"))  # processes have to agree on the number of steps
    with deferred_stop.sampling(functions, samples=samples, synced=synced, streamer=streamer) as running:
        follows = running.pure and not synced and not config.is_assistant
        if follows and running.no_user_code:
            running.most = best_words.most(kwargs.get("logits_processor") or (), config)
        if follows and call.may_replay(self, cache_names.cache_in(kwargs)) and step_inputs.serves(self):
            kwargs |= fast_processors.quickened(kwargs)
            self = step_inputs.Loop(self, call.Decoder, watched=not running.no_user_code)
        try:
            return original(self, *args, **kwargs)
        finally:
            expert_slots.give_back(model)


@PATCH.replaces("transformers.generation.utils", "DeferredStopCheck.is_supported")
def is_supported(
    original: Callable[..., bool], device: Any, cache: Any, cache_is_returned: bool, is_assistant: bool
) -> bool:
    if original(device, cache, cache_is_returned, is_assistant):
        return True
    running = deferred_stop.current()
    if running is None or cache_is_returned or is_assistant or device.type not in RECORDERS:
        return False
    running.ours = running.can_be_deferred()
    return running.ours


@PATCH.replaces("transformers.generation.utils", "DeferredStopCheck.__call__")
def check(original: Callable[..., bool], self: Any, unfinished: Any, tokens: Any, length: int) -> bool:
    running = deferred_stop.current()
    if running is None or not running.ours:
        return original(self, unfinished, tokens, length)
    if running.defers():
        running.note_random_state(tokens.device)
        return original(self, unfinished, tokens, length)
    found: bool = type(self).__mro__[1].__call__(self, unfinished, tokens, length)  # this waits
    return found


@PATCH.replaces("transformers.generation.utils", "DeferredStopCheck.finish")
def finish(original: Callable[..., int], self: Any) -> int:
    running = deferred_stop.current()
    if running is None or not running.ours:
        return original(self)
    if not running.deferred:
        return 0
    steps = original(self)
    if steps:
        running.undo_last_draw()
    return steps


def reproduce(workspace: Workspace) -> Outcome:
    """How often the host waits for a token. Without a GPU, a stand-in captures."""
    import sys
    from unittest import mock

    import torch

    from gemma4_compat._lab import scenarios, tiny
    from gemma4_compat._lab.stand_ins import tape

    model = workspace.load("4bit")
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
    options |= {"do_sample": False, "cache_implementation": "static"}
    waits = getattr(sys.modules["transformers.generation.utils"], "StopCheck", None)
    if waits is None:
        return Outcome(False, "this release has no stop check that could be deferred", applicable=False)
    with torch.no_grad(), tape.standing_in(RECORDERS), mock.patch.object(deferred_stop, "WAITING", float("inf")):
        expected = model.generate(**options, disable_compile=True)
        with scenarios.noted(waits, "__call__") as waited:
            found = model.generate(**options)
    return Outcome(
        len(waited) > _TOKENS // 2,
        f"{_TOKENS} tokens that are decoded by replay: the host waits for {len(waited)} of them",
        parity=float(not torch.equal(expected, found)),
    )
