"""Tables of language models, worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common.records import read
from experiments.lm.report import (
    Case,
    about,
    context_table,
    filled_page,
    grouped,
    mask_table,
    same_table,
)
from experiments.lm.rows import ModelRow

DOCS = Path(__file__).resolve().parents[3] / "docs/results/language_models"
ROW = replace(
    read(DOCS / "results.csv.gz", ModelRow)[0],
    **{"seed": 0, "train_loss": 2.0, "val_loss": 1.0, "ms_step": 4.0, "late_loss": 3.0},
    **{"saved_mib": 10.4, "peak_mib": None},
)


def test_a_case_is_the_newest_row_of_each_seed():
    rows = [replace(ROW, val_loss=9.0), replace(ROW, seed=1, val_loss=2.0), ROW]
    case = Case(rows)
    assert case.rows == [ROW, rows[1]]
    assert case.text("val_loss") == "1.500 ± 0.500"  # half the range
    assert Case([ROW]).text("val_loss") == "1.000" and Case([ROW]).text("peak_mib") == "–"


def test_speed_ups_and_differences_are_to_standard_attention():
    base = replace(ROW, case="standard", provider="standard")
    ours = replace(ROW, case="ours", provider="sparse", ms_step=1.0, train_loss=2.01)
    head, *lines = same_table([Case([ours]), Case([base])])
    assert lines == [
        ["ours", "2.0100", "0.500 %", "1.0000", "1", "4.00x", "10", "–"],
        ["standard", "2.0000", "0.000 %", "1.0000", "4", "1.00x", "10", "–"],
    ]
    assert len(head) == len(lines[0])
    seeds = [(base, ours), (replace(base, seed=1), replace(ours, seed=1, train_loss=2.03))]
    for order in (seeds, seeds[::-1]):  # the largest difference of a seed
        cases = [Case(list(rows)) for rows in zip(*order, strict=True)]
        assert same_table(cases)[2][2] == "1.500 %"


@pytest.mark.parametrize("plan", ["same", "contexts", "masks"])
def test_tables_mix_no_options_that_no_case_changes(plan):
    usual = replace(ROW, plan=plan, positions="rotary" if plan == "contexts" else "learned")
    others = {"precision": "bf16", "packed": True, "mask": "sliding(8) & causal()"}
    others |= {"positions": "learned" if plan == "contexts" else "rotary", "provider": "sdpa"}
    for name in others.keys() - {"same": {"provider"}, "masks": {"mask"}}.get(plan, set()):
        other = replace(usual, **{name: others[name]})
        first, second = grouped([usual, other, replace(usual, seed=1)])
        assert len(first[0].rows) == 2 and second[0].rows == [other]
        assert about(first) != about(second)
        if name != "precision":
            assert f"{name}={others[name]}" in about(second)


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="no line <!-- lm: same -->"):
        filled_page("text", "same", [])


def test_contexts_are_in_their_order():
    rows = [replace(ROW, case=str(n), context=n, batch=64 // n) for n in (32, 8)]
    _, *lines = context_table([Case([row]) for row in rows])
    assert lines == [
        [n, w, "2.72", "1.000", "3.000", "4", "10"] for n, w in (("8", "8"), ("32", "2"))
    ]


@pytest.mark.parametrize("turn", [1, -1])
def test_masks_are_in_the_order_of_their_pairs(turn):
    shares = ("dense", 1.0, 1.0), ("few", 0.5, 0.25)
    rows = [
        replace(ROW, case=name, mask=name, density=density, pairs=pairs, steps=7)
        for name, density, pairs in shares
    ]
    _, *lines = mask_table([Case([row]) for row in rows[::turn]])
    assert lines == [
        ["dense", "`dense`", "100.0 %", "100.0 %", "7", "2.72", "1.000", "4"],
        ["few", "`few`", "50.0 %", "25.0 %", "7", "2.72", "1.000", "4"],
    ]
