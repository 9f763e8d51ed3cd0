"""BigBird: counts, what a row may draw, and the very blocks of Google's code."""

import numpy as np
import pytest

from masks import global_tokens, local, parse
from masks.patterns.bigbird import bigbird, etc_, longformer
from masks.patterns.bigbird_compat import bigbird_compat, paper_plan
from masks.patterns.columns import global_at
from masks.patterns.distances import dilated
from tests.masks.patterns.token_graphs import B


def blocks(mask, n: int, block: int = B, heads: int | None = None) -> np.ndarray:
    """bool (heads or 1, n, n), of token blocks"""
    return mask.build(n * block, block_size=block, heads=heads).layout()[0] > 0


def google(n: int, r: int = 3) -> int:
    return 2 * n + 2 * (4 + r) + (n - 4) * (5 + r)


@pytest.mark.parametrize(
    ("n", "count"), [(16, 142), (32, 302), (48, 462), (64, 622), (128, 1262), (256, 2542)]
)
def test_count(n: int, count: int):
    for seed in range(3):
        drawn = blocks(bigbird(B, seed=seed), n, heads=2)
        assert (drawn.sum((1, 2)) == count).all() and count == google(n)
    for r in range(8):
        assert blocks(bigbird(B, r, per_head=False), n).sum() == google(n, r)


def test_rows():
    n, r = 40, 4
    drawn = blocks(bigbird(B, r), n, heads=3)
    i = np.arange(n)
    window = abs(i[:, None] - i) <= 1
    assert drawn[:, [0, -1]].all() and drawn[:, :, [0, -1]].all() and drawn[:, window].all()
    extra = drawn & ~window
    extra[:, [0, -1]] = extra[:, :, [0, -1]] = False
    assert (extra[:, 1:-1].sum(2) == r).all()
    assert len({head.tobytes() for head in extra}) == 3


def test_random_blocks_are_uniform_among_the_free_ones():
    """Row 5 of 12 blocks may draw 1, 2, 3, 7, 8, 9 and 10."""
    drawn = blocks(bigbird(B, 2), 12, heads=1400)[:, 5].sum(0)
    free = [1, 2, 3, 7, 8, 9, 10]
    assert np.abs(drawn[free] - 400).max() < 5 * np.sqrt(400)
    assert (np.delete(drawn, free) == 1400).all()


def test_options():
    wide = blocks(bigbird(B, 0, window=5, global_blocks=2, per_head=False), 30)[0]
    i = np.arange(30)
    ends = (i < 2) | (i >= 28)
    assert np.array_equal(wide, (abs(i[:, None] - i) <= 2) | ends[:, None] | ends)
    bare = blocks(bigbird(B, 2, window=1, global_blocks=0, per_head=False), 30)[0]
    assert bare.diagonal().all() and (bare.sum(1) == 3).all()


def test_a_short_sequence_is_dense():
    for n in range(1, 8):
        assert blocks(bigbird(B, per_head=False), n).all()
    assert not blocks(bigbird(B, per_head=False), 8).all()
    assert blocks(bigbird_compat(B), 11, heads=1).all()
    assert not blocks(bigbird_compat(B), 12, heads=1).all()


def test_random_blocks_of_google():
    """Seed 0, 4096 tokens in blocks of 64, 3 random ones, head 0, rows 1 to 5."""
    rows = [[9, 14, 7], [9, 6, 7], [10, 5, 14], [6, 8, 12], [2, 13, 1]]
    assert paper_plan(np.random.RandomState(0), 64, 64, 3)[:5].tolist() == rows
    for n in (64, 48, 32, 16):  # one plan, cut
        drawn = blocks(bigbird_compat(), n, 64, heads=2)[0]
        for row, cols in enumerate(rows, 1):
            seen = {0, n - 1, row - 1, row, row + 1, *cols}
            assert np.flatnonzero(drawn[row]).tolist() == sorted(seen)
        random = drawn & (abs(np.arange(n)[:, None] - np.arange(n)) > 1)
        assert not random[1:-1, 16:-1].any()  # only from the first 1024 tokens


@pytest.mark.parametrize("n", [16, 32, 48, 64, 128, 256])
def test_count_of_google(n: int):
    drawn = blocks(bigbird_compat(), n, 64, heads=3)
    for head in drawn:
        assert head.sum() == google(n) if n > 16 else 136 <= head.sum() <= 142


def test_google_beyond_the_plan():
    """5000 tokens: rows take turns among the heads, and random blocks are among the first 11."""
    drawn = blocks(bigbird_compat(seed=2), 80, 64, heads=2)
    far = drawn & (abs(np.arange(80)[:, None] - np.arange(80)) > 1)
    assert not far[:, 1:-1, 11:-1].any()
    stream = np.random.RandomState(2)
    for row in range(1, 40):
        for head in range(2):
            illegal = {row - 1, row, row + 1, 0, 10} | ({9} if row == 1 else set())
            illegal |= {1} if row == 9 else set()
            cols = [col for col in stream.permutation(11) if col not in illegal][:3]
            assert np.flatnonzero(far[head, row]).tolist() == sorted(
                {0, 79, *cols} - {row - 1, row, row + 1}
            )
    alone = blocks(bigbird_compat(seed=2), 80, 64, heads=1)
    assert np.array_equal(alone[0, 1], drawn[0, 1]) and (alone[0] != drawn[0]).any()


def test_layers_of_google():
    mask = bigbird_compat(seed=None)
    assert mask.per_layer and mask.layer(5) == bigbird_compat(seed=5)
    assert mask.layer(0) == bigbird_compat() and mask.layer(0).layer(9) == bigbird_compat()
    assert parse(str(mask)) == mask and parse("bigbird_compat(64, 3, seed=5)") == mask.layer(5)
    with pytest.raises(ValueError, match="layer to layer"):
        mask.build(4096, heads=2)


def test_no_global_state():
    np.random.seed(3)
    before = np.random.get_state()[1].tobytes()  # type: ignore[index]
    first = bigbird_compat().build(8192, heads=2)
    assert before == np.random.get_state()[1].tobytes()  # type: ignore[index]
    assert bigbird_compat().build(8192, heads=2) == first


def test_errors():
    for make, message in (
        (lambda: bigbird_compat(0), "block is 0"),
        (lambda: bigbird_compat(64, 0), "random is 0"),
        (lambda: bigbird_compat(seed=2**32), "seed is 4294967296: give an integer <= "),
        (lambda: bigbird_compat().build(4096), "give heads= to build"),
        (lambda: bigbird_compat(128, 6).build(4096, heads=1), "a row has fewer left: give a small"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_longformer():
    assert longformer(9, global_tokens=()) == local(4) == longformer(8, global_tokens=())
    assert longformer(9, 3) == dilated(12, 3) | global_at((0,))
    n, w = 300, 16
    dense = longformer(2 * w, global_tokens=(0, 100)).build(n, block_size=B).to_dense()[0, 0]
    window, tokens = n * (2 * w + 1) - w * (w + 1), 2 * (2 * n - 2)
    both = (2 * w + 1) + (4 * w + 1)  # what the window has of the lines of tokens 0 and 100
    assert dense[0].all() and dense[:, 100].all() and dense.sum() == window + tokens - both


def test_etc():
    n, g, r = 500, 30, 40
    dense = etc_(g, r).build(n, block_size=B).to_dense()
    assert dense.sum() == g * (2 * n - g) + (n - g) * (2 * r + 1) - r * (r + 1)
    assert parse("etc:30:40") == etc_(g, r) == global_tokens(g) | local(r)
