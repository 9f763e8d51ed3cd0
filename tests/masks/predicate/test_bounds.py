"""Bounds of expressions and of tables, against enumeration."""

import numpy as np
import pytest

from masks import runs as rl
from masks.predicate.bounds import Bounds
from masks.predicate.expression import atom, lift
from masks.predicate.table import CHUNK, table
from tests.masks.predicate.rules import predicate, texts

NUMBERS = """
q; 7; q + k; q - k; 3 - q; -q; 5 * q - 2 * k + 1; (q - k) + k; abs(q - k); abs(q - 7); +k; q * k
(q - k) * (q - k); (q - k) ** 3; (q - k) ** 2; np.square(q - 3); q * (k - 5); -2 * q * k; q // 7
q // -7; q // k; (q - k) // 5; 50 // k; q % 7; q % -7; q % k; (q - k) % 5; 50 % k; k % 64
q & 15; q & 12; q & k; q | k; q ^ k; ~q; (q - k) & 7; (q - k) ^ k; q & -8; (q - 9) | 3; q << 3
q >> 2; np.minimum(q, k); np.maximum(q, 3 * k); np.clip(q, 2, 9); np.abs(q - k) // 3
np.clip(q - k, -4, None); np.where(q < k, q, k - 5); np.where((q < 5) & (k > 3), 1, -1)
np.where(q % 2 == 0, q, -q); q / 3; (q - k) / 4; q / k; q * 0.5 - k; np.sqrt(q * q + k * k)
np.floor(q / 4); np.ceil(k / -3); 0.1 * q * k; abs(q / 3 - k / 7); np.minimum(q / 2, k)
np.where(q < k, q / 2, k); -(q / 7); T[abs(q)]; T[abs(q) // 3] - T[abs(k)]; F[abs(q)]
T[(q - k) % 200]; q - T[abs(q)]; np.sqrt(q); T[np.where(q < 0, 0, q)]; (q % 7) * 2 - q % 3
abs(abs(q) - abs(k)); np.int32(3) * q - np.array(4)
"""


TRUTHS = """
q < k; q <= k; q > k; q >= k; q == k; q != k; q < 9.5; q / 2 == k; 4 < q; q - k < k - q
q / 3 < k / 3; (q < 9) & (k > 3); (q < 9) | (k > 3); (q < 9) ^ (k > 3); ~(q < k)
(q < 3) == (k < 3); (q < 3) != (k < 3); np.logical_and(q < 9, k < 2)
np.logical_or(q < 9, k < 2); np.logical_xor(q < 9, k < 2); np.logical_not(q == 3)
np.where(q < k, q < 3, k % 2 == 0); B[abs(q)]; B[abs(q)] & (k < 9); True & (q < k)
np.isin(q, [3, 4, 5, 9]); np.isin(q - k, [1, 2, 4, 8, 16]); np.isin(q % 8, [0, 1], invert=True)
(q - k) % 4 == 0; np.equal(q, 3 * k); np.bitwise_and(q < 5, k < 5); q % 5 == k % 5
np.invert(q < 2)
"""


def rectangles(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), each (2, count): of q and k, negative numbers too."""
    low = rng.integers(-40, 40, (2, count))
    return low, low + rng.integers(0, rng.integers(1, 25, (1, count)), (2, count))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("text", texts(NUMBERS) + texts(TRUTHS))
def test_bounds_contain_every_value(text: str):
    function = predicate(text)
    low, high = rectangles(np.random.default_rng(len(text)), 300)
    bounds = Bounds({name: (low[i], high[i]) for i, name in enumerate("qk")})
    node = lift(function(atom("q"), atom("k")))
    found = bounds.codes(node) if node.kind == "bool" else bounds.range(node)
    shape = low.shape[1:]
    for i in range(low.shape[1]):
        q = np.arange(low[0, i], high[0, i] + 1)[:, None]
        k = np.arange(low[1, i], high[1, i] + 1)
        values = np.asarray(function(q, k))
        if node.kind == "bool":
            code = np.broadcast_to(found, shape)[i]
            assert code == rl.MIXED or (values == (code == rl.FULL)).all(), (q[0], k[0])
        else:
            least, most = (np.broadcast_to(bound, shape)[i] for bound in found)
            unsure = np.isnan(least) & np.isnan(most)
            assert unsure or (least <= values.min() and values.max() <= most), (q.ravel(), k)


EXACT = "q - k; 5 * q - 2 * k + 1; (q - k) + k; abs(q - k); (q - k) ** 2; q * k; q // 7; q // -7"
EXACT += "; np.minimum(q, k); np.clip(q, 2, 9); q / 3; q << 3; (q - k) // 5; -q; ~q; q * 0.5 - k"


@pytest.mark.parametrize("text", texts(EXACT))
def test_bounds_are_reached(text: str):
    """The least and the greatest value themselves, so that no block is in question for nothing."""
    function = predicate(text)
    low, high = rectangles(np.random.default_rng(1), 200)
    bounds = Bounds({name: (low[i], high[i]) for i, name in enumerate("qk")})
    least, most = bounds.range(function(atom("q"), atom("k")))
    for i in range(200):
        q = np.arange(low[0, i], high[0, i] + 1)[:, None]
        values = function(q, np.arange(low[1, i], high[1, i] + 1))
        assert (least[i], most[i]) == (values.min(), values.max())


@pytest.mark.parametrize("n", [1, 15, 16, 17, 300, 1000])
def test_range_of_a_table(n: int):
    rng = np.random.default_rng(n)
    data = rng.integers(-(1 << 40), 1 << 40, n)
    low = rng.integers(0, n, 500)
    high = np.minimum(low + rng.integers(0, n, 500), n - 1)
    least, most = table(data).range(low, high)
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        inside = data[a : b + 1]
        assert least[i] <= inside.min() and most[i] >= inside.max()
        if a // CHUNK != b // CHUNK:
            assert (least[i], most[i]) == (inside.min(), inside.max())
