"""The measurement of selectors: every step of every kind runs and is recorded."""

import csv

import pytest
import torch
from omegaconf import OmegaConf

from experiments import select

CONFIG = {
    "selectors": None, "density": 0.25, "seq_len": 128, "batch": 1, "heads": 2, "kv_heads": 1,
    "head_dim": 16, "dtype": None, "device": "cpu", "seconds": 1e-4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """The calls are tiny: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_of_every_kind(tmp_path, capsys):
    path = tmp_path / "select.csv"
    rows = select.main(OmegaConf.create(CONFIG | {"csv": str(path)}), "command")
    kinds = {row.selector.split("(")[0] for row in rows}
    assert kinds == {"top_k", "mass", "antidiagonal", "gate", "moba", "nsa"}
    assert [row.step for row in rows[:5]] == list(select.STEPS)
    assert all(row.ms_graph is None and row.graph_share is None for row in rows)
    assert all(row.ms_median > 0 and 0 < row.density <= 1 for row in rows)
    chosen = OmegaConf.create(CONFIG | {"csv": str(path), "selectors": ["moba(128, 1)"]})
    more = select.main(chosen, "command")
    with path.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) + len(more) == len(rows) + 5
    assert "moba(128, 1)" in capsys.readouterr().out


def test_text_that_is_no_selector():
    with pytest.raises(ValueError, match="is no selector"):
        select.parse("causal()")
