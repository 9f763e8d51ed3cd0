"""Figures from a CSV alone."""

from dataclasses import asdict

import pytest

from experiments.bench.cases import make_grid
from experiments.bench.rows import SpeedRow
from experiments.common.records import OK, Records
from experiments.plot import draw_all
from tests.experiments.bench.speed_rows import ROW


def written(path, **grid):
    """A CSV as `speed` writes it, with made-up times."""
    records = Records(path, SpeedRow)
    for case in make_grid("cpu", heads=1, block_size=32, **grid).cases():
        for provider in ("cpu", "sdpa", "flex", "a new one"):
            for direction in ("forward", "backward"):
                if provider == "sdpa" and case.mask != "dense":
                    continue
                ms = case.flops(direction) / (2e8 if provider == "sdpa" else 1e8)
                fields = asdict(ROW) | asdict(case)
                fields |= {"provider": provider, "direction": direction, "density": case.density}
                fields |= {"v_dim": case.value_dim, "ideal_ms": case.flops(direction) / 1e9}
                records.append(SpeedRow(**fields | {"ms_median": ms, "ms_p20": ms, "ms_p80": ms}))
    return path


def kinds(paths):
    assert all(path.stat().st_size > 1000 for path in paths)
    assert {path.suffix for path in paths} == {".png", ".svg"}
    return {path.name.split("-")[0].split(".")[0] for path in paths}


MASKS = ["dense", "random:0.5:block=32", "random:0.25:block=32", "local:32+global:16"]


def test_every_figure_is_drawn(tmp_path):
    csv = written(tmp_path / "s.csv", mask=MASKS, seq_len=[128, 256])
    paths = draw_all(csv, tmp_path / "plots")
    assert kinds(paths) == {"speedup", "length", "masks"}
    svg = next(p for p in paths if p.name.startswith("speedup") and p.suffix == ".svg").read_text()
    for text in (
        "ideal: 1 / density",
        "fastest dense (sdpa)",
        "flex, random blocks",
        "device limit",
    ):
        assert text in svg


def test_one_direction_one_length_and_no_dense_row_are_enough(tmp_path):
    csv = written(tmp_path / "s.csv", mask=MASKS[1:], seq_len=128)
    assert kinds(draw_all(csv, tmp_path)) == {"speedup", "masks"}


def test_dense_alone_gives_time_against_length(tmp_path):
    csv = written(tmp_path / "s.csv", mask="dense", seq_len=[64, 128])
    assert kinds(draw_all(csv, tmp_path)) == {"length"}


def test_a_file_without_measurements_is_refused(tmp_path):
    Records(tmp_path / "s.csv", SpeedRow).append(SpeedRow(**asdict(ROW) | {"status": "failed: x"}))
    with pytest.raises(ValueError, match=r"no measured row.*experiments\.speed"):
        draw_all(tmp_path / "s.csv", tmp_path)
    assert OK not in (tmp_path / "s.csv").read_text().splitlines()[1].split(",")
