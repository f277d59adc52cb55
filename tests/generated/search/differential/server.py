"""One side of the search: a process with the libraries and the models, which forks for every entry.

A fork has a model that nobody has touched, and takes with it what a call leaves behind: hooks, threads, a hang, a
crash. The package is on unless GEMMA4_COMPAT_DISABLE says ``all``.

``python -m tests.generated.search.differential.server ORDER``: a JSON file with ``entries`` (names), ``out`` and
``work`` (folders), ``limit`` (seconds for an entry), ``adapter_first`` (dispatch the model with its adapter) and
``plant`` (``module:function`` to call first, or None).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import gemma4_compat  # noqa: F401  (before the others)
from tests.generated.search import run
from tests.generated.search.differential import table, world

CACHED = 3  # kinds whose models are kept in memory


def main(order_file: str) -> int:
    order = json.loads(Path(order_file).read_text(encoding="utf-8"))
    _libraries()
    if order["plant"]:
        module, _, function = order["plant"].partition(":")
        getattr(importlib.import_module(module), function)()
    out = Path(order["out"])
    kind, workspace, model, failed = "", None, None, None
    with run.quiet():
        for number, name in enumerate(order["entries"]):
            entry = table.named(name)
            if entry.kind != kind:
                kind, model, failed = entry.kind, None, None
                try:
                    workspace = world.prepare(Path(order["work"]), kind)
                    model = world.load(workspace, kind)
                except Exception as error:  # noqa: BLE001  (this release has no such model)
                    failed = {"status": "absent", "text": _first_line(error)}
                gc.collect()
                gc.freeze()
            result = failed or _forked(entry, workspace, model, order)
            with (out / f"{number}.unfinished").open("wb") as file:
                pickle.dump(result, file)
            (out / f"{number}.unfinished").rename(out / f"{number}.pkl")
    return 0


def _libraries() -> None:
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration, Trainer  # noqa: F401

    warnings.simplefilter("ignore")


def _forked(entry: table.Entry, workspace: Any, model: Any, order: dict[str, Any]) -> dict[str, Any]:
    """What an entry gives, from a fork."""
    limit = order["limit"]
    folder = Path(tempfile.mkdtemp(prefix="gemma4-entry-"))
    process = os.fork()
    if not process:
        _child(entry, workspace, model, folder, order["adapter_first"])
    descriptor = os.pidfd_open(process)
    try:
        ready, _, _ = select.select([descriptor], [], [], limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what it started, too
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if not ready:
            return {"status": "hang", "text": f"no answer in {limit:.0f} s"}
        try:
            return pickle.loads((folder / "result").read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return {"status": "crash", "text": f"the process ended with {code}"}
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _child(entry: table.Entry, workspace: Any, model: Any, folder: Path, adapter_first: bool) -> None:
    import torch

    torch.set_num_threads(torch.get_num_threads())  # a fork's pool is made anew; two threads at once must not do that

    with contextlib.suppress(BaseException):
        os.setsid()  # children of a call are no children of the search's
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    tempfile.tempdir = str(folder)
    os.chdir(folder)
    torch.manual_seed(0)
    random.seed(0)
    result: dict[str, Any]
    here = None
    try:
        here = world.World(workspace, entry.kind, entry.place, model, adapter_first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = entry.call.function(here, **entry.call.options)
        if isinstance(shown, table.Expect):
            result = {"status": "value", "value": flat(shown.found), "right": flat(shown.right)}
        else:
            result = {"status": "value", "value": flat(shown)}
    except table.NotHereError as error:
        result = {"status": "absent", "text": str(error)}
    except BaseException as error:  # noqa: BLE001  (whatever the libraries raise is what is compared)
        result = {
            "status": "error",
            "type": _name(type(error)),
            "mro": [_name(kind) for kind in type(error).__mro__],
            "text": _first_line(error),
            "ready": here is not None and here.ready,
            "trace": "".join(traceback.format_exception(error))[-6000:],
        }
    result["whole"] = here is not None and here.whole
    (folder / "result").write_bytes(pickle.dumps(result))
    os._exit(0)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"/[^\s'\"]+", "PATH", lines[0].strip()) if lines else ""
    return re.sub(r"0x[0-9a-f]+", "0x", text)[:200]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Tensors as arrays, numbers and words, by their path in containers."""
    import torch

    if isinstance(value, torch.Tensor):
        return {name: _array(value)}
    if isinstance(value, dict):
        return {path: leaf for key, item in value.items() for path, leaf in flat(item, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {path: leaf for key, item in enumerate(value) for path, leaf in flat(item, f"{name}.{key}").items()}
    if isinstance(value, (set, frozenset)):
        return flat(sorted(map(str, value)), name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return {name: value}
    if isinstance(value, (torch.dtype, torch.device, type)):
        return {name: str(value)}
    if hasattr(value, "to_tuple"):
        return flat(value.to_tuple(), name)
    raise TypeError(f"{name}: a call shows tensors and plain values, not {type(value).__name__}")


def _array(value: Any) -> Any:
    """A numpy array, with the name of the dtype; of a tensor on meta its shape."""
    import torch

    value = value.detach()
    dtype = str(value.dtype).removeprefix("torch.")
    if value.device.type == "meta":
        return ("meta", dtype, tuple(value.shape))
    value = value.cpu()
    if value.dtype in (torch.bfloat16, torch.float16) or not value.dtype.is_floating_point:
        plain = value.float() if value.dtype.is_floating_point else value
    else:
        plain = value
    return ("tensor", dtype, plain.contiguous().numpy().copy())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
