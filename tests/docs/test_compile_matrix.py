"""The published compilations: the page follows from the rows, and no row is beyond its limits."""

from experiments.bench.compile_matrix.rows import CompileRow
from experiments.bench.compile_matrix.table import page_tables
from experiments.common.provenance import ROOT
from experiments.common.records import read
from experiments.common.text_table import fill

RESULTS = ROOT / "docs" / "results"
ROWS = read(RESULTS / "cpu" / "compile_matrix.csv", CompileRow)


def test_the_tables_follow_from_the_rows():
    page = (RESULTS / "compile_matrix.md").read_text()
    assert fill(page, page_tables(ROWS)) == page


def test_nothing_is_beyond_its_limits():
    assert [(row, faults) for row in ROWS if (faults := row.faults())] == []
