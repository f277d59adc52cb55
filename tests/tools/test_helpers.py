"""What the tests are made with is tested, too."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2, 2), (3, 4, 5), (9, 3, 3, 2)], ids=str)
def test_pairwise_has_every_two_values_of_different_factors_and_is_the_same_each_time(sizes: tuple[int, ...]) -> None:
    factors = [[f"{number}-{value}" for value in range(size)] for number, size in enumerate(sizes)]
    cells = pairwise(*factors)
    for (first, one), (second, other) in itertools.combinations(enumerate(factors), 2):
        assert {(cell[first], cell[second]) for cell in cells} == set(itertools.product(one, other))
    assert len(cells) == len(set(cells))
    everything = list(itertools.product(*factors))
    assert set(cells) <= set(everything)
    assert len(cells) < len(everything) or len(factors) == 2
    assert cells == pairwise(*factors)
