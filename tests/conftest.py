"""Shared by tests that need the libraries: the tiny checkpoint, answers of one device, reproductions in children."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported. Tiny models: threads cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gemma4_compat
from gemma4_compat._doctor.reproductions import children
from gemma4_compat._engine import versions
from gemma4_compat._engine.io import notice
from gemma4_compat._engine.runtime import locks
from gemma4_compat._lab.workspace import never_wait_for_the_disk
from tests import collecting, durations, tiers, torch_state, warm
from tests.helpers import ROOT, Finished, Library, child

# A shell ignores Ctrl-C for what it starts in the background, and nohup ignores a closed terminal. Children inherit
# that, but not a handler: where Python has one, they start with the default action.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGINT,):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)

_SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("GEMMA4_COMPAT_")}

#: What looks at measurements or at the trained model, which an sdist does not have.
NEEDS_EVIDENCE = (
    *("generated/search/test_differential_search.py", "project/docs/test_links.py", "project/docs/test_site.py"),
    *("one_device/test_trained.py", "unit/doctor/reproductions/test_show.py"),
    *("project/tools/test_compare_report.py", "project/tools/test_docs.py", "project/tools/test_evidence.py"),
    *("project/tools/test_matrix.py", "project/tools/test_package.py", "project/tools/test_quantized_bytes.py"),
    *("project/tools/test_readers.py", "unit/doctor/explain/test_explain_errors.py"),
    *("unit/gemma4/models/test_acts_on.py", "unit/gemma4/models/test_variants.py", "unit/plan/test_speed.py"),
    *("unit/commands/test_serve.py", "unit/commands/test_serve_process.py", "unit/prefix_cache/test_parked.py"),
)
if not (ROOT / "docs" / "evidence").exists():
    collect_ignore = [*NEEDS_EVIDENCE]

#: The quick tests, empty if others were asked for; and where the tests of ``--changed`` are.
_QUICK: pytest.StashKey[tiers.Tier] = pytest.StashKey()
_TOUCHED: pytest.StashKey[list[Path] | None] = pytest.StashKey()

#: Warnings of the engine that pyproject.toml's filter has turned into errors. They are never raised.
_shown: list[str] = []
notice.show = lambda warning, file, line: _shown.append(f"{file}:{line}: {warning}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promises", action="store_true", help="the tests of every push: all but those marked full")
    parser.addoption("--full", action="store_true", help="every test")
    parser.addoption("--changed", metavar="COMMIT", nargs="?", const="HEAD", help="all tests of the patches, rooms "
                     "and pages that changed since that commit (default: HEAD)")  # fmt: skip
    parser.addoption("--sample", metavar="COUNT:SEED", help="of COUNT parts of the tests, the one that SEED chooses")
    parser.addoption("--record", action="store_true", help="write what each test costs to tests/durations.json")
    parser.addoption("--case", metavar="TEXT", action="append", default=[], help="of tests that look at many patches "
                     "or files in one go, only those whose name contains TEXT")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    collecting.chosen[:] = config.getoption("--case")
    since = config.getoption("--changed")
    try:
        config.stash[_TOUCHED] = None if since is None else tiers.changed(config.rootpath, since)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    # Words or markers choose among all tests of a push.
    others = ("--promises", "--full", "--changed", "--sample", "--record", "-k", "-m")
    is_quick = not any(config.getoption(name) for name in others) and not _are_named(config)
    config.stash[_QUICK] = tiers.quick(durations.read()) if is_quick else {}
    if config.getoption("--record"):
        config.pluginmanager.register(durations.Recorder(config))
    if importlib.util.find_spec("numpy") is not None:
        never_wait_for_the_disk()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the tier that was asked for, and what is in no ``--sample``."""
    if config.getoption("--sample"):
        count, _, seed = config.getoption("--sample").partition(":")
        if not count.isdecimal() or int(count) == 0:
            raise pytest.UsageError(f"--sample is COUNT:SEED, such as 3:today, not {count!r}")
        _keep(config, items, lambda item: in_sample(item.nodeid, int(count), seed))
    if config.getoption("--full") or config.getoption("--changed") or _are_named(config):
        return
    _keep(config, items, lambda item: not item.get_closest_marker("full"))
    tier, seen = config.stash[_QUICK], set()

    def is_quick(item: pytest.Item) -> bool:
        file, _, function = item.nodeid.partition("[")[0].partition("::")
        is_first = (file, function) not in seen
        seen.add((file, function))
        if function not in durations.read().get(file, {}):
            return True  # a new one
        every = tier.get(file, {}).get(function)
        return every is not None and (every or is_first)

    if tier:
        _keep(config, items, is_quick)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file is not imported: it has no test of the tier."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    touched = config.stash[_TOUCHED]
    if touched is not None and not any(path == collection_path or path in collection_path.parents for path in touched):
        return True
    tier = config.stash[_QUICK]
    file = collection_path.relative_to(config.rootpath).as_posix()
    return True if tier and file not in tier and file in durations.read() else None


def _are_named(config: pytest.Config) -> bool:
    """Whether files or folders are: they run whole."""
    everything = {str(config.rootpath / path) for path in config.getini("testpaths")}
    return {str((config.invocation_params.dir / argument).resolve()) for argument in config.args} != everything


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    kept = [(item, wanted(item)) for item in items]
    items[:] = [item for item, is_kept in kept if is_kept]
    config.hook.pytest_deselected(items=[item for item, is_kept in kept if not is_kept])


def in_sample(test: str, count: int, seed: str) -> bool:
    """Whether a test is in the part that ``seed`` chooses of ``count``; all cases of a function are in one part."""
    return zlib.crc32(test.partition("[")[0].encode()) % count == zlib.crc32(seed.encode()) % count


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker gets a run of neighbours, which share what their module builds, and idle ones take from the others:
    `-n 2` means that unless another ``--dist`` is named.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """No module of the tests may change what every later test and child process inherits."""
    now = {name: value for name, value in os.environ.items() if name.startswith("GEMMA4_COMPAT_")}
    # typer makes the commands anew for each call of its runner, which takes longer than most commands.
    if hasattr(runner := sys.modules.get("typer.testing"), "_get_command"):
        runner._get_command = functools.cache(runner._get_command)
    if now != _SETTINGS:
        raise pytest.UsageError(f"importing the tests changed the shim's settings: {_SETTINGS} became {now}")
    # What the tests import lasts as long as they do, half a million objects and more. Collections, and searches of the
    # heap, take a tenth of a second and more to pass them.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _a_patch_that_could_not_apply_is_a_failure() -> Iterator[None]:
    yield
    said, _shown[:] = _shown[:], []
    assert not said


@pytest.fixture(autouse=True)
def _locks_are_taken_in_order() -> Iterator[None]:
    """Of every thread of every test: the order is in :mod:`gemma4_compat._engine.runtime.locks`."""
    found = []
    locks.watch = lambda lock, held: found.extend((rank, lock.rank) for rank in held if rank > lock.rank)
    yield
    locks.watch = None
    assert not found, "a lock was taken while one further down was held"


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """The test that changes what torch has once for a process fails, not one that comes later."""
    before = torch_state.now()
    yield
    changed = torch_state.changes(before, torch_state.now())
    torch_state.put(before)
    assert not changed, "the test left torch's state changed"


@pytest.fixture(scope="session")
def folder_of_workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny checkpoint is, once :func:`workspace` or :func:`reproduce` has built it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs the upstream libraries: pip install 'gemma4-compat[test]'")
    return tmp_path_factory.mktemp("gemma4")


@pytest.fixture(scope="session")
def workspace(folder_of_workspace: Path) -> Any:
    """The tiny Gemma 4 checkpoint and its adapters, built once a run with the shim on."""
    from gemma4_compat._lab.workspace import Workspace

    if any(folder_of_workspace.iterdir()):
        return Workspace(folder_of_workspace)
    return Workspace.build(folder_of_workspace)


@pytest.fixture
def bench() -> Iterator[Any]:
    """Where cases of ``tests.generated.search`` are run."""
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    from tests.generated.search import run

    with run.bench() as place:
        yield place


@pytest.fixture(scope="session")
def one_device(workspace: Any) -> Callable[[str | None, str | None], Any]:
    """``one_device(quantization, adapter)``: the answers of that model with everything on one device, computed
    once.
    """
    from peft import PeftModel

    known: dict[tuple[str | None, str | None], Any] = {}

    def outputs(quantization: str | None, adapter: str | None) -> Any:
        key = (quantization, adapter)
        if key not in known:
            model = workspace.load(quantization)
            if adapter is not None:
                model = PeftModel.from_pretrained(model, workspace.adapter(adapter))
            known[key] = workspace.outputs(model)
        return known[key]

    return outputs


@pytest.fixture(scope="session")
def reproduce(folder_of_workspace: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """``reproduce(patch_id, shim=...)``: the reproduction's result in a process of its own, each run once.

    ``shim`` is "off", "on", or armed, libraries imported, and undone: "reverted" (every patch), "others" (this one,
    the others are on). This process need not import the libraries.
    """
    folder = folder_of_workspace
    known: dict[tuple[str, str], dict[str, Any]] = {}
    servers: dict[str, children.Forks] = {}

    def answer(command: str, disabled: str) -> dict[str, Any]:
        if children.can_fork():
            server = servers.get(disabled) or servers.setdefault(
                disabled, stack.enter_context(children.Forks(folder, disabled))
            )
            return server(command)
        return children.alone(command, folder, disabled=disabled)

    def run(patch_id: str, *, shim: str) -> dict[str, Any]:
        if not any(folder.iterdir()):
            built = answer("build", "")
            assert "built" in built, built
        key = (patch_id, shim)
        if key not in known:
            command = {"reverted": f"{patch_id}:reverted", "others": f"{patch_id}:alone"}.get(shim, patch_id)
            known[key] = answer(command, "all" if shim == "off" else "")
        return known[key]

    with contextlib.ExitStack() as stack:
        yield run


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Library]]:
    """``create(...)``: a :class:`Library` of a name of its own, importable until the test ends."""
    made: list[Library] = []

    def make(**options: Any) -> Library:
        made.append(Library.create(tmp_path, **options))
        return made[-1]

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for library in made:
        for name in [name for name in sys.modules if name.partition(".")[0] == library.name]:
            del sys.modules[name]


@pytest.fixture
def library(create: Callable[..., Library]) -> Library:
    """The usual one: version 1.0, everything in its module ``core``."""
    return create()


def is_affected(patch: gemma4_compat.Patch) -> bool:
    """Whether, by the patch's own claim, the installed releases have the defect."""
    version = versions.installed(patch.distribution)
    if version is None or not versions.admits(patch.affected, version):
        return False
    for text in patch.requires:
        name, specifier = versions.requirement(text)
        found = versions.installed(name)
        if found is None or not versions.admits(specifier, found):
            return False
    return True


def patch(patch_id: str) -> gemma4_compat.Patch:
    return {item.id: item for item in gemma4_compat.patches()}[patch_id]


def census() -> tuple[int, int]:
    """How many tensors are alive, and how many bytes their distinct storages hold (meta ones hold none)."""
    import torch

    gc.collect()
    fakes = ("FakeTensor", "FunctionalTensor")  # left by torch.compile elsewhere in this process; they hold nothing
    tensors = [
        item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and type(item).__name__ not in fakes
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type != "meta"
    }
    return len(tensors), sum(storages.values())


@pytest.fixture(scope="session")
def variant_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``variant_checkpoint(variant)``: a tiny checkpoint of it, built once. A release without it skips the test."""
    from gemma4_compat._lab import tiny_models

    @functools.cache
    def build(variant: str) -> Path:
        try:
            return tiny_models.build_checkpoint(tmp_path_factory.mktemp("variant"), variant=variant)
        except gemma4_compat.Gemma4CompatError as error:
            pytest.skip(str(error))

    return build


@pytest.fixture(scope="session")
def warm_child() -> Iterator[Callable[..., Finished]]:
    """:func:`tests.helpers.child` for scripts that import the libraries, in forks where these are safe.

    A script is a file, or text after ``"-c"``.
    """
    with contextlib.ExitStack() as stack:
        python = sys.executable
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-")))
        if children.can_fork():
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("GEMMA4_COMPAT_")}
            inherited.pop("PYTHONWARNINGS", None)
            path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
            environment = inherited | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
            python = stack.enter_context(warm.interpreter(folder, environment))

        def run(*arguments: str, **options: Any) -> Finished:
            if arguments[0] == "-c":
                script = folder / f"{zlib.crc32(arguments[1].encode())}.py"
                script.write_text(arguments[1], encoding="utf-8")
                arguments = (str(script), *arguments[2:])
            return child(*arguments, python=python, **options)

        yield run
