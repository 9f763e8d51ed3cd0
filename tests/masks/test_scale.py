"""A million tokens in few tiles and megabytes; a cache among threads."""

import threading
import tracemalloc

import numpy as np
import pytest

import masks
from tests.masks.helpers import LONG
from tests.notes import note

SPARSE = masks.local(256) | masks.butterfly(128) | masks.global_tokens(64)


def random_lengths(mean: int) -> list[int]:
    lengths = 1 + np.random.default_rng(0).exponential(mean - 1, 2 * LONG // mean)
    return lengths.astype(int).tolist()


LENGTHS = random_lengths(2000)
ENDS = np.cumsum(LENGTHS)
LAST = np.minimum(np.arange(len(ENDS)) + 8, len(ENDS) - 1)
ANSWERED = np.where(np.arange(len(ENDS)) % 9, ENDS, ENDS[LAST])  # prompts, each with eight answers
MILLIONS = {  # tiles at most of a million tokens
    SPARSE & masks.causal(): 6,
    masks.local(256): 2,
    masks.tri_shape(4, 4096, 64): 7,
    masks.power_of_two() & masks.causal(): 3,
    masks.diagonals((0, 3, 1000, 100_000)): 6,
    masks.fixed(65536, 128): 9,
    masks.fixed(262144, 20, vertices=2): 9,
    masks.log_sparse(1 << 20): 9,
    masks.documents(LENGTHS) & masks.causal(): 1000,
    masks.shared_prefix(1000, LENGTHS) & masks.causal(): 1000,
    masks.hstu(LENGTHS, np.minimum(LENGTHS, 20)): 2000,
    masks.prefix_tree(ENDS - LENGTHS, ANSWERED): 1000,
    masks.causal() >> masks.packed(LENGTHS): 1000,
    masks.block_diagonal(2000) & masks.causal(): 32,
    masks.block_diffusion(4): 9,
    masks.frame_causal(1560, 21, sinks=3): 150,
    masks.bigbird(128, per_head=False): 0,
    masks.expander(8): 0,
    masks.longformer(512) & masks.causal(): 9,
    masks.neighborhood((64, 128, 128), (3, 5, 5)): 1,
    masks.local_2d((1024, 1024), 16): 5,
    masks.sliding_tiles((1024, 1024), 8, 5): 5,
}


@pytest.mark.usefixtures("no_cache")
def test_masks_of_a_million_tokens_have_few_tiles():
    for mask, tiles in MILLIONS.items():
        with note(mask):
            heads = None if mask.period == 1 else mask.period
            assert len(mask.build(LONG, heads=heads).bits) <= tiles


@pytest.mark.parametrize(
    ("mask", "mebibytes"),
    [
        (masks.causal(), 10),
        (masks.local(256), 10),
        (SPARSE & masks.causal(), 80),
        (masks.power_of_two() & masks.causal(), 100),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_cache")
def test_build_memory(mask: masks.Mask, mebibytes: float):
    """Far below the 64 MiB of one byte a block, let alone the 1 TiB of one a pair of tokens."""
    mask.build(LONG // 2)  # what the first call loads
    tracemalloc.start()
    blocks = mask.build(LONG - 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert blocks.rows == LONG // 128 and peak < mebibytes * 2**20


def test_cache_among_threads():
    errors: list[Exception] = []

    def build() -> None:
        try:
            for n in range(1, 60):
                assert masks.sliding(5).build(n, block_size=16).n_q == n
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
