"""Tables: speed-ups over our own dense attention, and shares of the ideal."""

from dataclasses import replace

from experiments.bench.reports.table import tables
from experiments.bench.speed_run import measurements
from experiments.common.records import OK
from tests.experiments.bench.bench_cases import CASE, CPU, ROW, made_up_rows


def test_table_compares_with_our_own_dense():
    tasks = measurements([replace(CASE, mask="dense"), CASE], ["cpu", "flex"], ["backward"])
    rows = [replace(task.row(CPU, ""), status="unsupported: on a CPU") for task in tasks]
    for i, row in enumerate(rows):
        if row.provider == "cpu":
            rows[i] = replace(row, status=OK, ms_median=8.0 if row.mask == "dense" else 2.0)
    text = tables(rows)
    assert "8.000  (1.00x)" in text and "2.000  (4.00x)" in text
    assert "flex backward: unsupported: on a CPU" in text


def test_tables_say_the_share_of_the_ideal(monkeypatch):
    row = made_up_rows(monkeypatch)[0]
    assert " 50%" in tables([row])
    other = tables([replace(row, v_dim=8, layout="token_major")])
    assert "v_dim 8" in other and "token_major" in other


def test_a_time_below_the_ideal_is_marked():
    fast = replace(ROW, ideal_ms=2 * ROW.ms, warning="faster than the ideal")
    text = tables([fast, replace(ROW, n_q=512)])
    assert "200%!" in text and text.endswith("! faster than the ideal")
    assert "!" not in tables([ROW])


def test_a_speed_up_that_no_density_gives_is_told():
    """Half of the blocks cannot be three times as fast: dense attention was measured too slow."""
    dense = replace(ROW, mask="dense", density=1.0, ms_median=3.0)
    fair = replace(ROW, mask="random_blocks(0.5)", density=0.5, ms_median=1.5)
    assert "ideal speed-up" not in tables([dense, fair])
    assert "150 % of the ideal speed-up" in tables([dense, replace(fair, ms_median=1.0)])


def test_speed_ups_are_over_our_own_dense_attention_of_any_file():
    dense = replace(ROW, mask="dense", ms_median=8.0)
    peer = replace(dense, provider="sdpa", ms_median=1.0)
    assert "2.000  (4.00x)" in tables([ROW, dense, peer])
    assert "2.000  (4.00x)" in tables([ROW, peer], known=[dense])
    assert "x)" not in tables([ROW, peer])
