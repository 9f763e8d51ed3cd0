"""The published compilations: the page follows from the rows, and limits hold."""

from experiments.bench.compile_matrix.rows import CompileRow
from experiments.bench.compile_matrix.table import page_tables
from experiments.common.provenance import ROOT
from experiments.common.records import read
from experiments.common.text_table import fill

RESULTS = ROOT / "docs" / "results"
ROWS = read(RESULTS / "cpu" / "compile_matrix.csv.gz", CompileRow)


def test_the_tables_follow_from_the_rows():
    page = (RESULTS / "compile_matrix.md").read_text()
    assert fill(page, page_tables(ROWS)) == page


def test_limits_hold():
    assert [(row.triton, row.target, row.kernel, row.label) for row in ROWS if row.faults()] == []


def test_no_row_is_superseded():
    """Those of a backend are of one source."""
    compiled = {(row.triton, row.target, row.backend, row.source) for row in ROWS}
    assert len(compiled) == len({compilation[:3] for compilation in compiled})
