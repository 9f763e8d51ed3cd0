"""`where`: bounds against enumeration, masks against brute force, and what it says."""

import pickle
import random
import re
import warnings

import numpy as np
import pytest

import masks
from masks import runs as rl
from masks.predicate import where as module
from masks.predicate.bounds import Bounds
from masks.predicate.expression import lift
from masks.predicate.operators import symbol
from masks.predicate.table import CHUNK, table
from masks.predicate.where import where
from masks.runs import Grid
from masks.spec import find

DATA = np.random.default_rng(0)
T = table(DATA.integers(-50, 50, 200))
F = table(DATA.normal(size=200))
B = table(DATA.random(200) < 0.2)

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


def texts(block: str) -> list[str]:
    return [text.strip() for text in re.split(r"[;\n]", block) if text.strip()]


def predicate(text: str, arguments: str = "q, k"):
    return eval(f"lambda {arguments}: {text}", {"np": np, "T": T, "F": F, "B": B})


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
    node = lift(function(symbol("q"), symbol("k")))
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
    least, most = bounds.range(function(symbol("q"), symbol("k")))
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


def random_number(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["q", "k", "q", "k", "(q - k)", "(q - k)", str(rng.randrange(1, 30))])
    x, y = random_number(rng, depth - 1), random_number(rng, rng.randrange(depth))
    c = rng.choice([2, 3, 4, 7, 8, 16, 33, -5])
    return rng.choice(
        [
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {c})",
            f"({x} // {c})",
            f"({x} % {c})",
            f"({x} % {abs(c)})",
            f"abs({x})",
            f"np.minimum({x}, {y})",
            f"np.maximum({x}, {c})",
            f"({x} ^ {y})",
            f"({x} & {abs(c)})",
            f"np.where({random_truth(rng, depth - 1)}, {x}, {y})",
            f"T[{x} % 200]",
            f"({x} >> 1)",
            f"({x} * {y})",
        ]
    )


def random_truth(rng: random.Random, depth: int) -> str:
    if depth <= 0 or rng.random() < 0.3:
        x, y = random_number(rng, max(depth, 0)), random_number(rng, min(max(depth, 0), 1))
        x = f"({x} + q - q)"  # no comparison of constants: ~True is -2
        return rng.choice(
            [f"({x} {op} {y})" for op in ("<", "<=", "==", "!=", ">=")]
            + [f"(abs({x}) <= {rng.randrange(40)})", f"np.isin({x}, [0, 1, 5, 20, 21])"]
            + [f"B[{x} % 200]", f"({x} / 3 < {y})", f"({x} % 4 == 0)"]
        )
    x, y = random_truth(rng, depth - 1), random_truth(rng, depth - 1)
    return rng.choice([f"({x} & {y})", f"({x} | {y})", f"~{x}", f"({x} ^ {y})"])


def random_grid(rng: random.Random) -> Grid:
    n_q, n_k = rng.randrange(1, 120), rng.randrange(1, 120)
    block_q, block_k = rng.choice([1, 3, 4, 8, 16]), rng.choice([2, 4, 8, 8, 16])
    q_origin = rng.randrange(1 - block_q, n_q) if rng.random() < 0.3 else 0
    k_origin = rng.randrange(1 - block_k, n_k) if rng.random() < 0.3 else 0
    return Grid(n_q, n_k, block_q, block_k, 1, 1, q_origin, k_origin)


def tiles_of(function, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """(allowed, exists): bool (rows, cols, block_q, block_k), by the definition."""
    dense = np.broadcast_to(
        function(np.arange(grid.n_q)[:, None], np.arange(grid.n_k)), (grid.n_q, grid.n_k)
    )
    shape = (grid.rows, grid.cols, grid.block_q, grid.block_k)
    allowed, exists = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, col, i, j in np.ndindex(shape):
        q = grid.q_origin + row * grid.block_q + i
        k = grid.k_origin + col * grid.block_k + j
        if 0 <= q < grid.n_q and 0 <= k < grid.n_k:
            exists[row, col, i, j], allowed[row, col, i, j] = True, dense[q, k]
    return allowed, exists


def check_codes_and_signatures(text: str, grid: Grid) -> None:
    """No decided block is wrong, and mixed blocks of one signature are the same bit for bit."""
    function = predicate(text)
    mask = where(function)
    assert mask.reason == "", mask.reason
    codes = mask.runs(grid).at(np.arange(grid.size))
    allowed, exists = tiles_of(function, grid)
    for code, tile, real in zip(
        codes, allowed.reshape(grid.size, -1), exists.reshape(grid.size, -1), strict=True
    ):
        assert code != rl.EMPTY or not tile.any(), text
        assert code != rl.FULL or tile[real].all(), text

    mixed = np.flatnonzero(codes == rl.MIXED)
    if len(mixed) == 0:
        return
    s, row, col = grid.split(mixed)
    signature = mask.signature(grid, s, row, col)
    seen: dict[tuple[int, int], bytes] = {}
    for number, cut, i, j in zip(signature, grid.cut(row, col), row, col, strict=True):
        tile = allowed[i, j].tobytes()
        assert seen.setdefault((int(number), int(cut)), tile) == tile, text


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(100))
def test_codes_and_signatures_of_random_predicates(seed: int):
    rng = random.Random(seed)
    check_codes_and_signatures(random_truth(rng, 3), random_grid(rng))


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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_random_predicates_build_exactly(seed: int):
    rng = random.Random(1000 + seed)
    function = predicate(random_truth(rng, 3))
    n_q, n_k = rng.choice([1, 16, 97, 200]), rng.choice([5, 64, 161])
    dense = where(function).build(n_q, n_k, (rng.choice([16, 48]), rng.choice([16, 32]))).to_dense()
    expected = np.broadcast_to(function(np.arange(n_q)[:, None], np.arange(n_k)), (n_q, n_k))
    assert np.array_equal(dense[0, 0], expected)


def test_the_same_as_the_patterns():
    for function, mask in [
        (lambda q, k: q >= k, masks.causal()),
        (lambda q, k: abs(q - k) <= 256, masks.local(256)),
        (lambda q, k: (q < 64) | (k < 64), masks.global_tokens(64)),
        (lambda q, k: True, masks.dense()),
        (lambda q, k: np.bool_(False), ~masks.dense()),
        (lambda q, k: q >= 0, masks.dense()),
    ]:
        assert where(function).build(3000, 2777, (64, 128)) == mask.build(3000, 2777, (64, 128))
        assert where(function).build(1 << 18) == mask.build(1 << 18)


def evaluated(function, n: int) -> tuple[masks.BlockMask, float]:
    """(the mask, tiles that were looked at)"""
    pairs = 0

    def counting(q, k):
        nonlocal pairs
        result = function(q, k)
        if isinstance(result, np.ndarray):
            pairs += result.size
        return result

    blocks = where(counting).build(n)
    return blocks, pairs / (128 * 128)


def test_blocks_that_are_alike_are_evaluated_once():
    n, w = 1 << 16, 1024
    ids = table(np.cumsum(DATA.random(n) < 1 / 2000))
    for function, most in [
        (lambda q, k: q >= k, 3),
        (lambda q, k: ((q - k < 4096) | (k < 70)) & (q >= k), 12),
        (lambda q, k: (abs(q - k) <= 2048) & ((q - k) % 4 == 0), 40),
        (lambda q, k: (abs(q // w - k // w) <= 16) & (abs(q % w - k % w) <= 16), 300),
        (lambda q, k: (ids[q] == ids[k]) & (q >= k), 300),
    ]:
        blocks, tiles = evaluated(function, n)
        assert 0 < tiles <= most
        assert len(blocks.bits) <= tiles


def test_a_million_tokens():
    blocks = where(lambda q, k: (abs(q - k) <= 2048) & ((q - k) % 4 == 0)).build(1 << 20)
    assert blocks.nnz == 270064 and len(blocks.bits) == 3
    w = 1024
    blocks = where(lambda q, k: (abs(q // w - k // w) <= 16) & (abs(q % w - k % w) <= 16)).build(
        1 << 20
    )
    assert blocks.nnz == 737440 and len(blocks.bits) == 3


def test_per_head():
    widths = table([3, 50, 200])
    mask = where(lambda h, q, k: abs(q - k) <= widths[h], per_head=True)
    dense = mask.build(300, 250, 32, heads=3).to_dense()
    for head, width in enumerate([3, 50, 200]):
        assert np.array_equal(
            dense[0, head], masks.local(width).build(300, 250, 32).to_dense()[0, 0]
        )
    with pytest.raises(ValueError, match="heads"):
        mask.build(64)
    with pytest.raises(ValueError, match="entry 3 of a table of 3"):
        mask.build(64, heads=4)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k: DATA_IDS[q] == DATA_IDS[k], r"wrap it once, as in ids = masks\.table\(ids\)"),
        (lambda q, k: np.sin(q) > np.cos(k), r"np\.(sin|cos) is not known"),
        (lambda q, k: q.astype(np.int32) > k, "astype"),
        (lambda q, k: q * (1 << 50) > k * (1 << 50), r"2\*\*52"),
        (lambda q, k: np.uint64(3) + q < k, "is no number that fits"),
        (lambda q, k: (q < k) * 2 > 1, "arithmetic with a truth value"),
    ],
)
def test_what_is_not_understood_is_evaluated(function, reason: str):
    mask = where(function)
    with pytest.warns(UserWarning, match=rf"lambda.* up to {100 * 120:,} pairs.*{reason}"):
        dense = mask.build(100, 120, 32).to_dense()[0, 0]
    assert np.array_equal(dense, function(np.arange(100)[:, None], np.arange(120)))


DATA_IDS = np.repeat(np.arange(20), 10)


def test_a_product_that_wraps_around():
    """NumPy's integers wrap; bounds that do not know would be wrong."""
    function = predicate("q * q * q * q * q * q * 1000003 > k")
    with pytest.warns(UserWarning, match=r"2\*\*52"):
        dense = where(function).build(3000, 20, 16).to_dense()[0, 0]
    assert np.array_equal(dense, function(np.arange(3000)[:, None], np.arange(20)))
    assert not dense[2000:].all(1).all() and dense.any()


def test_too_many_pairs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PAIRS", 1 << 16)
    mask = where(lambda q, k: np.sin(q) > k)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"more than 65,536 pairs.*sin"):
        mask.build(1024)
    with pytest.warns(UserWarning):  # few pairs are in question here
        (mask & masks.causal() & masks.local(3)).build(1024, 1024, 16)


def test_no_warning_where_it_is_understood():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        where(predicate("(q % (k + 1) == 0) & (q // (k + 2) < 5)")).build(99)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda q, k: q > k and k > 3, r"fails.*Write & \| ~"),
        (lambda q, k: 0 <= q - k < 5, r"fails.*Write & \| ~"),
        (lambda q, k: max(q, k) < 3, r"fails.*np\.maximum"),
        (lambda q, k: q - k, "gives int64: give booleans"),
        (lambda q, k: np.ones(7, bool), r"gives shape \(7,\)"),
        (lambda q: q > 0, "fails"),
        (3, "where\\(\\) is given 3, no function"),
    ],
)
def test_functions_that_are_no_predicates(function, message: str):
    with pytest.raises(ValueError, match=message):
        where(function)


def test_bad_tables():
    for bad in (np.zeros((2, 2)), [], ["a"], [0.0, np.nan], np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError, match="table"):
            table(bad)
    ids = table([0] * 100)
    mask = where(lambda q, k: ids[q] == ids[k])
    assert mask.build(100, 80, 16).density == 1
    for lengths in ((101, 80), (80, 101)):
        with pytest.raises(ValueError, match="entry 100 of a table of 100"):
            mask.build(*lengths, 16)
    with pytest.raises(ValueError, match="entry -1 of a table"):
        where(lambda q, k: ids[q - 1] == 0)


def test_identity():
    function = predicate("q > k")
    mask, same, other = where(function), where(function), where(predicate("q > k"))
    assert mask == same and hash(mask) == hash(same) and mask != other
    assert re.fullmatch(r"where\('<lambda>#\d+'\)", str(mask)) and not mask.spelled
    assert find(str(mask)) is mask and find(str(mask | masks.causal())) == mask | masks.causal()
    assert where(predicate("q > k", "h, q, k"), per_head=True) != mask
    assert masks.parse(str(mask)) == mask
    text = str(where(predicate("q > k + 1")))
    with pytest.raises(ValueError, match="no function of this process"):
        masks.parse(text)


def module_level(q, k):
    return q % 5 == k % 5


@pytest.mark.usefixtures("own_patterns")
def test_pickle():
    assert pickle.loads(pickle.dumps(where(module_level))) == where(module_level)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(where(lambda q, k: q > k))

    @masks.pattern()
    def every_other(step: int) -> masks.Mask:
        return where(lambda q, k: (q - k) % step == 0)

    mask = every_other(3)
    assert mask.spelled and str(mask) == "every_other(3)" and mask == every_other(step=3)
    assert masks.parse("every_other:3&causal") == mask & masks.causal()
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert np.array_equal(
        mask.build(64).to_dense()[0, 0],
        np.subtract.outer(np.arange(64), np.arange(64)) % 3 == 0,
    )
