"""What a run measures, and what a rerun skips."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.cases import CAUSAL
from experiments.bench.measure import Bench
from experiments.bench.peers import fa4
from experiments.bench.providers import DIRECTIONS
from experiments.bench.reports.table import newest
from experiments.bench.rows import SpeedRow
from experiments.bench.speed_run import (
    chosen,
    describe,
    in_rounds,
    measurements,
    run,
    unmeasured,
)
from experiments.common.records import OK, Records, read
from tests.experiments.bench.bench_cases import CASE, CPU, OPTIONS, ROW, measured


def test_plan_keeps_dense_only_providers_to_dense_cases():
    dense = replace(CASE, mask="dense", block_q=0, block_k=0)
    tasks = measurements([dense, CASE], ["cpu", "sdpa"], ["forward"])
    found = [(t.case.mask, t.provider) for t in tasks]
    assert found == [("dense", "cpu"), ("dense", "sdpa"), (CASE.mask, "cpu")]


def test_plan_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="providers='fast': choose from reference, cpu"):
        measurements([CASE], ["fast"], ["forward"])
    with pytest.raises(ValueError, match="directions='sideways': choose from forward, backward"):
        measurements([CASE], ["cpu"], ["sideways"])
    with pytest.raises(ValueError, match=r"24.*multiples of 16"):
        measurements([replace(CASE, block_q=24)], ["cpu"], ["forward"])


def test_causal_is_for_every_peer():
    causal = replace(CASE, mask=CAUSAL)
    tasks = measurements([causal, replace(causal, n_k=100)], ["sdpa"], ["forward"])
    assert [t.case.n_k for t in tasks] == [200]
    assert measured(causal, "sdpa", "forward").status == OK


def test_named_grids_are_refused_where_they_make_no_sense():
    with pytest.raises(ValueError, match="grid='all': choose from limits"):
        chosen(OPTIONS | {"grid": "all"}, CPU)
    with pytest.raises(ValueError, match="its own masks and shapes"):
        chosen(OPTIONS | {"heads": 3}, CPU)
    assert {t.provider for t in chosen(OPTIONS | {"providers": "sdpa"}, CPU)} == {"sdpa"}


def test_a_rerun_measures_only_what_is_missing(tmp_path, capsys):
    tasks = measurements([CASE], ["cpu"], DIRECTIONS)
    bench = Bench(CPU, seconds=0.01)
    first = run(tasks[:1], bench, Records(tmp_path / "s.csv", SpeedRow), "")
    again = run(tasks, bench, Records(tmp_path / "s.csv", SpeedRow), "")
    assert again[0].date == first[0].date and len(read(tmp_path / "s.csv", SpeedRow)) == 2
    assert "(measured " in capsys.readouterr().out
    assert unmeasured(tasks, CPU, Records(tmp_path / "s.csv", SpeedRow)) == []
    assert unmeasured(tasks, CPU, Records(tmp_path / "t.csv", SpeedRow)) == tasks


def test_rounds_measure_all_again_and_begin_with_another_provider(tmp_path):
    cases = [replace(CASE, mask="dense"), CASE]
    tasks = in_rounds(measurements(cases, ["cpu", "reference"], DIRECTIONS), 3)
    assert [t.provider for t in tasks if t.direction == "forward" and t.case == CASE] == [
        *("cpu", "reference"), *("reference", "cpu"), *("cpu", "reference"),
    ]  # fmt: skip
    assert tasks[8].case == CASE and tasks[15].case == cases[0]  # dense comes last
    assert [t.round for t in tasks] == [1] * 8 + [2] * 8 + [3] * 8
    assert [t.direction for t in tasks[:4]] == ["forward", "backward"] * 2
    rows = run(
        tasks[:2] + tasks[14:16], Bench(CPU, 0.01), Records(tmp_path / "s.csv", SpeedRow), ""
    )
    assert {(row.provider, row.round) for row in rows} == {("cpu", 1), ("cpu", 2)}
    assert [row.round for row in read(tmp_path / "s.csv", SpeedRow)] == [1, 1, 2, 2]


def test_the_page_is_a_grid(monkeypatch):
    monkeypatch.setattr(fa4, "missing", lambda: None)
    for device in (CPU, torch.device("cuda")):
        found = chosen(OPTIONS | {"grid": "page"}, device)
        assert len({t.case.layout for t in found}) == 2 and len(set(found)) == len(found)
    by_provider = {}
    for what in found:
        by_provider.setdefault(what.provider, set()).add(what.case.mask.partition("(")[0])
    assert by_provider["fa4_varlen"] == {"documents"}
    assert by_provider["fa4_window"] == {"sliding", "local"}
    assert {"dense", "random_blocks", "sliding", "local", "documents"} <= by_provider["fa4"]
    assert {t.case.n_q for t in found} == {2**14, 2**18, 2**20}


def test_the_same_refusal_is_written_once(tmp_path):
    tasks = measurements([replace(CASE, mask="dense")], ["flex"], ["backward"])
    for _ in range(2):
        run(tasks, Bench(CPU, 0.01), Records(tmp_path / "s.csv", SpeedRow), "")
    assert [row.status[:11] for row in read(tmp_path / "s.csv", SpeedRow)] == ["unsupported"]


def test_a_new_version_of_a_peer_is_measured_again_and_its_rounds_stay_together():
    old = replace(ROW, provider="fa4", version="4.0", ms_median=9.0)
    rows = [replace(old, version="4.1", round=i + 1, ms_median=ms) for i, ms in enumerate((1, 3))]
    rows[1] = replace(rows[1], source="changed")
    assert old.key != rows[0].key == replace(rows[0], source="changed").key
    (found,) = newest([old, *rows])
    assert (found.ms_median, found.round, found.version) == (2.0, 2, "4.1")


def test_a_row_in_a_line_warns():
    assert "50 % of ideal" in describe(ROW) and "warning" not in describe(ROW)
    assert describe(replace(ROW, warning="too fast")).endswith("warning: too fast")
    assert describe(replace(ROW, status="failed: x")).endswith("failed: x")
