"""Masks of a rule: codes and signatures of blocks, names, batch entries, what is refused."""

import pickle
import random
import re
import warnings
from functools import partial

import numpy as np
import pytest

import masks
from masks.predicate import where as module
from masks.predicate.table import table
from masks.predicate.where import where
from masks.runs import Grid
from masks.spec import find
from tests.masks.helpers import any_grid, check_window
from tests.notes import each_seed, note

DATA = np.random.default_rng(0)
T = table(DATA.integers(-50, 50, 200))
F = table(DATA.normal(size=200))
B = table(DATA.random(200) < 0.2)


def texts(block: str) -> list[str]:
    return [text.strip() for text in re.split(r"[;\n]", block) if text.strip()]


def predicate(text: str, arguments: str = "q, k"):
    return eval(f"lambda {arguments}: {text}", {"np": np, "T": T, "F": F, "B": B})


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


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k: DATA_IDS[q] == DATA_IDS[k], r"wrap it once, as in ids = masks\.table\(ids\)"),
        (lambda q, k: np.sin(q) > np.cos(k), r"np\.(sin|cos) is not known"),
        (lambda q, k: q.astype(np.int32) > k, "astype"),
        (lambda q, k: q * (1 << 50) > k * (1 << 50), r"2\*\*52"),
        (lambda q, k: q * q * q * q * q * q * 1000003 > k, r"2\*\*52"),  # NumPy's wrap around
        (lambda q, k: np.uint64(3) + q < k, "is no number that fits"),
        (lambda q, k: (q < k) * 2 > 1, "arithmetic with a truth value"),
        (lambda q, k: np.sort(q) <= k, r"np\.sort is not known"),
        (lambda q, k: q**9 < k, "a power of 9: exponents are the integers 1 to 8"),
        (lambda q, k: q ** (k % 3) < 9, "a power of an expression"),
        (lambda q, k: q << 62 > k, "shifts are by constants from 0 to 61"),
        (lambda q, k: np.floor(q) < k, r"np\.floor of an integer"),
        (lambda q, k: np.isin(q, [1.5, 3.0]) | (k < 5), "no signed integers"),
        (lambda q, k: np.logical_and(q < k, q), "a truth value and a number"),
        (lambda q, k: q * 1.0 < k * float("nan"), "nan is no number that fits"),
    ],
)
def test_what_is_not_understood_is_evaluated(function, reason: str):
    mask = where(function)
    with pytest.warns(UserWarning, match=rf"lambda.* up to {100 * 120:,} pairs.*{reason}"):
        dense = mask.build(100, 120, 32).to_dense()[0, 0]
    assert np.array_equal(dense, function(np.arange(100)[:, None], np.arange(120)))


DATA_IDS = np.repeat(np.arange(20), 10)


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


def test_tables_alone_make_rectangles():
    """Tokens that the tables do not tell apart are looked up once: here cells of a mesh."""
    data = np.random.default_rng(0)
    for _ in range(4):
        q_cell, k_cell = (data.integers(0, 12, n // 10).repeat(10) for n in (300, 500))
        meets, some = data.random((12, 12)) < 0.3, data.random(30).repeat(10) < 0.7
        q_table, k_table, both, rows = map(table, (q_cell, k_cell, meets.ravel(), some))
        mask = masks.where(
            lambda q, k, t=(q_table, k_table, both, rows): t[2][t[0][q] * 12 + t[1][k]] & t[3][q]
        )
        blocks = mask.build(300, 500, (32, 48))
        dense = meets[q_cell][:, k_cell] & some[:, None]
        assert np.array_equal(blocks.to_dense()[0, 0], dense)


def test_tables_that_are_too_short():
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


def by_entry_and_head(b, h, q, k):
    return q - k < 9 * b + h


@pytest.mark.usefixtures("own_patterns")
def test_pickle():
    assert pickle.loads(pickle.dumps(where(module_level))) == where(module_level)
    own = where(by_entry_and_head, per_head=True, batch=2)
    assert pickle.loads(pickle.dumps(own)) == own
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
        mask.build(64).to_dense()[0, 0], np.subtract.outer(np.arange(64), np.arange(64)) % 3 == 0
    )


def test_batch_entries_and_heads():
    """fn(b, q, k) and fn(b, h, q, k): a row of the table for every entry, and windows by head."""
    n, data = 200, np.random.default_rng(0).integers(0, 4, (3, 200)).cumsum(axis=1) // 40
    ids, widths = table(data.ravel()), table([5, 90])
    same = data[:, None, :, None] == data[:, None, None, :]
    mask = where(lambda b, q, k: ids[b * n + q] == ids[b * n + k], batch=3)
    near = where(
        lambda b, h, q, k: (ids[b * n + q] == ids[b * n + k]) & (abs(q - k) <= widths[h]),
        per_head=True,
        batch=3,
    )
    window = abs(np.subtract.outer(np.arange(n), np.arange(n))) <= np.array([5, 90])[:, None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(mask.build(n, block_size=32).to_dense(), same)
        assert np.array_equal(near.build(n, block_size=32, heads=2).to_dense(), same & window)
    assert mask.batch == 3 and re.fullmatch(r"where\('.*#\d+', batch=3\)", str(mask))
    with pytest.raises(ValueError, match="batch extents 2 and 3 do not combine"):
        mask | masks.documents(((n,), (n,)))


@pytest.mark.parametrize(
    "function",
    [
        lambda k, q: q - k >= 3,
        lambda kv_idx, q_idx: q_idx - kv_idx >= 3,
        lambda key, query, k=0: query - key >= 3,  # only the first two are called
        partial(lambda width, kv, q: q - kv >= width, 3),
        lambda i, j: i - j >= 3,
        lambda *numbers: numbers[0] - numbers[1] >= 3,
    ],
)
def test_parameters_are_known_by_name(function):
    q, k = np.arange(150)[:, None], np.arange(200)
    assert np.array_equal(where(function).build(150, 200, 32).to_dense()[0, 0], q - k >= 3)


@pytest.mark.usefixtures("own_patterns")
def test_a_named_rule_with_a_digest_is_pickled():
    @masks.pattern(digest=True)
    def ends(stops: tuple[int, ...]) -> masks.Mask:
        stop = table(stops)
        return where(lambda q, k: k < stop[q])

    mask = ends(tuple(range(1, 101)))
    assert not mask.spelled and pickle.loads(pickle.dumps(mask)) == mask
    assert mask.build(100) == masks.causal().build(100)


def check_codes_and_signatures(text: str, grid: Grid) -> None:
    function = predicate(text)
    mask = where(function)
    assert mask.reason == "", mask.reason
    q, k = np.arange(grid.n_q)[:, None], np.arange(grid.n_k)
    check_window(mask, grid, np.broadcast_to(function(q, k), (grid.n_q, grid.n_k)))


@each_seed(60)
def test_codes_and_signatures_of_random_predicates(seed: int):
    rng = random.Random(seed)
    n_q, n_k = rng.randrange(1, 120), rng.randrange(1, 120)
    check_codes_and_signatures(random_truth(rng, 3), any_grid(rng, n_q, n_k))


ALIKE = """
q - k <= 3; abs(q - k) <= 5; abs(2 * q - 3 * k) < 17; abs(q % 10 - k % 7) <= 2; q // 5 == k // 7
T[q] == T[k]; np.where(q % 3 == 0, q, k) < 20; (np.minimum(q // 16, 3) + k) % 3 == 0
(abs(q - k) + q) % 5 == 0; (q // 6 * 5 - k) % 4 < 2; (q % 24 - k % 12) % 5 == 0; q * k % 7 < 3
(T[q // 30] + k) % 9 == 0; (abs(q - 50) - k) % 6 == 0; (q / 3 - k / 2) < 4
((q - k) % 8 + k) % 3 == 1
q < T[k]; k - 3 <= T[q]; (T[k] <= q) | (k == T[q]); T[2 * k] < q; 2 * T[k] > q; T[q] - T[k] < 9
"""


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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_codes_and_signatures():
    """Numbers are compared with three of their values: bounds that are too narrow show there."""
    q, k = np.arange(120)[:, None], np.arange(110)
    compared = []
    for text in texts(NUMBERS):
        values = np.unique(np.nan_to_num(predicate(text)(q, k)))
        compared += [
            f"({text}) {op} {values[len(values) * i // 4].item()}"
            for i, op in ((1, "<"), (2, "=="), (3, ">="))
        ]
    for i, text in enumerate(texts(ALIKE) + texts(TRUTHS) + compared):
        with note(text):
            check_codes_and_signatures(text, Grid(60, 55, *((4, 4), (3, 8), (8, 5))[i % 3]))


def test_a_function_that_changed_makes_another_mask():
    width, ids = 3, np.arange(100) // 9
    q, k = np.arange(100)[:, None], np.arange(100)

    def rule(q, k):
        return (abs(q - k) <= width) | (table(ids)[q] == k) | np.isin(q, [width, 50])

    for width in (3, 10, 3):  # noqa: B007 (the rule reads it)
        mask = where(rule)
        assert mask == where(rule)
        assert np.array_equal(mask.build(100).to_dense()[0, 0], rule(q, k))
    ids, made = ids[::-1], mask & masks.causal()
    with pytest.raises(ValueError, match="w=w"):  # as functions that are made in a loop
        made.build(99)
    with pytest.raises(ValueError, match="changed"):
        masks.parse(mask.key)
    assert np.array_equal(where(rule).build(100).to_dense()[0, 0], rule(q, k))
