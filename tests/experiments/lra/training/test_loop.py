"""Runs from end to end in this process: every task and attention, resuming, refusals."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import masks
from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.lra.models.attention.flash import default_mask
from experiments.lra.tasks.task import pixel_order
from experiments.lra.training import checkpoint, data
from experiments.lra.training.journal import rounded
from experiments.lra.training.step import Trainer
from tests.experiments.lra.training.cases import TASKS, same, settings, train, write_data
from tests.experiments.lra.training.commands import journal


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, which all runs here share."""
    folder = tmp_path_factory.mktemp("lra")
    (folder / "data").mkdir()
    write_data(folder / "data")
    return folder


def load(place, task="listops", attention="linear", **changes):
    return checkpoint.load(settings(place, task, attention, **changes).folder / "checkpoint.pt")


def lines(place, *names, **changes):
    return journal(settings(place, *names, **changes).folder)


class Killed(BaseException):
    """What a kill looks like from inside."""


@pytest.fixture
def killed_after(monkeypatch):
    """Makes training end after some steps, with nothing written any more."""

    def arm(steps):
        advance = Trainer.advance

        def fails(trainer):
            if trainer.step == steps:
                raise Killed
            advance(trainer)

        monkeypatch.setattr(Trainer, "advance", fails)
        return lambda: monkeypatch.setattr(Trainer, "advance", advance)

    return arm


@pytest.fixture
def assert_resumes(place, killed_after):
    """A run that is killed after three steps and started again ends with the same bits."""

    def check(task, attention, name="uncut", **changes):
        whole, cut = changes | {"name": name}, changes | {"name": f"{name}-cut"}
        result = train(place, task, attention, **whole)
        assert result["complete"] and result["steps"] == 4 and 0 <= result["accuracy"] <= 1
        disarm = killed_after(3)
        with pytest.raises(Killed):
            train(place, task, attention, **cut)
        disarm()
        train(place, task, attention, **cut)
        states = [load(place, task, attention, **some) for some in (whole, cut)]
        for name in ("model", "optimizer", "sums", "random", "best", "step", "logged"):
            assert same(states[0][name], states[1][name]), name
        logs = [lines(place, task, attention, **some) for some in (whole, cut)]
        assert [x["kind"] for x in logs[1]].count("resume") == 1
        told = "loss accuracy lr grad_norm grad_norm_max epoch kind step".split()
        ours, theirs = (
            [{k: x.get(k) for k in told} for x in log if x["kind"] in ("train", "val", "test")]
            for log in logs
        )
        assert ours == theirs

    return check


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_and_attention_trains_and_resumes(assert_resumes, task, attention):
    assert_resumes(task, attention)


@pytest.mark.parametrize("attention", ["flash", "sparse"])
def test_a_run_that_skips_padding_resumes(assert_resumes, attention):
    changes = {"task__max_length": 250, "attention__padding": "skip", "model__layers": 2}
    assert_resumes("listops", attention, "skip", **changes)


def test_what_a_run_leaves_behind(place):
    changes = {"name": "files", "steps": 5, "log_every": 2, "tensorboard": "true"}
    result = train(place, attention="sparse", mask="local:16", **changes)
    folder = settings(place, attention="sparse", mask="local:16", **changes).folder
    assert json.loads((folder / "result.json").read_text()) == rounded(result)
    names = {path.name.split(".")[0] for path in folder.iterdir()} - {""}
    assert names == {"config", "journal", "checkpoint", "weights", "result", "events"}
    best = load(place, attention="sparse", mask="local:16", **changes)["best"]
    weights = checkpoint.load(folder / "weights.pt")
    assert weights["step"] == best["step"] and same(weights["model"], best["model"])
    assert result.keys() >= set(
        "task source attention mask seed steps planned_steps complete accuracy val_accuracy "
        "seconds ms_per_step memory_mib device versions date baselines scale recipe".split()
    )
    found = lines(place, attention="sparse", mask="local:16", **changes)
    assert [(x["kind"], x["step"]) for x in found] == [
        ("start", 0), ("train", 2), ("val", 2), ("train", 4), ("val", 4), ("train", 5), ("val", 5),
        ("test", 5), ("end", 5),
    ]  # fmt: skip
    start = found[0]
    assert start["task"]["name"] == "listops" and start["config"]["mask"] == "local:16"
    assert {"device", "versions", "params", "date"} <= start.keys()
    assert {"torch", "triton", "source", "commit"} == result["versions"].keys()
    assert start["mask"] == result["mask"] == "local:16" and result["length"] == 64
    one = found[1]
    assert one["tokens_per_s"] > 0 and one["lr"] > 0 and one["memory_mib"] > 1
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(found))


def test_a_run_records_the_mask_that_it_used(place):
    """The default of the length, resolved, and the density at that length."""
    changes = {"task__max_length": 512, "steps": 0, "name": "default-mask"}
    source = settings(place, attention="sparse", **changes | {"name": "any", "steps": 1}).folder
    train(place, attention="sparse", **changes | {"name": "any", "steps": 1})
    result = train(place, attention="sparse", **changes | {"init_from": source})
    mask = masks.parse(result["mask"])
    assert mask.key == default_mask(512).key
    assert result["density"] == pytest.approx(mask.build(512).density) and result["density"] < 1
    start = lines(place, attention="sparse", **changes | {"init_from": source})[0]
    assert start["mask"] == result["mask"] and start["config"]["mask"] is None
    dense = train(place, attention="linear", name="no-mask", steps=1)
    assert dense["mask"] is None and dense["density"] is None


def test_a_complete_run_is_left_alone(place, capsys, monkeypatch):
    first = train(place, name="done")
    capsys.readouterr()
    monkeypatch.setattr(data, "load_task", None)
    assert train(place, name="done") == rounded(first)
    assert "is complete: test accuracy" in capsys.readouterr().err


def test_best_weights_are_the_ones_that_are_tested(place):
    result = train(place, name="best", steps=8, lr=0.3)
    best = load(place, name="best", steps=8, lr=0.3)["best"]
    vals = [x for x in lines(place, name="best", steps=8, lr=0.3) if x["kind"] == "val"]
    assert result["val_accuracy"] == pytest.approx(max(x["accuracy"] for x in vals), abs=1e-6)
    assert result["best_step"] == best["step"]
    assert best["step"] == next(
        x["step"] for x in vals if x["accuracy"] == max(v["accuracy"] for v in vals)
    )


def test_pieces_of_a_batch_give_the_same_result(place):
    changes = {"task": "text", "model__dropout": 0, "model__attention_dropout": 0, "lr": 1e-3}
    train(place, name="whole", **changes)
    train(place, name="pieces", micro_batch=2, **changes)
    whole, pieces = load(place, name="whole", **changes), load(place, name="pieces", **changes)
    for name, weights in whole["model"].items():
        torch.testing.assert_close(pieces["model"][name], weights, rtol=1e-3, atol=1e-5)


def test_a_time_limit_stops_and_the_same_command_goes_on(place, capsys):
    train(place, name="long", steps=6)
    result = train(place, name="short", steps=6, minutes=1e-9, log_every=5)
    assert not result["complete"] and result["steps"] == 1 and result["planned_steps"] == 6
    assert result["ms_per_step"] > 0
    assert "the same command continues from there" in capsys.readouterr().err
    kinds = [x["kind"] for x in lines(place, name="short", steps=6)]
    assert kinds[-1] == "end" and "test" in kinds
    result = train(place, name="short", steps=6)
    assert result["complete"] and result["steps"] == 6
    short, long = (load(place, name=name, steps=6) for name in ("short", "long"))
    assert same(short["best"], long["best"]) and same(short["model"], long["model"])


def test_a_run_is_done_once_a_validation_is_good_enough(place, capsys):
    changes = {"name": "easy", "steps": 6, "eval_every": 2, "stop_at": 1e-3, "val_examples": None}
    changes["task__examples"] = "[24,40,6]"  # one in ten is right by chance
    result = train(place, **changes)
    assert result["complete"] and result["steps"] == 2 and result["planned_steps"] == 6
    assert train(place, **changes)["date"] == result["date"]
    assert "is complete" in capsys.readouterr().err
    refuse(place, "stop_at=2: give an accuracy", **changes | {"stop_at": 2})
    changes |= {"name": "hard", "stop_at": 1.0}
    assert train(place, **changes)["steps"] == 6


def test_data_alone(place, tmp_path, capsys):
    changes = {"cache_dir": tmp_path / "cache", "runs": tmp_path / "runs"}
    assert train(place, "listops", data_only=True, **changes) == {}
    assert "listops (generated" in (told := capsys.readouterr().err) and "is ready in" in told
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    del changes["runs"]
    train(place, "listops", name="there", **changes)
    changes |= {"data_only": True, "precision": "bf16"}  # as a plan asks for it, on a processor
    assert train(place, "listops", name="there", **changes) == {}
    assert train(place, "listops", **changes | {"scale": "small"}) == {}
    assert "scale=small: made for a CPU" in capsys.readouterr().err


def test_pretraining_and_what_starts_from_it(place):
    changes = {"attention": "sparse", "model__dim": 16}
    pre = train(place, "image", name="pre", pretrain="masked_pixels", **changes)
    assert pre["pretrain"] == "masked_pixels"
    source = settings(place, "image", name="pre", pretrain="masked_pixels", **changes).folder
    changes |= {"name": "fine", "init_from": source, "seed": 1, "steps": 1, "lr": 1e-12}
    assert train(place, "image", **changes)["init_from"] == str(source)
    before = checkpoint.load(source / "checkpoint.pt")["best"]["model"]
    after = load(place, "image", **changes)
    for name, weights in after["model"].items():
        if not name.startswith("head."):
            torch.testing.assert_close(weights, before[name], rtol=0, atol=1e-9)
    assert not torch.equal(after["model"]["head.0.weight"], before["head.0.weight"])


def test_a_fresh_head_on_the_weights_of_another_run(place, capsys):
    changes = {"attention": "linear", "name": "first", "lr": 1e-12}
    train(place, "image", **changes)
    source = settings(place, "image", **changes).folder
    before = load(place, "image", **changes)["model"]
    changes |= {"init_from": source, "seed": 1}
    for init_head in (None, "fresh"):
        changes |= {"name": f"head-{init_head}", "init_head": init_head}
        train(place, "image", **changes)
        after = load(place, "image", **changes)["model"]
        same = {name for name in before if torch.allclose(after[name], before[name], atol=1e-9)}
        fresh = {name for name in before if name.startswith("head.")} if init_head else set()
        assert same == set(before) - fresh
    assert "fresh: head.0.weight" in capsys.readouterr().err


def test_no_steps_test_the_weights_of_another_run(place, capsys):
    first = train(place, "image", attention="linear", name="trained")
    folder = settings(place, "image", attention="linear", name="trained").folder
    for number, source in enumerate((folder, folder / "weights.pt")):
        changes = {"attention": "linear", "name": f"tested{number}", "init_from": source}
        changes["steps"] = 0
        found = train(place, "image", **changes)
        assert found["complete"] and (found["steps"], found["ms_per_step"]) == (0, None)
        assert (found["accuracy"], found["loss"]) == (first["accuracy"], first["loss"])
        assert "; 0 of 0 steps in" in capsys.readouterr().err
        assert train(place, "image", **changes)["date"] == found["date"]  # it is complete


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
    refuse(place, "no task 'chess': choose from", "listops", task__name="chess")
    refuse(place, "there is no attention 'soft'", attention__name="soft", name="new")
    refuse(place, "linear attention has no option", name="new", **{"+attention__rank": 3})
    refuse(place, "no aclImdb in .*nowhere", "text", data_dir="nowhere", name="new")
    refuse(place, "listops-1000.*task.generate=true", task__generate="false", name="new")
    refuse(place, "pretrain=masked_pixels needs images", pretrain="masked_pixels", name="new")
    refuse(place, "init_from=nowhere: no checkpoint.pt", init_from="nowhere", name="new")
    path = place / "kept.pt"
    for content, words in ((b"junk", "cannot be read"), (None, "has no step, best, about")):
        path.write_bytes(content) if content else checkpoint.save(path, {"model": {}})
        # never advises to delete the folder, whatever else is in it
        words = rf"{path} {words}.*: init_from= takes the folder of a run, or its weights; give an"
        refuse(place, words, init_from=path, name="new")
    refuse(place, "heads", model__heads=0, name="new")


def test_other_settings_in_the_same_folder(place):
    train(place, name="taken")
    refuse(place, "holds a run with other settings .*steps 4 -> 6.*name=", name="taken", steps=6)
    folder = settings(place, name="taken").folder
    (folder / "result.json").write_text("{")
    refuse(place, "result.json cannot be read", name="taken")
    (folder / "result.json").unlink()
    (folder / "config.yaml").unlink()
    refuse(place, "config.yaml cannot be read", name="taken")


def test_other_data_in_the_same_folder(place, killed_after):
    disarm = killed_after(3)
    with pytest.raises(Killed):
        train(place, name="data")
    disarm()
    refuse(place, "holds a run with other settings", name="data", data_seed=1)
    path = settings(place, name="data").folder / "checkpoint.pt"
    state = checkpoint.load(path)
    checkpoint.save(path, state | {"data": "else"})
    refuse(place, "was trained on other data of listops", name="data")
    state["model"]["cls"] = torch.zeros(3)
    state["optimizer"]["exp_avg"] = state["optimizer"]["exp_avg"][:7]
    checkpoint.save(path, state)
    refuse(place, rf"{path} does not fit this model \(cls is \(3,\) there, missing", name="data")
    del state["model"]["cls"]
    checkpoint.save(path, state)
    refuse(place, r"\(exp_avg is \(7,\) there, .*delete it to start over", name="data")
    checkpoint.save(path, {"step": 1})
    refuse(place, "has no model, optimizer, .*: delete it to start over", name="data")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_a_batch_too_large_says_what_to_do(place, monkeypatch, error):
    def fails(trainer):
        raise error

    monkeypatch.setattr(Trainer, "_body", fails)
    words = "4 examples of 64 tokens at a time.*too much for the memory of .*: micro_batch=2"
    refuse(place, words, name="new")
    refuse(place, "1 examples of .*a smaller model", name="new", micro_batch=1)


def test_a_loss_that_is_not_finite_ends_the_run(place):
    with pytest.raises(ValueError, match=r"the loss is nan .*by step \d+: lower lr=1e\+30"):
        train(place, name="nan", lr=1e30, clip=None, steps=40, warmup=0, schedule="constant")


def test_small_runs_say_so(place, capsys):
    result = train(place, name="small", scale="small")
    assert result["scale"] == "small"
    assert "scale=small: made for a CPU" in capsys.readouterr().err
    assert "listops-small" in str(settings(place, name="small", scale="small").folder)


def test_finer_pathfinder_starts_from_a_coarser_one(place):
    """Path-X's recipe: the same model on 32, 64, 128 and 256 pixels a side."""
    changes = {"attention": "linear", "name": "finer", "steps": 1, "batch": 1, "val_examples": 1}
    train(place, "pathfinder32", **changes)
    source = settings(place, "pathfinder32", **changes).folder
    coarse = load(place, "pathfinder32", **changes)["model"]["positions"]
    changes |= TASKS["pathfinder32"] | {"init_from": source, "lr": 1e-12, "batch": 1}
    changes |= {"task.examples": "[2,1,1]", "task.order": "hilbert", "task.difficulty": 6}
    for side in (64, 128, 256):
        train(place, f"pathfinder{side}", **changes)
        fine = load(place, f"pathfinder{side}", **changes)["model"]["positions"]
        rows = np.empty((side * side, fine.shape[1]), np.float32)
        rows[pixel_order((side, side), "hilbert")] = fine.numpy()
        scale = side // 32
        expected = coarse.view(32, 32, -1).numpy().repeat(scale, 0).repeat(scale, 1)
        np.testing.assert_allclose(rows.reshape(expected.shape), expected, atol=1e-9)
    axial = changes | {"name": "axial", "model__positions": "axial"}
    train(place, "pathfinder32", **axial | {"init_from": None})
    axial["init_from"] = settings(place, "pathfinder32", **axial).folder
    train(place, "pathfinder64", **axial)
    coarse, fine = (load(place, f"pathfinder{n}", **axial)["model"]["axial.rows"] for n in (32, 64))
    np.testing.assert_allclose(fine, coarse.repeat_interleave(2, 0), atol=1e-9)
    few = changes | {"attention": "performer"}  # as many random features as suit the length
    train(place, "pathfinder32", **few | {"init_from": None})
    few["init_from"] = settings(place, "pathfinder32", **few).folder
    assert train(place, "pathfinder64", **few)["complete"]
    changes |= {"name": "narrow", "model__dim": 8, "model__head_dim": 4}
    words = r"positions is \(4096, 8\) here, \(4096, 16\) there; the model .* must be those of"
    refuse(place, words, "pathfinder64", **changes)
