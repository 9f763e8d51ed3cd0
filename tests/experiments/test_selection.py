"""The measurement of selectors: every step of every kind runs and is recorded."""

import pytest

from experiments.bench.rows import SelectRow
from experiments.bench.selectors import STEPS, parse
from experiments.common.records import read
from sparseflash.select import Gate

SMALL = "seq_len=128 batch=1 heads=2 kv_heads=1 head_dim=16 density=0.25 device=cpu seconds=1e-4"


def test_rows_of_every_kind(tmp_path, run_program, one_thread):
    words = [f"csv={tmp_path}/select.csv", *SMALL.split()]
    assert run_program("selection", *words)[0] == 0
    rows = read(tmp_path / "select.csv", SelectRow)
    kinds = {row.mask.split("(")[0] for row in rows}
    assert kinds == {"top_k", "mass", "antidiagonal", "gate", "moba", "nsa"}
    assert [row.step for row in rows[:5]] == list(STEPS)
    assert all(row.ms_graph is None and row.graph_share is None for row in rows)
    assert all(row.ms_median > 0 and 0 < row.density <= 1 for row in rows)
    status, printed, _ = run_program("selection", *words, 'selectors=["moba(128, 1)"]')
    assert status == 0 and "moba(128, 1)" in printed
    assert len(read(tmp_path / "select.csv", SelectRow)) == len(rows) + 5


def test_texts_of_selectors():
    named = "moba(512, 3, union=True)", "mass(0.9, block_size=(64, 128), max_blocks=32)"
    for text in (*named, "top_k(0.1, pool='bound', within=causal() & ~local(4), always=local(0))"):
        assert str(parse(str(parse(text)))) == str(parse(text))
    assert str(parse(named[0])) == named[0]
    gate = parse("gate(Gate(4, 16, 2, block_size=64), 3)").module
    assert (type(gate), gate.block_size) == (Gate, (64, 64))


ESCAPE = "top_k(select.__globals__['os'].mkdir('{}'))", "[top_k(1), io.open('{}', 'w')][0]"
ESCAPE += ("top_k(1, within=checks.__builtins__['open']('{}', 'w'))",)


@pytest.mark.parametrize("text", ESCAPE)
def test_a_text_is_not_run(text, tmp_path):
    with pytest.raises(ValueError, match="is no selector"):
        parse(text.format(tmp_path / "made"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ["causal()", "top_k(", "nothing(3)", "top_k(-1)"])
def test_text_that_is_no_selector(text):
    with pytest.raises(ValueError, match=r"is no selector.*give a call of sparseflash\.select"):
        parse(text)
