"""Blocks taken out of a mask, and what ranks that share a sequence compute and receive."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from masks import BlockMask
from masks.analysis.partition import RULES

SIZE = 16
MASKS = {
    "causal": masks.causal(),
    "longformer": masks.longformer(32, 1, (0, 1, 2)),
    "random": masks.random_blocks(0.2, block=16, per_head=True),
    "tokens": masks.where(lambda q, k: (q * 7 + k * 3) % 11 < 4),
}


def tokens(blocks, n):
    """The tokens of block numbers, in their order."""
    return np.concatenate([np.arange(b * SIZE, min(n, (b + 1) * SIZE)) for b in blocks])


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(list(MASKS)), st.integers(65, 200), st.randoms(use_true_random=False),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_blocks_taken_are_those_of_the_tokens(name, n, random, last_row, last_col):
    heads = 2 if MASKS[name].per_head else None
    mask = MASKS[name].build(n, block_size=SIZE, heads=heads)
    chosen = []
    for last in (last_row, last_col):
        inner = random.sample(range(mask.rows - 1), random.randint(1, mask.rows - 1))
        chosen.append(np.array([*inner, *([mask.rows - 1] if last else [])]))
    rows, cols = chosen
    want = mask.to_dense()[:, :, tokens(rows, n)][..., tokens(cols, n)]
    assert mask.take(rows, cols) == BlockMask.from_dense(want, SIZE)


def bytes_received(mask, owner, ranks, width, kv_heads):
    """From the layout alone, where no query travels: K and V of every block that a rank needs."""
    layout = mask.layout() > 0
    if layout.shape[1] > 1:
        layout = layout.reshape(len(layout), kv_heads, -1, *layout.shape[2:]).any(2)
    shared = kv_heads // layout.shape[1]
    return [
        int(layout[:, :, owner == r].any(2)[..., owner != r].sum()) * shared * width
        for r in range(ranks)
    ]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_and_work(name, ranks):
    mask = MASKS[name].build(500, block_size=SIZE, heads=8 if MASKS[name].per_head else None)
    load = (mask.layout() > 0).sum((0, 1, 3))
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 64, "v_dim": 32}
    for rule in RULES:
        found = mask.partition(ranks, owner=rule, queries=False, **sizes)
        counts = np.bincount(found.owner, minlength=ranks)
        assert len(counts) == ranks and counts.max() - counts.min() <= max(2, 0.2 * counts.mean())
        width = 2 * SIZE * (64 + 32)
        assert found.received.tolist() == bytes_received(mask, found.owner, ranks, width, 4), rule
        assert found.sent.sum() == found.received.sum()
        assert found.computed.tolist() == np.bincount(found.owner, load, ranks).tolist()
        both = mask.partition(ranks, owner=found.owner, **sizes)
        assert both.computed.sum() == found.computed.sum()
        assert both.received.sum() <= found.received.sum(), rule  # or why would a query travel?
    auto = mask.partition(ranks, **sizes)
    assert auto.forward <= 1.1 * min(auto.tried.values())


def test_queries_of_global_tokens_travel():
    """The first rows need every key: as keys they would bring all of them to their rank."""
    mask = masks.longformer(64, 1, (0,)).build(4096, block_size=64)
    keys, queries = (mask.partition(4, queries=q, heads=8, kv_heads=8) for q in (False, True))
    assert queries.visits == 3
    assert queries.share < 0.2 * keys.share and queries.imbalance < 1.05 < keys.imbalance


def test_one_rank_and_refusals():
    mask = masks.causal()
    alone = mask.partition(256, 1, SIZE)
    assert abs(alone.speedup - 1) < 1e-9 and not alone.received.any() and "causal" in str(alone)
    for words, call in (
        (("ranks", "0"), lambda: mask.partition(256, 0)),
        (("2 blocks", "3 ranks"), lambda: mask.partition(256, 3)),
        (("owner", "mine"), lambda: mask.partition(512, 2, owner="mine")),
        (("owner", "(4,)"), lambda: mask.partition(512, 2, owner=np.zeros(3, int))),
        (("owner", "5"), lambda: mask.partition(512, 2, owner=np.array([0, 1, 5, 0]))),
        (("heads", "kv_heads"), lambda: mask.partition(512, 2, heads=8, kv_heads=3)),
        (("sizes", "gbs"), lambda: mask.partition(512, 2, gbs=3)),
        (("512 x 256",), lambda: mask.build(512, 256).partition(2)),
        (("rows", "different"), lambda: mask.build(512).take([0, 0], [1])),
        (("cols", "last"), lambda: mask.build(500).take([0], [3, 1])),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    masks.causal().partition(1024, 4).draw(tmp_path / "some.png")
    assert (tmp_path / "some.png").stat().st_size > 1000


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install 'matplotlib"):
        masks.causal().partition(1024, 4).draw()
