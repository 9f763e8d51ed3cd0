"""Pictures: true at every zoom, without a display."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import masks
from masks.draw import shares

matplotlib = pytest.importorskip("matplotlib")


@pytest.mark.parametrize("pixels", [1, 3, 7, 16, 100])
def test_shares_by_counting(pixels: int):
    mask = masks.local(40) | masks.random_blocks(0.1, block=24, per_head=True)
    blocks = mask.build(700, 500, (16, 32), heads=2)
    layout = blocks.layout()[0, 1]
    partial, full, zoom_q, zoom_k = shares(blocks, pixels, batch=0, head=1)
    assert max(partial.shape) <= pixels
    for i, j in np.ndindex(partial.shape):
        part = layout[i * zoom_q : (i + 1) * zoom_q, j * zoom_k : (j + 1) * zoom_k]
        assert partial[i, j] == pytest.approx((part == 1).mean())
        assert full[i, j] == pytest.approx((part == 2).mean())


def test_a_thin_diagonal_survives():
    ax = masks.local(0).draw(1 << 20)
    image = np.asarray(ax.get_images()[0].get_array())
    background = image[0, -1]
    assert image.shape[0] <= 512
    different = np.abs(image - background).max(-1) > 0.1
    assert np.array_equal(different, np.eye(len(image), dtype=bool))


def test_the_parts_of_the_picture(tmp_path: Path):
    mask = masks.butterfly(128) | masks.local(256)
    ax = mask.draw(16384, path=tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000
    assert "butterfly(128) | local(256)" in ax.get_title() and "density 0.0777" in ax.get_title()
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 16384), (16384, 0))
    assert "token" in ax.get_xlabel() and "token" in ax.get_ylabel()
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["full", "partial", "empty"]


def test_draws_into_given_axes():
    from matplotlib.figure import Figure

    left, right = Figure(figsize=(8, 4)).subplots(1, 2)
    assert masks.causal().draw(1000, ax=left) is left
    assert masks.causal().build(1000, 300).draw(ax=right) is right
    assert right.get_xlim() == (0, 300)


def test_slices():
    mask = masks.random_blocks(0.3, per_head=True)
    first, second = (mask.draw(2048, heads=2, head=h) for h in (0, 1))
    a, b = (np.asarray(ax.get_images()[0].get_array()) for ax in (first, second))
    assert not np.array_equal(a, b) and "head 1" in second.get_title()
    with pytest.raises(ValueError, match="head is 2: this mask has 0 to 1"):
        mask.draw(2048, heads=2, head=2)
    with pytest.raises(ValueError, match="batch is -1"):
        mask.draw(2048, heads=2, batch=-1)


def test_needs_no_display():
    code = (
        "import sys, masks; masks.causal().draw(100);assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
