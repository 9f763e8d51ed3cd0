"""`where`: bounds against enumeration, masks against brute force, and what it says."""

import pickle
import re
import warnings
from functools import partial

import numpy as np
import pytest

import masks
from masks.predicate import where as module
from masks.predicate.table import table
from masks.predicate.where import where
from masks.spec import find
from tests.masks.predicate.rules import predicate


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
        mask.build(64).to_dense()[0, 0],
        np.subtract.outer(np.arange(64), np.arange(64)) % 3 == 0,
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
