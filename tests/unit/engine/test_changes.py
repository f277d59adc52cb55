"""What is replaced, where, how it looks, and that undoing it restores every raw slot by identity."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, PatchState
from gemma4_compat._engine.changes import ChangeSet, restore
from gemma4_compat._engine.engine import Engine
from tests.helpers import CORE, Library, collected, foreign, installed, is_ours, raw, tagged, traces

LOWER, UPPER = "fakelib-lower", "fakelib-upper"
ALIAS = "from LIBRARY.core import double\n"


def says(word: str) -> Callable[..., Any]:
    return lambda original, *args, **kwargs: (word, original(*args, **kwargs))


def function(core: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), core)


# The name of a slot, how to use it, and where the code is that it inherits.
SLOTS: list[tuple[str, Callable[[Any], Any], str | None]] = [
    ("double", lambda core: core.double(1), None),
    ("Layer.forward", lambda core: core.Layer().forward(1), None),
    ("Layer.scale", lambda core: (core.Layer.scale(1), core.Layer().scale(1)), None),
    ("Layer.make", lambda core: type(core.Special.make()).__name__, None),
    ("Special.forward", lambda core: core.Special().forward(1), "Layer.forward"),
    ("Special.scale", lambda core: (core.Special.scale(1), core.Special().scale(1)), "Layer.scale"),
    ("Special.make", lambda core: type(core.Special.make()).__name__, "Layer.make"),
]


@pytest.mark.parametrize("name, use, inherited_from", SLOTS, ids=[slot[0] for slot in SLOTS])
def test_every_kind_of_slot_is_replaced_and_restored_by_identity(
    library: Library, name: str, use: Callable[[Any], Any], inherited_from: str | None
) -> None:
    calls = []

    def counting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    core = library.load()
    path, _, attribute = name.rpartition(".")
    owner = function(core, path) if path else core
    before, below, answer = raw(owner, attribute), raw(core.Layer, attribute), use(core)
    engine = installed(library.patch(library.target(name, counting, proven_on=inherited_from)))
    assert is_ours(raw(owner, attribute))
    assert type(raw(owner, attribute)) is type(before or below), "a static method stays one"
    assert use(core) == answer
    assert calls
    if inherited_from:
        assert before is None
        assert raw(core.Layer, attribute) is below, "the base is left alone"
    calls.clear()
    engine.revert()
    assert raw(owner, attribute) is before
    assert (attribute in vars(owner)) == (inherited_from is None)
    assert use(core) == answer
    assert not calls
    assert not traces([library.name])


def test_a_class_method_gets_the_class_it_was_called_on(library: Library) -> None:
    classes = []
    installed(library.patch(library.target("Layer.make", lambda original, cls: classes.append(cls) or original(cls))))
    core = library.load()
    assert isinstance(core.Special.make(), core.Special)
    assert classes == [core.Special]


def test_a_property_stays_one_and_is_given_back(library: Library) -> None:
    core = library.load()
    kind: Any = type("Sized", (), {"size": property(core.double, None, None, "how much")})
    core.Layer.Sized = kind
    before, changes = raw(kind, "size"), ChangeSet("fakelib-double")
    kind.__mul__ = lambda self, factor: factor
    changes.replace(core.__name__, "Layer.Sized.size", lambda original, self: ("patched", original(self)))
    assert kind().size == ("patched", 2)
    assert kind.size.__doc__ == "how much"
    assert changes.overridden() == ()
    kind.size = property(lambda self: "theirs")
    assert changes.overridden() == (f"{core.__name__}.Layer.Sized.size",)
    assert changes.undo() == (f"{core.__name__}.Layer.Sized.size",)
    assert kind().size == "theirs"
    again = ChangeSet("fakelib-double")
    kind.size = before
    again.replace(core.__name__, "Layer.Sized.size", lambda original, self: "ours")
    assert kind().size == "ours"
    assert again.undo() == ()
    assert raw(kind, "size") is before


def test_names_taken_before_the_patch_are_rebound_and_given_back(create: Callable[..., Library]) -> None:
    library = create(api=ALIAS)
    core, api = library.load(), library.load("api")
    original = core.double
    engine = installed(library.patch())
    assert api.double is core.double
    assert api.double(2) == ("patched", 4)
    assert engine.status()["fakelib-double"].late
    engine.revert()
    assert raw(api, "double") is raw(core, "double") is original


def test_names_taken_after_the_patch_are_given_back_too(create: Callable[..., Library]) -> None:
    library = create(api=ALIAS, other="from LIBRARY.core import double as twice\n")
    engine = installed(library.patch())
    api, other = library.load("api"), library.load("other")
    assert api.double(2) == other.twice(2) == ("patched", 4)
    engine.revert()
    original = raw(library.load(), "double")
    assert original(2) == 4
    assert raw(api, "double") is raw(other, "twice") is original
    assert not traces([library.name])


def test_another_function_of_the_same_name_is_not_touched(create: Callable[..., Library]) -> None:
    library = create(api="def double(x):\n    return 'mine'\n")
    api = library.load("api")
    mine = api.double
    engine = installed(library.patch())
    assert library.load().double(2) == ("patched", 4)
    assert api.double is mine
    engine.revert()
    assert api.double is mine


def test_proxies_and_placeholders_in_sys_modules_are_not_asked(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the engine asked a lazy module for {name}")

    class Placeholder:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the engine asked a placeholder for {name}")

    monkeypatch.setitem(sys.modules, "lazy_thing", Lazy("lazy_thing"))
    monkeypatch.setitem(sys.modules, "placeholder_thing", Placeholder())
    core = library.load()
    engine = installed(library.patch())
    assert core.double(2) == ("patched", 4)
    engine.revert()
    assert core.double(2) == 4


def test_a_name_that_somebody_rebound_meanwhile_is_theirs(create: Callable[..., Library]) -> None:
    library = create(api=ALIAS)
    api = library.load("api")
    engine = installed(library.patch())
    api.double = mine = lambda x: "mine"
    assert engine.status()["fakelib-double"].overridden == (f"{library.name}.api.double",)
    engine.revert()
    assert api.double is mine
    assert library.load().double(2) == 4


# ------------------------------------------------------------------------------------------ somebody else on top of us


@pytest.mark.parametrize("name", ["double", "Layer.forward"])
def test_a_wrapper_put_over_ours_is_reported_and_survives_the_revert(library: Library, name: str) -> None:
    core = library.load()
    engine = installed(library.patch(library.target(name)))
    owner, attribute = (core.Layer, "forward") if "." in name else (core, name)
    label = f"{library.name}.core.{name}"
    arguments = (core.Layer(), 3) if "." in name else (2,)
    assert engine.status()["fakelib-double"].overridden == ()
    wrapper = foreign(raw(owner, attribute))
    setattr(owner, attribute, wrapper)
    assert wrapper(*arguments) == ("foreign", ("patched", 4))
    status = engine.status()["fakelib-double"]
    assert status.state is PatchState.APPLIED
    assert status.overridden == (label,)
    assert label in status.reason
    status = engine.revert()["fakelib-double"]
    assert status.state is PatchState.REVERTED
    assert label in status.reason
    assert raw(owner, attribute) is wrapper
    assert wrapper(*arguments) == ("foreign", 4), "ours passes through"


@pytest.mark.parametrize("name", ["Layer.scale", "Layer.make"])
def test_a_replacement_of_a_static_or_class_method_is_noticed(library: Library, name: str) -> None:
    core = library.load()
    engine = installed(library.patch(library.target(name)))
    assert engine.status()["fakelib-double"].overridden == ()
    attribute = name.partition(".")[2]
    theirs = type(raw(core.Layer, attribute))(lambda *_: "theirs")
    setattr(core.Layer, attribute, theirs)
    assert engine.status()["fakelib-double"].overridden == (f"{library.name}.core.{name}",)
    engine.revert()
    assert raw(core.Layer, attribute) is theirs


@pytest.mark.parametrize("name, arguments", [("double", (2,)), ("Layer.forward", (None, 3)), ("Layer.scale", (0.4,))])
def test_installing_again_below_a_foreign_wrapper_switches_ours_on_where_it_is(
    create: Callable[..., Library], name: str, arguments: tuple[Any, ...]
) -> None:
    library = create(api=ALIAS)
    core, api = library.load(), library.load("api")
    path, _, attribute = name.rpartition(".")
    owner = getattr(core, path) if path else core
    engine = installed(library.patch(library.target(name)))
    wrapper = foreign(getattr(owner, attribute))
    setattr(owner, attribute, wrapper if name != "Layer.scale" else staticmethod(wrapper))
    for _ in range(2):
        assert function(core, name)(*arguments) == ("foreign", ("patched", 4))
        status = engine.status()["fakelib-double"]
        assert (status.state, status.overridden) == (PatchState.APPLIED, (f"{core.__name__}.{name}",))
        assert name != "double" or api.double(2) == ("patched", 4)
        status = engine.revert()["fakelib-double"]
        assert "ours stays below it and passes through" in status.reason
        assert function(core, name)(*arguments) == ("foreign", 4)
        assert api.double(2) == 4
        engine.install()


def test_a_wrapper_that_is_taken_off_again_leaves_ours_in_charge(library: Library) -> None:
    core = library.load()
    original = core.double
    engine = installed(library.patch())
    ours = core.double
    core.double = foreign(ours)
    assert engine.status()["fakelib-double"].overridden
    core.double = ours
    assert engine.status()["fakelib-double"].overridden == ()
    engine.revert()
    assert raw(core, "double") is original


# ----------------------------------------------------------------------------------------- two patches on one function


def two(library: Library, name: str = "double") -> tuple[Any, Engine]:
    """The core, and an engine with both patches applied."""
    core = library.load()
    engine = installed(
        library.patch(library.target(name, says("lower")), id=LOWER),
        library.patch(library.target(name, says("upper")), library.target("triple"), id=UPPER, after=(LOWER,)),
    )
    return core, engine


@pytest.mark.parametrize("order", [(LOWER, UPPER), (UPPER, LOWER), (None,)])
def test_two_patches_on_one_function_come_off_in_any_order(library: Library, order: tuple[str | None, ...]) -> None:
    core = library.load()
    original = core.double
    core, engine = two(library)
    assert core.double(2) == ("upper", ("lower", 4))
    assert [status.overridden for status in engine.status().values()] == [(), ()]
    for step, patch_id in enumerate(order):
        status = engine.revert(patch_id)
        if step == 0 and patch_id:
            remaining = UPPER if patch_id == LOWER else LOWER
            assert core.double(2) == (remaining.rpartition("-")[2], 4)
            assert status[remaining].state is PatchState.APPLIED
            assert status[remaining].overridden == ()
        assert patch_id is None or status[patch_id].state is PatchState.REVERTED
    assert raw(core, "double") is original
    assert not traces([library.name])


def test_names_taken_between_two_patches_are_given_back_by_one_search(create: Callable[..., Library]) -> None:
    library = create(between="from LIBRARY.core import double as twice\n", late="from LIBRARY.core import double\n")
    core = library.load()
    original, module = core.double, core.__name__
    lower, upper = ChangeSet(LOWER), ChangeSet(UPPER)
    lower.replace(module, "double", says("lower"))
    between = library.load("between")
    upper.replace(module, "double", says("upper"))
    late = library.load("late")
    assert (between.twice(2), late.double(2)) == (("lower", 4), ("upper", ("lower", 4)))
    elsewhere: list[tuple[Any, Any]] = []
    assert (upper.undo(elsewhere), lower.undo(elsewhere)) == ((), ())
    assert raw(core, "double") is original
    assert is_ours(raw(late, "double")), "not searched for yet"
    restore(elsewhere)
    assert raw(between, "twice") is raw(late, "double") is original
    assert not traces([library.name])


@pytest.mark.parametrize("patch_id", [LOWER, UPPER])
@pytest.mark.parametrize("name, arguments", [("double", (2,)), ("Layer.forward", (None, 3)), ("Layer.scale", (0.4,))])
def test_a_patch_that_shares_its_function_is_installed_again_in_its_place(
    library: Library, patch_id: str, name: str, arguments: tuple[Any, ...]
) -> None:
    core, engine = two(library, name)
    for _ in range(2):
        engine.revert(patch_id)
        engine.install()
        assert function(core, name)(*arguments) == ("upper", ("lower", 4))
        assert core.triple(2) == ("patched", 6)
    engine.revert()
    assert function(core, name)(*arguments) == 4
    assert not traces([library.name])


@pytest.mark.parametrize("patch_id", [LOWER, UPPER, "fakelib-top"])
def test_what_lies_on_another_function_of_a_covering_patch_comes_off_first_too(
    library: Library, patch_id: str
) -> None:
    core = library.load()
    originals = core.double, core.triple
    engine = installed(
        library.patch(library.target("double", says("lower")), id=LOWER),
        library.patch(library.target("double", says("upper")), library.target("triple", says("upper")), id=UPPER),
        library.patch(library.target("triple", says("top")), id="fakelib-top"),
    )
    before = core.double(2), core.triple(2)
    assert before == (("upper", ("lower", 4)), ("top", ("upper", 6)))
    engine.revert(patch_id)
    without = patch_id.rpartition("-")[2]
    assert without not in f"{core.double(2)} {core.triple(2)}"
    assert not any(status.overridden for status in engine.status().values())
    layers = 0
    function = core.triple
    while is_ours(function):
        function, layers = function.__wrapped__, layers + 1
    assert layers == (2 if patch_id == LOWER else 1), "nothing passes through what has been taken off"
    engine.install()
    assert (core.double(2), core.triple(2)) == before
    engine.revert()
    assert (core.double, core.triple) == originals
    assert not traces([library.name])


def test_the_lower_of_two_comes_off_below_a_foreign_wrapper(library: Library) -> None:
    core, engine = two(library)
    core.double = foreign(core.double)
    assert engine.status()[UPPER].overridden == (f"{library.name}.core.double",)
    assert engine.revert(LOWER)[LOWER].state is PatchState.REVERTED
    words = str(core.double(2))
    assert (words.count("upper"), words.count("lower"), words.count("foreign")) == (1, 0, 1)
    engine.revert()
    assert core.double(2) == ("foreign", 4)


def test_a_foreign_object_on_top_that_cannot_be_replaced_does_not_break_a_revert(library: Library) -> None:
    core, engine = two(library)
    core.double = functools.lru_cache(core.double)
    status, said = collected(lambda: engine.revert(LOWER))
    assert status[LOWER].state is PatchState.REVERTED
    upper = status[UPPER].state is PatchState.APPLIED
    assert core.double(2) == (("upper", 4) if upper else 4)
    assert core.triple(2) == (("patched", 6) if upper else 6), "all of a patch or nothing"
    assert len(said) == (not upper)


# ---------------------------------------------------------------------------------------------------- revert and again


def test_revert_of_one_leaves_the_others(library: Library) -> None:
    core = library.load()
    engine = installed(library.patch(), library.patch(library.target("triple"), id="fakelib-triple"))
    status = engine.revert("fakelib-double")
    assert {name: item.state for name, item in status.items()} == {
        "fakelib-double": PatchState.REVERTED,
        "fakelib-triple": PatchState.APPLIED,
    }
    assert (core.double(2), core.triple(2)) == (4, ("patched", 6))
    assert engine.revert("fakelib-double") == status


def test_revert_of_an_unknown_id_is_an_error_that_names_the_nearest(library: Library) -> None:
    core = library.load()
    engine = installed(library.patch())
    with pytest.raises(Gemma4CompatError, match="no patch has the id 'double'; did you mean 'fakelib-double'"):
        engine.revert("double")
    assert core.double(2) == ("patched", 4)


def test_revert_before_the_import_keeps_the_patch_off_until_it_is_installed_again(library: Library) -> None:
    engine = installed(library.patch())
    status = engine.revert("fakelib-double")["fakelib-double"]
    assert (status.state, status.reason) == (
        PatchState.REVERTED,
        "reverted before it was applied; install() arms it again",
    )
    core = library.load()
    assert core.double(2) == 4
    assert engine.status()["fakelib-double"].state is PatchState.REVERTED
    engine.install()
    assert core.double(2) == ("patched", 4)
    assert engine.status()["fakelib-double"].late


def test_revert_and_install_before_the_import_arms_again(library: Library) -> None:
    engine = installed(library.patch())
    engine.revert()
    engine.install()
    assert engine.status()["fakelib-double"].state is PatchState.PENDING
    assert library.load().double(2) == ("patched", 4)


def test_revert_and_install_after_the_import_applies_again_as_often_as_wanted(create: Callable[..., Library]) -> None:
    library = create(api=ALIAS)
    core, api = library.load(), library.load("api")
    original = core.double
    engine = installed(library.patch())
    for _ in range(3):
        engine.revert()
        assert raw(core, "double") is raw(api, "double") is original
        engine.install()
        assert core.double(2) == api.double(2) == ("patched", 4)
        assert engine.status()["fakelib-double"].state is PatchState.APPLIED


def test_a_reference_taken_while_applied_passes_through_until_the_next_install(library: Library) -> None:
    core = library.load()
    engine = installed(library.patch())
    taken = core.double
    assert taken(2) == ("patched", 4)
    engine.revert()
    assert taken(2) == 4
    engine.install()
    assert taken(2) == ("patched", 4)


def test_a_bound_method_taken_while_applied_is_repaired_again_after_the_next_install(library: Library) -> None:
    """Accelerate keeps ``module.forward`` of a model that it dispatches."""
    core = library.load()
    engine = installed(
        library.patch(library.target("Layer.forward", says("lower")), id=LOWER),
        library.patch(library.target("Layer.forward", says("upper")), id=UPPER),
    )
    kept, applied = core.Layer().forward, core.Layer().forward(1)
    for _ in range(2):
        engine.revert()
        assert kept(1) == core.Layer().forward(1) != applied
        engine.install()
        assert kept(1) == core.Layer().forward(1) == applied
    engine.revert()
    assert kept(1) == core.Layer().forward(1) != applied


def test_attributes_copied_from_a_replacement_can_be_deep_copied(library: Library) -> None:
    """Accelerate copies those of a module's forward onto its own, and models are deep-copied."""
    core = library.load()
    installed(library.patch())
    taken = functools.update_wrapper(functools.partial(core.double), core.double)
    attributes = {key: value for key, value in vars(taken).items() if key != "__wrapped__"}
    assert copy.deepcopy(attributes) == attributes


# --------------------------------------------------------------------------------------- what a replacement looks like


@pytest.mark.parametrize("name", ["double", "Layer.forward", "Layer.scale", "Layer.make"])
def test_a_replaced_function_looks_like_the_original(library: Library, name: str) -> None:
    def look(core: Any) -> tuple[Any, ...]:
        found = function(core, name)
        names = ("__name__", "__qualname__", "__module__", "__doc__")
        return (inspect.signature(found), inspect.getsource(found), *(getattr(found, key) for key in names))

    core = library.load()
    before = look(core)
    installed(library.patch(library.target(name)))
    assert traces([library.name]) == [f"{library.name}.core.{name}"]
    assert look(core) == before


def test_a_replacement_is_a_plain_function_without_the_marks_of_the_original(library: Library) -> None:
    core = library.load()
    core.double._torchdynamo_disable = True
    installed(library.patch())
    assert type(core.double) is types.FunctionType
    assert not hasattr(core.double, "_torchdynamo_disable")


def test_pickle_and_deepcopy_of_a_replaced_function(library: Library) -> None:
    core = library.load()
    original = core.double
    engine = installed(library.patch())
    data = pickle.dumps(core.double)
    assert pickle.loads(data) is core.double
    assert copy.deepcopy(core.double) is core.double
    engine.revert()
    assert pickle.loads(data) is original, "it is stored by name"


@pytest.mark.parametrize("round_trip", [lambda item: pickle.loads(pickle.dumps(item)), copy.deepcopy, copy.copy])
def test_pickle_and_copies_of_an_instance_with_a_replaced_method(
    library: Library, round_trip: Callable[[Any], Any]
) -> None:
    engine = installed(library.patch(library.target("Layer.forward")))
    layer = library.load().Special()
    layer.weight = [1, 2]
    again = round_trip(layer)
    assert type(again) is type(layer)
    assert vars(again) == {"weight": [1, 2]}
    assert again.forward(1) == ("patched", 2)
    engine.revert()
    assert again.forward(1) == 2


# ----------------------------------------------------------------------------------------------------------- ChangeSet


@pytest.mark.parametrize(
    "name, error", [("gone", AttributeError), ("Layer.gone", AttributeError), ("NUMBER", TypeError)]
)
def test_what_cannot_be_replaced_is_an_error_that_changes_nothing(
    library: Library, name: str, error: type[Exception]
) -> None:
    core = library.load()
    before = dict(vars(core)), dict(vars(core.Layer))
    changes = ChangeSet("fakelib-double")
    with pytest.raises(error):
        changes.replace(f"{library.name}.core", name, tagged)
    assert changes.overridden() == changes.undo() == ()
    assert (dict(vars(core)), dict(vars(core.Layer))) == before


def test_two_replacements_in_one_slot_are_undone_newest_first(library: Library) -> None:
    core = library.load()
    original = core.double
    changes = ChangeSet("fakelib-double")
    changes.replace(f"{library.name}.core", "double", says("first"))
    changes.replace(f"{library.name}.core", "double", says("second"))
    assert core.double(2) == ("second", ("first", 4))
    assert changes.undo() == ()
    assert raw(core, "double") is original


def test_undoing_twice_is_undoing_once(create: Callable[..., Library]) -> None:
    library = create(core=CORE)
    core = library.load()
    original = core.double
    changes = ChangeSet("fakelib-double")
    changes.replace(f"{library.name}.core", "double", tagged)
    assert core.double(2) == ("patched", 4)
    assert changes.undo() == ()
    core.double = theirs = foreign(original)
    assert changes.undo() == ()
    assert core.double is theirs
