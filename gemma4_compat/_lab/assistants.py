"""What goes wrong between a model and its assistant: scenarios of the assistant patches and of their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.patch import Outcome
from gemma4_compat._lab import scenarios
from gemma4_compat._lab.workspace import Workspace

#: Tokens of the vocabulary -> their probability at every place, for the model and for a perfect assistant.
PROBABILITIES = {10: 0.4, 11: 0.3, 12: 0.2, 13: 0.1}
_PLACES = 100
_NEW_TOKENS = 12


def sampled(workspace: Workspace) -> Outcome:
    """Whether the likeliest token comes out as often as its probability says, with a perfect assistant."""
    return _of_both(workspace, _sampled)


def fed(workspace: Workspace) -> Outcome:
    """Whether an assistant reads keys of rejected tokens."""
    return _of_both(workspace, _fed)


def kept(workspace: Workspace) -> Outcome:
    """Whether the prompt's hidden states of all layers are kept."""
    return _of_both(workspace, _kept)


def offloaded(workspace: Workspace) -> Outcome:
    """Whether an assistant drafts while its first module is offloaded."""
    return _of_both(workspace, _offloaded)


def _of_both(workspace: Workspace, show: Callable[[Any, Any, Workspace], Outcome]) -> Outcome:
    def one(space: Workspace) -> Outcome:
        # Where this release cannot call an assistant without other patches, there is nothing to see.
        able = scenarios.assisted(space)
        if not able.applicable or able.defect:
            return Outcome(False, able.detail, applicable=False)
        return show(space.load(), space.load_assistant(), space)

    return scenarios.of_both_classes(workspace, gemma4=one, unified=one)


def _sampled(model: Any, assistant: Any, workspace: Workspace) -> Outcome:
    import torch

    learned = torch.full((model.config.get_text_config().vocab_size,), -1e4)
    for token, probability in PROBABILITIES.items():
        learned[token] = torch.tensor(probability).log()
    ends = [head_says(one, learned) for one in (model, assistant)]
    torch.manual_seed(0)
    try:
        tokens = model.generate(
            **workspace.inputs(text_only=True),
            assistant_model=assistant,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=_PLACES,
            max_new_tokens=_PLACES,
        )
    finally:
        for end in ends:
            end.remove()
    token, probability = next(iter(PROBABILITIES.items()))
    seen = int((tokens[0, -_PLACES:] == token).sum())
    deviation = (_PLACES * probability * (1 - probability)) ** 0.5
    wrong = abs(seen - _PLACES * probability) > 5 * deviation
    return Outcome(wrong, f"a token of probability {probability} in {seen} of {_PLACES} places")


def head_says(model: Any, logits: Any) -> Any:
    """A handle to remove: until then the logits of ``model`` are these, (vocabulary,), at every place.

    A softcap is undone first, so that the capped logits are what is given.
    """
    import torch

    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if "Assistant" not in type(model).__name__ and cap:
        logits = torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6)) * cap

    def replace(_: Any, __: Any, output: Any) -> Any:
        return logits.to(output.device, output.dtype).expand_as(output).clone()

    return model.lm_head.register_forward_hook(replace)


def calls(assistant: Any) -> tuple[list[dict[str, Any]], Any]:
    """A list that fills with the arguments of each call of ``assistant``, and the handle that ends it."""
    found: list[dict[str, Any]] = []

    def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        found.append(dict(kwargs))

    return found, assistant.register_forward_pre_hook(note, with_kwargs=True)


def of_accepted(model: Any, tokens: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Layer type -> the keys that an assistant should have been given, (1, heads, tokens, width), of a fresh forward.

    Args:
        model: in float32, where a forward of many tokens and forwards of few differ by less than 1e-3.
        tokens: (1, length), the text that ``generate`` returned.
        call: one of :func:`calls`.
    """
    import torch

    read = int(call["position_ids"].max())  # the model has not read the newest token yet
    with torch.no_grad():
        outputs = model(input_ids=tokens[:, :read], return_shared_kv_states=True)
    return {kind: keys for kind, (keys, _) in outputs.shared_kv_states.items()}


def _fed(model: Any, assistant: Any, workspace: Workspace) -> Outcome:
    model, assistant = model.float(), assistant.float()
    found, handle = calls(assistant)
    batch = workspace.inputs(text_only=True)
    try:
        tokens = model.generate(**batch, assistant_model=assistant, max_new_tokens=_NEW_TOKENS, do_sample=False)
    finally:
        handle.remove()
    worst, where = 0, ""
    for call in found:
        expected = of_accepted(model, tokens, call)
        for kind, (keys, _) in call["shared_kv_states"].items():
            # (given, expected): the largest difference of a key that is given from one that should be.
            apart = (keys[0, 0][:, None] - expected[kind][0, 0][None]).abs().amax(dim=-1)
            foreign = int((apart.amin(dim=-1) > 1e-3).sum())
            if foreign > worst:
                worst, where = foreign, f"{foreign} of {keys.shape[2]} keys in {kind} are those of rejected tokens"
    return Outcome(worst > 0, where or f"all keys of {len(found)} calls are those of accepted tokens")


def _kept(model: Any, assistant: Any, workspace: Workspace) -> Outcome:
    batch = workspace.inputs(text_only=True)
    length = batch["input_ids"].shape[1]
    held: list[int] = []

    def note(_: Any, __: Any, outputs: Any) -> None:
        held.append(sum(states.shape[1] for states in outputs.hidden_states or ()))

    handle = model.register_forward_hook(note)
    options = {"max_new_tokens": _NEW_TOKENS, "do_sample": False}
    try:
        found = model.generate(**batch, **options, assistant_model=assistant)
    finally:
        handle.remove()
    if not found.equal(model.generate(**batch, **options)):
        return Outcome(True, "with an assistant model other tokens are generated")
    return Outcome(held[0] > length, f"{held[0]} hidden states are kept of a prompt of {length} tokens")


def _offloaded(model: Any, _: Any, workspace: Workspace) -> Outcome:
    batch, options = workspace.inputs(text_only=True), {"max_new_tokens": _NEW_TOKENS, "do_sample": False}
    found = model.generate(**batch, **options, assistant_model=workspace.load_assistant(offloaded=True))
    if found.equal(model.generate(**batch, **options)):
        return Outcome(False, f"{_NEW_TOKENS} tokens with an offloaded assistant are those without")
    return Outcome(True, "with an offloaded assistant other tokens are generated")
