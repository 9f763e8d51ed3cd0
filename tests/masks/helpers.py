"""Masks from text, random ones, and what they allow by the definitions, token by token."""

import random
import re

import numpy as np
import scipy.sparse

import masks
from masks import BlockMask, Mask
from masks import runs as rl
from masks.algebra import And, Not, Or
from masks.leaves.leaf import ByLength
from masks.runs import Grid
from tests.masks.oracles import LEAVES, ORACLES

B = 16  # tokens of a token block


def mask_of(expression: str) -> Mask:
    """Python with the names of `masks`."""
    return eval(expression, {**vars(masks), "np": np, "scipy": scipy})


def rows(table: str) -> list[list[str]]:
    """Lines `a  =>  b` of a text; a line that begins with => goes on with the one before."""
    lines = re.sub(r"\n +=>", "  =>", table.strip()).split("\n")
    return [line.split("  =>  ") for line in lines]


def dense(mask: Mask, n_q: int, n_k: int | None = None) -> np.ndarray:
    """bool (n_q, n_k)"""
    return mask.build(n_q, n_k, 32).to_dense()[0, 0]


def graph(
    mask: Mask, n: int, heads: int | None = None, *, block: int = B, cols: int | None = None
) -> np.ndarray:
    """bool (heads or 1, n, cols or n), of token blocks"""
    return mask.build(n * block, (cols or n) * block, block, heads=heads).layout()[0] > 0


def kinds(mask: Mask, n: int, block_size: int) -> tuple[int, int, int]:
    """(full blocks, partial blocks, bit tiles)"""
    blocks = mask.build(n, block_size=block_size)
    lengths = np.diff(blocks.starts, append=blocks.grid.size)
    full, partial = (lengths[kind].sum() for kind in (blocks.tiles == -1, blocks.tiles >= 0))
    return int(full), int(partial), len(blocks.bits)


BLOCKS = (16, 32, 48, 64)
LENGTHS = (1, 15, 16, 63, 64, 97, 128, 161)


def composition(rng: random.Random, n_q: int, n_k: int, depth: int) -> Mask:
    """Random leaves, joined; extents that vary are left to tests of their own."""
    if depth == 0:
        return rng.choice(LEAVES)(rng, n_q, n_k)
    a = composition(rng, n_q, n_k, depth - 1)
    match rng.choice("|&-~"):
        case "|":
            return a | composition(rng, n_q, n_k, rng.randrange(depth))
        case "&":
            return a & composition(rng, n_q, n_k, rng.randrange(depth))
        case "-":
            return a - composition(rng, n_q, n_k, rng.randrange(depth))
        case _:
            return ~a


def any_blocks(rng: random.Random) -> BlockMask:
    """A composition, half of the time with heads, batch entries and blocks with holes."""
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    if rng.random() < 0.5:
        data = np.random.default_rng(rng.randrange(1 << 30))
        shape = rng.choice([1, 2]), rng.choice([1, 3]), n_q, n_k
        mask = mask & masks.mask_from(data.random(shape) < rng.choice([0.9, 0.999]))
        mask |= masks.local(20)
    return mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS)))


def brute_dense(mask: Mask, n_q: int, n_k: int, batch: int = 1, heads: int = 1) -> np.ndarray:
    """bool (batch, heads, n_q, n_k)"""
    dense = allowed(mask, n_q, n_k, heads)
    return np.ascontiguousarray(np.broadcast_to(dense, (batch, heads, n_q, n_k)))


def allowed(mask: Mask, n_q: int, n_k: int, heads: int = 1) -> np.ndarray:
    """bool, broadcasting to (batch, heads, n_q, n_k)"""
    match mask:
        case Or():
            return np.any(_parts(mask, n_q, n_k, heads), axis=0)
        case And():
            return np.all(_parts(mask, n_q, n_k, heads), axis=0)
        case Not():
            return ~allowed(mask.part, n_q, n_k, heads)
    found = ORACLES.get(mask.kind) or ORACLES.get(type(getattr(mask, "transform", mask)))
    if found:
        return found(mask, n_q, n_k, heads)
    # A rule is its own definition, which test_counts compares with those of others.
    rule = mask.make(Grid(n_q, n_k, 16, 16)) if isinstance(mask, ByLength) else mask
    places = {
        "b": np.arange(mask.batch or 1)[:, None, None, None],
        "h": np.arange(heads)[:, None, None],
        "q": np.arange(n_q)[:, None],
        "k": np.arange(n_k),
    }
    dense = rule.fn(*[places[place] for place in rule.places])
    return np.broadcast_to(dense, np.broadcast_shapes(dense.shape, (n_q, n_k)))


def _parts(mask: Or | And, n_q: int, n_k: int, heads: int) -> list[np.ndarray]:
    return list(np.broadcast_arrays(*[allowed(part, n_q, n_k, heads) for part in mask.parts]))


def brute_layout(dense: np.ndarray, block_size: tuple[int, int]) -> np.ndarray:
    """uint8 (batch, heads, rows, cols) by looking into every block of a dense mask."""
    block_q, block_k = block_size
    batch, heads, n_q, n_k = dense.shape
    layout = np.zeros((batch, heads, -(-n_q // block_q), -(-n_k // block_k)), np.uint8)
    for b, h, i, j in np.ndindex(layout.shape):
        block = dense[b, h, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        layout[b, h, i, j] = 2 if block.all() else 1 if block.any() else 0
    return layout


def check(mask: Mask, blocks: BlockMask, dense: np.ndarray) -> None:
    """`blocks` is the normal form of `dense` (batch, heads, n_q, n_k)."""
    assert np.array_equal(blocks.to_dense(), dense), mask
    assert np.array_equal(blocks.layout(), brute_layout(dense, blocks.block_size)), mask
    # Every bit is that of the dense mask, those beyond its ends included, which are 0.
    bits = BlockMask.from_dense(dense, blocks.block_size).bits
    assert np.array_equal(blocks.bits, bits), mask
    assert len({tile.tobytes() for tile in blocks.bits}) == len(blocks.bits)
    numbers = blocks.tiles[blocks.tiles >= 0]
    _, first = np.unique(numbers, return_index=True)
    assert len(first) == len(blocks.bits) and (np.diff(first) > 0).all()  # by order of appearance


def any_grid(rng: random.Random, n_q: int, n_k: int) -> Grid:
    """A grid that begins before, at, or beyond the first tokens, and ends anywhere."""
    block_q, block_k = rng.choice([1, 4, 7, 16, 33]), rng.choice([2, 5, 16, 24])
    origins = rng.randrange(1 - block_q, n_q), rng.randrange(1 - block_k, n_k)
    grid = Grid(n_q, n_k, block_q, block_k, 1, 1, *rng.choice([origins, origins, (0, 0)]))
    if rng.random() < 0.5:
        return grid
    first_row, first_col = rng.randrange(grid.rows), rng.randrange(grid.cols)
    last_row, last_col = rng.randrange(first_row, grid.rows), rng.randrange(first_col, grid.cols)
    return grid.window((first_row, last_row + 1), (first_col, last_col + 1))


def check_window(mask: Mask, grid: Grid, dense: np.ndarray) -> None:
    """Codes, tokens and signatures on any grid agree with the window of `dense` (n_q, n_k)."""
    placed, x = mask.place(grid), np.arange(grid.size)
    _, row, col = grid.split(x)
    ends = (a.tolist() for a in (grid.q_first[row], grid.q_last[row] + 1))
    key_ends = (a.tolist() for a in (grid.k_first[col], grid.k_last[col] + 1))
    signatures = zip(grid.cut(row, col), *placed.signature(x), strict=True)
    tiles: dict[tuple, bytes] = {}
    for code, top, bottom, left, right, signature in zip(
        placed.runs.at(x), *ends, *key_ends, signatures, strict=True
    ):
        tile = dense[top:bottom, left:right]
        if code != rl.MIXED:
            assert (tile == (code == rl.FULL)).all(), (mask, grid, top, left)
            continue
        q, k = np.arange(top, bottom)[None, :, None], np.arange(left, right)[None, None]
        allowed = placed.allowed(np.zeros((1, 1, 1), np.int64), q, k)
        assert (np.broadcast_to(allowed, (1, *tile.shape)) == tile).all(), (mask, grid, top, left)
        alike = tiles.setdefault(signature, tile.tobytes())
        assert alike == tile.tobytes(), (mask, grid, top, left)
