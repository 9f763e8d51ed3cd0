"""Patterns on a canvas: neighbourhoods, local windows, axes and tiles."""

import random
import time
from math import prod

import numpy as np
import pytest

import masks
from masks import Mask
from masks import runs as rl
from masks.patterns.neighborhood import axial, local_2d, neighborhood, sliding_tiles
from masks.runs import Grid
from masks.transforms.reorder import hilbert, morton, tiled
from tests.masks.brute import brute_dense, check
from tests.masks.cases import BLOCKS, composition
from tests.masks.oracles.canvas import any_canvas, any_canvas_mask

SIZES = (1, 12, 48, 64, 97, 128, 150)


def kinds(mask: Mask, n: int, block_size: int) -> tuple[int, int]:
    """(full, partial) blocks."""
    blocks = mask.build(n, block_size=block_size)
    lengths = np.diff(blocks.starts, append=blocks.rows * blocks.cols)
    return int(lengths[blocks.tiles == -1].sum()), int(lengths[blocks.tiles >= 0].sum())


def check_window(mask: Mask, grid: Grid, dense: np.ndarray) -> None:
    """Codes, tokens and signatures on any grid agree with the crop of the dense mask."""
    placed = mask.place(grid)
    x = np.arange(grid.size)
    _, row, col = grid.split(x)
    q_first, q_last = grid.q_first[row].tolist(), grid.q_last[row].tolist()
    k_first, k_last = grid.k_first[col].tolist(), grid.k_last[col].tolist()
    codes = placed.runs.at(x)
    tiles: dict[tuple, bytes] = {}
    signatures = zip(grid.cut(row, col), *placed.signature(x), strict=True)
    for i, signature in enumerate(signatures):
        q = np.arange(q_first[i], q_last[i] + 1)
        k = np.arange(k_first[i], k_last[i] + 1)
        tile = dense[np.ix_(q, k)]
        if codes[i] != rl.MIXED:
            assert (tile == (codes[i] == rl.FULL)).all(), (mask, grid, i)
            continue
        slice_0 = np.zeros((1, 1, 1), np.int64)
        allowed = placed.allowed(slice_0, q[None, :, None], k[None, None, :])
        assert np.array_equal(np.broadcast_to(allowed, (1, *tile.shape))[0], tile), (mask, grid, i)
        assert tiles.setdefault(signature, tile.tobytes()) == tile.tobytes(), (mask, grid, i)


def any_grid(rng: random.Random, n_q: int, n_k: int) -> Grid:
    block_q, block_k = rng.choice([4, 7, 16, 33]), rng.choice([5, 16, 24])
    origins = rng.randrange(1 - block_q, n_q), rng.randrange(1 - block_k, n_k)
    return Grid(n_q, n_k, block_q, block_k, 1, 1, *origins)


@pytest.mark.parametrize("seed", range(300))
def test_composition(seed: int):
    rng = random.Random(seed)
    n = rng.choice(SIZES)
    mask = any_canvas_mask(rng, any_canvas(rng, n))
    if seed % 3:
        other = composition(rng, n, n, rng.randrange(2))
        mask = rng.choice([mask | other, mask & other, mask - other, other - mask])
    dense = brute_dense(mask, n, n)
    check(mask, mask.build(n, block_size=(rng.choice(BLOCKS), rng.choice(BLOCKS))), dense)
    check_window(mask, any_grid(rng, n, n), dense[0, 0])


def natten_start(i: int, kernel: int, stride: int, length: int) -> int:
    """Reference 1.11: the formula of NATTEN's kernels."""
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    leader = min(i // stride * stride + stride // 2, length - 1)
    return max(leader - left, 0) + (leader + right >= length) * (length - right - leader - 1)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 23])
def test_formula_of_natten(length: int):
    for kernel in range(1, length + 1):
        for stride in range(1, kernel + 1):
            dense = neighborhood((length,), kernel, stride=stride).build(length).to_dense()[0, 0]
            for i, row in enumerate(dense):
                start = natten_start(i, kernel, stride, length)
                assert np.flatnonzero(row).tolist() == list(range(start, start + kernel))


@pytest.mark.parametrize(("kernel", "keys"), [(3, 9), (4, 16), ((4, 7), 28), (8, 64)])
def test_every_query_has_the_whole_kernel(kernel, keys: int):
    """Also on canvases that are no squares, and for even kernels."""
    dense = neighborhood((16, 8), kernel).build(128).to_dense()
    assert (dense.sum(-1) == keys).all()


def test_a_short_row_in_plain_sight():
    rows = neighborhood((7,), 2, dilation=3).build(7, block_size=16).to_dense()[0, 0]
    # the residue classes are 0 3 6, 1 4 and 2 5
    seen = [np.flatnonzero(row).tolist() for row in rows]
    assert seen == [[0, 3], [1, 4], [2, 5], [0, 3], [1, 4], [2, 5], [3, 6]]


@pytest.mark.parametrize(("extent", "kernel", "dilation"), [(20, 5, 1), (20, 5, 3), (11, 3, 2)])
def test_pairs_of_a_causal_axis(extent: int, kernel: int, dilation: int):
    mask = neighborhood((extent, 4), (kernel, 2), dilation=(dilation, 1), causal=(True, False))
    pairs = mask.build(extent * 4, block_size=16).to_dense().sum()
    assert pairs == (extent * kernel - dilation * kernel * (kernel - 1) // 2) * 4 * 2


@pytest.mark.parametrize(
    ("kernel", "block", "rows", "tiles"),
    [
        (7, 64, (0, 3584), (0, 2116)),
        (7, 128, (0, 896), (0, 1012)),
        (17, 64, (0, 8704), (324, 1980)),
        (17, 128, (0, 2176), (0, 1056)),
        (33, 64, (0, 16896), (2704, 3696)),
        (33, 128, (0, 4224), (520, 1400)),
    ],
)
def test_published_counts(kernel: int, block: int, rows: tuple, tiles: tuple):
    """Full and partial blocks of an image of 128 x 128, in rows and in tiles (reference 1.11)."""
    canvas, n = (128, 128), 128 * 128
    mask = neighborhood(canvas, kernel)
    assert kinds(mask, n, block) == rows
    assert kinds(mask >> tiled(canvas, (8, block // 8)), n, block) == tiles
    assert kinds(mask >> morton(canvas), n, block) == tiles
    if block == 64:  # aligned squares: the same in every such curve
        assert kinds(mask >> hilbert(canvas), n, block) == tiles


def test_published_counts_of_hilbert():
    canvas, n = (128, 128), 128 * 128
    for kernel, count in ((7, (0, 966)), (17, (0, 1018)), (33, (464, 1600))):
        assert kinds(neighborhood(canvas, kernel) >> hilbert(canvas), n, 128) == count


@pytest.mark.parametrize("canvas", [(9,), (6, 9), (3, 4, 5)])
def test_local_counts(canvas: tuple[int, ...]):
    for r in range(min(canvas)):
        pairs = local_2d(canvas, r).build(prod(canvas), block_size=16).to_dense().sum()
        assert pairs == prod((2 * r + 1) * e - r * (r + 1) for e in canvas)
    reach = max(canvas) * 10**6
    assert local_2d(canvas, reach).build(prod(canvas)) == masks.dense().build(prod(canvas))
    assert kinds(local_2d(canvas, reach, norm="euclidean"), prod(canvas), 16)[1] == 0


def test_balls():
    """The lattice points of diamonds (2r(r + 1) + 1) and of discs."""
    canvas, centre = (31, 31), 15 * 31 + 15
    for r, disc in enumerate([1, 5, 13, 29, 49, 81, 113]):
        for norm, count in (("manhattan", 2 * r * (r + 1) + 1), ("euclidean", disc)):
            dense = local_2d(canvas, r, norm=norm).build(31 * 31).to_dense()
            assert dense[0, 0, centre].sum() == count
            assert np.array_equal(dense[0, 0], dense[0, 0].T)


@pytest.mark.parametrize("canvas", [(9,), (6, 9), (3, 4, 5)])
def test_axial_counts(canvas: tuple[int, ...]):
    dense = axial(canvas).build(prod(canvas)).to_dense()
    assert (dense.sum(-1) == sum(canvas) - len(canvas) + 1).all()


@pytest.mark.parametrize(
    ("canvas", "tile", "window"), [((24, 24), 4, 3), ((8, 12, 16), 4, (1, 3, 2))]
)
def test_sliding_tiles_are_full_blocks(canvas, tile: int, window):
    n, block = prod(canvas), tile ** len(canvas)
    mask = sliding_tiles(canvas, tile, window) >> tiled(canvas, tile)
    per_row = prod(window) if isinstance(window, tuple) else window ** len(canvas)
    assert kinds(mask, n, block) == (n // block * per_row, 0)


@pytest.mark.parametrize(
    "text",
    [
        "neighborhood((16, 8), 3)",
        "neighborhood((16, 8), (3, 5), dilation=(2, 1), stride=2, causal=(True, False))",
        "neighborhood((128,), 3, causal=True)",
        "local_2d((16, 8), 3)",
        "local_2d((2, 8, 8), 3, norm='euclidean')",
        "local_2d((16, 8), (0, 7)) | local_2d((16, 8), (15, 0))",
        "sliding_tiles((16, 8), (4, 2), 3)",
    ],
)
def test_text(text: str):
    mask = masks.parse(text)
    assert str(mask) == text and masks.parse(str(mask)) == mask
    mask.build(128)


def test_text_is_canonical():
    assert masks.parse("natten:16x8:3") == neighborhood((16, 8), (3, 3), dilation=(1, 1))
    assert masks.parse("axial:16x8") == axial((16, 8)) == axial([16, 8])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: neighborhood((8, 8), 3).build(63), "n_q is 63 and n_k 63, but .* has 64 tokens"),
        (lambda: neighborhood((8, 8), 3).build(64, 65), "n_q is 64 and n_k 65"),
        (lambda: (local_2d((8, 8), 3) >> tiled((4, 4), 2)).build(16), "has 64 tokens"),
        (lambda: neighborhood((8, 4), 3, dilation=2), "needs an extent of 6, but .* has 4"),
        (lambda: neighborhood((8, 8), 9), "needs an extent of 9"),
        (lambda: neighborhood((8, 8), 3, stride=4), "stride is 4: give an integer <= the kernel"),
        (lambda: neighborhood((8, 8), (3, 3, 3)), r"kernel is \(3, 3, 3\): give one integer, or 2"),
        (lambda: neighborhood((8, 8), 0), "kernel is 0"),
        (lambda: neighborhood((8, 8), 3, dilation=0), "dilation is 0"),
        (lambda: neighborhood((8, 8), 3, causal=1), "causal is 1: give True or False"),  # type: ignore[arg-type]
        (lambda: neighborhood((8, 8), 3, causal=(True,)), "give one flag, or 2"),
        (lambda: neighborhood(64, 3), "canvas is 64: give one to three extents"),  # type: ignore[arg-type]
        (lambda: neighborhood((2, 2, 2, 2), 1), "one to three extents"),
        (lambda: local_2d((8, 0), 3), "canvas extent is 0"),
        (lambda: local_2d((8, 8), -1), "radius is -1"),
        (lambda: local_2d((8, 8), 1, norm="l1"), "norm is 'l1'"),
        (lambda: local_2d((8, 8), (1, 2), norm="manhattan"), "give one integer for the norm"),
        (lambda: sliding_tiles((8, 8), 4, 3), "window is 3, but an extent of 8 has 2 tiles of 4"),
        (lambda: sliding_tiles((8, 8), 0, 1), "tile is 0"),
    ],
)
def test_refuses(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        (neighborhood((1024, 1024), 33), 5),
        (neighborhood((64, 128, 128), (3, 5, 5)), 1),
        (local_2d((1024, 1024), 16), 5),
        (sliding_tiles((1024, 1024), 8, 5), 5),
    ],
    ids=str,
)
def test_a_million_tokens(mask: Mask, tiles: int):
    """Three quarters of a million partial blocks, and few kinds of them; generous seconds."""
    begin = time.perf_counter()
    blocks = mask.build(1 << 20)
    assert time.perf_counter() - begin < 20
    assert len(blocks.bits) <= tiles
