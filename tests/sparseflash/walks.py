"""Random masks, and the pairs of tokens that somebody who walks over block lists sees."""

import numpy as np

from sparseflash.schedule.blocks import Schedule, unpack_bits


def random_mask(rng: np.random.Generator, outer, n_q: int, n_k: int, cell) -> np.ndarray:
    """Empty, partial and full cells, and rows and columns of nothing and of everything."""
    kinds = rng.integers(0, 4, (*outer, -(-n_q // cell[0]), -(-n_k // cell[1])))
    kinds[..., rng.integers(kinds.shape[-2]), :] = rng.choice([0, 2])
    kinds[..., :, rng.integers(kinds.shape[-1])] = rng.choice([0, 2])
    kinds = kinds.repeat(cell[0], -2).repeat(cell[1], -1)[..., :n_q, :n_k]
    return (kinds == 2) | ((kinds == 1) & (rng.random(kinds.shape) < 0.3))


def walked(schedule: Schedule, *, by_row: bool) -> tuple[np.ndarray, int]:
    """Bool (slices, n_q, n_k) that is listed, and the number of partial blocks.

    Checks the order and the dtypes of the lists.
    """
    lists = schedule.rows if by_row else schedule.cols
    sizes = schedule.block_q, schedule.block_k
    rows, cols = -(-schedule.n_q // sizes[0]), -(-schedule.n_k // sizes[1])
    n_own, slices = rows if by_row else cols, schedule.batch * schedule.heads
    seen = np.zeros((slices, rows, cols, *sizes), bool)
    tiles = unpack_bits(schedule.bits, schedule.block_k).numpy()
    ptr, mid = lists.ptr.tolist(), lists.mid.tolist()
    assert ptr[0] == 0 and len(ptr) == slices * n_own + 1 and len(mid) == slices * n_own
    assert ptr[-1] <= len(lists.idx) == len(lists.tile)
    n_partial = 0
    for line, (first, middle, last) in enumerate(zip(ptr[:-1], mid, ptr[1:], strict=True)):
        for lo, hi, full in ((first, middle, False), (middle, last, True)):
            idx, tile = lists.idx[lo:hi].tolist(), lists.tile[lo:hi].tolist()
            assert idx == sorted(set(idx)) and all((t == -1) == full for t in tile)
            n_partial += 0 if full else len(idx)
            for other, t in zip(idx, tile, strict=True):
                s, own = divmod(line, n_own)
                seen[(s, own, other) if by_row else (s, other, own)] = full or tiles[t]
    assert [str(x.dtype)[6:] for x in lists] == ["int64", "int64", "int32", "int32"]
    seen = seen.swapaxes(2, 3).reshape(slices, rows * sizes[0], cols * sizes[1])
    assert not seen[:, schedule.n_q :].any() and not seen[..., schedule.n_k :].any()
    return seen[:, : schedule.n_q, : schedule.n_k], n_partial
