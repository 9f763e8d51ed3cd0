"""Tables on the pages of results are those that the programs make of the published rows."""

import pytest

from experiments.common.provenance import ROOT
from experiments.papers import attention_table

RESULTS = ROOT / "docs" / "results"
PROGRAMS = {  # program and its page: rows, and tables of theirs that the page must have
    "accuracy": ("accuracy.csv", ["rmse_d64", "rmse_d128"]),
    "attention_table": ("lengths.csv.gz", ["ms_plain", "memory_plain", "ms_both"]),
    "io": ("io.csv", ["shape", "block", "sparsity"]),
    "memory": ("memory.csv", ["stacks"]),
    "softmax": ("softmax.csv.gz", ["larger_k"]),
}


@pytest.mark.parametrize("folder", ["h200", "cpu"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_page_has_the_tables_of_its_rows(run_program, tmp_path, program, folder, monkeypatch):
    monkeypatch.setattr(attention_table, "draw_all", lambda rows, out: [])  # takes long
    rows, tables = PROGRAMS[program]
    published = (RESULTS / f"{program}.md").read_text()
    for name in tables:
        assert f"<!-- rows: {name} {folder}/{rows.removesuffix('.gz')} -->" in published
    (page := tmp_path / "page.md").write_text(published)
    words = [f"csv={RESULTS}/{folder}/{rows}", "measure=false", f"pages=[{page}]"]
    if program != "accuracy":  # it draws none
        words.append(f"{'out' if program == 'softmax' else 'plots'}={tmp_path}")
    module = "softmax.__main__" if program == "softmax" else program
    status, _, error = run_program(f"papers.{module}", *words)
    assert status == 0, error
    assert page.read_text() == published
