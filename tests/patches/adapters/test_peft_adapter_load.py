"""What a load of an adapter leaves is what upstream leaves, the random numbers that come next included."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.adapters import creation, mersenne, state
from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.adapters.peft_adapter_load import PATCH, calls_of
from tests.helpers import without
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"random weights were drawn \d+ times"


def plain(value: Any, depth: int = 0) -> Any:
    """An attribute, so that it can be compared: of what is not data its type."""
    import torch

    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.dtype, value.device, tuple(value.shape), value.requires_grad
    if isinstance(value, dict) and depth < 3:
        # Keys that are no names are the numbers of hooks, which go on from one model to the next.
        return [(key if isinstance(key, str) else "number", plain(inner, depth + 1)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__qualname__


def picture(model: Any) -> list[Any]:
    """Every module with all of its attributes, in their order."""
    return [
        (name, type(module).__qualname__, [(key, plain(value)) for key, value in vars(module).items()])
        for name, module in model.named_modules()
    ]


def left_by(load: Callable[[], Any]) -> dict[str, Any]:
    """All that can be seen after a load."""
    import torch

    torch.manual_seed(7)
    torch.randn(5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, result = load()
    drawn = torch.get_rng_state()
    values = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    return {
        "picture": picture(model),
        "values": {name: (value.dtype, value.float().numpy().tobytes()) for name, value in values.items()},
        "random state": drawn.numpy().tobytes(),
        # Those of an import come once in a process.
        "warnings": [str(one.message) for one in said if one.category is not DeprecationWarning],
        "result": plain(list(map(list, result))) if result is not None else None,
    }


def assert_same(load: Callable[[], Any]) -> dict[str, Any]:
    found = left_by(load)
    with without(PATCH.id):
        expected = left_by(load)
    pairs = zip(found.pop("picture"), expected.pop("picture"))
    different = [
        (one[:2], [pair for pair in zip(one[2], other[2]) if pair[0] != pair[1]])
        for one, other in pairs
        if one != other
    ]
    assert different == []
    for what, value in expected.items():
        assert found[what] == value, what
    return found


def changed(adapter: Path, folder: Path, *, leave_out: str | None = None, **settings: Any) -> Path:
    """A copy of an adapter with other settings, and without the weights that have a text in their names."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | settings), encoding="utf-8")
    if leave_out is not None:
        weights = load_file(folder / "adapter_model.safetensors")
        save_file(
            {name: value for name, value in weights.items() if leave_out not in name},
            folder / "adapter_model.safetensors",
        )
    return folder


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
@pytest.mark.parametrize(
    "how", ["from_pretrained", "trainable", "no autocast", "second", "transformers", "low memory"]
)
def test_a_load_leaves_what_upstream_leaves(workspace: Any, how: str, quantization: str | None) -> None:
    from peft import PeftModel

    adapter = workspace.adapter("all")
    options: dict[str, Any] = {
        "trainable": {"is_trainable": True},
        "no autocast": {"autocast_adapter_dtype": False},
        "low memory": {"low_cpu_mem_usage": True},
    }.get(how, {})

    def load() -> tuple[Any, Any]:
        model = workspace.load(quantization)
        if how == "transformers":
            model.load_adapter(str(adapter))
            return model, None
        model = PeftModel.from_pretrained(model, adapter, **options)
        return model, model.load_adapter(str(adapter), "second", is_trainable=True) if how == "second" else None

    assert_same(load)


@pytest.mark.parametrize("kind", ["towers", "layers"])
def test_on_a_split_base(workspace: Any, kind: str) -> None:
    from peft import PeftModel

    assert_same(lambda: (PeftModel.from_pretrained(workspace.split(offload=kind), workspace.adapter("all")), None))


@pytest.mark.parametrize("how", ["from_pretrained", "transformers"])
@pytest.mark.parametrize("leave_out", [".layers.1.", "o_proj.lora_B", "k_proj.lora_A"])
def test_weights_that_the_file_lacks_are_drawn_as_ever(
    workspace: Any, tmp_path: Path, how: str, leave_out: str
) -> None:
    from peft import PeftModel

    adapter = changed(workspace.adapter("language"), tmp_path / "some", leave_out=leave_out)

    def load() -> tuple[Any, Any]:
        model = workspace.load()
        if how == "transformers":
            model.load_adapter(str(adapter))
            return model, None
        return PeftModel.from_pretrained(model, adapter), None

    assert_same(load)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": "orthogonal"},
        {"use_rslora": True, "lora_dropout": 0.1},
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"exclude_modules": ["o_proj"]},
        {"layers_to_transform": [0, 2]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"inference_mode": False},
    ],
    ids=str,
)
def test_whatever_the_configuration_says(workspace: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = [name for name, _ in workspace.load().named_modules() if name.endswith(("q_proj", "o_proj"))]
    targets = [name for name in targets if "language_model" in name]
    config = LoraConfig(**{"r": 4, "target_modules": targets, **settings})
    get_peft_model(workspace.load(), config).save_pretrained(tmp_path / "adapter")
    assert_same(lambda: (PeftModel.from_pretrained(workspace.load(), tmp_path / "adapter"), None))


def test_a_file_of_other_shapes_that_is_to_be_ignored(workspace: Any) -> None:
    from peft import PeftModel

    def load() -> tuple[Any, Any]:
        model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language"))
        return model, model.load_adapter(str(workspace.mismatched_adapter()), "other", ignore_mismatched_sizes=True)

    assert_same(load)


def test_a_load_that_fails_leaves_the_random_numbers_of_upstream(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    adapter = Path(shutil.copytree(workspace.adapter("language"), tmp_path / "cut"))
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    def state_after() -> Any:
        model = workspace.load()
        torch.manual_seed(1)
        with pytest.raises(Exception, match=r".") as raised:
            PeftModel.from_pretrained(model, adapter)
        assert "named_modules" not in vars(model)
        return str(raised.value), torch.get_rng_state().tolist()

    found = state_after()
    with without(PATCH.id):
        assert state_after() == found


def test_what_stands_around_the_load_is_left_to_upstream(workspace: Any) -> None:
    """Another default device or dtype, and a mode that watches: layers are created as ever."""
    import torch
    from peft import PeftModel
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        drawn = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.drawn += "uniform_" in str(func)
            return func(*args, **(kwargs or {}))

    model = workspace.load()
    with Watch() as watch:
        PeftModel.from_pretrained(model, workspace.adapter("language"))
    assert watch.drawn
    assert creation.is_usual()
    with torch.device("meta"):
        assert not creation.is_usual()


def test_other_models_and_new_adapters_draw(workspace: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = workspace.load()
    config = LoraConfig(r=2, target_modules=["o_proj"])
    assert calls_of(torch.nn.init.kaiming_uniform_, lambda: get_peft_model(model, config))


@pytest.mark.parametrize(("seed", "before"), [(0, 0), (1, 5), (2, 623), (3, 624), (4, 100_000)])
def test_the_generator_jumps_to_where_it_would_be(seed: int, before: int) -> None:
    import torch

    for numbers in (0, 1, 623, 624, 625, 59_811, 1_000_003, 8_000_000, 20_000_001):
        torch.manual_seed(seed)
        torch.rand(before)
        torch.randn(3)  # half of a pair is kept for the next time
        start = torch.get_rng_state()
        torch.empty(numbers).uniform_()
        expected = torch.get_rng_state()
        assert torch.equal(mersenne.after(start, numbers), expected)
        torch.set_rng_state(start)
        mersenne.advance(numbers)
        assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(ValueError, match="state of torch's CPU generator"):
        mersenne.after(torch.zeros(16, dtype=torch.uint8), 1)


def test_weights_that_were_not_read_get_their_values_afterwards() -> None:
    import torch

    def linear(inputs: int, outputs: int) -> Any:
        return torch.nn.Linear(inputs, outputs, bias=False)

    torch.manual_seed(5)
    expected = []
    for inputs, outputs in [(8, 16), (12, 4)]:
        first, second = linear(inputs, 2), linear(2, outputs)
        torch.nn.init.kaiming_uniform_(first.weight, a=5**0.5)
        torch.nn.init.zeros_(second.weight)
        expected.append((first.weight.detach().clone(), second.weight.detach().clone()))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with creation.creating("default", {}) as created:
        made = []
        for inputs, outputs in [(8, 16), (12, 4)]:
            pair = [
                created.linear(*sides, torch.device("cpu"), torch.float32) for sides in ((inputs, 2), (2, outputs))
            ]
            created.count(*pair)
            made.append(pair)
    assert torch.equal(torch.get_rng_state(), after)
    created.fill({id(module) for module in itertools.chain(*made)})
    assert torch.equal(torch.get_rng_state(), after)
    for pair, values in zip(made, expected):
        assert all(torch.equal(module.weight, value) for module, value in zip(pair, values))


class Own:
    """Models that do not load as ``nn.Module`` does."""

    @staticmethod
    def plain() -> Any:
        import torch

        shared = torch.nn.Linear(2, 2)
        return torch.nn.ModuleDict(
            {"a": torch.nn.Sequential(shared, torch.nn.BatchNorm1d(2)), "b": shared, "none": torch.nn.Linear(2, 3)}
        )

    @staticmethod
    def hooked() -> Any:
        model = Own.plain()
        model["a"].register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
        return model

    @staticmethod
    def with_extra_state() -> Any:
        import torch

        class Extra(torch.nn.Linear):  # type: ignore[misc]
            def get_extra_state(self) -> Any:
                return 1

            def set_extra_state(self, state: Any) -> None:
                self.extra = state

        model = Own.plain()
        model["extra"] = Extra(2, 2)
        return model


@pytest.mark.parametrize("build", [Own.plain, Own.hooked, Own.with_extra_state])
@pytest.mark.parametrize("keys", [["a.0.weight"], ["none.bias", "a.1.running_mean"], ["b.weight", "no.such"], []])
def test_a_state_dict_is_loaded_as_by_torch(build: Callable[[], Any], keys: list[str]) -> None:
    import torch

    torch.manual_seed(0)
    one, other = build(), build()
    shapes = {key: value.shape for key, value in one.state_dict().items() if hasattr(value, "shape")}
    weights = {key: torch.rand(shapes.get(key, (1,))) for key in keys}
    other.load_state_dict(one.state_dict())
    expected, found = one.load_state_dict(weights, strict=False), state.load(other, weights, strict=False)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items() if key in shapes)


def test_a_quick_walk_is_the_walk(workspace: Any) -> None:
    model = workspace.load()
    slow = list(model.named_modules()), [name for name, _ in model.named_parameters()], list(model.modules())
    below = list(model.model.named_modules(prefix="x"))
    with walk.quick(model, model):
        assert (
            list(model.named_modules()),
            [name for name, _ in model.named_parameters()],
            list(model.modules()),
        ) == slow
        assert list(model.named_modules(remove_duplicate=False))
        assert list(model.model.named_modules(prefix="x")) == below
    assert "named_modules" not in vars(model)
