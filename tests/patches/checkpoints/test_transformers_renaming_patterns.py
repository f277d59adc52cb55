"""F73: names of tensors become patterns when they are used as such, and are then upstream's."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._checkpoint import shards
from gemma4_compat._reproduction import tiny
from gemma4_compat.patches.checkpoints.transformers_renaming_patterns import PATCH, Later, compiled
from tests.helpers import without
from tests.patches.promise import Promise

ODD = ["a", "a_", "_", ".", "0", "a..b", "layers.0.", "model.x_", "g0", "weight", "weight.absmax", "A.0.lora_A"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ regular expressions were compiled for the names of \d+ tensors"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import transformers.core_model_loading  # noqa: F401  # the patch is applied now


def renaming(*args: Any, **kwargs: Any) -> Any:
    from transformers.core_model_loading import WeightRenaming

    return WeightRenaming(*args, **kwargs)


def upstreams(*args: Any, **kwargs: Any) -> Any:
    with without(PATCH.id):
        return renaming(*args, **kwargs)


def attributes(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name, "absent") for name in names if name != "__weakref__"}


def files(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def names_in(workspace: Any) -> list[str]:
    found = set(shards.checkpoint(workspace.checkpoint))
    for targets in ("all", "language"):
        found |= shards.entries(workspace.adapter(targets) / "adapter_model.safetensors").keys()
    return sorted(found)


def is_compiled(value: Any) -> bool:
    return type(value.compiled_sources) is re.Pattern or value.compiled_sources._found is not None


def test_the_objects_are_those_of_upstream(workspace: Any) -> None:
    names = names_in(workspace)
    pairs = [*itertools.product(ODD, ODD), *zip(names, names), *zip(names, reversed(names))]
    found = [renaming(*pair) for pair in pairs]
    assert not any(map(is_compiled, found))
    with without(PATCH.id):
        expected = [renaming(*pair) for pair in pairs]
    for one, other, (source, _) in zip(found, expected, pairs):
        assert type(one) is type(other)
        assert list(attributes(one)) == list(attributes(other))
        assert attributes(one) == attributes(other)
        assert repr(one) == repr(other)
        assert isinstance(one.compiled_sources, re.Pattern)
        for key in (source, f"x.{source}", f"{source}_scale", f"{source}.y", "nothing"):
            assert one.rename_source_key(key) == other.rename_source_key(key)
        assert attributes(one.reverse_transform()) == attributes(other.reverse_transform())
        assert attributes(one) == attributes(other)


def test_a_pattern_is_compiled_at_its_first_use_and_no_sooner() -> None:
    one = renaming("old.name", "new.name")
    assert not is_compiled(one)
    assert one.rename_source_key("model.old.name")[0] == "model.new.name"
    assert is_compiled(one)
    pattern = one.compiled_sources
    assert pattern.search("an old.name") is not None
    assert re.search(pattern, "an old.name") is not None
    assert (pattern.pattern, pattern.flags, pattern.groupindex) == (
        upstreams("old.name", "new.name").compiled_sources.pattern,
        re.compile("").flags,
        {"g0": 1},
    )


def test_a_later_pattern_is_equal_to_what_it_becomes() -> None:
    mine, other, real = (renaming("a.b", "c"), renaming("a.b", "d"), upstreams("a.b", "c"))
    patterns = [one.compiled_sources for one in (mine, other, real)]
    assert {*patterns} == {patterns[2]}
    assert patterns[0] == patterns[2] == patterns[1]
    assert patterns[0] != renaming("a.c", "c").compiled_sources
    assert patterns[0] != "a.b"
    assert repr(patterns[0]) == repr(patterns[2])
    with pytest.raises(AttributeError, match=r"re\.Pattern.*no_such"):
        patterns[0].no_such  # noqa: B018


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("used", [False, True])
def test_copies(again: Callable[[Any], Any], used: bool) -> None:
    value = renaming("old.name", "new.name")
    if used:
        value.rename_source_key("old.name")
    other = again(value)
    assert attributes(other) == attributes(value)
    assert other.rename_source_key("old.name") == ("new.name", "old.name")
    assert again(value.compiled_sources) == value.compiled_sources


def test_what_was_pickled_is_read_without_the_shim() -> None:
    assert b"gemma4_compat" not in pickle.dumps(renaming("old.name", "new.name"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (r"^model\.", "model.language_model."),
        ("old", r"^new\."),
        ("a.*.b", "c"),
        (r"a\.(.+)", r"b.\1"),
        ("", ""),
        ("a-b", "c"),
        ("ä", "b"),
        (["old"], ["new"]),
        ("old", ["new"]),
        (["one", "two"], "both"),
    ],
)
def test_everything_else_is_compiled_at_once(source: Any, target: Any) -> None:
    value = renaming(copy.copy(source), copy.copy(target))
    assert type(value.compiled_sources) is re.Pattern
    assert attributes(value) == attributes(upstreams(copy.copy(source), copy.copy(target)))


def test_other_classes_and_other_arguments_are_left_alone() -> None:
    from transformers import core_model_loading

    class Own(core_model_loading.WeightRenaming):  # type: ignore[misc]
        pass

    converter = core_model_loading.WeightConverter("a", "b", operations=[core_model_loading.Transpose(0, 1)])
    named = renaming(source_patterns="a", target_patterns="b")
    assert all(type(value.compiled_sources) is re.Pattern for value in (Own("a", "b"), converter, named))
    assert attributes(named) == attributes(renaming("a", "b"))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'target_patterns'"):
        renaming("a")
    with pytest.raises(ValueError, match="Cannot assign to field source_patterns"):
        renaming("a", "b").source_patterns = "c"


def test_many_threads_at_the_first_use() -> None:
    values = [renaming(f"layer.{number}.weight", "x") for number in range(20)]
    with ThreadPoolExecutor(16) as pool:
        for value in values:
            found = list(pool.map(value.rename_source_key, [value.source_patterns[0]] * 16))
            assert found == [("x", value.source_patterns[0])] * 16


def test_what_was_made_before_the_undo_goes_on() -> None:
    value = renaming("old.name", "new.name")
    with without(PATCH.id):
        assert type(renaming("old.name", "new.name").compiled_sources) is re.Pattern
        assert type(value.compiled_sources) is Later
        assert value.rename_source_key("old.name") == ("new.name", "old.name")


@pytest.mark.parametrize("action", ["checkpoint", "adapter", "save"])
def test_no_pattern_is_compiled_for_a_tensor(workspace: Any, tmp_path: Path, action: str) -> None:
    names = names_in(workspace)
    model = workspace.load()
    act = {
        "checkpoint": lambda: tiny.load(workspace.checkpoint),
        "adapter": lambda: model.load_adapter(str(workspace.adapter("language"))),
        "save": lambda: model.save_pretrained(tmp_path),
    }[action]
    count = compiled(names, act)
    assert count == 0
    model = workspace.load()
    with without(PATCH.id):
        assert compiled(names, act) > len(names) / 10


def test_what_is_loaded_and_saved_is_the_same(workspace: Any, tmp_path: Path) -> None:
    import torch

    def saved(name: str) -> tuple[Any, dict[str, str]]:
        model = tiny.load(workspace.checkpoint)
        model.load_adapter(str(workspace.adapter("language")))
        state = {key: value.clone() for key, value in model.state_dict().items()}
        tiny.load(workspace.checkpoint).save_pretrained(tmp_path / name)
        return state, files(tmp_path / name)

    state, written = saved("with")
    with without(PATCH.id):
        expected, expected_files = saved("without")
    assert written == expected_files
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in state)
