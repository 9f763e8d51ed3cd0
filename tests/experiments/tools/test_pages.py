"""What templates of pages do with tables and frames."""

import pandas as pd
import pytest

from experiments.tools.pages import columns, lines, pivot, shares

TABLE = "| a | b | c |\n| --- | ---: | --- |\n| x | 1 | p\\|q |\n| y | 2 | r |"


def test_columns_and_lines_choose_parts_of_a_table():
    assert columns(TABLE, "c", mean="b").splitlines()[::2] == ["| c | mean |", "| p\\|q | 1 |"]
    assert lines(TABLE, "^. y").splitlines()[2:] == ["| y | 2 | r |"]
    with pytest.raises(ValueError, match="d"):
        columns(TABLE, "d")


def test_text_around_tables_stays():
    text = f"Before.\n\n{TABLE}\n\nBetween.\n\n{TABLE}\n"
    assert columns(text, "b").count("| b |\n") == 2 and "\n\nBetween.\n\n" in lines(text, "x")


def test_a_pivot_has_means_and_their_standard_deviation():
    frame = pd.DataFrame({"name": ["A", "A", "B"], "start": ["u", "u", "v"], "x": [1.0, 2.0, 3.0]})
    body = pivot(frame, ["name"], "start", "x").splitlines()
    assert body[0] == "| name | u | v |"
    assert body[2:] == ["| A | 1.5 ± 0.7 | – |", "| B | – | 3.0 |"]


def test_shares_are_of_sums():
    frame = pd.DataFrame({"run": ["a", "a", "b"], "yes": [1, 3, 5], "all": [2, 6, 10]})
    body = shares(frame, ["run"], yes="yes/all").splitlines()
    assert body[0] == "| run | yes |" and body[2:] == ["| a | 50.0 |", "| b | 50.0 |"]
