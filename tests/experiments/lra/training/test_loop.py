"""Runs from end to end in this process: every task and attention, resuming, refusals."""

import json
from collections import Counter
from functools import partial
from itertools import cycle, pairwise
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch

import masks
from experiments.common.bits import unpack
from experiments.lra import run as loop
from experiments.lra.finished import evaluate_run
from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.lra.models.attention.flash import default_mask
from experiments.lra.tasks import pathfinder
from experiments.lra.tasks.task import pixel_order
from experiments.training import data
from experiments.training import state as checkpoint
from experiments.training.journal import rounded
from experiments.training.step import AHEAD, Trainer
from tests.experiments.lra.training.cases import (
    KINDS,
    TASKS,
    assert_same,
    settings,
    train,
)

OTHERS = [task for task in TASKS if task not in KINDS]


@pytest.mark.parametrize(
    ("task", "attention"),
    [
        *zip(cycle(KINDS), ATTENTIONS, strict=False),
        *zip(cycle((*OTHERS[1:], OTHERS[0])), ATTENTIONS, strict=False),  # of another kind
    ],
)
def test_every_task_and_attention_trains_and_resumes(assert_resumes, task, attention):
    assert_resumes(task, attention)


@pytest.mark.parametrize("attention", ["flash", "sparse"])
def test_a_run_that_skips_padding_resumes(assert_resumes, attention):
    changes = {"task__max_length": 250, "attention__padding": "skip", "model__layers": 2}
    assert_resumes("listops", attention, name="skip", **changes)


def test_an_epoch_of_a_run_takes_every_example_once(ran, monkeypatch):
    """Those beyond the batches that are copied to the device at a time, too."""
    count, seen, batch = AHEAD + 7, [], data.DeviceSplit.batch

    def noted(split, rows):
        if len(split) == count:
            seen.append(split.tokens[rows])
        return batch(split, rows)

    def nothing(trainer, **options):  # it would run the first step twice
        pass

    monkeypatch.setattr(data.DeviceSplit, "batch", noted)
    monkeypatch.setattr(Trainer, "prepare", nothing)
    changes = {"task.examples": f"[{count},2,2]", "batch": 1, "steps": count, "eval_every": 1000}
    ran("listops", name="epoch", log_every=1000, checkpoint_every=1000, **changes)
    assert len(seen) == count == len(torch.cat(seen).unique(dim=0))


def test_what_a_run_leaves_behind(ran):
    changes = {"steps": 5, "log_every": 2, "tensorboard": "true", "mask": "local:16"}
    run = ran(attention="sparse", name="files", **changes)
    result = run.result
    assert json.loads((run.folder / "result.json").read_text()) == rounded(result)
    assert unpack(result["correct"]).mean() == pytest.approx(result["accuracy"])
    assert result["data"] == run.state["data"]
    names = {path.name.split(".")[0] for path in run.folder.iterdir()} - {""}
    assert names == {"config", "journal", "checkpoint", "weights", "result", "run", "events"}
    assert result.keys() >= set(
        "task source attention mask seed steps planned_steps complete accuracy val_accuracy "
        "seconds ms_per_step memory_mib device versions date baselines scale recipe".split()
    )
    lines = run.journal
    assert [(x["kind"], x["step"]) for x in lines] == [
        ("start", 0), ("train", 2), ("val", 2), ("train", 4), ("val", 4), ("train", 5), ("val", 5),
        ("test", 5), ("end", 5),
    ]  # fmt: skip
    start, one = lines[:2]
    assert start["task"]["name"] == "listops" and start["config"]["mask"] == "local:16"
    assert {"device", "versions", "params", "date"} <= start.keys()
    names = {"torch", "triton", "source", "commit", "dropout", "dropout_hidden"}
    assert names == result["versions"].keys()
    assert start["mask"] == result["mask"] == "local:16" and result["length"] == 64
    assert one["tokens_per_s"] > 0 and one["lr"] > 0 and one["memory_mib"] > 1
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(lines))


def test_a_run_records_the_mask_that_it_used(ran):
    """The default of the length, resolved, and the density at that length."""
    changes = {"attention": "sparse", "task__max_length": 512}
    source = ran(name="any", steps=1, **changes).folder
    run = ran(name="default-mask", steps=0, init_from=source, **changes)
    mask = masks.parse(run.result["mask"])
    assert mask.key == default_mask(512).key
    assert run.result["density"] == pytest.approx(mask.build(512, block_size=32).density)
    assert run.result["density"] < 0.5
    start = run.journal[0]
    assert start["mask"] == run.result["mask"] and start["config"]["mask"] is None
    dense = ran(attention="linear", name="no-mask", steps=1).result
    assert dense["mask"] is None and dense["density"] is None


def test_a_complete_run_is_left_alone(ran, capsys, monkeypatch):
    first = ran(name="done").result
    capsys.readouterr()
    monkeypatch.setattr(loop, "load_task", None)
    assert ran(name="done").result == rounded(first)
    assert "is complete: test accuracy" in capsys.readouterr().err


def test_best_weights_are_the_ones_that_are_kept_and_tested(ran):
    run = ran(name="best", steps=8, lr=0.3)
    vals = {x["step"]: x["accuracy"] for x in run.journal if x["kind"] == "val"}
    best = max(vals, key=vals.__getitem__)  # the first of equals
    assert run.result["val_accuracy"] == pytest.approx(vals[best], abs=1e-6)
    weights = checkpoint.load(run.folder / "weights.pt")
    assert run.result["best_step"] == run.state["best"]["step"] == weights["step"] == best
    assert_same(weights["model"], run.state["best"]["model"])


def test_pieces_of_a_batch_give_the_same_result(ran):
    changes = {"task": "text", "model__dropout": 0, "model__attention_dropout": 0, "lr": 1e-3}
    whole, pieces = ran(name="whole", **changes), ran(name="pieces", micro_batch=2, **changes)
    found = [run.state["model"] for run in (pieces, whole)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_a_time_limit_stops_and_the_same_command_goes_on(ran, capsys):
    long = ran(name="long", steps=6)
    short = ran(name="short", steps=6, minutes=1e-9, log_every=5)
    result = short.result
    assert not result["complete"] and result["steps"] == 1 and result["planned_steps"] == 6
    assert result["ms_per_step"] > 0
    assert "the same command continues from there" in capsys.readouterr().err
    kinds = [x["kind"] for x in short.journal]
    assert kinds[-1] == "end" and "test" in kinds
    short = ran(name="short", steps=6)
    assert short.result["complete"] and short.result["steps"] == 6
    assert_same(*([run.state[name] for name in ("best", "model")] for run in (short, long)))


def test_a_run_is_done_once_a_validation_is_good_enough(place, ran, capsys):
    changes = {"name": "easy", "steps": 6, "eval_every": 2, "stop_at": 1e-3, "val_examples": None}
    changes["task__examples"] = "[24,40,6]"  # one in ten is right by chance
    result = ran(**changes).result
    assert result["complete"] and result["steps"] == 2 and result["planned_steps"] == 6
    assert ran(**changes).result["date"] == result["date"]
    assert "is complete" in capsys.readouterr().err
    refuse(place, "stop_at=2: give an accuracy", **changes | {"stop_at": 2})
    assert ran(**changes | {"name": "hard", "stop_at": 1.0}).result["steps"] == 6


def test_a_mask_that_skips_nothing_is_told_and_block_size_mends_it(ran, place, capsys):
    changes = {"attention": "sparse", "mask": "local:4", "steps": 1, "name": "blocks"}
    coarse = ran(**changes, block_size=64).result
    assert "density 1" in capsys.readouterr().err
    fine = ran(**changes | {"name": "fine"}, block_size=16).result
    assert "density 1" not in capsys.readouterr().err
    assert coarse["density"] == 1 and fine["density"] == 10 / 16  # 4 x 4 blocks, 3 diagonals
    refuse(place, "block_size", **changes, block_size=20)
    refuse(place, "block_size=16 is for attention=sparse", attention="flash", block_size=16)


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


def test_a_fresh_head_on_the_weights_of_another_run(ran, capsys):
    first = ran("image", name="first", lr=1e-12)
    before = first.state["model"]
    for init_head in (None, "fresh"):
        changes = {"init_from": first.folder, "seed": 1, "lr": 1e-12, "init_head": init_head}
        after = ran("image", name=f"head-{init_head}", **changes).state["model"]
        same = {name for name in before if torch.allclose(after[name], before[name], atol=1e-9)}
        fresh = {name for name in before if name.startswith("head.")} if init_head else set()
        assert same == set(before) - fresh
    assert "fresh: head.0.weight" in capsys.readouterr().err


def test_no_steps_test_the_weights_of_another_run(ran, capsys):
    first = ran("image", name="trained")
    kept = first.folder.with_name("kept")  # as an archive keeps a run
    copytree(first.folder, kept, ignore=ignore_patterns("checkpoint.pt"))
    for number, source in enumerate((first.folder, first.folder / "weights.pt", kept)):
        changes = {"name": f"tested{number}", "init_from": source, "steps": 0}
        found = ran("image", **changes).result
        assert found["complete"] and (found["steps"], found["ms_per_step"]) == (0, None)
        assert all(found[name] == first.result[name] for name in ("accuracy", "loss"))
        assert "; 0 of 0 steps in" in capsys.readouterr().err
        assert ran("image", **changes).result["date"] == found["date"]  # it is complete


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
    refuse(place, "recipe=nystrom with task='chess': choose from", "listops", task__name="chess")
    refuse(place, "there is no attention 'soft'", attention__name="soft", name="new")
    refuse(place, "linear attention has no option", name="new", **{"+attention__rank": 3})
    refuse(place, "no aclImdb in .*nowhere", "text", data_dir="nowhere", name="new")
    refuse(place, "listops-1000.*task.generate=true", task__generate="false", name="new")
    refuse(place, "init_from=nowhere: no weights there", init_from="nowhere", name="new")
    path = place / "kept.pt"
    for content, words in ((b"junk", "is not a checkpoint"), (None, "has no step, best, about")):
        path.write_bytes(content) if content else checkpoint.save(path, {"model": {}})
        # never advises to delete the folder, whatever else is in it
        words = rf"{path} {words}.*: init_from= takes the folder of a run, or its weights; give an"
        refuse(place, words, init_from=path, name="new")
    refuse(place, "heads", model__heads=0, name="new")


def test_weights_of_a_larger_model(place, ran):
    folder = ran(name="deep", model__layers=2).folder
    words = rf"init_from={folder}: blocks\.1\..* is missing here; the model .* must be those"
    refuse(place, words, init_from=folder, name="new")


def test_other_settings_in_the_same_folder(place, ran):
    folder = ran(name="taken").folder
    refuse(place, "holds a run with other settings .*steps 4 -> 6.*name=", name="taken", steps=6)
    refuse(place, r"settings \(model\.layers 1 -> 3\): ", name="taken", model__layers=3)
    for text in ("{", "[]", "{}"):
        (folder / "result.json").write_text(text)
        refuse(place, "result.json .*: delete it to recreate it", name="taken")
    (folder / "result.json").unlink()
    for text in ("lr: [1, 2\nx: }", "- lr"):
        (folder / "config.yaml").write_text(text)
        refuse(place, r"(?s)config.yaml cannot be read .*: move ", name="taken")
    (folder / "config.yaml").unlink()
    refuse(place, "config.yaml cannot be read", name="taken")


def test_other_data_in_the_same_folder(place, killed):
    killed(name="data")
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
    words = r"\.pt was trained when the mask .* allowed other pairs: restore its pattern"
    refuse(place, words, **changes)
    define(3)
    assert train(place, **changes)["complete"]
    run = settings(place, **changes)
    evaluate_run(run.folder, run, torch.device("cpu"), "command")
    define(4)
    with pytest.raises(ValueError, match=words):
        evaluate_run(run.folder, run, torch.device("cpu"), "command")


def test_images_of_another_version_in_the_same_folder(place, killed, monkeypatch):
    killed("pathfinder32", name="images")
    monkeypatch.setattr(pathfinder, "IMAGES", pathfinder.IMAGES + 1)
    words = rf"other data of pathfinder32 than these \(generated v{pathfinder.IMAGES}\): restore"
    refuse(place, words, "pathfinder32", name="images")


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


def compile_by(call, monkeypatch):
    """Lets runs on the CPU, which are not compiled, be compiled to call(model, *arguments)."""
    prepare = Trainer.prepare
    monkeypatch.setattr(Trainer, "prepare", lambda t, **o: prepare(t, **o | {"compile": True}))
    monkeypatch.setattr(torch, "compile", lambda model, **options: partial(call, model))


def test_a_compiled_run_trains_validates_and_tests_compiled(ran, monkeypatch):
    changes = {"steps": 4, "eval_every": 2}
    plain, calls = ran(name="plain", **changes), Counter()

    def call(model, *arguments):
        calls[model.training] += 1
        return model(*arguments)

    compile_by(call, monkeypatch)
    made, evaluator = [], loop.Evaluator
    monkeypatch.setattr(
        loop, "Evaluator", lambda *a, **o: made.append(evaluator(*a, **o)) or made[-1]
    )
    compiled = ran(name="compiled", **changes)
    validation, test = (evaluation.batches for evaluation in made)
    assert calls == {True: 1 + 4, False: 2 * validation + test}  # the first step runs twice
    assert compiled.result["loss"] == plain.result["loss"]


def test_a_run_that_torch_compile_cannot_compile_does_not_start(place, monkeypatch):
    """Training at less than half the speed is not what was asked for."""

    def call(model, *arguments):
        raise RuntimeError("Triton has no such type\nand more")

    compile_by(call, monkeypatch)
    words = r"torch\.compile fails \(RuntimeError: Triton has no such type\): compile=false"
    refuse(place, words, name="new")


def test_a_loss_that_is_not_finite_ends_the_run(place):
    with pytest.raises(ValueError, match=r"the loss is nan .*by step \d+: lower lr=1e\+30"):
        train(place, name="nan", lr=1e30, clip=None, steps=40, warmup=0, schedule="constant")


def test_finer_pathfinder_starts_from_a_coarser_one(place, ran):
    """Path-X's recipe: the same model on 32, 64, 128 and 256 pixels a side."""
    changes = {"name": "finer", "steps": 1, "batch": 1, "val_examples": 1, "lr": 1e-12}
    first = ran("pathfinder32", **changes)
    coarse = first.state["model"]["positions"]
    changes = TASKS["pathfinder32"] | changes
    changes |= {"task.examples": "[2,1,1]", "task.order": "hilbert", "init_from": first.folder}
    for side in (64, 128, 256):
        fine = ran(f"pathfinder{side}", **changes).state["model"]["positions"]
        rows = np.empty((side * side, fine.shape[1]), np.float32)
        rows[pixel_order((side, side), "hilbert")] = fine.numpy()
        scale = side // 32
        expected = coarse.view(32, 32, -1).numpy().repeat(scale, 0).repeat(scale, 1)
        np.testing.assert_allclose(rows.reshape(expected.shape), expected, atol=1e-9)
    axial = changes | {"name": "axial", "model__positions": "axial"}
    first = ran("pathfinder32", **axial | {"init_from": None})
    second = ran("pathfinder64", **axial | {"init_from": first.folder})
    coarse, fine = (run.state["model"]["axial.rows"] for run in (first, second))
    np.testing.assert_allclose(fine, coarse.repeat_interleave(2, 0), atol=1e-9)
    few = changes | {"attention": "performer"}  # as many random features as suit the length
    source = ran("pathfinder32", **few | {"init_from": None}).folder
    assert ran("pathfinder64", **few | {"init_from": source}).result["complete"]
    changes |= {"name": "narrow", "model__dim": 8, "model__head_dim": 4}
    words = r"positions is \(4096, 8\) here, \(4096, 16\) there; the model .* must be those of"
    refuse(place, words, "pathfinder64", **changes)
