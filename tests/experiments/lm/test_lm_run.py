"""Runs of language models: they learn, continue bit for bit, and say what they found, in tables."""

from pathlib import Path

import pytest
import torch

from experiments.common.rows import frame, read
from experiments.lm import run as lm_run
from experiments.lm.report import (
    Options,
    about,
    grouped,
    main,
    row,
    table,
    tables,
)  # fmt: skip
from experiments.lm.run import make_model, tail, train
from experiments.lm.settings import make_settings
from experiments.lm.text import load_corpus
from experiments.training import run_file
from experiments.training.state import load


def test_the_loss_decreases(settings):
    run = train(settings(steps=60, lr=3e-3, batch=8, warmup=5))
    result = run["result"]
    curve = [loss for _, loss in result["curve"]]
    assert curve[0] > 4 and result["train_loss"] < curve[0]
    assert curve[-1] < 3.4 and result["val_loss"] < 4.2
    assert result["saved_mib"] > 0 and run["task"]["name"] == "texts"
    # the training loss is that of the last hundred steps
    assert tail([(50, 9.0), (100, 4.0), (150, 2.0), (200, 1.0)], 200) == 1.5
    assert tail([(2, 3.0), (3, 6.0)], 3) == 4.0


MLP = {"mlp": "butterfly(16, 1)", "mlp_block": 16, "mlp_rank": 2}


@pytest.mark.parametrize("changes", [{}, {"packed": True, "dropout": 0.1}, MLP])
def test_a_run_continues_bit_for_bit(changes, settings, interrupted):
    whole = train(settings(name="whole", checkpoint_every=3, **changes))["result"]
    part = settings(name="part", checkpoint_every=3, **changes)
    interrupted(train, part, step=6)
    torch.manual_seed(123)
    result = train(part)["result"]
    for name in ("curve", "positions", "val_loss", "train_loss"):
        assert result[name] == whole[name]
    ends = [load(s.folder / "checkpoint.pt") for s in (part, settings(name="whole", **changes))]
    for name in ("model", "optimizer"):
        for key, tensor in ends[0][name].items():
            assert torch.equal(tensor, ends[1][name][key])


def test_a_complete_run_reads_no_data_and_others_the_same(settings, monkeypatch, texts):
    here = settings(steps=1)
    train(here)
    with monkeypatch.context() as patch:
        patch.setattr(lm_run, "load_corpus", None)
        assert train(here)["complete"]
    other = settings(minutes=1e-9, steps=20)
    train(other)
    (texts / "new.txt").write_text("something else")
    with pytest.raises(ValueError, match="was trained on other data than text of"):
        train(other)


def test_bad_settings_are_one_line(settings):
    for changes, text in (
        ({"provider": "flash"}, "choose from sparse, standard, sdpa"),
        ({"tokenizer": "bpe:3"}, "choose bytes, or bpe:SIZE"),
        ({"val_tokens": 3}, r"give 32 \(context\) or more"),
        ({"plan": "equal_time"}, "run plan=masks first"),
        ({"mlp": "butterfly(16)", "mlp_block": 48}, "mlp_block=48: choose from 16, 32"),
        ({"mlp_rank": 2}, "mlp_rank=2.*give mlp="),
        ({"mask": "moba(16, 2)", "provider": "standard"}, "needs provider=sparse"),
    ):
        with pytest.raises(ValueError, match=text):
            train(settings(**changes))


def test_the_validation_loss_is_that_of_the_validation_part(settings):
    here = settings(steps=8)
    result = train(here)["result"]
    corpus = load_corpus(here.data, "bytes", here.cache_dir)
    model = make_model(here, corpus)
    model.load_state_dict(load(here.folder / "weights.pt")["model"])
    tokens = torch.from_numpy(corpus.val[:65].astype(int))
    losses = model.eval()(tokens[:64].view(2, 32), tokens[1:].view(2, 32))
    assert result["val_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert result["positions"] == pytest.approx(losses.mean(0).tolist(), rel=1e-3)


@pytest.mark.parametrize(
    "plan, timed, changes",
    [("masks", "equal_time", {"mask": "sliding:8"}), ("mlp", "mlp_time", {"mask": "dense", **MLP})],
)
def test_equal_time_is_that_of_the_dense_steps(settings, plan, timed, changes):
    dense, rows = {"mask": "dense", "case": "dense"}, []
    for given, ms in ((dense, 30.0), (changes | {"case": "sparse"}, 10.0)):
        here = settings(steps=8, plan=plan, **given)
        run = train(here)
        run |= {"result": run["result"] | {"ms_per_step": ms}}
        run_file.write(here.folder, run)
        rows.append(row(run))
    given = {"steps": 8, "plan": timed}
    assert settings(**given, **dense).steps == 8
    assert settings(**given, **changes, case="sparse").steps == 24
    run["sessions"][-1]["device"] = "another device"  # whose times say nothing
    run_file.write(here.folder, run)
    with pytest.raises(ValueError, match=f"plan={timed} .* another device x 1"):
        settings(**given, **changes, case="sparse")
    (cases,) = grouped(rows[::-1], plan)
    head, *lines = table(plan, cases)
    if plan == "mlp":
        found = [[line[head.index(name)] for name in ("MLP weights", "speed-up")] for line in lines]
        assert [line[0] for line in lines] == ["dense", "sparse"]
        assert found == [["100.0 %", "1.00x"], ["27.0 %", "3.00x"]]


def test_what_is_compiled_and_captured(options, monkeypatch):
    monkeypatch.setattr("experiments.common.devices.find_device", lambda name: torch.device("cuda"))
    chosen = make_settings(options(mask="moba(16, 2)"))
    assert chosen.graph and not chosen.compile
    assert make_settings(options()).compile
    packed = make_settings(options(packed=True))
    assert not packed.graph and not packed.compile
    with pytest.raises(ValueError, match="compile='blocks': choose from"):
        make_settings(options(compile="blocks"))


# ---- tables and figures

DOCS = Path(__file__).resolve().parents[3] / "docs/results/language_models"
ROW = read(DOCS / "results.jsonl.gz")[0] | {
    **{"seed": 0, "train_loss": 2.0, "val_loss": 1.0, "ms_step": 4.0, "late_loss": 3.0},
    **{"saved_mib": 10.4, "peak_mib": None},
}


def test_a_case_is_the_newest_row_of_each_seed():
    rows = [ROW | {"val_loss": 9.0}, ROW | {"seed": 1, "val_loss": 2.0}, ROW]
    ((case,),) = grouped(rows, ROW["plan"])
    assert case == [ROW, rows[1]]
    _, line = table("contexts", [case])
    # the perplexity, and the validation loss with half its range
    assert line[2:4] == ["5.05 ± 2.34", "1.500 ± 0.500"]


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


def test_rows_name_every_option_that_changes_a_result_or_its_time(settings):
    run = train(settings(steps=2, plan="masks", case="dense"))
    usual, changes = row(run), {"layers": 1, "conv": 3, "init_std": 0.1}
    for name, value in changes.items():
        other = row(run | {"settings": run["settings"] | {name: value}})
        assert other["recipe"] == f"{usual['recipe']} {name}={value}"
    two = row(run | {"sessions": [run["sessions"][-1] | {"processes": 2}]})
    assert two["device"] == f"{usual['device']} x 2"
    compiled = [usual | {"plan": "mlp", "mode": mode} for mode in ("eager", "compile")]
    assert len(grouped(compiled, "mlp")) == 2


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
    with pytest.raises(ValueError, match="plan="):  # none is of a comparison
        main.__wrapped__(Options(runs=str(tmp_path / "nothing")), "command")
