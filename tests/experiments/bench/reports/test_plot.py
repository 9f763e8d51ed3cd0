"""Figures from rows alone."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.bench.grids import make_grid
from experiments.bench.reports.plot import draw_speed
from experiments.bench.rows import SpeedRow
from experiments.common.figures import COLUMN, PAGE, style
from experiments.common.records import Records
from experiments.plot import draw_all, measured, patterns
from tests.experiments.bench.bench_cases import ROW

MASKS = ["dense", "random:0.5:block=32", "random:0.25:block=32", "local:32+global:16"]


def made_up(providers=("cpu", "sdpa", "flex", "a new one"), **grid):
    """Rows as `speed` writes them, with made-up times."""
    for case in make_grid("cpu", **{"heads": 1, "block_size": 32} | grid).cases():
        for provider in providers:
            for direction in ("forward", "backward"):
                if provider == "sdpa" and case.mask != "dense":
                    continue
                ms = case.flops(direction) / (2e8 if provider == "sdpa" else 1e8)
                fields = asdict(case) | {"v_dim": case.value_dim, "density": case.density}
                fields |= {"provider": provider, "direction": direction, "ideal_ms": ms / 10}
                yield replace(ROW, **fields, ms_median=ms, ms_p20=0.9 * ms, ms_p80=1.1 * ms)


def written(path, **grid):
    records = Records(path, SpeedRow)
    for row in made_up(**grid):
        records.append(row)
    return path


def kinds(paths):
    assert all(path.stat().st_size > 1000 for path in paths)
    assert {path.suffix for path in paths} == {".png", ".svg"}
    return {path.name.split("-")[0].split(".")[0] for path in paths}


def test_every_figure_is_drawn(tmp_path):
    csv = written(tmp_path / "s.csv", mask=MASKS, seq_len=[128, 256])
    paths = draw_all(measured(csv), tmp_path / "plots")
    assert kinds(paths) == {"speedup", "length", "masks"}
    names = {path.stem for path in paths}
    assert "speedup-some-cpu-2-threads-b1-h1-n128-d64-float32" in names
    svg = next(p for p in paths if p.name.startswith("speedup") and p.suffix == ".svg").read_text()
    for text in ("ideal: 1 / density", "1x: PyTorch SDPA, dense", "FlexAttention"):
        assert text in svg


def test_points_are_at_their_sparsity_speed_and_time():
    rows = list(made_up(["cpu"], mask=MASKS[:3], seq_len=256))
    dense = next(row for row in rows if row.mask == "dense")  # twice the time of half the blocks
    longer = [replace(row, n_q=512, ms_median=4 * row.ms) for row in rows]
    with style():
        figures = draw_speed([*rows, *longer])
        speedup = next(f for name, f in figures.items() if "speedup" in name and "n256" in name)
        length = next(f for name, f in figures.items() if "length" in name)
    points = speedup.axes[0].containers[0]
    sparse = sorted((row for row in rows if row.random), key=lambda row: row.density)
    sparse = [row for row in sparse if row.direction == "forward"]
    x, y = points.lines[0].get_data()
    assert x == pytest.approx([np.log2(1 / row.density) for row in sparse])
    assert y == pytest.approx([dense.ms / row.ms for row in sparse])
    for (low, high), value in zip(points.lines[2][0].get_segments(), y, strict=True):
        assert (low[1], high[1]) == pytest.approx((value / 1.1, value / 0.9))
    x, y = speedup.axes[1].containers[0].lines[0].get_data()  # beside it the rate
    assert x == pytest.approx([np.log2(1 / row.density) for row in sparse])
    assert y == pytest.approx([row.tflops for row in sparse])
    speedup.draw_without_rendering()
    ticks = [float(text.get_text()) for text in speedup.axes[-1].get_xticklabels()]
    assert ticks[:2] == [0, 50]  # sparsity, where half of the blocks are a step
    x, y = length.axes[0].containers[0].lines[0].get_data()
    assert (list(x), list(y)) == ([256, 512], [dense.ms, 4 * dense.ms])
    plt.close("all")


def test_a_legend_is_short_and_names_what_a_reader_knows():
    ours = ("hopper", "hopper_deterministic", "fa4", "flex")
    rows = [row for n in (16, 32, 64) for row in made_up(ours, mask=MASKS, seq_len=256,
                                                         block_size=n)]  # fmt: skip
    with style():
        for figure in draw_speed(rows).values():
            texts = [text.get_text() for text in figure.legends[0].get_texts()]
            names = [text for text in texts if ": " not in text]  # others have a mask
            assert len(texts) <= 12 and not any("_" in text for text in names)
            assert "FlashAttention-4" in texts and "SparseFlash (Hopper)" in texts
            assert figure.get_figwidth() in (COLUMN, PAGE)
            figure.draw_without_rendering()
            assert figure.legends[0].get_window_extent().width <= figure.bbox.width
            plt.close(figure)


@pytest.mark.parametrize(
    ("mask", "seq_len", "found"),
    [
        ([*MASKS, "local:32&~local:32"], 128, {"speedup", "masks"}),  # the last has no block
        (MASKS[1:], 128, {"speedup", "masks"}),
        ("dense", [64, 128], {"length"}),
    ],
)
def test_figures_of_a_few_rows(mask, seq_len, found, tmp_path):
    csv = written(tmp_path / "s.csv", mask=mask, seq_len=seq_len)
    assert kinds(draw_all(measured(csv), tmp_path)) == found


def test_structured_masks_alone_have_their_speed_up(tmp_path):
    csv = written(tmp_path / "s.csv", mask=["dense", "local:32", "local:64"], seq_len=256)
    paths = draw_all(measured(csv), tmp_path / "plots")
    assert kinds(paths) == {"speedup", "masks"}
    svg = next(p for p in paths if p.name.startswith("speedup") and p.suffix == ".svg").read_text()
    assert "FlexAttention" in svg and "a: local(32)" in svg and "b: local(64)" in svg
    one = written(tmp_path / "one.csv", mask=["dense", "local:32"], seq_len=256)
    assert kinds(draw_all(measured(one), tmp_path / "one")) == {"masks"}


def test_a_mask_that_begins_with_random_blocks_is_structured():
    drawn = replace(ROW, mask="random_blocks(0.5, block=32, per_head=True)")
    assert drawn.random
    assert not replace(drawn, mask="random_blocks(0.5) & causal()").random
    assert not replace(drawn, mask="random_blocks(0.5) | global_tokens(16)").random


def test_random_blocks_are_shown_once():
    rows = list(made_up(mask=[*MASKS, "causal"], seq_len=[128, 256]))
    found = patterns(rows)
    assert [blocks.text for blocks in found if "random" not in blocks.text] == [
        "local(32) | global_tokens(16)",
        "causal()",
    ]
    assert len(found) == 3


def test_a_file_without_measurements_is_refused(tmp_path):
    Records(tmp_path / "s.csv", SpeedRow).append(replace(ROW, status="failed: x"))
    with pytest.raises(ValueError, match=r"no measured row.*experiments\.speed"):
        measured(tmp_path / "s.csv")


def test_rows_of_one_version_of_triton(tmp_path):
    records = Records(tmp_path / "s.csv", SpeedRow)
    for number, version in enumerate(("3.6.0", "3.9.0")):
        records.append(replace(ROW, triton=version, ms_median=1.0 + number))
    assert [row.ms for row in measured(records.path)] == [2.0]
    assert [row.ms for row in measured(records.path, "3.6.0")] == [1.0]
    with pytest.raises(ValueError, match=r"no measured row with triton=3\.7\.1"):
        measured(records.path, "3.7.1")
