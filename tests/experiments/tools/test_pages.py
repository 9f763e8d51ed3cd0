"""What templates of pages do with tables and frames."""

import pandas as pd
import pytest

from experiments.tools.pages import columns, lines, pivot

TABLE = "| a | b | c |\n| --- | ---: | --- |\n| x | 1 | p\\|q |\n| y | 2 | r |"


def test_columns_and_lines_choose_parts_of_a_table():
    assert columns(TABLE, "c", mean="b").splitlines()[::2] == ["| c | mean |", "| p\\|q | 1 |"]
    assert lines(TABLE, "^. y").splitlines()[2:] == ["| y | 2 | r |"]
    with pytest.raises(ValueError, match="d"):
        columns(TABLE, "d")


def test_a_pivot_has_a_line_for_each_value_and_refuses_two_in_one_cell():
    frame = pd.DataFrame({"name": ["A", "A", "B"], "start": ["u", "v", "u"], "x": [1.0, 2.0, 3.0]})
    body = pivot(frame, "name", "start", "x", "{:.1f}").splitlines()
    assert body[0] == "|  | u | v |" and body[2:] == ["| A | 1.0 | 2.0 |", "| B | 3.0 | – |"]
    with pytest.raises(ValueError, match="several x"):
        pivot(pd.concat([frame, frame]), "name", "start", "x")
