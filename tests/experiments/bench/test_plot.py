"""Figures from rows alone."""

from dataclasses import asdict

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.bench.grids import make_grid
from experiments.bench.plot import draw_speed
from experiments.bench.tables import SpeedRow, newest
from experiments.common.config import as_list
from experiments.common.figures import style
from tests.experiments.bench.bench_cases import ROW

MASKS = ["dense", "random:0.5:block=32", "random:0.25:block=32", "local:32+global:16"]
PROVIDERS = ("cpu", "sdpa", "flex", "a new one")


def made_up(providers=PROVIDERS, **grid):
    """Return rows as `speed` writes them, with made-up times."""
    rows = []
    several = ("mask", "seq_len", "block_size")
    lists = {k: as_list(v) if k in several else v for k, v in grid.items()}
    for case in make_grid("cpu", **{"heads": 1, "block_size": [32]} | lists):
        for provider in providers:
            for direction in ("forward", "backward"):
                if provider == "sdpa" and case.mask != "dense":
                    continue
                ms = case.flops(direction) / (2e8 if provider == "sdpa" else 1e8)
                fields = asdict(case) | {"v_dim": case.value_dim, "density": case.density}
                fields |= {"provider": provider, "direction": direction, "ideal_ms": ms / 10}
                fields |= {} if provider in ("cpu", "hopper") else {"version": ""}
                times = {"ms_median": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}
                rows.append(SpeedRow(ROW | fields | times))
    return newest(rows)


def drawn(rows):
    with style():
        figures = draw_speed(rows)
    return figures, {name.split("-")[0] for name in figures}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("mask", "seq_len", "kinds"),
    [
        ([*MASKS, "local:32&~local:32"], [128, 256], {"speedup", "length"}),
        (MASKS[1:], 128, {"speedup"}),  # without dense
        ("dense", [64, 128], {"length"}),
    ],
)
def test_figures_of_rows(mask, seq_len, kinds):
    figures, found = drawn(made_up(mask=mask, seq_len=seq_len))
    assert found == kinds
    for name, figure in figures.items():
        if name.startswith("speedup"):
            texts = " ".join(t.get_text() for axes in figure.axes for t in axes.texts)
            assert ("1x: PyTorch SDPA, dense" in texts) == ("dense" in mask)
            legend = " ".join(t.get_text() for t in figure.legends[0].get_texts())
            assert "FlexAttention" in legend and "open: other masks" in legend


def test_points_are_at_their_sparsity_speed_and_time():
    rows = made_up(["cpu"], mask=MASKS[:3], seq_len=256)
    dense = next(row for row in rows if row.mask == "dense")  # twice the time of half the blocks
    longer = [SpeedRow(row | {"n_q": 512, "ms_median": 4 * row.ms}) for row in rows]
    figures, _ = drawn([*rows, *longer])
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
