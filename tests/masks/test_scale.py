"""A million tokens in milliseconds and megabytes; a light import; a cache among threads."""

import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import masks
from tests.masks.helpers import LONG, assert_builds_within

SPARSE = masks.local(256) | masks.butterfly(128) | masks.global_tokens(64)


def random_lengths(mean: int) -> list[int]:
    lengths = 1 + np.random.default_rng(0).exponential(mean - 1, 2 * LONG // mean)
    return lengths.astype(int).tolist()


LENGTHS = random_lengths(2000)
ENDS = np.cumsum(LENGTHS)
LAST = np.minimum(np.arange(len(ENDS)) + 8, len(ENDS) - 1)
ANSWERED = np.where(np.arange(len(ENDS)) % 9, ENDS, ENDS[LAST])  # prompts, each with eight answers
TIMES = {  # of a million tokens: milliseconds, and bit tiles at most
    SPARSE: (300, 6),
    SPARSE & masks.causal(): (300, 6),
    masks.causal(): (10, 1),
    masks.local(256): (10, 2),
    masks.sinks(64) & masks.causal(): (300, 2),
    masks.global_tokens(64): (300, 3),
    masks.prefix_lm(1000): (300, 3),
    masks.streaming(4, 4096): (300, 4),
    masks.tri_shape(4, 4096, 64): (300, 7),
    masks.dilated(4096, 4): (300, 3),
    masks.power_of_two() & masks.causal(): (300, 3),
    masks.power_of_two(128) & masks.causal(): (300, 1),
    masks.diagonals((0, 3, 1000, 100_000)): (300, 6),
    masks.fixed(65536, 128): (300, 9),
    masks.fixed(262144, 20, vertices=2): (300, 9),
    masks.log_sparse(1 << 20): (1000, 9),
    masks.documents(LENGTHS) & masks.causal(): (100, 1000),
    masks.shared_prefix(1000, LENGTHS) & masks.causal(): (100, 1000),
    masks.hstu(LENGTHS, np.minimum(LENGTHS, 20)): (300, 2000),
    masks.prefix_tree(ENDS - LENGTHS, ANSWERED): (300, 1000),
    masks.causal() >> masks.packed(LENGTHS): (300, 1000),
    masks.causal() >> masks.shift(1000): (30, 3),
    masks.causal() >> masks.snap(128): (30, 0),
    masks.block_diagonal(2048): (10, 0),
    masks.block_diagonal(2000) & masks.causal(): (30, 32),
    masks.block_causal(32): (30, 1),
    masks.block_diffusion(4): (300, 9),
    masks.frame_causal(1560, 21, sinks=3): (300, 150),
    masks.butterfly(size=8192): (300, 0),
    masks.pixelfly(): (300, 0),
    masks.bigbird(128, per_head=False): (300, 0),
    masks.random_regular(8): (300, 0),
    masks.expander(8): (300, 0),
    masks.hubs(): (300, 0),
    masks.longformer(512) & masks.causal(): (300, 9),
    masks.etc_(256, 512): (300, 2),
}


@pytest.mark.parametrize("mask", TIMES, ids=lambda mask: str(mask)[:60])
@pytest.mark.usefixtures("no_cache")
def test_build_time(mask: masks.Mask):
    milliseconds, tiles = TIMES[mask]
    heads = None if mask.period == 1 else mask.period
    assert_builds_within(mask, milliseconds, tiles, heads=heads)


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        (masks.neighborhood((1024, 1024), 33), 5),
        (masks.neighborhood((64, 128, 128), (3, 5, 5)), 1),
        (masks.local_2d((1024, 1024), 16), 5),
        (masks.sliding_tiles((1024, 1024), 8, 5), 5),
    ],
    ids=str,
)
def test_canvases_of_a_million_tokens(mask: masks.Mask, tiles: int):
    """Up to three quarters of a million partial blocks, and few kinds."""
    assert len(mask.build(LONG).bits) <= tiles


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


def test_import_is_light(tmp_path: Path):
    """The best of up to ten, in seconds of the processor: the machine may be doing other things.

    With compiled files, as a user imports it; the first of the ten writes them.
    """
    code = (
        "import sys, time; import numpy; begin = time.process_time(); import masks;"
        "print(time.process_time() - begin);"
        "heavy = {'torch', 'triton', 'matplotlib', 'scipy', 'einops'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    run = [sys.executable, "-c", code]
    settings = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    seconds = []
    while len(seconds) < 10 and (not seconds or min(seconds) >= 0.2):
        done = subprocess.run(run, check=True, capture_output=True, env=settings)
        seconds.append(float(done.stdout))
    assert min(seconds) < 0.2


def test_building_again_is_free():
    mask = masks.local(3) | masks.butterfly(64)
    assert mask.build(1000) is masks.parse(str(mask)).build(1000, 1000, (128, 128))
    assert mask.build(1000) is not mask.build(1000, block_size=64)
    assert mask.build(1000, heads=4) is mask.build(1000)  # it is the same for all heads


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
