"""A run of measurements goes on where the last one stopped."""

from dataclasses import replace

import pytest

from experiments.common.records import OK, Records
from experiments.papers.attention import resume
from experiments.papers.attention.resume import Pages, resumed, tell
from experiments.papers.attention.rows import MemoryRow


def row(n: int) -> MemoryRow:
    facts = {"attention": "ours", "checkpoint": "none", "batch": 1, "dim": 16, "hidden": 16}
    facts |= {"heads": 1, "layers": 4, "dtype": "float32", "mask": "", "density": None}
    return MemoryRow(n=n, **facts, **MemoryRow.origin("cpu", ""))


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(resume, "time", found := Clock())
    return found


def test_time_is_up_and_the_next_call_goes_on(tmp_path, clock, capsys):
    records, calls = Records(tmp_path / "rows.csv", MemoryRow), []

    def measure(rows):
        clock.now += 40
        calls.append(rows[0].n)
        return [replace(r, status=OK, ms_median=1.0) for r in rows]

    groups = [([row(n)], measure) for n in (1, 2, 3)]
    tell(resumed(groups, records, 1.0), 3, lambda r: f"n={r.n}")
    assert calls == [1, 2] and "1 measurements are left" in capsys.readouterr().out
    again = Records(records.path, MemoryRow)
    tell(resumed(groups, again, 1.0), 3, lambda r: f"n={r.n}")
    assert calls == [1, 2, 3] and [r.n for r in again.rows] == [1, 2, 3]
    assert capsys.readouterr().out.split() == ["n=1", "n=2", "n=3"]


def test_reasons_stay_and_failures_are_tried_again(tmp_path):
    records = Records(tmp_path / "rows.csv", MemoryRow)
    for status in ("out of memory: x", "failed: x", OK):
        n = 1 if status.startswith("out") else 2
        for _ in range(2):
            groups = [([row(n)], lambda rows, s=status: [replace(r, status=s) for r in rows])]
            before = len(records.rows)
            list(resumed(groups, records, None))
            assert len(records.rows) - before <= 1
    assert [r.status for r in records.rows] == ["out of memory: x", "failed: x", OK]


def test_a_page_keeps_what_is_written_while_rows_are_measured(tmp_path):
    page, csv = tmp_path / "page.md", tmp_path / "rows.csv"
    text = f"<!-- rows: some {tmp_path.name}/rows.csv -->\nold\n<!-- end -->\n"
    page.write_text(text)
    pages = Pages([str(page)], csv)
    page.write_text(f"{text}A new sentence.\n")
    assert pages.fill({"some": lambda: "new"}) == [page]
    assert page.read_text() == f"{text}A new sentence.\n".replace("old", "new")


def test_one_row_that_is_lacking_measures_its_group(tmp_path):
    records = Records(tmp_path / "rows.csv", MemoryRow)
    done = replace(row(1), status=OK, ms_median=1.0)
    records.append(done)
    groups = [([row(1), row(2)], lambda rows: [rows[0], replace(rows[1], status=OK)])]
    assert [r.status for r in resumed(groups, records, None)] == [OK, OK]
    assert [r.n for r in records.rows] == [1, 2]


def test_a_lost_gpu_ends_the_run(tmp_path):
    records = Records(tmp_path / "rows.csv", MemoryRow)
    lost = "failed: CUDA error: an illegal memory access was encountered"
    groups = [([row(n)], lambda rows: [replace(rows[0], status=lost)]) for n in (1, 2)]
    assert [r.n for r in resumed(groups, records, None)] == [1] == [r.n for r in records.rows]
