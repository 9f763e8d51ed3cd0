"""Comparisons of rows whose times follow from their work."""

from dataclasses import replace

import pytest

from experiments.bench.reports import compare
from tests.experiments.bench.bench_cases import ROW, made_up_rows


def test_it_compares_what_belongs_together(monkeypatch):
    rows = made_up_rows(monkeypatch)
    found = {}
    for score in compare.scores(rows, "cpu"):
        found.setdefault(score.comparison, []).append(score)
    assert {s.value for s in found["sdpa_cudnn time / cpu time"]} == {2.0}
    assert {s.value for s in found["ideal time / time"]} == {0.5}
    even = found["even time / uneven time, at one density"]
    assert all(s.value == pytest.approx(1) for s in even)
    assert any(s.case.startswith("bigbird") for s in even)
    small = found["time at 128 / time at smaller blocks"]
    assert {round(s.value, 6) for s in small} == {0.25, 1.0}
    assert all((s.value < 0.5) == ("16x16" in s.case) for s in small)
    text = compare.report(rows, "cpu")
    assert "summary (above 1 is better)" in text and "own dense x density" in text
    with pytest.raises(ValueError, match=r"own='hopper': choose from cpu, sdpa_cudnn"):
        compare.report(rows, "hopper")


def test_a_mask_without_a_block_has_no_speed_to_compare():
    dense = replace(ROW, mask="dense", density=1.0)
    even = replace(ROW, mask="random_blocks(0.25)")
    rows = [dense, even, replace(ROW, mask="local(0) & ~local(0)", density=0.0, tflops=0.0)]
    found = [s.comparison for s in compare.scores(rows, "cpu") if s.case.startswith("local")]
    assert found == [compare.IDEAL]
    assert "nan" not in (text := compare.report(rows, "cpu")) and "inf" not in text
