"""The algebra: laws of sets, identity by text, heads and layers, and what a mask refuses."""

import gc
import operator
import pickle
import random

import numpy as np
import pytest

import masks
from masks import Mask
from masks.spec import find
from tests.masks.helpers import composition
from tests.notes import each_seed

N_Q, N_K, BLOCK = 150, 133, (32, 48)


def same(a: Mask, b: Mask) -> bool:
    return a.build(N_Q, N_K, BLOCK) == b.build(N_Q, N_K, BLOCK)


def test_equality_is_by_text():
    a, b, c = masks.local(3), masks.causal(), masks.butterfly(64)
    assert ~~a == a and a - b == a & ~b and (a | b) | c == a | (b | c)
    assert a | b != b | a and a != "local(3)"
    assert len({a, masks.local(3, 3), masks.local(np.int64(3))}) == 1
    assert a.key == str(a) == repr(a)


@each_seed(60)
def test_round_trips(seed: int):
    mask = composition(random.Random(seed), N_Q, N_K, 3)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask and hash(copy) == hash(mask) and same(copy, mask)
    if mask.spelled:
        assert masks.parse(str(mask)) == mask
    elif "where(" not in mask.key:  # a living function is found by its number
        with pytest.raises(ValueError, match=r"digest|sha256"):
            masks.parse(str(mask))


def test_no_truth_value():
    with pytest.raises(TypeError, match=r"write \| & ~ for"):
        _ = masks.causal() and masks.local(3)


def test_immutable():
    for mask in (masks.causal(), masks.causal() | masks.local(3), ~masks.causal()):
        with pytest.raises(AttributeError):
            mask.key = "dense()"


def test_extents():
    data = np.ones((2, 3, 5, 7), bool)
    mask = masks.mask_from(data)
    assert (mask.batch, mask.heads, mask.per_head) == (2, 3, False)
    assert (masks.mask_from(data[:1, :1]).batch, masks.mask_from(data[0, 0]).heads) == (None, None)
    joined = masks.causal() | ~masks.mask_from(data[0]) | masks.mask_from(data[:, :1])
    assert (joined.batch, joined.heads) == (2, 3)
    assert (masks.causal() & masks.random_blocks(0.5, per_head=True)).per_head
    with pytest.raises(ValueError, match="heads extents 2 and 3"):
        mask & masks.mask_from(data[0, :2])


def test_found_by_key():
    data = np.eye(20) > 0
    first, second = (masks.mask_from(data) | masks.causal() for _ in range(2))
    key = second.key
    del first
    gc.collect()
    assert find(key) == second  # that an equal one has died does not matter
    blocks = masks.BlockMask.from_dense(data, 16)
    assert find(blocks.key) == blocks and find("causal()") == masks.causal()
    copy, digest = pickle.loads(pickle.dumps(second)), blocks.key
    del second, blocks
    gc.collect()
    assert find(key) == copy
    with pytest.raises(ValueError, match=f"{digest} is in memory"):
        find(digest)
    del copy
    gc.collect()
    with pytest.raises(ValueError, match="no text"):
        find(key)


def test_array_is_copied():
    data = np.eye(20, dtype=bool)
    mask = masks.mask_from(data)
    data[:] = True
    assert mask.build(20, block_size=16).to_dense().sum() == 20
    assert mask != masks.mask_from(data) and mask == masks.mask_from(np.eye(20) > 0)


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        ("local(4)", r"masks\.parse\(text\)"),
        (np.ones((8, 8), bool), r"masks\.mask_from\(array\)"),
        (masks.local(4).build(8), "combine masks, then build"),
        (masks.causal, "causal is a function: call it"),
        (3, "unsupported operand"),
        (None, "unsupported operand"),
    ],
    ids=["text", "array", "block mask", "function", "number", "None"],
)
def test_what_is_no_mask_does_not_combine(other, remedy):
    joins = (operator.or_, operator.and_, operator.sub)
    for join in joins:
        for pair in ((masks.local(2), other), (other, masks.local(2))):
            with pytest.raises(TypeError, match=remedy):
                join(*pair)


LOCAL, BUTTERFLY = masks.local(5), masks.butterfly(16)


def test_heads_compose():
    mask = masks.heads(LOCAL, BUTTERFLY) & masks.causal() | masks.heads(*[LOCAL] * 3)
    assert mask.build(50, block_size=16).heads == 6
    nested = masks.heads(masks.heads(*[LOCAL] * 3), BUTTERFLY)
    assert nested.build(50, block_size=16).heads == 6
    two = masks.heads(LOCAL, masks.random_blocks(count=1, block=16, per_head=True))
    assert two.build(64, heads=4).heads == 4


def test_a_head_without_mixed_blocks():
    parts = masks.causal() >> masks.snap(16), LOCAL
    dense = masks.heads(*parts).build(100, block_size=16).to_dense()[0]
    for head, part in zip(dense, parts, strict=True):
        assert np.array_equal(head, part.build(100, block_size=16).to_dense()[0, 0])


def test_layers_take_turns():
    mask = (masks.layers(LOCAL, BUTTERFLY, masks.dense()) | masks.sliding(3)) & masks.causal()
    assert mask.per_layer and not mask.layer(0).per_layer
    assert mask.layer(4) == (BUTTERFLY | masks.sliding(3)) & masks.causal()
    assert masks.parse(str(mask)) == mask
    assert LOCAL.layer(7) is LOCAL
    assert (~masks.layers(LOCAL, BUTTERFLY)).layer(1) == ~BUTTERFLY
    assert masks.heads(masks.layers(LOCAL, BUTTERFLY), LOCAL).layer(1) == masks.heads(
        BUTTERFLY, LOCAL
    )
    assert masks.layers(masks.layers(LOCAL, BUTTERFLY), LOCAL).layer(0) == LOCAL
