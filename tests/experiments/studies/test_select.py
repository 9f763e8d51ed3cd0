"""The studies of selectors, step by step, and of making masks."""

from experiments.common.rows import frame
from experiments.studies.mask_build import DOCUMENTS, mask_of
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


def test_rows_count_the_blocks(measured):
    rows = measured("mask_build", "lengths=[500,1000]", f"mask=[causal,'{DOCUMENTS}']")
    assert len(rows) == 8 and ok(rows)
    for row in rows:
        built = mask_of(row.mask, row.seq_len).build(row.seq_len, block_size=128)
        assert (row.nnz, row.density) == (built.nnz, built.density)
        assert row.ms_median > 0 and (row.builder == "schedule" or row.peak_mib > 0)


def test_documents_cover_the_sequence():
    n = 16384
    seen = mask_of(DOCUMENTS, n).build(n, block_size=16).to_dense()[0]
    assert seen[0].diagonal().all() and 4 <= (seen[0].sum(1) == 1).sum() < 30
