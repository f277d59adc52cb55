"""A static cache that is a copy of an unused one is what its constructor makes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from gemma4_compat._gemma4.models import variants
from gemma4_compat._graphs import initializing, new_caches


class Counted:
    """The constructor, with the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, cache: Any, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        transformers.StaticCache.__init__(cache, *args, **kwargs)


@pytest.fixture
def config() -> Any:
    return variants.config("E2B").get_text_config()


def made(constructor: Counted, config: Any, **options: Any) -> Any:
    cache = object.__new__(transformers.StaticCache)
    new_caches.construct(constructor, cache, config=config, **{"max_cache_len": 40, "offloading": False, **options})
    return cache


def shown(cache: Any) -> Any:
    def plain(found: dict[str, Any]) -> dict[str, Any]:
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()}

    others = {name: value for name, value in vars(cache).items() if name != "layers"}
    return others, [(type(layer), plain(vars(layer))) for layer in cache.layers]


def test_copies_are_equal_and_independent(config: Any) -> None:
    constructor = Counted()
    first = made(constructor, config)
    first.layers[0].cumulative_length.add_(3)
    second, third = made(constructor, config), made(constructor, config)
    assert constructor.calls == 1
    assert shown(second) == shown(third) == shown(transformers.StaticCache(config=config, max_cache_len=40))
    second.layers[0].cumulative_length.add_(3)
    second.layers[0].is_initialized = True
    assert shown(third) == shown(made(constructor, config))
    assert all(one is not other for one, other in zip(second.layers, third.layers, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "sliding_window", 8),
        lambda config: config.layer_types.__setitem__(0, "full_attention"),
        lambda config: setattr(config, "num_kv_shared_layers", 0),
    ],
)
def test_a_change_of_the_configuration_is_noticed(config: Any, change: Any) -> None:
    constructor = Counted()
    made(constructor, config)
    change(config)
    found = made(constructor, config)
    assert constructor.calls == 2
    assert shown(found) == shown(transformers.StaticCache(config=config, max_cache_len=40))


def test_another_length_device_or_configuration_is_another_cache(config: Any) -> None:
    constructor = Counted()
    made(constructor, config)
    assert made(constructor, config, max_cache_len=48).layers[-1] is not None
    with torch.device("meta"):
        assert made(constructor, config).layers[0].cumulative_length.device.type == "meta"
    made(constructor, variants.config("E2B").get_text_config())
    assert constructor.calls == 4


def test_what_layers_set_is_given_to_later_ones_without_their_python() -> None:
    def layer() -> Any:
        return transformers.cache_utils.StaticLayer(max_cache_len=6)

    first, states = layer(), torch.zeros(1, 2, 3, 4)
    before = dict(vars(first))
    first.lazy_initialization(states, states)
    noted = initializing.Initialized.of(first, before)
    assert noted is not None
    own = (first.keys.add_(1), first.values.add_(1), first.cumulative_length.add_(1))
    second, third = layer(), layer()
    assert initializing.fill([second], [noted], own)
    third.lazy_initialization(states, states)
    assert vars(second).keys() == vars(third).keys()
    for name, value in vars(third).items():
        assert (
            torch.equal(value, vars(second)[name]) if isinstance(value, torch.Tensor) else value == vars(second)[name]
        )
    assert second.keys is own[0]


def test_layers_of_other_code_are_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.cache_utils.StaticLayer
    layer, states = kind(max_cache_len=6), torch.zeros(1, 2, 3, 4)
    before = dict(vars(layer))
    layer.lazy_initialization(states, states)
    noted, own = initializing.Initialized.of(layer, before), (layer.keys, layer.values, layer.cumulative_length)
    with torch.inference_mode():
        assert not initializing.fill([kind(max_cache_len=6)], [noted], own)  # it would make inference tensors
    assert not initializing.fill([kind(max_cache_len=6)], [None], own)
    monkeypatch.setattr(kind, "lazy_initialization", lambda *_: None)
    another = kind(max_cache_len=6)
    assert not initializing.fill([another], [noted], own)
    assert not another.is_initialized
