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


def test_limits_hold_but_where_the_page_says_so():
    beyond = [row for row in ROWS if row.faults()]
    assert all("spills" in fault for row in beyond for fault in row.faults())
    picks = [row for row in beyond if row.target != "gfx942"]
    assert {row.triton for row in beyond} == {"3.6.0"}
    assert {row.kernel for row in picks} == {"picks_backward_kv"}
    spilled = [row.spilled_bytes for row in picks]
    page = (RESULTS / "compile_matrix.md").read_text()
    assert f"but {len(beyond)},\n" in page and f"{len(beyond) - len(picks)} for gfx942" in page
    assert f"spill {min(spilled)} to {max(spilled)} bytes" in page


def test_no_row_is_superseded():
    """Those of a backend are of one source."""
    compiled = {(row.triton, row.target, row.backend, row.source) for row in ROWS}
    assert len(compiled) == len({compilation[:3] for compilation in compiled})
