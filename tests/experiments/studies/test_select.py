"""The study of selectors: every step of every kind."""

from experiments.common.rows import frame
from experiments.studies.select import STEPS, tables
from tests.experiments.studies.conftest import ok

SMALL = "seq_len=128 batch=1 heads=2 kv_heads=1 head_dim=16 density=0.25".split()


def test_rows_of_every_kind(measured):
    rows = measured("select", *SMALL)
    kinds = {row["mask"].split("(")[0] for row in rows}
    assert kinds == {"top_k", "mass", "moba", "nsa"}
    assert [row.step for row in rows[:5]] == list(STEPS)
    assert ok(rows) and all(row.ms_median > 0 and 0 < row.density <= 1 for row in rows)
    table = tables(frame(rows))["selectors"]
    ms = {row.step: row.ms_median for row in rows[:5]}
    assert table.count("\n") == 1 + len(rows) // 5
    assert f"| {(ms['selection'] + ms['schedule']) / ms['forward']:.3f} |" in table
