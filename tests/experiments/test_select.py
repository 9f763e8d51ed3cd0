"""The measurement of selectors: every step of every kind runs and is recorded."""

import pytest

from experiments import select
from experiments.bench.rows import SelectRow
from experiments.bench.selectors import STEPS, parse
from experiments.common.records import read

CONFIG = {
    "selectors": None, "density": 0.25, "seq_len": 128, "batch": 1, "heads": 2, "kv_heads": 1,
    "head_dim": 16, "dtype": None, "device": "cpu", "seconds": 1e-4,
    "allow_changes": False,
}  # fmt: skip


def test_rows_of_every_kind(tmp_path, capsys, one_thread):
    path = tmp_path / "select.csv"
    rows = select.measure_all(CONFIG | {"csv": str(path)}, "command")
    kinds = {row.mask.split("(")[0] for row in rows}
    assert kinds == {"top_k", "mass", "antidiagonal", "gate", "moba", "nsa"}
    assert [row.step for row in rows[:5]] == list(STEPS)
    assert all(row.ms_graph is None and row.graph_share is None for row in rows)
    assert all(row.ms_median > 0 and 0 < row.density <= 1 for row in rows)
    chosen = CONFIG | {"csv": str(path), "selectors": ["moba(128, 1)"]}
    more = select.measure_all(chosen, "command")
    assert len(read(path, SelectRow)) == len(rows) + len(more) == len(rows) + 5
    assert "moba(128, 1)" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["causal()", "top_k(", "nothing(3)", "top_k(-1)"])
def test_text_that_is_no_selector(text):
    with pytest.raises(ValueError, match=r"is no selector.*give a call of sparseflash\.select"):
        parse(text)
