"""With an assistant model only the hidden states that it reads are kept.

Symptom: silent: ``generate`` with a Gemma 4 assistant keeps the prompt's hidden states of every layer (0.84 GiB
for 8,192 tokens of E2B). From 5.23.0 on it also computes the whole prompt in the layers that share keys and values,
although only its last token is needed there.

Cause: ``SinglePositionMultiTokenCandidateGenerator`` asks for ``output_hidden_states=True`` and reads only the last
layer. ``Gemma4TextModel._maybe_slice_kv_shared_inputs`` computes every position if it sees this flag.

Fix: During such a ``generate`` the flag does not reach the model, unless the caller set it. The output's
``hidden_states`` then holds what the head reads: the last layer's states of the newest token and its candidates. The
tokens are the same. A model compiled by ``torch.compile`` is left as it is, because each call would compile it anew.

Remove when: ``SinglePositionMultiTokenCandidateGenerator`` no longer asks for the hidden states of all layers.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F87", severity="memory", affected=">=5.8.0", after="transformers-assisted-turns")

_FLAG = "output_hidden_states"


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._assisted_decoding")
def assisted_decoding(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    assistant = type(kwargs.get("assistant_model")).__name__
    if (
        not assistant.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant"))
        or not is_gemma4_config(self.config)
        or self.get_output_embeddings() is None
        or _is_compiled(self)
    ):
        return original(self, *args, **kwargs)
    with _head_input_as_hidden_states(self, wanted=bool(kwargs.get(_FLAG))):
        return original(self, *args, **kwargs)


def _is_compiled(model: Any) -> bool:
    return model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


@contextlib.contextmanager
def _head_input_as_hidden_states(model: Any, *, wanted: bool) -> Iterator[None]:
    """``hidden_states`` of this thread's outputs is what the head read, unless all layers' are ``wanted``."""
    owner = threading.get_ident()
    read: list[Any] = []

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if wanted or threading.get_ident() != owner or not kwargs.get("return_shared_kv_states"):
            return None
        read.clear()
        return args, {name: value for name, value in kwargs.items() if name != _FLAG}

    def head(_: Any, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == owner:
            read[:] = args[:1]

    def after(_: Any, __: Any, outputs: Any) -> None:
        if threading.get_ident() == owner and read and outputs.hidden_states is None:
            outputs.hidden_states = (read.pop().to(outputs.logits.device),)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.get_output_embeddings().register_forward_pre_hook(head, prepend=True),
        model.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import assistants

    return assistants.kept(workspace)
