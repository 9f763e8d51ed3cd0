"""The study of selectors: every step of every kind, and selectors as texts."""

import pytest

from experiments.common.rows import frame
from experiments.studies.select import STEPS, parse, tables
from tests.experiments.studies.conftest import ok

SMALL = "seq_len=128 batch=1 heads=2 kv_heads=1 head_dim=16 density=0.25".split()


def test_rows_of_every_kind(measured):
    rows = measured("select", *SMALL)
    kinds = {row["mask"].split("(")[0] for row in rows}
    assert kinds == {"top_k", "mass", "moba", "nsa"}
    assert [row.step for row in rows[:5]] == list(STEPS)
    assert ok(rows) and all(row.ms_median > 0 and 0 < row.density <= 1 for row in rows)
    table = tables(frame(rows))["selectors"]
    ms = {row.step: row.ms_median for row in rows[:5]}
    assert table.count("\n") == 1 + len(rows) // 5
    assert f"| {(ms['selection'] + ms['schedule']) / ms['forward']:.3f} |" in table


def test_texts_of_selectors():
    named = "moba(512, 3, union=True)", "mass(0.9, block_size=(64, 128), max_blocks=32)"
    for text in (*named, "top_k(0.1, pool='bound', within=causal() & ~local(4), always=local(0))"):
        assert str(parse(str(parse(text)))) == str(parse(text))
    assert str(parse(named[0])) == named[0]


ESCAPE = "top_k(select.__globals__['os'].mkdir('{}'))", "[top_k(1), io.open('{}', 'w')][0]"
ESCAPE += ("top_k(1, within=checks.__builtins__['open']('{}', 'w'))",)


@pytest.mark.parametrize("text", [*ESCAPE, "causal()", "top_k(", "nothing(3)", "top_k(-1)"])
def test_a_text_that_is_no_selector_is_not_run(text, tmp_path):
    with pytest.raises(ValueError, match=r"is no selector.*give a call of sparseflash\.select"):
        parse(text.format(tmp_path / "made"))
    assert not (tmp_path / "made").exists()
