"""Runs of language models: they learn, continue bit for bit, and become rows and tables."""

import gc
import gzip
import json
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.common.records import as_csv, read
from experiments.lm import plans as plans_module
from experiments.lm import prepare as prepare_module
from experiments.lm import settings as settings_module
from experiments.lm.plans import PLANS, bucketed, make_row, old_points, planned, run_plan, thinned
from experiments.lm.prepare import make_model
from experiments.lm.report import CURVES, Case, difference, grouped
from experiments.lm.result import tail
from experiments.lm.rows import ModelRow, PointRow
from experiments.lm.run import train
from experiments.lm.session import Session
from experiments.lm.settings import LAYERS, make_settings
from experiments.lm.tokens import load_corpus
from experiments.training.clock import Interrupted
from experiments.training.device import reset_memory
from experiments.training.evaluate import Evaluator
from experiments.training.step import Trainer

LEFT = {"complete": False}


@pytest.mark.parametrize("model", ["tiny", "bert-tiny"])
def test_the_loss_decreases(model, settings):
    result = train(settings(model=model, steps=60, lr=3e-3, batch=8, warmup=5))
    curve = [loss for _, loss in result["curve"]]
    assert curve[0] > 4 and result["train_loss"] < curve[0]
    assert curve[-1] < (3.4 if model == "tiny" else 4.2) and result["val_loss"] < 4.2
    assert len(result["positions"]) == (32 if model == "tiny" else 0)
    assert result["saved_mib"] > 0


def test_a_complete_run_leaves_no_activations(settings):
    """The next run of the process has their memory."""

    def activations() -> int:
        gc.collect()
        return sum(type(x) is torch.Tensor and 29 in x.shape for x in gc.get_objects())

    before = activations()
    train(settings(model="tiny", provider="standard", context=29, steps=2))
    assert activations() == before


@pytest.mark.parametrize("changes", [{}, {"model": "bert-tiny"}, {"packed": True, "dropout": 0.1}])
def test_a_run_continues_bit_for_bit(changes, settings, monkeypatch):
    whole = train(settings(name="whole", checkpoint_every=3, **changes))
    part = settings(name="part", checkpoint_every=3, **changes)
    saved = Session._save

    def stop(self):
        saved(self)
        if self.trainer.step == 6:
            raise Interrupted("SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_save", stop)
        with pytest.raises(Interrupted):
            train(part)
    torch.manual_seed(123)
    result = train(part)
    for name in ("curve", "positions", "val_loss", "train_loss"):
        assert result[name] == whole[name]
    ends = [
        torch.load(s / "checkpoint.pt", weights_only=True)
        for s in (part.folder, settings(name="whole", **changes).folder)
    ]
    for name in ("model", "optimizer"):
        for key, tensor in ends[0][name].items():
            assert torch.equal(tensor, ends[1][name][key])


def test_a_signal_is_a_checkpoint_and_the_limit_of_time_too(settings, monkeypatch):
    slow = settings(minutes=1e-9, steps=50)
    assert train(slow)["complete"] is False
    assert (slow.folder / "checkpoint.pt").exists()
    assert not (slow.folder / "result.json").exists()
    assert train(replace(slow, minutes=None))["complete"]
    monkeypatch.setattr(prepare_module, "load_corpus", None)
    assert train(slow)["complete"]  # a complete run reads no data


def test_times_and_rates_are_of_the_steps_alone(settings, monkeypatch, capsys):
    """The set-up takes 50 seconds here, a step one, an evaluation 100, and all else no time."""
    now = [0.0]

    def slow(call, seconds):
        return lambda self, *given: now.__setitem__(0, now[0] + seconds) or call(self, *given)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Session, "_prepare", slow(Session._prepare, 50))
    monkeypatch.setattr(Trainer, "advance", slow(Trainer.advance, 1))
    monkeypatch.setattr(Evaluator, "__call__", slow(Evaluator.__call__, 100))
    here = settings(steps=4, log_every=3, eval_every=2)
    result = train(here)
    lines = map(json.loads, (here.folder / "journal.jsonl").read_text().splitlines())
    assert [x["tokens_per_s"] for x in lines if x["kind"] == "train"] == [64, 64]
    assert (result["ms_per_step"], result["seconds"]) == (1000, 50 + 4 + 100)
    assert "step 3/4" in (shown := capsys.readouterr().err) and "0:01 left" in shown
    assert result["val_tokens"] == 64


def test_other_text_is_refused(settings, texts):
    first = settings(minutes=1e-9)
    train(first)
    (texts / "new.txt").write_text("something else")
    with pytest.raises(ValueError, match="was trained on other text"):
        train(first)


def test_a_context_too_long_for_the_memory_is_one_line(settings, monkeypatch):
    monkeypatch.setattr(settings_module, "free_memory", lambda device: 2**10)
    with pytest.raises(ValueError, match=r"of standard attention.*or provider=sparse"):
        train(settings(provider="standard"))

    def lacks(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.undo()
    monkeypatch.setattr(Session, "run", lacks)
    with pytest.raises(ValueError, match=r"2 windows of context=32 at a time.*micro_batch=1"):
        train(settings())


def test_bad_settings_are_one_line(settings):
    for changes, text in {
        "model": ("gpt", "choose from tiny"),
        "provider": ("flash", "choose from sparse, standard, sdpa"),
        "mask": ("nothing:3", "unknown pattern"),
        "context": (0, "give a whole number"),
        "runs": (0, "runs=0: give a path"),
        "compile": ("None", "compile='None': give layers, true, false or null"),
        "deterministic": ("no", "deterministic='no': give true, false or null"),
        "weight_decay": ("x", "weight_decay='x': give a number, at least 0"),
        "tokenizer": ("bpe:3", "choose bytes, or bpe:SIZE"),
        "val_tokens": (3, r"give 32 \(context\) or more"),
    }.items():
        with pytest.raises(ValueError, match=text[1]):
            train(settings(**{changes: text[0]}))
    with pytest.raises(ValueError, match="needs provider=sparse"):
        settings(mask="moba(16, 2)", provider="standard")
    with pytest.raises(ValueError, match="packed=true: documents are packed for objective=next"):
        settings(model="bert-tiny", packed=True)


def test_the_training_loss_is_that_of_the_last_hundred_steps():
    assert tail([(50, 9.0), (100, 4.0), (150, 2.0), (200, 1.0)], 200) == 1.5
    assert tail([(2, 3.0), (3, 6.0)], 3) == 4.0


def test_curves_are_thinned():
    assert thinned([(i, float(i)) for i in range(1, 101)], 40)[0] == (3, 2.0)
    assert bucketed([1.0, 2.0, 3.0, 3.0, 5.0, 5.0, 5.0, 5.0], 3) == [(2, 1.5), (4, 3.0), (8, 5.0)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_is_rows_a_table_and_a_figure(plan, options, tmp_path, capsys, one_thread):
    cases = {"same": None, "contexts": [4, 32]}.get(plan, ["dense", "sliding"])
    page = tmp_path / "page.md"
    page.write_text(f"<!-- lm: {plan} -->\nold\n<!-- end -->\n")
    given = options(steps=4, cases=cases, pages=[str(page)])
    if plan == "equal_time":
        with pytest.raises(ValueError, match="needs the time of a step of 'dense'"):
            run_plan(plan, given, "command")
        assert not (tmp_path / "rows").exists()
        first = {row.case: row for row in run_plan("masks", {**given, "pages": []}, "")}
    rows = run_plan(plan, given, "command")
    if plan == "equal_time":
        times = {row.case: row.steps * first[row.case].ms_step for row in rows}
        assert abs(times["sliding"] - times["dense"]) <= first["sliding"].ms_step
    assert len(rows) == len(planned(plan, given)) == (3 if plan == "same" else 2)
    if plan == "same":
        losses = [row.train_loss for row in rows]
        assert max(losses) - min(losses) < 1e-4 * losses[0]
        saved = {row.provider: row.saved_mib or 0 for row in rows}
        assert saved["standard"] > saved["sparse"] > 0
    text = capsys.readouterr().out
    assert "a single run each" in text and next((tmp_path / "rows").glob("lm-*.png"))
    assert rows[0].case in page.read_text() and "old" not in page.read_text()
    path = tmp_path / "rows" / "results.csv"
    before = path.read_bytes()
    run_plan(plan, given, "command")
    assert path.read_bytes() == before
    path.unlink()
    path.with_name("results.csv.gz").write_bytes(gzip.compress(before))
    assert run_plan(plan, given, "command") == rows and not path.exists()
    points = old_points(tmp_path / "rows")
    assert {p.curve for p in points} == ({"step", "position"} if plan in CURVES else set())
    again = read(path.with_name("results.csv.gz"), ModelRow)
    assert [row.key for row in again if row.plan == plan] == [row.key for row in rows]
    assert not list((tmp_path / "runs").rglob("checkpoint.pt"))


def test_the_validation_loss_is_that_of_the_validation_part(settings):
    here = settings(steps=8)
    result = train(here)
    corpus = load_corpus(here.data, "bytes", here.cache_dir)
    model, _ = make_model(here, corpus)
    weights = torch.load(here.folder / "checkpoint.pt", weights_only=True)["model"]
    model.load_state_dict(weights)
    tokens = torch.from_numpy(corpus.val[:65].astype(int))
    losses = model.eval()(tokens[:64].view(2, 32), tokens[1:].view(2, 32))
    assert result["val_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert result["positions"] == pytest.approx(losses.mean(0).tolist(), rel=1e-3)


def test_tables_have_percent_and_perplexity(options, one_thread):
    rows = run_plan("same", options(steps=2, cases=["standard", "ours"]), "")
    first, second = (
        replace(row, train_loss=x, val_loss=1.0) for row, x in zip(rows, (2.0, 2.01), strict=True)
    )
    assert difference(Case([second]), Case([first])) == pytest.approx(0.5)
    assert Case([first]).perplexity == "2.72"
    assert Case([first, replace(first, seed=1, val_loss=2.0)]).perplexity == "5.05 ± 2.34"
    settings = make_settings(options(steps=2, provider="standard", keep=False))
    result = train(settings) | {"positions": [4.0, 3.0, 2.0, 1.0] * 2}  # complete already
    assert make_row("same", "a", settings, result).late_loss == 1.5


def test_contexts_have_equal_tokens_a_step(options):
    found = planned("contexts", options(context=64, batch=4))
    assert {s.context * s.batch for _, s in found} == {256} and len(found) == 4
    for context, least in ((100, 8), (8, 8), (2056, 16)):
        with pytest.raises(ValueError, match=f"context={context} .* multiple of {least}, 16 or mo"):
            planned("contexts", options(context=context))


def test_another_rate_has_rows_and_a_table_of_its_own(options, capsys, one_thread):
    for lr in (1e-3, 1e-1):
        rows = run_plan("same", options(steps=2, cases=["SDPA", "ours"], lr=lr), "")
    assert len(rows) == 4 and len({row.val_loss for row in rows[1:3]}) == 2
    tables = capsys.readouterr().out.split("M parameters")[2:]  # of the second call
    for table, row, end in zip(tables, rows[::2], ("-2.png", ".png"), strict=True):
        assert f"{row.val_loss:.4f}" in table and row.recipe in table and end in table
    figures = {path for table in tables for path in table.split() if path.endswith(".png")}
    assert len(figures) == 2 and all(Path(path).stat().st_size for path in figures)
    assert "lr=0.1 warmup=20 schedule=cosine betas=[0.9, 0.95]" in rows[2].recipe


def test_equal_time_needs_the_dense_run_of_its_recipe(options, monkeypatch, one_thread):
    trained = []
    run_plan("masks", options(steps=2, cases=["dense"]), "")
    monkeypatch.setattr(plans_module, "train", lambda run, *_: trained.append(run.lr) or LEFT)
    run_plan("equal_time", options(steps=2, cases=["dense"]), "")
    run_plan("equal_time", options(steps=2, cases=["dense"], lr=0.5), "")
    assert trained == [0.5]


def test_equal_time_takes_times_of_steps_like_its_own(options, one_thread):
    given = options(steps=4, cases=["dense", "sliding"])
    rows = run_plan("masks", given, "")
    rows = [replace(row, ms_step={"dense": 2.0}.get(row.case, 1.0)) for row in rows]
    own = [run for _, run in planned("masks", given)]
    runs = list(zip(("dense", "sliding"), own, strict=True))
    others = {"precision": "bf16", "positions": "rotary", "provider": "sdpa", "packed": True}
    others["objective"] = "masked"
    slow = [replace(rows[1], ms_step=9.0, **{name: value}) for name, value in others.items()]
    assert [run.steps for _, run in plans_module._timed(runs, [*rows, *slow])] == [4, 8]


def test_a_plan_evaluates_and_saves_at_the_end_only(options, monkeypatch, one_thread):
    """Evaluations and checkpoints took as long as the steps of a short run on a GPU."""
    evaluated, saved = [], []
    monkeypatch.setattr(Evaluator, "__call__", lambda self: evaluated.append(1) or {"loss": 1.0})
    monkeypatch.setattr(Session, "_save", lambda self: saved.append(1))
    given = options(steps=12, cases=["ours"], eval_every=None)
    run = planned("same", given)[0][1]
    assert run.eval_every == 12
    row = run_plan("same", given, "")[0]
    assert not evaluated and not saved  # the loss by position has the mean
    assert row.val_loss == pytest.approx(row.late_loss, rel=0.2)
    assert make_settings(options(eval_every=None)).eval_every == 100
    assert run.folder == replace(run, eval_every=5).folder  # it changes no result
    train(make_settings(options(steps=12)))
    assert len(evaluated) == 1 and len(saved) == 1  # at step 6; the weights of one run are kept


def test_full_plans_are_of_equal_tokens_and_take_other_steps(options, monkeypatch):
    given = options(context=None, batch=None, steps=None, model=None)
    monkeypatch.setattr(plans_module, "find_device", lambda _: torch.device("cuda"))
    given = {**given, "small": {**given["full"]}}
    for name, plan in PLANS.items():
        monkeypatch.setitem(PLANS, name, replace(plan, small=plan.full))
        if name == "equal_time":
            continue
        found = planned(name, given)
        assert {run.context * run.batch for _, run in found} == {32_768}
        assert {run.seed for _, run in found} == ({0} if name == "same" else {0, 1})
        assert {run.steps for _, run in found} == ({1000} if name == "same" else {300})
        assert {run.steps for _, run in planned(name, {**given, "steps": 50})} == {50}
        assert {run.seed for _, run in planned(name, {**given, "seeds": [1]})} == {1}


def test_equal_time_takes_the_dense_run_of_equal_steps(options, monkeypatch, one_thread):
    given = options(steps=4, cases=["dense", "sliding"])
    csv = Path(given["csv"]) / "results.csv"
    dense, sliding = run_plan("masks", given, "")
    csv.write_text(as_csv([dense, replace(sliding, ms_step=dense.ms_step / 2)], ModelRow))
    dense, _ = read(csv, ModelRow)
    trained = []
    monkeypatch.setattr(plans_module, "train", lambda run, *_: trained.append(run) or LEFT)
    timed = replace(dense, plan="equal_time", recipe=f"{dense.recipe} dense_steps=4")
    for _ in range(2):
        assert run_plan("equal_time", given, "") == [timed]
    assert {run.steps for run in trained} == {8}
    twice = [replace(row, steps=8) for row in read(csv, ModelRow)[:2]]
    csv.write_text(as_csv([*read(csv, ModelRow), *twice], ModelRow))
    found = run_plan("equal_time", {**given, "steps": 8}, "")
    assert [case.first.steps for (case,) in grouped(found)] == [4, 8]  # a table for each time


@pytest.mark.parametrize("other", [{"packed": True}, {"objective": "masked"}])
def test_equal_time_takes_no_run_of_another_kind(other, options, one_thread):
    given = options(steps=2, cases=["dense"])
    (own,) = run_plan("masks", given, "")
    rows = [own, replace(own, **other)]
    (Path(given["csv"]) / "results.csv").write_text(as_csv(rows, ModelRow))
    (found,) = run_plan("equal_time", given, "")
    assert (found.packed, found.objective) == (False, "next")


def test_points_of_finished_measurements_are_compressed(options, one_thread):
    given = options(steps=4, cases=["ours"])
    run_plan("same", given, "")
    plain = Path(given["csv"]) / "points.csv"
    points = read(plain, PointRow)
    plain.with_name("points.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert old_points(plain.parent) == points + points  # of finished ones, and of this one


def test_nothing_of_a_run_stays_in_memory(settings, monkeypatch):
    """Else the peak of the next run of a process holds it."""
    kept, run = [], Session.run

    def watched(self):
        result = run(self)
        kept.extend(map(weakref.ref, (self.model, self.trainer, self.trainer.flat.values)))
        return result

    monkeypatch.setattr(Session, "run", watched)
    for provider in ("standard", "sdpa", "sparse"):
        train(settings(provider=provider, steps=2))
        reset_memory(torch.device("cpu"))
        assert all(ref() is None for ref in kept)


def test_moba_may_be_a_graph_but_is_not_compiled(options, monkeypatch):
    monkeypatch.setattr(settings_module, "find_device", lambda _: torch.device("cuda"))
    chosen = make_settings(options(mask="moba(16, 2)"))
    assert chosen.graph and not chosen.compile
    assert make_settings(options()).compile
    packed = make_settings(options(packed=True))
    assert not packed.graph and not packed.compile


def test_blocks_may_be_compiled_by_themselves(options, monkeypatch, one_thread):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    (case, run), *_ = planned("masks", options(steps=4, cases=["dense"]))
    plain = train(run)
    here = replace(run, compile=LAYERS, name="layers")
    result = train(here)
    assert result["compiled"] == LAYERS and plain["compiled"] is False
    assert make_row("masks", case, here, result).mode == "compile by layers"
    assert result["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-5)
    with pytest.raises(ValueError, match="compile='blocks': give layers, true, false or null"):
        make_settings(options(compile="blocks"))


def test_an_unknown_case_is_refused(options):
    with pytest.raises(ValueError, match=r"cases='mine': plan=same has 'standard'"):
        planned("same", options(cases=["mine"]))


@pytest.mark.parametrize(
    "plan, key, value", [("masks", "mask", "sliding:8"), ("same", "provider", "sdpa")]
)
def test_an_option_that_each_case_has_for_itself_is_refused(plan, key, value, options):
    with pytest.raises(ValueError, match=f"{key}={value}: each case of plan={plan} has its own"):
        planned(plan, options(**{key: value}))


def test_a_run_leaves_its_manifest(settings):
    here = settings(steps=2)
    train(here)
    assert json.loads((here.folder / "manifest.json").read_text())[0]["name"] == "texts"
