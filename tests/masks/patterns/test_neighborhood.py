"""Patterns on a canvas: the formula of NATTEN, and lattice points."""

import numpy as np
import pytest

from masks.patterns.neighborhood import neighborhood
from tests.masks.helpers import dense


def natten_start(i: int, kernel: int, stride: int, length: int) -> int:
    """Reference 1.11: the formula of NATTEN's kernels."""
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    leader = min(i // stride * stride + stride // 2, length - 1)
    return max(leader - left, 0) + (leader + right >= length) * (length - right - leader - 1)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 23])
def test_formula_of_natten(length: int):
    for kernel in range(1, length + 1):
        for stride in range(1, kernel + 1):
            for i, row in enumerate(dense(neighborhood((length,), kernel, stride=stride), length)):
                start = natten_start(i, kernel, stride, length)
                assert np.flatnonzero(row).tolist() == list(range(start, start + kernel))
