"""Presets: the counts and quirks of the published code."""

import pickle

import numpy as np
import pytest

from masks import Mask, causal, global_tokens, local, parse
from masks.patterns.segments import block_diagonal
from masks.patterns.sparse_transformer import fixed, strided
from masks.presets.deepspeed import (
    deepspeed_bigbird,
    deepspeed_bslongformer,
    deepspeed_fixed,
    deepspeed_local_sliding_window,
    deepspeed_variable,
)
from masks.presets.lra import lra_bigbird, lra_fixed, lra_local, lra_longformer, lra_strided

B = 16
UNI = "unidirectional"


def blocks(mask: Mask, n: int, heads: int | None = None) -> np.ndarray:
    """bool (heads or 1, n, n), of token blocks of B tokens"""
    return mask.build(n * B, block_size=B, heads=heads).layout()[0] > 0


@pytest.mark.parametrize(("n", "size", "count"), [(16, 4, 112), (64, 4, 1216), (64, 8, 960)])
def test_fixed(n: int, size: int, count: int):
    assert blocks(deepspeed_fixed(size), n).sum() == count == n * (size + n // size - 1)
    for g in (2, 4):
        total = blocks(deepspeed_fixed(size, g), n).sum()
        assert total == n * (size + g * (n // size - 1))


@pytest.mark.parametrize(("n", "size", "count"), [(64, 4, 640), (64, 8, 512), (16, 4, 64)])
def test_fixed_unidirectional(n: int, size: int, count: int):
    drawn = blocks(deepspeed_fixed(size, attention=UNI), n)[0]
    assert drawn.sum() == count == n * (size + n // size) // 2 and not np.triu(drawn, 1).any()


def test_fixed_unidirectional_leaks():
    """More than one global block lets the first of them see the ones after it."""
    drawn = blocks(deepspeed_fixed(4, 2, attention=UNI), 16)[0]
    assert np.argwhere(np.triu(drawn, 1)).tolist() == [[2, 3], [6, 7], [10, 11], [14, 15]]


def test_fixed_with_fewer_blocks_than_global_ones():
    """Their columns count from the end, so only the last row gets one."""
    drawn = blocks(deepspeed_fixed(4, 4, attention=UNI), 3)[0]
    assert np.array_equal(drawn, np.tri(3, dtype=bool))


def test_fixed_horizontal_and_short_window():
    drawn = blocks(deepspeed_fixed(4, horizontal_global_attention=True), 10)[0]
    assert drawn[[3, 7, 9]].all() and drawn[:, [3, 7, 9]].all()  # 11 would be beyond the end
    assert np.flatnonzero(drawn[4]).tolist() == [3, 4, 5, 6, 7, 9]


def test_fixed_patterns_of_heads():
    mask = deepspeed_fixed(4, num_different_global_patterns=4)
    assert mask.per_head and mask.period == 4
    drawn = blocks(mask, 16, heads=8)
    for head in range(8):
        column = 3 - head % 4
        assert drawn[head, :, column::4].all() and drawn[head].sum() == 112
    assert mask.build(256).heads == 4


def test_variable():
    drawn = blocks(deepspeed_variable(local_window_blocks=(2, 3), global_block_indices=()), 10)[0]
    window = np.repeat([0, 1, 2, 3], [2, 3, 3, 2])
    assert np.array_equal(drawn, window[:, None] == window)
    both = {"global_block_indices": (1, 40), "global_block_end_indices": (3, 41)}
    drawn = blocks(deepspeed_variable(local_window_blocks=(1,), **both, attention=UNI), 6)[0]
    assert np.argwhere(np.triu(drawn, 1)).tolist() == [[1, 2]]  # a range begins with its first row
    assert drawn.sum() == 6 + 10 - 2
    lines = blocks(deepspeed_variable(horizontal_global_attention=True), 12)[0]
    assert lines[0].all() and lines[:, 0].all() and lines.sum() == 3 * 16 + 2 * 8


def test_variable_draws_everywhere():
    drawn = blocks(deepspeed_variable(2, (1,), (), attention=UNI), 50)[0]
    assert (drawn.sum(1) >= 2).all() and np.triu(drawn, 1).sum() > 30


def test_bigbird():
    for seed in range(5):
        for n in (16, 64):
            drawn = blocks(deepspeed_bigbird(seed=seed), n)[0]
            assert 5 * n - 6 < drawn.sum() <= 6 * n - 6 and drawn[0].all() and drawn[:, 0].all()
    causal_blocks = blocks(deepspeed_bigbird(attention=UNI), 30)[0]
    assert not np.triu(causal_blocks, 1).any() and causal_blocks[:, 0].all()
    heads = blocks(deepspeed_bigbird(different_layout_per_head=True), 30, heads=3)
    assert len({head.tobytes() for head in heads}) == 3


@pytest.mark.parametrize(("n", "count"), [(16, 74), (64, 314)])
def test_bslongformer(n: int, count: int):
    assert blocks(deepspeed_bslongformer(), n).sum() == count == 5 * n - 6
    whole = (block_local(1) | global_tokens(B)).build(n * B, block_size=B)
    assert deepspeed_bslongformer().build(n * B, block_size=B) == whole


def block_local(radius: int) -> Mask:
    return deepspeed_local_sliding_window(2 * radius + 1, attention="bidirectional")


@pytest.mark.parametrize("n", [5, 16])
def test_local_sliding_window(n: int):
    i = np.arange(n)
    for window in (1, 3, 4, 5):
        w = window // 2
        drawn = blocks(deepspeed_local_sliding_window(window), n)[0]
        distance = i[:, None] - i
        assert np.array_equal(drawn, (distance >= 0) & (distance <= w))
        assert drawn.sum() == n * (w + 1) - w * (w + 1) // 2
        both = blocks(block_local(w), n)
        assert both.sum() == n * (2 * w + 1) - w * (w + 1)


def test_lra_local():
    assert lra_local() == block_diagonal(50)
    dense = lra_local(50, interleaved=True).build(1024).to_dense()[0, 0]
    i = np.arange(1024)
    assert np.array_equal(dense, i[:, None] % 21 == i % 21)  # 1024 + 26 tokens in 21 chunks
    dense = lra_local(50, interleaved=True).build(1000).to_dense()[0, 0]
    assert np.array_equal(dense, i[:1000, None] % 21 == i[:1000] % 21)  # a whole chunk of padding


def test_lra_fixed():
    dense = lra_fixed().build(1000).to_dense()[0, 0]
    assert round(dense.mean(), 4) == 0.1300
    paper = fixed(50, 10).build(1000).to_dense()[0, 0]
    assert round(paper.mean(), 4) == 0.1205
    k = np.argwhere(dense & ~paper)[:, 1]
    assert (k % 50 == 0).all() and not (paper & ~dense).any()
    assert lra_strided() == strided(50)


def test_lra_longformer():
    assert lra_longformer(512) == local(255, 256) and lra_longformer(7) == local(3)
    assert lra_longformer(8, 1) == local(3, 4) | global_tokens(1)
    dense = lra_longformer(8).build(100).to_dense()[0, 0]
    assert (dense.sum(1)[10:90] == 8).all()


def test_lra_bigbird():
    """1000 tokens make 16 blocks of 64, and 1024 make 17, the last one without a token."""
    for n, blocks_ in ((1000, 16), (1024, 17), (4000, 63), (4096, 65)):
        layout = lra_bigbird().build(n, block_size=64, heads=2).layout()[0] > 0
        rows = layout.shape[1]
        assert rows == -(-n // 64) and layout[:, 0].all() and layout[:, :, 0].all()
        assert layout[:, -1].all() == layout[:, :, -1].all() == (blocks_ == rows)
        far = layout & (abs(np.arange(rows)[:, None] - np.arange(rows)) > 1)
        random = far[:, 1 : blocks_ - 1, 1 : blocks_ - 1]
        assert (random.sum(2) <= 3).all() and (random.sum(2)[:, : min(12, rows - 4)] == 3).all()
        assert not random[:, :, 15:].any()  # the first 1024 tokens
    assert lra_bigbird(seed=None).layer(4) == lra_bigbird(seed=4)


@pytest.mark.parametrize(
    "mask",
    [
        deepspeed_fixed(),
        deepspeed_fixed(8, 2, num_different_global_patterns=4),
        deepspeed_fixed(attention=UNI, block=32),
        deepspeed_variable(),
        deepspeed_variable(1, (2, 4), (0, 3), (1, 5), attention=UNI, seed=3),
        deepspeed_bigbird(),
        deepspeed_bigbird(2, 5, 2, different_layout_per_head=True),
        deepspeed_bslongformer(),
        deepspeed_bslongformer(5, (0, 7), attention=UNI),
        deepspeed_local_sliding_window(),
        deepspeed_local_sliding_window(5, attention="bidirectional", block=64),
        lra_local(),
        lra_local(interleaved=True),
        lra_fixed(),
        lra_strided(),
        lra_longformer(),
        lra_bigbird(),
        lra_bigbird(32, 2, seed=None),
    ],
    ids=str,
)
def test_text_and_pickle(mask: Mask):
    assert parse(str(mask)) == mask and pickle.loads(pickle.dumps(mask)) == mask
    if not mask.per_layer:
        copy = parse(str(mask)) & causal()
        assert copy.build(400, heads=4) == (mask & causal()).build(400, heads=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deepspeed_fixed(4, 3), "num_global_blocks is 3: give a divisor of 4"),
        (lambda: deepspeed_fixed(4, 8), "num_global_blocks is 8"),
        (lambda: deepspeed_fixed(attention="causal"), "attention is 'causal': choose one of"),
        (
            lambda: deepspeed_fixed(attention=UNI, horizontal_global_attention=True),
            "needs attention='bidirectional'",
        ),
        (lambda: deepspeed_fixed(4, 2, num_different_global_patterns=3), "give at most 2"),
        (lambda: deepspeed_variable(local_window_blocks=()), "give one size at least"),
        (lambda: deepspeed_variable(local_window_blocks=4), "give a tuple of integers"),
        (lambda: deepspeed_variable(local_window_blocks=(0,)), "one of local_window_blocks is 0"),
        (lambda: deepspeed_variable(0, (4,), (3,), (3,)), "give one number for each"),
        (lambda: deepspeed_variable(0, (4,), (3,), ()), "give one number for each"),
        (lambda: deepspeed_variable(9).build(128), "draws 9 of 8 blocks: give fewer"),
        (lambda: deepspeed_bigbird(2, attention=UNI), "give at most 1 for unidirectional"),
        (lambda: deepspeed_bigbird().build(32), "needs 3 blocks of 16 tokens, but there are 2"),
        (lambda: deepspeed_bslongformer(5).build(64), "needs 5 blocks"),
        (lambda: deepspeed_local_sliding_window(0), "num_sliding_window_blocks is 0"),
        (lambda: lra_local(0), "block is 0"),
        (lambda: lra_local(interleaved=1), "interleaved is 1: give True or False"),
        (lambda: lra_fixed(50, 51), "summary is 51"),
        (lambda: lra_longformer(0), "window is 0"),
        (lambda: lra_bigbird(seed=-1), "seed is -1"),
        (lambda: lra_bigbird().build(512), "give heads="),
    ],
)
def test_errors(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
