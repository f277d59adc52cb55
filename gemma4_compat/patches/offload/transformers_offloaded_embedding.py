"""``RuntimeError: Tensor on device meta is not on the expected device cuda:0!`` as soon as ``embed_tokens`` is on the
CPU or on disk, in the first forward.

Why: models with per-layer embeddings read the embedding's weight directly, outside its forward, where accelerate's
hook has not brought it in: the row of the padding token in every forward, and the whole table when they get
``inputs_embeds`` and have to find out which tokens they were.

Here: while such a model runs, an offloaded embedding shows, between its own forwards, a stand-in with the padding row
at every place: one row, repeated without taking memory. For the search through the whole table it is brought in as for
a forward.

Goes when transformers asks the embedding instead of reading its weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import placement as _placement
from gemma4_compat._offload import host_memory

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def model_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    embedding = _base_layer(self.language_model.embed_tokens)
    config = self.config.text_config
    if _placement.offload_hook(embedding) is None or not config.hidden_size_per_layer_input:
        return original(self, *args, **kwargs)
    with _padding_row_between_forwards(self.language_model.embed_tokens, embedding, config.pad_token_id):
        return original(self, *args, **kwargs)


def get_per_layer_inputs(original: Callable[..., Any], self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    embedding = _base_layer(self.embed_tokens)
    if input_ids is not None or _placement.offload_hook(embedding) is None:
        return original(self, input_ids, *args, **kwargs)
    with _onloaded(embedding):
        return original(self, input_ids, *args, **kwargs)


def _base_layer(module: Any) -> Any:
    """The embedding itself, below the layers of adapters, which pass ``weight`` on."""
    while "base_layer" in (children := vars(module)["_modules"]):
        module = children["base_layer"]
    return module


@contextlib.contextmanager
def _padding_row_between_forwards(outermost: Any, embedding: Any, token: int) -> Iterator[None]:
    """Inside, whenever the embedding's weight would be on meta, each of its rows reads as that of ``token``.

    The forward of the ``outermost`` layer around it is an exception: an adapter may need the real weight (DoRA).
    """
    import torch

    hook = _placement.offload_hook(embedding)
    stored = host_memory.stored(hook.weights_map, "weight")  # the map itself would read the whole weight
    row = stored.raw[token].to(_placement.execution_device(embedding), stored.dtype)
    between_forwards = embedding.weight
    stand_in = torch.nn.Parameter(row.expand(between_forwards.shape), requires_grad=False)

    def put_stand_in(*_: Any) -> None:
        nonlocal between_forwards
        if embedding.weight is not stand_in:
            between_forwards = embedding.weight
        embedding._parameters["weight"] = stand_in

    def remove_stand_in(*_: Any) -> None:
        embedding._parameters["weight"] = between_forwards

    put_stand_in()
    # Around accelerate's hook, which is inside `forward` and must not see the stand-in: it remembers addresses.
    handles = (
        outermost.register_forward_pre_hook(remove_stand_in, prepend=True),
        outermost.register_forward_hook(put_stand_in),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if embedding.weight is stand_in:
            remove_stand_in()


@contextlib.contextmanager
def _onloaded(embedding: Any) -> Iterator[None]:
    hook = _placement.offload_hook(embedding)
    before = embedding.weight
    hook.pre_forward(embedding)
    try:
        yield
    finally:
        hook.post_forward(embedding, None)
        embedding._parameters["weight"] = before


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    reference = workspace.answers(workspace.load())
    model = workspace.load()
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded=workspace.offloaded)
    placement["model.language_model.embed_tokens"] = placement["lm_head"] = workspace.offloaded
    model = workspace.dispatch_map(model, placement)
    return Outcome.of_parity(difference(reference, workspace.answers(model)), "embed_tokens offloaded")


_MODELING = "transformers.models.gemma4.modeling_gemma4"

PATCH = Patch(
    id="transformers-offloaded-embedding",
    summary="embed_tokens may be on the CPU or on disk in models with per-layer embeddings",
    symptom="RuntimeError: Tensor on device meta is not on the expected device cuda:0!",
    severity=Severity.CRASH,
    failure_points=("F11",),
    distribution="transformers",
    affected=">=5.5",
    measured="5.23.0",
    requires=("accelerate",),
    retire_when="transformers does not read embed_tokens.weight outside the embedding's forward",
    targets=(
        Target(
            module=_MODELING,
            name="Gemma4Model.forward",
            replacement=model_forward,
            known={
                "83fe0bb73114": "5.5.0 - 5.5.4",
                "d62fc1b5738d": "5.6.0 - 5.7.0",
                "2bc5cd6d3347": "5.8.0 - 5.8.1",
                "3c23fac10741": "5.9.0",
                "6c5b2f22f908": "5.10.1 - 5.12.1",
                "5e05ebab6366": "5.13.0 - 5.14.1",
                "6a1f7e64b438": "5.15.0",
                "5085b356ef7f": "5.15.1 - 5.17.0",
                "4550171a17c5": "5.18.0",
                "8cd6c3cdcabf": "5.19.0 - 5.22.2",
                "29a46ca115e4": "5.23.0",
            },
        ),
        Target(
            module=_MODELING,
            name="Gemma4TextModel.get_per_layer_inputs",
            replacement=get_per_layer_inputs,
            known={"da23f8c879e2": "5.5.0 - 5.20.2", "eac6abe69cb2": "5.21.0 - 5.23.0"},
        ),
    ),
    reproduce=reproduce,
)
