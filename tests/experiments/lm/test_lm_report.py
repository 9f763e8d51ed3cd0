"""Tables of language models, worked out by hand, and rows of runs."""

from pathlib import Path

import pytest

from experiments.common.rows import frame, read
from experiments.lm.report import (
    Options,
    about,
    grouped,
    main,
    row,
    spread,
    table,
    tables,
    values,
)  # fmt: skip
from experiments.lm.run import train

DOCS = Path(__file__).resolve().parents[3] / "docs/results/language_models"
ROW = read(DOCS / "results.jsonl.gz")[0] | {
    **{"seed": 0, "train_loss": 2.0, "val_loss": 1.0, "ms_step": 4.0, "late_loss": 3.0},
    **{"saved_mib": 10.4, "peak_mib": None},
}


def test_a_case_is_the_newest_row_of_each_seed():
    rows = [ROW | {"val_loss": 9.0}, ROW | {"seed": 1, "val_loss": 2.0}, ROW]
    ((case,),) = grouped(rows, ROW["plan"])
    assert case == [ROW, rows[1]]
    assert spread(values(case, "val_loss")) == "1.500 ± 0.500"  # half the range
    assert spread(values([ROW], "val_loss")) == "1.000"
    assert spread(values([ROW], "peak_mib")) == "–"
    _, line = table("contexts", [case])
    assert line[2] == "5.05 ± 2.34"  # the perplexity


def test_speed_ups_and_differences_are_to_standard_attention():
    base = ROW | {"case": "standard", "provider": "standard"}
    ours = ROW | {"case": "ours", "provider": "sparse", "ms_step": 1.0, "train_loss": 2.01}
    _, *lines = table("same", [[ours], [base]])
    assert lines == [
        ["ours", "2.0100", "0.500 %", "1.0000", "1", "4.00x", "10", "–"],
        ["standard", "2.0000", "0.000 %", "1.0000", "4", "1.00x", "10", "–"],
    ]
    seeds = [(base, ours), (base | {"seed": 1}, ours | {"seed": 1, "train_loss": 2.03})]
    for order in (seeds, seeds[::-1]):  # the largest difference of a seed
        cases = [list(rows) for rows in zip(*order, strict=True)]
        assert table("same", cases)[2][2] == "1.500 %"


def test_tables_mix_no_options_that_no_case_changes():
    usual = ROW | {"plan": "masks", "positions": "learned", "provider": "sparse"}
    for name, value in {"precision": "bf16", "packed": True, "positions": "rotary"}.items():
        other = usual | {name: value}
        first, second = grouped([usual, other, usual | {"seed": 1}], "masks")
        assert len(first[0]) == 2 and second[0] == [other], name
        assert about(first) != about(second), name


def test_runs_become_rows_tables_and_figures(settings, tmp_path, capsys):
    providers = {"standard": "standard", "SDPA": "sdpa", "ours": "sparse"}
    runs = [
        train(settings(steps=4, plan="same", case=case, provider=provider, keep=False))
        for case, provider in providers.items()
    ]
    options = {"runs": str(tmp_path / "runs"), "figures": str(tmp_path / "figures")}
    options["rows"] = str(tmp_path / "rows.jsonl")
    for _ in range(2):  # each run once
        main.__wrapped__(Options(**options), "command")
    rows = read(tmp_path / "rows.jsonl")
    assert [each["case"] for each in sorted(rows, key=lambda each: each["date"])]
    assert len(rows) == 3 and next((tmp_path / "figures").glob("lm-*.png"))
    losses = [each["train_loss"] for each in rows]
    assert max(losses) - min(losses) < 1e-4 * losses[0]
    saved = {each["provider"]: each["saved_mib"] for each in rows}
    assert saved["standard"] > saved["sparse"] > 0
    assert row(runs[0])["mode"] == "eager" and row(runs[0])["curve"][-1][0] == 4
    assert "a single run each" in capsys.readouterr().out
    assert tables(frame(rows))["same"].count("\n|") == 4
    with pytest.raises(ValueError):
        main.__wrapped__(Options(**options | {"rows": str(tmp_path / "rows.csv")}), "command")
