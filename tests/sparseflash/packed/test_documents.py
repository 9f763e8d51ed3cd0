"""Masks of packed documents made from tensors: the blocks of the static masks, and clear errors."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

import masks
from sparseflash import attention, packed
from tests.packing_cases import BLOCKS, as_tensor, assert_same_blocks


def dense_of(
    q_ends, n, causal=False, window=None, prefix=None, shared=False, k_ends=None, n_k=None
) -> np.ndarray:
    """Bool (n, n_k), pair by pair: the last query of a document stands at its last key."""
    k_ends, n_k = (q_ends, n) if k_ends is None else (k_ends, n_k)
    left, right = window or (n + n_k, n + n_k)
    seen = np.zeros((n, n_k), bool)
    for number, ((a, b), (c, d)) in enumerate(zip(pairwise(q_ends), pairwise(k_ends), strict=True)):
        place, key = np.arange(a, b)[:, None] + d - b, np.arange(c, d)
        near = (key >= place - left) & (key <= place + right) & ((key <= place) | (not causal))
        seen[a:b, c:d] = near | (key < c + (0 if prefix is None else prefix[number]))
        if shared and number > 0:
            seen[a:b, : k_ends[1]] = True
    return seen


def packings(seed: int, count: int):
    """Offsets: at random, with equal lengths, and around the edges of blocks."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, m = int(rng.integers(1, 400)), int(rng.choice([1, 2, 5, 12, 100]))
        step = int(rng.integers(1, 60))
        cuts = {
            "random": rng.integers(0, n + 1, m - 1),
            "equal": np.arange(step, n, step),
            "edges": np.clip(rng.integers(0, n // 16 + 1, m - 1) * 16 + rng.integers(-1, 2), 0, n),
        }[rng.choice(["random", "equal", "edges"])]
        yield rng, n, [0, *sorted(cuts.tolist()), n]


@pytest.mark.parametrize("seed", range(2))
def test_pairs(seed):
    """With windows, prefixes and padding, for the same keys and for others."""
    for rng, n, offsets in packings(seed, 90):
        offsets[-1] = max(offsets[-2], offsets[-1] - int(rng.integers(20)))  # padding
        count, options = len(offsets) - 1, {"causal": bool(rng.integers(2))}
        options["shared"] = rng.random() < 0.3
        options["window"] = (int(rng.integers(50)), int(rng.integers(50))) if seed else None
        prefix, keys, theirs = rng.integers(0, 30, count) * rng.integers(2), {}, {}
        if rng.integers(4):
            n_k = int(rng.integers(1, 400))
            cuts = np.sort(rng.integers(0, n_k + 1, count)).tolist()
            ends = [0, *cuts[:-1], n_k if rng.integers(2) else cuts[-1]]
            keys = {"cu_seqlens_k": torch.tensor(ends), "n_k": n_k}
            theirs = {"k_ends": ends, "n_k": n_k}
        block_size = BLOCKS[rng.integers(len(BLOCKS))]
        plain = keys or prefix.any()  # which have as many documents as the offsets
        found = packed.documents(
            torch.tensor(offsets) if plain else as_tensor(rng, offsets), n, **options, **keys,
            block_size=block_size,
            prefix=torch.from_numpy(prefix) if prefix.any() else None,
        )  # fmt: skip
        expected = dense_of(offsets, n, **options, prefix=prefix, **theirs)
        assert_same_blocks(found, masks.BlockMask.from_dense(expected, block_size))


def rows_of_a_batch(make, *given: torch.Tensor) -> None:
    """Every batch entry has the mask of its own row."""
    together = make(*given).to_block_mask().to_dense()
    for number, rows in enumerate(zip(*given, strict=True)):
        assert np.array_equal(together[number], make(*rows).to_block_mask().to_dense()[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_packing_for_every_batch_entry(interleaved):
    offsets = torch.tensor([[0, 10, 50, 50], [0, 33, 40, 48]], dtype=torch.int32)
    prefix, size = torch.tensor([3, 2, 1]), {"block_size": 32}
    rows_of_a_batch(lambda x: packed.documents(x, 80, causal=True, prefix=prefix, **size), offsets)
    rows_of_a_batch(
        lambda x: packed.block_diffusion(x, 100, 8, interleaved=interleaved, **size), offsets
    )
    leave = torch.tensor([[50, 50, 50, 80], [33, 40, 48, 80]])
    rows_of_a_batch(lambda *times: packed.prefix_tree(*times, 90, **size), offsets, leave)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_beyond_all_tokens_mean_all(dtype):
    offsets, far = torch.tensor([0, 30, 64], dtype=torch.int32), 2**60
    each = torch.full((2,), torch.iinfo(dtype).max, dtype=dtype)
    expected = masks.documents([30, 34]).build(64, 64, 16)
    for window, prefix in ((far, None), (0, far), (0, each)):
        found = packed.documents(offsets, 64, window=window, prefix=prefix, block_size=16)
        assert_same_blocks(found, expected)


def test_vmap_takes_the_documents_of_each_entry():
    q = torch.randn(1, 2, 33, 8)
    offsets = torch.tensor([[0, 10, 33], [0, 0, 30]])

    def call(given):
        return attention(q, q, q, packed.documents(given, 33, causal=True), backend="cpu")

    torch.testing.assert_close(torch.vmap(call)(offsets), torch.stack([*map(call, offsets)]))


@pytest.mark.parametrize("causal", [False, True])
def test_one_token_a_document(causal):
    """As many partial blocks as there can be: none of them is taken for a full one."""
    found = packed.documents(torch.arange(129), 128, causal=causal, block_size=16)
    assert np.array_equal(found.to_block_mask().to_dense()[0, 0], np.eye(128, dtype=bool))


def test_joins_a_mask_of_many_tiles():
    """Each tile belongs to one block, so it meets one tile of the mask: the products are few."""
    other = masks.strided(37)
    joined = packed.documents(torch.arange(0, 4001, 100), 4000, block_size=64) & other
    expected = masks.documents([100] * 40) & other
    assert joined.to_block_mask() == expected.build(4000, 4000, 64)


OFFSETS = torch.tensor([0, 30, 64])
REFUSED = {
    "dtype": ((OFFSETS.float(), 64), {}, "cu_seqlens is torch.float32: give int32 or int64"),
    "a list": (([0, 64], 64), {}, "cu_seqlens is a list: give a tensor"),
    "no end": ((OFFSETS[:0], 64), {}, "cu_seqlens has shape (0,)"),
    "three sides": ((OFFSETS, 64), {"window": (1, 2, 3)}, "window is (1, 2, 3)"),
    "elsewhere": ((OFFSETS, 64), {"prefix": OFFSETS[1:].to("meta")}, "prefix is on meta"),
    "beyond": ((OFFSETS, 63), {}, "cu_seqlens is 0, 30, 64: it must ascend from 0 to no more than"),
    "n_k alone": ((OFFSETS, 64), {"n_k": 80}, "n_k is 80, and cu_seqlens_k None"),
    "fewer keys": (
        (OFFSETS, 64),
        {"cu_seqlens_k": OFFSETS[:2]},
        "cu_seqlens_k has shape (2,) on cpu",
    ),
    "below 0": ((OFFSETS, 64), {"prefix": torch.tensor([3, -1])}, "prefix holds -1: give integers"),
    "prefixes": ((OFFSETS, 64), {"prefix": OFFSETS}, "prefix has shape (3,), and cu_seqlens 2"),
}


@pytest.mark.parametrize("given, options, message", REFUSED.values(), ids=REFUSED)
def test_refused(given, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        packed.documents(*given, **options)


def test_more_documents_than_declared():
    with pytest.raises(ValueError, match="offsets has 3 numbers in a row, length is 2: declare a"):
        packed.pad(OFFSETS, 2)
