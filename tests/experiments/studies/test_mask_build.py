"""The study of making masks: rows count what is built, and documents cover the sequence."""

from experiments.studies.mask_build import DOCUMENTS, mask_of
from tests.experiments.studies.conftest import ok


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
