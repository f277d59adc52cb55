"""A cache among arguments, by the name of before transformers 5.24 and by that of since."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.cache import cache_names


@pytest.mark.parametrize("name", cache_names.NAMES)
def test_it_is_found_by_either_name(name: str) -> None:
    cache = object()
    assert cache_names.cache_in({"config": 1, name: cache}) is cache
    assert cache_names.cache_in({"config": 1}) is None
    other = next(one for one in cache_names.NAMES if one != name)
    assert cache_names.cache_in({name: cache, other: None}) is cache


@pytest.mark.parametrize("name", cache_names.NAMES)
@pytest.mark.parametrize("wanted", cache_names.NAMES)
def test_it_is_renamed_and_nothing_else(name: str, wanted: str) -> None:
    given: dict[str, Any] = {"config": 1, name: 2, "position_ids": 3}
    assert cache_names.renamed(given, wanted) == {"config": 1, wanted: 2, "position_ids": 3}
    assert cache_names.renamed({"config": 1}, wanted) == {"config": 1}
    both = dict.fromkeys(cache_names.NAMES) | {name: 2}
    assert cache_names.renamed(both, wanted) == {wanted: 2}


def test_a_function_of_the_installed_transformers_is_called_by_its_own_name() -> None:
    """Whether or not a patch is on it."""
    import transformers
    from transformers import masking_utils

    expected = cache_names.NEW if versions.admits(">=5.24", transformers.__version__) else cache_names.OLD
    assert cache_names.of(masking_utils.create_causal_mask) == expected
    assert cache_names.of(masking_utils.create_masks_for_generate) == expected
