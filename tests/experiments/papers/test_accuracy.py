"""The error of attention with outliers: inputs, errors, rows and tables."""

from dataclasses import replace

import pytest
import torch

from experiments.common.provenance import ROOT
from experiments.common.records import OK, read
from experiments.papers import accuracy
from experiments.papers.accuracy import METHODS, draw, measured, tables
from experiments.papers.attention.rows import AccuracyRow
from sparseflash.testing import oracle

CPU = torch.device("cpu")
SMALL = "lengths=[64,128] head_dims=[16] batch=1 heads=1 device=cpu".split()
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")


def row(method: str = "standard", dtype: str = "float16", **further) -> AccuracyRow:
    facts = {"batch": 1, "heads": 2, "n": 512, "head_dim": 64, "outliers": 0.001, "mask": ""}
    facts |= {"density": None} | AccuracyRow.origin("cpu", "") | further
    return AccuracyRow(method=method, dtype=dtype, **facts)


def rmse(method: str, dtype: str = "float16", **further) -> float:
    found = measured(row(method, dtype, **further), CPU)
    assert found.status == OK and found.rmse is not None
    return found.rmse


def test_a_thousandth_of_the_entries_is_far_out():
    q, k, v = draw(row(n=8192), CPU)
    entries = torch.cat([t.float().flatten() for t in (q, k, v)])
    assert q.dtype == torch.float16 and not torch.equal(q, k) and not torch.equal(k, v)
    assert entries.mean().abs() < 0.01
    assert entries.var().item() == pytest.approx(1 + 0.001 * 100, rel=0.03)
    far = (entries.abs() > 5).float().mean().item()
    assert far == pytest.approx(0.001 * 0.62, rel=0.15)  # |N(0, 101)| > 5
    calm = draw(row(n=8192, outliers=0.0), CPU)[0].float()
    assert calm.abs().max() < 6 and calm.var().item() == pytest.approx(1, rel=0.02)


def test_the_error_is_the_root_of_the_mean_square(monkeypatch):
    def shifted(q, k, v):
        return oracle(q, k, v)[0] + 0.01

    monkeypatch.setitem(METHODS, "ours", METHODS["ours"]._replace(call=shifted))
    found = measured(row("ours", "float32", batch=2, n=64), CPU)
    assert found.rmse == pytest.approx(0.01, rel=1e-6)
    right = oracle(*draw(found, CPU))[0]
    assert found.relative == pytest.approx(0.01 / right.square().mean().sqrt().item(), rel=1e-6)


def test_a_softmax_in_float32_has_less_error_than_a_standard_one():
    for dtype in ("float16", "bfloat16"):
        assert rmse("ours", dtype) < rmse("standard", dtype) / 2
    assert rmse("ours", "bfloat16") > 4 * rmse("ours")
    assert rmse("ours", "float32") < 1e-6


def test_what_fails_is_a_row_with_the_reason():
    found = measured(row("cudnn"), CPU)
    assert found.rmse is None and found.status.split(":")[0] in ("failed", "unsupported")
    good = replace(row(), status=OK, rmse=1e-4)
    text = tables([good, found])["rmse_d64"]()
    assert "cuDNN" not in text and "| standard | float16 | 1.0e-04 | 1.00x | 3.2e-4 |" in text
    assert tables([good])["rmse_d128"]() == "Not measured yet."


def test_a_table_has_the_outliers_of_the_last_row():
    some, none = (replace(row(), status=OK, rmse=x, outliers=x) for x in (1e-3, 0.0))
    few = replace(none, rmse=2e-5)
    assert "2.0e-05" in tables([none, few])["rmse_d64"]()  # measured again
    assert "2.0e-05" in tables([some, few])["rmse_d64"]()
    assert "1.0e-03" in tables([few, some])["rmse_d64"]()
    wide = replace(some, n=2 * some.n, heads=some.heads + 1)
    assert f"{wide.n} tokens" not in tables([wide, some])["rmse_d64"]()


def test_program(tmp_path, run_program, measured_once):
    csv, page = tmp_path / "rows.csv", tmp_path / "page.md"
    page.write_text(f"<!-- rows: rmse_d16 {tmp_path.name}/rows.csv -->\nold\n<!-- end -->\n")
    words = [*SMALL, "outliers=0.25", f"pages=[{page}]"]
    rows, printed, _ = measured_once("papers.accuracy", AccuracyRow, *words)
    cpu = [name for name, method in METHODS.items() if not method.cuda]
    assert len(rows) == 2 * 2 * len(cpu)  # lengths, dtypes
    assert all(r.status == OK or r.method == "flash" for r in rows)
    assert {r.outliers for r in rows} == {0.25}
    assert "standard's / this, 128" in printed and "old" not in page.read_text()
    csv.write_text(csv.read_text().replace(",ok,", ",failed: no room,", 1))
    run_program("papers.accuracy", *words, f"csv={csv}")  # what failed is measured again
    again = read(csv, AccuracyRow)
    assert len(again) == len(rows) + 1 and replace(again[-1], date=rows[0].date) == rows[0]


@pytest.mark.parametrize("folder", ["h200", "cpu"])
def test_published_rows_are_of_methods_that_a_table_shows(folder):
    rows = read(ROOT / "docs/results" / folder / "accuracy.csv", AccuracyRow)
    assert {row.method for row in rows} <= {*METHODS}


def test_the_published_numbers_are_those_of_the_papers_page():
    text = (ROOT / "docs/results/papers.md").read_text()
    assert "1.9e-4; standard 3.2e-4" in text
    found = {(n, d): t for n, m in METHODS.items() for d, t in m.published.items()}
    assert found[("standard", "float16")] == "3.2e-4"
    assert found[("ours", "float16")].startswith("1.9e-4")
    assert accuracy.SPREAD**2 == 100
