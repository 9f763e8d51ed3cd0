"""Codes and signatures of the blocks of a predicate, against the definition."""

import random

import numpy as np
import pytest

from masks.predicate.where import where
from masks.runs import Grid
from tests.masks.brute import any_grid, check_window
from tests.masks.predicate.rules import predicate, random_truth, texts
from tests.notes import note


def check_codes_and_signatures(text: str, grid: Grid) -> None:
    function = predicate(text)
    mask = where(function)
    assert mask.reason == "", mask.reason
    q, k = np.arange(grid.n_q)[:, None], np.arange(grid.n_k)
    check_window(mask, grid, np.broadcast_to(function(q, k), (grid.n_q, grid.n_k)))


def check_codes_and_signatures_of_random_predicates(seed: int):
    rng = random.Random(seed)
    n_q, n_k = rng.randrange(1, 120), rng.randrange(1, 120)
    check_codes_and_signatures(random_truth(rng, 3), any_grid(rng, n_q, n_k))


def test_codes_and_signatures_of_random_predicates():
    for seed in range(60):
        with note(seed):
            check_codes_and_signatures_of_random_predicates(seed)


ALIKE = """
q - k <= 3; abs(q - k) <= 5; abs(2 * q - 3 * k) < 17; abs(q % 10 - k % 7) <= 2; q // 5 == k // 7
T[q] == T[k]; np.where(q % 3 == 0, q, k) < 20; (np.minimum(q // 16, 3) + k) % 3 == 0
(abs(q - k) + q) % 5 == 0; (q // 6 * 5 - k) % 4 < 2; (q % 24 - k % 12) % 5 == 0; q * k % 7 < 3
(T[q // 30] + k) % 9 == 0; (abs(q - 50) - k) % 6 == 0; (q / 3 - k / 2) < 4
((q - k) % 8 + k) % 3 == 1
"""


@pytest.mark.parametrize("text", texts(ALIKE))
def test_codes_and_signatures(text: str):
    for blocks in ((4, 4), (3, 8), (8, 5), (1, 6)):
        check_codes_and_signatures(text, Grid(120, 110, *blocks))
