"""Runs from end to end in this process: every task and attention, resuming, refusals."""

import json
import time
from itertools import cycle
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch

import masks
from experiments.common.files import unpack
from experiments.evaluate import evaluate_run
from experiments.lra import run as lra_run
from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.lra.models.attention.flash import default_mask
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import pixel_order
from experiments.training import state as checkpoint
from experiments.training.evaluate import Evaluator
from experiments.training.run_file import read_settings
from experiments.training.step import Trainer
from tests.experiments.lra.training.cases import TASKS, assert_same, settings, train, train_on
from tests.processes import on_ranks

HEADS = ("head.", "lm_head.", "hidden_token")


@pytest.mark.parametrize(("task", "attention"), [*zip(cycle(TASKS), ATTENTIONS, strict=False)])
def test_every_task_and_attention_trains_and_resumes(assert_resumes, task, attention):
    assert_resumes(task, attention, deterministic="true" if attention == "sparse" else "false")


@pytest.mark.parametrize("recipe", ["google", "spt"])
def test_other_recipes_train_and_resume(assert_resumes, recipe):
    assert_resumes("files", "linear", recipe=recipe)


def test_a_run_that_skips_padding_resumes(assert_resumes):
    changes = {"task__max_length": 250, "attention__padding": "skip", "model__layers": 2}
    assert_resumes("listops", "sparse", name="skip", **changes)


@pytest.mark.parametrize("task", ["retrieval", "listops"])
def test_self_pretraining_resumes_and_classifiers_start_from_it(assert_resumes, ran, task):
    changes, names = {"recipe": "rotary"}, (task, "sparse")
    assert_resumes(*names, name="tokens", pretrain="masked", **changes)
    pre = ran(*names, name="tokens", pretrain="masked", **changes)
    assert pre.result["correct"] is None
    losses = {x["step"]: x["loss"] for x in pre.journal if x["kind"] == "val"}
    assert pre.result["best_step"] == min(losses, key=losses.__getitem__)
    changes |= {"init_from": pre.folder, "lr": 1e-12, "seed": 1}
    begun = ran(*names, name="after", **changes).state["model"]
    before = pre.state["best"]["model"]
    for name, weights in before.items():
        if not name.startswith(HEADS):
            torch.testing.assert_close(begun[name], weights, rtol=0, atol=1e-9)
    assert not torch.equal(begun["head.0.weight"], before["head.0.weight"])


def test_what_a_run_leaves_behind(ran):
    run = ran(attention="sparse", name="files", steps=5, log_every=2, mask="local:16")
    result = run.result
    assert unpack(result["correct"]).mean() == pytest.approx(result["accuracy"], abs=1e-6)
    assert result["data"] == run.state["data"]
    names = {path.name.split(".")[0] for path in run.folder.iterdir()} - {""}
    assert names == {"run", "journal", "checkpoint", "weights"}
    assert [x["step"] for x in run.journal if x["kind"] == "train"] == [2, 4, 5]
    assert (result["complete"], result["reason"], result["steps"]) == (True, None, 5)
    assert result["task"]["name"] == "listops" and result["task"]["length"] == 64
    assert result["settings"]["mask"] == result["mask"] == "local:16"
    assert {"torch", "triton", "source", "commit"} <= result["sessions"][0]["versions"].keys()
    assert result["seconds"] > 0 and result["ms_per_step"] > 0 and result["memory_mib"] > 1


def test_the_default_mask_is_resolved(ran):
    run = ran(attention="sparse", name="default", steps=1, task__max_length=512)
    mask = masks.parse(run.result["mask"])
    assert mask.key == default_mask(512).key
    density = mask.build(512, block_size=32).density
    assert run.result["density"] == pytest.approx(density, rel=1e-5) and density < 0.5
    assert run.result["settings"]["mask"] is None
    dense = ran(attention="linear", name="no-mask", steps=1).result
    assert dense["mask"] is None and dense["density"] is None


def test_the_best_weights_are_kept_and_tested(ran, monkeypatch):
    run = ran(name="best", steps=8, lr=0.3)
    vals = {x["step"]: x["accuracy"] for x in run.journal if x["kind"] == "val"}
    best = max(vals, key=vals.__getitem__)  # the first of equals
    assert run.result["val_accuracy"] == pytest.approx(vals[best], abs=1e-6)
    weights = checkpoint.load(run.folder / "weights.pt")
    assert run.result["best_step"] == run.state["best"]["step"] == weights["step"] == best
    assert_same(weights["model"], run.state["best"]["model"])
    found = evaluate_run(run.folder, read_settings(run.folder, Settings), torch.device("cpu"))
    assert found["accuracy"] == pytest.approx(run.result["accuracy"], abs=1e-6)
    monkeypatch.setattr(lra_run, "load_task", None)  # a complete run is left alone
    assert ran(name="best", steps=8, lr=0.3).file == run.file


def test_pieces_of_a_batch_give_the_same_result(ran):
    changes = {"task": "text", "model__dropout": 0, "model__attention_dropout": 0, "lr": 1e-3}
    whole, pieces = ran(name="whole", **changes), ran(name="pieces", micro_batch=2, **changes)
    found = [run.state["model"] for run in (pieces, whole)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_a_time_limit_stops_and_the_same_command_goes_on(ran, killed):
    long = ran(name="long", steps=6)
    short = ran(name="short", steps=6, minutes=1e-9, log_every=5)
    result = short.result
    assert (result["complete"], result["reason"], result["steps"]) == (False, "minutes", 1)
    assert [x["kind"] for x in short.journal][-2:] == ["test", "end"]
    killed(name="short", steps=6)  # the weights of the first result are those of no step any more
    assert not (short.folder / "weights.pt").exists()
    short = ran(name="short", steps=6)
    assert short.result["complete"] and short.result["steps"] == 6
    assert [session["step"] for session in short.result["sessions"]] == [0, 1, 2]
    assert_same(*([run.state[name] for name in ("best", "model")] for run in (short, long)))


def test_a_goal_that_is_reached_exactly_ends_the_run_for_good(ran):
    changes = {"steps": 6, "val_examples": None, "task__examples": "[24,40,6]"}
    run = ran(name="goal", **changes)
    goal = next(x["accuracy"] for x in run.journal if x["kind"] == "val")
    changes |= {"name": "reached", "stop_at": goal}
    run = ran(**changes)
    assert run.result["complete"] and run.result["steps"] == 2 and goal > 0
    (run.folder / "run.json").unlink()  # as if it was killed before
    assert ran(**changes).result["steps"] == 2


def test_weights_need_not_be_kept(ran, place, tmp_path):
    run = ran(name="lean", keep="false")
    assert run.result["complete"] and not list(run.folder.glob("*.pt"))
    changes = {"cache_dir": tmp_path / "cache", "runs": tmp_path / "runs"}
    assert train(place, "listops", data_only=True, **changes) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_weights_of_another_run(ran, place):
    first = ran("image", name="first", lr=1e-12)
    before = first.state["model"]
    for init_head in (None, "fresh"):
        changes = {"init_from": first.folder, "seed": 1, "lr": 1e-12, "init_head": init_head}
        after = ran("image", name=f"head-{init_head}", **changes).state["model"]
        same = {name for name in before if torch.allclose(after[name], before[name], atol=1e-9)}
        fresh = {name for name in before if name.startswith("head.")} if init_head else set()
        assert same == set(before) - fresh
    kept = first.folder.with_name("kept")
    copytree(first.folder, kept, ignore=ignore_patterns("checkpoint.pt"))
    for number, source in enumerate((first.folder / "weights.pt", kept)):
        changes = {"name": f"tested{number}", "init_from": source, "steps": 0}
        found = ran("image", **changes).result
        assert found["complete"] and (found["steps"], found["ms_per_step"]) == (0, None)
        assert all(found[name] == first.result[name] for name in ("accuracy", "loss"))
    deep = ran(name="deep", model__layers=2).folder
    refuse(place, rf"init_from={deep}: blocks\.1\..* is missing here", init_from=deep, name="new")


def test_times_count_all_sessions_and_rates_the_steps_alone(ran, killed, monkeypatch):
    """A step takes a second here, an evaluation a hundred, and all else no time."""
    now, advance, evaluate = [0.0], Trainer.advance, Evaluator.__call__

    def taking(seconds, call):
        def slow(self):
            now[0] += seconds
            return call(self)

        return slow

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Trainer, "advance", taking(1, advance))
    monkeypatch.setattr(Evaluator, "__call__", taking(100, evaluate))
    killed("retrieval", name="times", log_every=3)
    run = ran("retrieval", name="times", log_every=3)
    lines = [x for x in run.journal if x["kind"] == "train"]
    assert [(x["step"], x["epoch"]) for x in lines] == [(3, 0.75), (4, 1.0)]  # of 16 pairs
    assert {x["tokens_per_s"] for x in lines} == {4 * 2 * 64}  # of both texts
    assert run.result["ms_per_step"] == 1000
    assert run.result["seconds"] == 4 + 3 * 100  # two validations and the test


def test_fewer_processes_continue_a_run_and_its_times_are_their_own(place, ran, monkeypatch):
    """Two processes end at step 2 of 4, in the middle of the steps of a line of the journal."""
    changes: dict[str, object] = {"steps": 4, "log_every": 4}
    changes |= {"model__dropout": 0, "model__attention_dropout": 0}
    whole = ran(name="alone", **changes)
    changes["name"] = "fewer"
    names = ("listops", "linear")
    on_ranks(2, train_on, place, names, changes | {"minutes": 1e-9}, group=False)
    now, advance = [0.0], Trainer.advance
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(trainer):  # a step takes a second, and all else no time
        now[0] += 1
        advance(trainer)

    monkeypatch.setattr(Trainer, "advance", slow)
    run = ran(**changes)
    assert [x["processes"] for x in run.result["sessions"]] == [2, 1]
    assert run.result["ms_per_step"] == 1000
    for name in ("loss", "accuracy", "grad_norm"):
        found = [x[name] for each in (run, whole) for x in each.journal if x["kind"] == "train"]
        assert found[0] == pytest.approx(found[1], rel=1e-4), name


def test_finer_pathfinder_starts_from_a_coarser_one(place, ran):
    """Path-X's recipe: the same model on 32, 64, 128 and 256 pixels a side."""
    changes = {"name": "finer", "steps": 1, "batch": 1, "val_examples": 1, "lr": 1e-12}
    first = ran("pathfinder32", **changes)
    coarse = first.state["model"]["positions"]
    changes = TASKS["pathfinder32"] | changes
    changes |= {"task.examples": "[2,1,1]", "task.order": "hilbert", "init_from": first.folder}
    for side in (64, 128):
        fine = ran(f"pathfinder{side}", **changes).state["model"]["positions"]
        rows = np.empty((side * side, fine.shape[1]), np.float32)
        rows[pixel_order((side, side), "hilbert")] = fine.numpy()
        scale = side // 32
        expected = coarse.view(32, 32, -1).numpy().repeat(scale, 0).repeat(scale, 1)
        np.testing.assert_allclose(rows.reshape(expected.shape), expected, atol=1e-9)
    few = changes | {"attention": "performer"}  # as many random features as suit the length
    source = ran("pathfinder32", **few | {"init_from": None}).folder
    assert ran("pathfinder64", **few | {"init_from": source}).result["complete"]
    changes |= {"name": "narrow", "model__dim": 8, "model__head_dim": 4}
    refuse(place, r"positions is \(4096, 8\) here, \(1024, 16\) there", "pathfinder64", **changes)


# ---- refusals: nothing is left half-written


def files(place):
    return sorted(path for path in (place / "runs").rglob("*") if path.is_file())


def refuse(place, words, *names, **changes):
    before = files(place)
    with pytest.raises(ValueError, match=words):
        train(place, *names, **changes)
    assert files(place) == before
    assert "new" not in {path.name for path in (place / "runs").rglob("new")}


def test_refusals(place):
    refuse(place, "rank", name="new", **{"+attention__rank": 3})
    refuse(place, "listops-1000.*task.generate=true", task__generate="false", name="new")
    refuse(place, "init_from=nowhere: no weights there", init_from="nowhere", name="new")
    path = place / "kept.pt"
    checkpoint.save(path, {"model": {}})
    refuse(place, f"{path} has no step, best, about", init_from=path, name="new")


def test_other_settings_in_the_same_folder(place, ran):
    folder = ran(name="taken").folder
    refuse(place, r"model\.layers 1 -> 3.*name=", name="taken", model__layers=3)
    run = json.loads((folder / "run.json").read_text())
    del run["settings"]["init_head"]  # as before there was such a setting
    (folder / "run.json").write_text(json.dumps(run))
    assert ran(name="taken").result["complete"]
    (folder / "run.json").write_text("{}")
    refuse(place, "run.json .*: delete it to recreate it", name="taken")


def test_another_process_may_train_while_the_data_are_read(place, ran, monkeypatch):
    load, others = lra_run.load_task, [{"name": "late", "keep": "false"}]

    def late(**data):
        if others:
            train(place, **others.pop())
        return load(**data)

    monkeypatch.setattr(lra_run, "load_task", late)
    assert len(ran(name="late", keep="false").result["sessions"]) == 1  # trained once
    others.append({"name": "other", "lr": 0.5})
    with pytest.raises(ValueError, match=r"lr 0\.5 -> 0\.01"):
        train(place, name="other")


def test_other_data_in_the_same_folder(place, killed):
    killed(name="data")
    refuse(place, "data_seed 0 -> 1", name="data", data_seed=1)
    path = settings(place, name="data").folder / "checkpoint.pt"
    state = checkpoint.load(path)
    checkpoint.save(path, state | {"data": "else"})
    refuse(place, "was trained on other data than listops", name="data")
    state["model"]["cls"] = torch.zeros(3)
    checkpoint.save(path, state)
    refuse(place, f"{path} does not fit this model", name="data")


@pytest.mark.usefixtures("own_patterns")
def test_a_pattern_that_changed_in_the_same_folder(place, killed):
    """The text of a mask of one's own stays, and means something else."""

    def define(width: int):
        @masks.pattern()
        def own():
            return masks.local(width)

    define(3)
    changes = {"attention": "sparse", "mask": "own", "name": "pattern"}
    killed("listops", **changes)
    define(4)
    refuse(place, "allowed other pairs", **changes)
    define(3)
    assert train(place, **changes)["complete"]
    run = settings(place, **changes)
    evaluate_run(run.folder, run, torch.device("cpu"))
    define(4)
    with pytest.raises(ValueError, match="allowed other pairs"):
        evaluate_run(run.folder, run, torch.device("cpu"))


def test_a_batch_too_large_says_what_to_do(place, monkeypatch):
    def fails(trainer):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")

    monkeypatch.setattr(Trainer, "_body", fails)
    refuse(place, "micro_batch=4 needs more memory", name="new")


def test_a_loss_that_is_not_finite_ends_the_run(place):
    changes = {"clip": None, "steps": 40, "warmup": 0, "schedule": "constant"}
    with pytest.raises(ValueError, match=r"the loss is nan .*by step \d+: lower lr=1e\+30"):
        train(place, name="nan", lr=1e30, **changes)
