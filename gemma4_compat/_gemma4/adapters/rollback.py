"""Restore a model when loading an adapter fails. Duck-typed on PEFT's layers; imports nothing upstream."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import fitting
from gemma4_compat._gemma4.models import walk

_MISMATCH = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[[^\]]*\])\).*?torch\.Size\((\[[^\]]*\])\)", re.S)
#: Tables with a row for each token, and their trained copies.
_VOCABULARY = re.compile(
    r"(?:^|\.)(?:embed_tokens|embed_tokens_per_layer|lm_head)"
    r"\.(?:(?:base_layer|original_module|token_adapter|modules_to_save)\.)*(?:\w+\.)?weight$"
)
#: The ids of base models and the adapter names of active loads.
_active: ContextVar[frozenset[tuple[int, str]]] = ContextVar("_active", default=frozenset())


@contextlib.contextmanager
def undone_if_it_fails(model: Any, adapter_name: str) -> Iterator[None]:
    """Inside, an adapter is added to ``model``; if that raises, the model is restored.

    This restores the module tree, PEFT's attributes of models and layers (configurations, scalings, active adapters),
    ``requires_grad``, and the weights of an existing adapter of that name. It does not restore base weights that an
    adapter changes on creation (PiSSA).

    If nested for the same base model and adapter, only the outer one restores.
    """
    key = id(fitting.base_of(model)), adapter_name
    if key in _active.get():
        yield
        return
    with in_place.bound(_active, _active.get() | {key}), _restored(model, adapter_name):
        yield


@contextlib.contextmanager
def _restored(model: Any, adapter_name: str) -> Iterator[None]:
    modules = walk.modules(model)
    snapshots = [
        (vars(module), _contents(vars(module)))
        for module in modules
        if module is model or "peft_config" in vars(module) or "_active_adapter" in vars(module)
    ]
    trees = [(module._modules, dict(module._modules)) for module in modules]
    # Weights that the load may overwrite. A model without PEFT modules has none.
    adapted = any(type(module).__module__.startswith("peft.") for module in modules)
    named = model.named_parameters() if adapted else ()
    own = {parameter for name, parameter in named if adapter_name in name.split(".")}
    parameters = [
        (parameter, parameter.requires_grad, parameter.detach().clone() if parameter in own else None)
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    ]
    with contextlib.ExitStack() as stack:

        @stack.callback
        def undo() -> None:
            for attributes, before in snapshots:
                attributes.clear()
                for name, (value, contents) in before.items():
                    attributes[name] = value
                    if contents is not None:
                        value.clear()
                        (value.extend if isinstance(value, list) else value.update)(contents)
            for children, saved in trees:
                children.clear()
                children.update(saved)
            for parameter, requires_grad, weight in parameters:
                parameter.requires_grad_(requires_grad)
                if weight is not None:
                    parameter.data.copy_(weight)

        yield
        stack.pop_all()


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of its contents if it is a container that may be changed in place."""
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None)
        for name, value in attributes.items()
    }


def mismatch(error: RuntimeError, adapter: Any, model: Any) -> Gemma4CompatError | None:
    """A clear error for torch's list of size mismatches; None for another error."""
    found = _MISMATCH.findall(str(error))
    return describe(adapter, model, [(name, saved, here) for name, saved, here in found]) if found else None


def describe(adapter: Any, model: Any, found: list[tuple[str, Any, Any]]) -> Gemma4CompatError:
    """The error for an adapter with these (name, saved shape, shape here)."""
    name, saved, here = found[0]
    made_for = "a base model of another size"
    tokens = str(saved).strip("[]").partition(",")[0]
    if _VOCABULARY.search(name) and all(_VOCABULARY.search(other) for other, _, _ in found):
        made_for = f"a vocabulary of {tokens} tokens: call resize_token_embeddings({tokens}) on the base model before"
    return Gemma4CompatError(
        f"the adapter {str(adapter)!r} does not fit {type(model).__name__}: {len(found)} of its tensors have another "
        f"shape, the first {name!r} ({saved} saved, {here} here). It was made for {made_for}. "
        "Nothing of it was kept, and the model was not changed."
    )
