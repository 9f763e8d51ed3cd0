"""Figures from rows alone."""

from dataclasses import asdict

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.bench.plot import draw_speed
from experiments.bench.run import make_grid
from experiments.bench.tables import SpeedRow, newest
from experiments.common.figures import style
from tests.experiments.bench.bench_cases import ROW

MASKS = ["dense", "random:0.5:block=32", "random:0.25:block=32"]


def made_up():
    """Return rows as `speed` writes them, with made-up times."""
    rows = []
    for case in make_grid("cpu", mask=MASKS, seq_len=[256], heads=1, block_size=[32]):
        for direction in ("forward", "backward"):
            ms = case.flops(direction) / 1e8
            fields = asdict(case) | {"v_dim": case.value_dim, "density": case.density}
            fields |= {"provider": "cpu", "direction": direction, "ideal_ms": ms / 10}
            times = {"ms_median": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}
            rows.append(SpeedRow(ROW | fields | times))
    return newest(rows)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_points_are_at_their_sparsity_speed_and_time():
    rows = made_up()
    dense = next(row for row in rows if row.mask == "dense")  # twice the time of half the blocks
    longer = [SpeedRow(row | {"n_q": 512, "ms_median": 4 * row.ms}) for row in rows]
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
