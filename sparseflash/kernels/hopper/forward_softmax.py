"""Softmax of a block in the Hopper forward, and its dropout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.hopper.common import column_key, keeps, piece_tokens


@gluon.jit
def dropped(p, idx_ptr, entry, row_keys, column_head, threshold, PIECE: gl.constexpr):
    """P with what dropout takes set to 0."""
    COLS: gl.constexpr = p.shape[1]
    C_L: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    at = idx_ptr + entry.to(gl.int64) * (COLS // PIECE)
    block, token = piece_tokens(at, COLS, PIECE, C_L)
    column_keys = column_key(block * PIECE + token, column_head)
    return gl.where(keeps(row_keys[:, None], column_keys[None, :], threshold), p, 0.0)


@gluon.jit
def _row_max(s, T_L: gl.constexpr):
    """Of S (64, MINOR), as a tree: a chain of maxima would wait for itself."""
    R_S: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    COLS: gl.constexpr = s.shape[1]
    t = gl.convert_layout(s.reshape([64, COLS // 32, 4, 4, 2]), T_L, assert_trivial=True)
    t = gl.max(gl.max(gl.max(t, 4), 2), 1)
    return gl.convert_layout(gl.max(t, 1), R_S, assert_trivial=True)


@gluon.jit
def softmax(s, m, scale, MASKED: gl.constexpr, T_L: gl.constexpr):
    """(P, new maxima, factor of the old ones)."""
    m_new = gl.maximum(m, _row_max(s, T_L) * scale)
    m_sub = m_new
    if MASKED:
        m_sub = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    return gl.exp2(s * scale - m_sub[:, None]), m_new, gl.exp2(m - m_sub)


@gluon.jit
def row_sums(p, LAYOUT: gl.constexpr):
    """Of P (64, MINOR), one for each of the four lanes that share a row: (64, 4).

    Only the maxima of a block must be known to all four; the sums are joined when a tile ends.
    """
    COLS: gl.constexpr = p.shape[1]
    p = gl.convert_layout(p.reshape([64, COLS // 8, 4, 2]), LAYOUT, assert_trivial=True)
    return gl.sum(gl.sum(p, 3), 1)
