"""transformers-peft-release: a model's own adapters with the PEFT that there is."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat.patches.adapters.transformers_peft_release import PATCH
from tests.conftest import is_affected
from tests.helpers import without
from tests.patches.promise import Promise

affected = pytest.mark.skipif(not is_affected(PATCH), reason="this transformers asks for a released PEFT")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: The version of PEFT you are using is not compatible, please use a version >= 0\.22\.0"


@affected
def test_every_call_that_asks_for_a_release(workspace: Any) -> None:
    from peft import LoraConfig

    model = tiny.load(workspace.checkpoint)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("add_adapter", (config, "new")),
        ("set_adapter", ("new",)),
        ("disable_adapters", ()),
        ("enable_adapters", ()),
        ("active_adapters", ()),
        ("get_adapter_state_dict", ("new",)),
        ("delete_adapter", ("new",)),
    ]
    with without(PATCH.id):
        for name, given in calls:
            with pytest.raises(ValueError, match=r"please use a version >= 0\.22\.0"):
                getattr(model, name)(*given)
    with pytest.raises(ValueError, match="No adapter loaded"):  # upstream's own error, not that of a release
        model.active_adapters()
    model.add_adapter(config, "new")
    assert model.active_adapters() == ["new"]
    model.set_adapter("new")
    model.disable_adapters()
    model.enable_adapters()
    assert set(model.get_adapter_state_dict("new"))
    model.delete_adapter("new")
    assert not any("lora" in name for name, _ in model.named_parameters())


@affected
@pytest.mark.parametrize("asked", ["0.22.1", "0.23.0", "99"])
def test_other_requirements_are_upstreams(asked: str) -> None:
    from transformers.utils import peft_utils

    with pytest.raises(ValueError, match=rf"please use a version >= {asked}"):
        peft_utils.check_peft_version(asked)
    peft_utils.check_peft_version("0.1.0")


@affected
@pytest.mark.parametrize("installed", ["0.19.1", "0.20.0"])
def test_an_older_peft_is_refused_as_by_the_release_before(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    from transformers.utils import peft_utils

    monkeypatch.setattr(peft_utils.importlib.metadata, "version", lambda name: installed)
    if installed == "0.20.0":
        peft_utils.check_peft_version("0.22.0")
        return
    with pytest.raises(ValueError, match=r"please use a version >= 0\.20\.0"):
        peft_utils.check_peft_version("0.22.0")


@affected
def test_undone_it_asks_as_before() -> None:
    from transformers.utils import peft_utils

    with without(PATCH.id), pytest.raises(ValueError, match=r"please use a version >= 0\.22\.0"):
        peft_utils.check_peft_version("0.22.0")
    peft_utils.check_peft_version("0.22.0")
