"""Pictures: true at every zoom, without a display."""

import numpy as np
import pytest

import masks
from masks.draw import shares, tokens

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("pixels", "rows", "cols"),
    [*((pixels, None, None) for pixels in (1, 3, 7, 16, 100)), (4, (5, 30), (3, 9))],
)
def test_shares_by_counting(pixels: int, rows, cols):
    mask = masks.local(40) | masks.random_blocks(0.1, block=24, per_head=True)
    blocks = mask.build(700, 500, (16, 32), heads=2)
    layout = blocks.layout()[0, 1]
    if rows:
        layout = layout[rows[0] : rows[1] + 1, cols[0] : cols[1] + 1]
    partial, full, zoom_q, zoom_k = shares(blocks, pixels, batch=0, head=1, rows=rows, cols=cols)
    assert max(partial.shape) <= pixels
    for i, j in np.ndindex(partial.shape):
        part = layout[i * zoom_q : (i + 1) * zoom_q, j * zoom_k : (j + 1) * zoom_k]
        assert partial[i, j] == pytest.approx((part == 1).mean())
        assert full[i, j] == pytest.approx((part == 2).mean())


def test_tokens_of_a_window():
    mask = masks.local(40) | masks.random_blocks(0.1, block=24, per_head=True)
    blocks = mask.build(700, 500, (16, 32), heads=2)
    dense, layout = blocks.to_dense()[0, 1], blocks.layout()[0, 1]
    for rows, cols in (((0, 699), (0, 499)), ((5, 5), (499, 499)), ((33, 210), (40, 95))):
        codes = tokens(blocks, rows, cols, batch=0, head=1)
        q, k = np.arange(rows[0], rows[1] + 1), np.arange(cols[0], cols[1] + 1)
        assert np.array_equal(codes, dense[np.ix_(q, k)] * layout[np.ix_(q // 16, k // 32)])


def differs(ax) -> np.ndarray:
    """Which pixels of the picture are not as that of its top right corner."""
    image = np.asarray(ax.get_images()[0].get_array())
    return np.abs(image - image[0, -1]).max(-1) > 0.1


def test_zoom_shows_tokens():
    mask = masks.local(0) | masks.global_tokens(3)
    ax = mask.build(1 << 16).draw(rows=(130, 389), cols=(130, 329))
    assert (ax.get_xlim(), ax.get_ylim()) == ((130, 330), (390, 130))
    assert np.array_equal(differs(ax), np.eye(260, 200, dtype=bool))
    legend = ax.get_legend()
    assert legend is not None and "allowed, full block" in legend.get_texts()[0].get_text()
    wide = mask.build(1 << 16).draw(rows=(1000, 60000))  # by blocks again
    assert wide.get_ylim() == (60001, 1000) and wide.get_xlim() == (0, 1 << 16)


def test_a_thin_diagonal_survives():
    different = differs(masks.local(0).draw(1 << 20))
    assert len(different) <= 512 and np.array_equal(different, np.eye(len(different), dtype=bool))


def test_slices():
    mask = masks.random_blocks(0.3, per_head=True)
    first, second = (mask.draw(2048, heads=2, head=h) for h in (0, 1))
    a, b = (np.asarray(ax.get_images()[0].get_array()) for ax in (first, second))
    assert not np.array_equal(a, b) and "head 1" in second.get_title()
