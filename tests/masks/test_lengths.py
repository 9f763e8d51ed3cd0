"""Another length of a mask that was built before: cropped or extended, and the same content."""

import random
from dataclasses import replace

import pytest

import masks
from masks.build import Cache, resolve
from masks.extend import extend
from masks.runs import Grid
from tests.masks.cases import BLOCKS, LENGTHS, composition
from tests.masks.families import HEADS, LEAVES


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("masks.build.cache", Cache(max_items=32, max_bytes=1 << 28))


def stable(rng: random.Random) -> masks.Mask:
    """A composition that does not look at the length."""
    while True:
        mask = composition(rng, 300, 300, rng.randrange(3))
        if mask.prefix_stable:
            return masks.heads(mask, ~mask) if rng.random() < 0.1 else mask


@pytest.mark.parametrize("seed", range(300))
def test_extend(seed: int):
    rng = random.Random(seed)
    mask, sizes = stable(rng), (rng.choice(BLOCKS), rng.choice(BLOCKS))
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    more_q, more_k = (n + rng.choice([0, 0, 1, 16, 33, 100]) for n in (n_q, n_k))
    long = mask.build(more_q, more_k, sizes)
    short = resolve(
        mask.place(replace(long.grid, n_q=n_q, n_k=n_k)), replace(long.grid, n_q=n_q, n_k=n_k)
    )
    extended = extend(mask, short, more_q, more_k)
    assert extended == long, mask
    assert mask.build(n_q, n_k, sizes) == short, mask  # cropped
    assert extended.text == mask.key


def test_another_length_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def predicate(q, k):
        asked.append(1)
        return (q // 7 + k // 5) % 3 == 0

    mask = masks.where(predicate)
    first = mask.build(1000)
    asked.clear()
    short = mask.build(900)
    assert not asked and short.text == str(mask)
    assert mask.build(1000) is first
    longer = mask.build(1100)
    assert asked and longer.crop(900) == short
    mask.build(1000, block_size=64)
    assert mask.build(999, block_size=64).block_size == (64, 64)


def test_heads_and_lengths_are_kept_apart():
    mask = masks.heads(masks.local(20), masks.causal())
    assert mask.build(300, heads=HEADS).heads == HEADS
    assert mask.build(200).heads == 2
    assert mask.build(200) == masks.heads(*[masks.local(20), masks.causal()] * 1).build(200)


def test_refuses_masks_that_look_at_the_length():
    mask = masks.causal(align="bottom_right")
    with pytest.raises(ValueError, match="another mask at another length"):
        extend(mask, mask.build(100), 200, 200)
    with pytest.raises(ValueError, match="n_q is 50"):
        extend(masks.causal(), masks.causal().build(100), 50, 200)
    assert any(maker(random.Random(0), 90, 90).prefix_stable for maker in LEAVES)


def test_longer_on_one_side_only():
    mask = masks.local(30) | masks.global_tokens(5)
    fresh = {}
    for lengths in ((300, 100), (200, 200), (100, 300), (310, 310), (50, 50)):
        grid = Grid(*lengths, 64, 64)
        fresh[lengths] = resolve(mask.place(grid), grid)
    for lengths in fresh:
        assert mask.build(*lengths, 64) == fresh[lengths]
