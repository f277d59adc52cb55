"""``gemma4-compat env``: facts for a report, no secret, nothing imported or started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._doctor import environment
from gemma4_compat._engine import versions
from tests.helpers import child
from tests.unit.engine.test_import_cost import UPSTREAM, imported_by

SECRETS = {"HF_TOKEN": "hunter2", "WANDB_API_KEY": "hunter2", "HTTPS_PROXY": "http://me:hunter2@x", "HOME": "/hunter2"}


def collected() -> dict[str, object]:
    return environment.collect(gemma4_compat.__version__, gemma4_compat.status())


def test_it_says_what_is_installed_and_what_applies() -> None:
    done = CliRunner().invoke(cli.app, ["env"])
    assert done.exit_code == 0
    for part in (gemma4_compat.__version__, f"transformers {versions.installed('transformers')}", "- patches: "):
        assert part in done.stdout
    data = json.loads(CliRunner().invoke(cli.app, ["env", "--json"]).stdout)
    assert sum(data["states"].values()) == len(gemma4_compat.patches())
    assert set(data["enabled"]) <= {patch.id for patch in gemma4_compat.patches()}


def test_what_is_off_is_named_with_the_reason_and_no_secret_is_shown() -> None:
    done = child("-m", "gemma4_compat", "env", environment=SECRETS | {"GEMMA4_COMPAT_DISABLE": "peft-keep-dispatch"})
    assert (done.code, done.stderr) == (0, "")
    assert "- settings: GEMMA4_COMPAT_DISABLE=peft-keep-dispatch" in done.stdout
    assert "- off: peft-keep-dispatch: disabled by GEMMA4_COMPAT_DISABLE" in done.stdout
    assert "hunter2" not in done.stdout


def test_it_imports_no_library() -> None:
    loaded = imported_by("import sys; sys.argv[1:] = ['env']; from gemma4_compat.cli import main; main()")
    assert not {name.partition(".")[0] for name in loaded} & set(UPSTREAM)


@pytest.mark.parametrize("started", [True, False])
def test_torch_is_asked_for_gpus_only_where_it_uses_them(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    def names(index: int) -> str:
        assert started, "asked"
        return f"GPU {index}"

    cuda = SimpleNamespace(is_initialized=lambda: started, device_count=lambda: 2, get_device_name=names)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0")))
    monkeypatch.setattr(environment, "DRIVER", Path("/no such folder"))
    data = collected()
    assert data["devices"] == (["GPU 0", "GPU 1"] if started else None)
    assert str(data["torch"]).endswith("(cuda 13.0)")


def test_the_driver_says_which_gpus_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text(
        "Model: \t\t NVIDIA GeForce RTX 3060\nIRQ:   \t\t 45\nGPU UUID: \t GPU-hunter2\n"
    )
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC: 13\n"
    )
    monkeypatch.setattr(environment, "DRIVER", tmp_path)
    data = collected()
    assert (data["devices"], data["driver"]) == (["NVIDIA GeForce RTX 3060"], "580.95.05")
    assert "hunter2" not in environment.text(data)
    assert "- GPUs: NVIDIA GeForce RTX 3060 (driver 580.95.05)" in environment.text(data)
