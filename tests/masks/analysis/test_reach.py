"""What is seen through layers: against boolean matrix powers, and known tables."""

import random

import numpy as np
import pytest

import masks
from masks import BlockMask, Mask, segments
from masks.analysis import layers
from masks.analysis.reach import reach
from masks.analysis.stats import stats
from tests.masks.analysis.test_stats import any_mask
from tests.masks.helpers import brute_layout
from tests.notes import each_seed

BLOCK, N = 16, 4096  # 256 blocks


def after(layers: list[np.ndarray]) -> list[np.ndarray]:
    """Which keys each query has seen after every layer, the token itself from the start."""
    seen, result = np.eye(len(layers[0]), dtype=bool), []
    same = all(allowed is layers[0] for allowed in layers)
    for allowed in layers:
        before = seen
        seen = seen | ((allowed.astype(np.float32) @ seen.astype(np.float32)) > 0)
        result.append(seen)
        if same and np.array_equal(seen, before):
            break
    return result + result[-1:] * (len(layers) - len(result))


@each_seed(60)
def test_tokens_exactly(seed: int):
    rng = random.Random(seed)
    n, block = rng.choice([1, 64, 100, 161]), rng.choice([(16, 16), (32, 16), (48, 64)])
    heads = rng.choice([1, 1, 2])
    stack = [any_mask(rng, n, n, heads) for _ in range(rng.choice([1, 1, 3]))]
    causal, layers = rng.random() < 0.5, rng.choice([None, 2, 5])
    blocks = [BlockMask.from_dense(dense, block) for dense in stack]
    found = reach(blocks if len(blocks) > 1 else blocks[0], layers, causal=causal, exact=True)

    union = [dense[0].any(0) for dense in stack]
    depth = layers or (len(stack) if len(stack) > 1 else n + 1)
    states = after([union[i % len(union)] for i in range(depth)])
    wanted = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
    shares = [state[wanted].mean() for state in states]
    for i, share in enumerate(shares):
        assert found.upper[min(i, len(found.upper) - 1)] == pytest.approx(share)
    assert found.upper == found.lower and found.at_least == found.at_most
    complete = [i + 1 for i, share in enumerate(shares) if share == 1]
    assert found.at_least == (complete[0] if complete else None)
    end = states[-1] & wanted
    assert np.array_equal(found.seen_keys, end.sum(1))
    assert np.array_equal(found.seen_by, end.sum(0))
    assert np.array_equal(found.wanted_keys, wanted.sum(1))
    assert np.array_equal(found.wanted_by, wanted.sum(0))
    assert bool(found.missing) == (not complete) and (found.worst is None) == bool(complete)
    if found.worst:
        query = found.worst[0]
        missing = np.concatenate([np.arange(a, b + 1) for a, b in found.missing])
        assert np.array_equal(missing, np.flatnonzero(wanted[query] & ~end[query]))


@each_seed(60)
def test_blocks_are_bounds(seed: int):
    rng = random.Random(1000 + seed)
    n, block = rng.choice([64, 100, 161, 192]), rng.choice([(16, 16), (32, 16), (16, 48)])
    heads = rng.choice([1, 2])
    stack = [any_mask(rng, n, n, heads) for _ in range(rng.choice([1, 1, 3]))]
    causal, layers = rng.random() < 0.5, rng.randrange(1, 6)
    blocks = [BlockMask.from_dense(dense, block) for dense in stack]
    several = blocks if len(blocks) > 1 else blocks[0]
    found = reach(several, layers, causal=causal, exact=False)
    assert len(found.upper) == len(found.lower)  # the last number holds from there on
    wanted = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
    want = brute_layout(wanted[None, None], block)[0, 0] > 0
    union = [dense[0].any(0) for dense in stack]
    states = after([union[i % len(union)] for i in range(layers)])
    for i, state in enumerate(states):
        some = brute_layout((state & wanted)[None, None], block)[0, 0] > 0
        every = brute_layout((state | ~wanted)[None, None], block)[0, 0] == 2
        high, low = (s[min(i, len(s) - 1)] for s in (found.upper, found.lower))
        assert low <= every[want].mean() + 1e-12 and some[want].mean() <= high + 1e-12
        if every[want].all():
            assert found.at_least is not None and found.at_least <= i + 1
    if found.at_most:
        assert (states[found.at_most - 1] | ~wanted).all()


def test_diagonal_blocks_count_from_their_layer_on():
    near, far = masks.local(0), masks.causal()
    found = masks.layers(near, near, far).reach(64, 3, causal=True, exact=False, block_size=16)
    assert found.lower == (0, 0, 1) and found.upper == (0.4, 0.4, 1)
    found = masks.layers(far, near).reach(64, 2, causal=True, exact=False, block_size=16)
    assert found.lower == (1,)
    blocks = masks.layers(masks.block_diagonal(16) & far, near)
    found = blocks.reach(64, 2, causal=True, exact=False, block_size=16)
    assert found.lower == (0.4, 0.4)  # they stay seen
    found = (far - near).reach(64, 1, causal=True, exact=False, block_size=16)
    assert found.lower == (0.6,)  # no query sees itself, so no block on the diagonal is all seen


LOCAL = masks.local(BLOCK) | masks.butterfly(BLOCK)
CAUSAL = masks.causal()


@pytest.mark.parametrize(
    ("mask", "n", "layers", "fixpoint", "shares"),
    [  # layers to everything, layers until nothing changes, share after each; 256 tokens: exactly
        (masks.butterfly(BLOCK), N, 8, 8, [0.035, 0.145, 0.363, 0.637, 0.855, 0.965, 0.996, 1]),
        (masks.butterfly(BLOCK) & CAUSAL, N, None, 8, [0.039, 0.093]),
        (LOCAL & CAUSAL, N, 13, 13, [0.043, 0.118, 0.230, 0.370, 0.536, 0.708]),
        (masks.power_of_two(), 256, 5, 5, [0.059, 0.310, 0.740, 0.971, 1]),
        (masks.strided(16), 256, 2, 2, [0.179, 1]),
    ],
    ids=str,
)
def test_known_curves(mask: Mask, n: int, layers: int | None, fixpoint: int, shares: list[float]):
    blocks = mask.build(n, block_size=BLOCK)
    found = reach(blocks, causal=stats(blocks).causal, exact=n == 256)
    assert found.at_least == layers and found.settled
    assert found.upper[: len(shares)] == pytest.approx(tuple(shares), abs=6e-4)
    assert len(set(found.upper)) == fixpoint


def test_causal_butterfly_clears_bits():
    blocks = (masks.butterfly(BLOCK) & masks.causal()).build(N, block_size=BLOCK)
    found = reach(blocks, causal=True, exact=False)
    assert round(found.upper[-1] * 256 * 257 / 2) == 3**8
    assert "19.9 %" in found.never and "never" in found.depth
    assert found.worst == (3840, 3855)  # 240 = 11110000b sees 16 blocks of 241


def test_what_does_not_stack():
    for other in (masks.local(3).build(128), masks.local(3).build(64, block_size=32)):
        with pytest.raises(ValueError, match="do not stack"):
            reach([masks.local(3).build(64), other])
    with pytest.raises(ValueError, match="blocks is empty"):
        reach([])


def test_heads_together_and_alone():
    blocks = masks.heads(masks.local(16), masks.butterfly(16)).build(1024, block_size=16)
    together, local, butterfly = (reach(blocks, head=h, exact=False) for h in (None, 0, 1))
    assert butterfly.at_least == 6 and local.at_least == 63 and together.at_least == 5


def test_it_is_exact_up_to_some_thousands_of_tokens(monkeypatch: pytest.MonkeyPatch):
    """Every token of local(128) sees 128 more tokens a layer, on either side."""
    found = masks.local(128).reach(4096)
    assert found.exact and found.at_least == found.at_most == -(-4095 // 128)
    assert not masks.local(128).reach(4097).exact
    monkeypatch.setattr(segments, "MOST_INTERVALS", 100)  # too many pieces: by blocks again
    assert not masks.local(128).reach(4096).exact


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    blocks = (LOCAL & masks.causal()).build(1000, block_size=BLOCK)
    whole = reach(blocks, causal=True, exact=True)
    monkeypatch.setattr(layers, "CHUNK_BYTES", 1)
    parts = reach(blocks, causal=True, exact=True)
    assert str(parts) == str(whole) and parts.upper == whole.upper
    assert np.array_equal(parts.seen_by, whole.seen_by)


def test_every_batch_entry_has_its_own_reach():
    """Entry 0 sees nothing new, entry 1 all; a layer with one mask has it for both."""
    array = np.stack([np.eye(64, dtype=bool), np.ones((64, 64), bool)])[:, None]
    own, same = masks.mask_from(array), masks.local(7)
    for exact in (False, True):
        options = {"exact": exact, "block_size": 16}
        alone, together = (own.reach(64, 1, batch=b, **options) for b in (0, 1))
        assert (alone.at_least, together.at_least) == (None, 1)
        stacked = masks.layers(same, own)
        found = [stacked.reach(64, 2, batch=b, **options) for b in (0, 1)]
        expected = [same.reach(64, 1, **options), masks.dense().reach(64, 1, **options)]
        assert [f.upper[-1] for f in found] == [f.upper[-1] for f in expected]
    for mask, depth in ((own, None), (stacked, 2)):
        with pytest.raises(ValueError, match=r"the 2 batch entries have .* give batch=0 to 1"):
            mask.reach(64, depth)
        with pytest.raises(ValueError, match="batch is 2: give an integer <= 1"):
            mask.reach(64, depth, batch=2)
