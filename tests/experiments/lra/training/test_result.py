"""What a run says of itself: its best step, its times and rates, and when it is done."""

import time

import pytest

from experiments.lra import run as loop
from experiments.training import state as checkpoint
from experiments.training.evaluate import Evaluator
from experiments.training.step import Trainer
from tests.experiments.lra.training.cases import train


def validations(run, quantity):
    return {x["step"]: x[quantity] for x in run.journal if x["kind"] == "val"}


def test_of_equal_validations_the_first_is_the_best(ran):
    run = ran(name="still", lr=1e-12, checkpoint_every=None)
    assert len(set(validations(run, "accuracy").values())) == 1
    assert run.result["best_step"] == 2
    _, step, _ = checkpoint.load_weights(run.folder / "checkpoint.pt", "")
    assert step == 2  # another run starts from the best weights
    assert run.state["step"] == 4  # the last step has a checkpoint, however fast the run is


def test_the_best_of_a_pretrained_model_has_the_least_loss(ran):
    run = ran(name="slow", pretrain="masked", lr=1e-4)
    losses, shares = (validations(run, name) for name in ("loss", "accuracy"))
    best = min(losses, key=losses.__getitem__)
    assert best != max(shares, key=shares.__getitem__)
    assert run.result["best_step"] == best


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
    for name in ("whole", "cut"):
        changes = {"name": f"times-{name}", "log_every": 3}
        if name == "cut":
            killed("retrieval", **changes)
        run = ran("retrieval", **changes)
        lines = [x for x in run.journal if x["kind"] == "train"]
        assert [(x["step"], x["epoch"]) for x in lines] == [(3, 0.75), (4, 1.0)]  # of 16 pairs
        assert {x["tokens_per_s"] for x in lines} == {4 * 2 * 64}  # of both texts
        assert run.result["ms_per_step"] == 1000
        assert run.result["seconds"] == 4 + 3 * 100  # two validations and the test
        assert run.result["data_mib"] == 16 * (2 * 64 + 2 * 4 + 8) / 2**20


def test_validations_take_their_own_examples_and_batches(ran, monkeypatch):
    made = []
    monkeypatch.setattr(
        loop, "Evaluator", lambda *a, **o: made.append(Evaluator(*a, **o)) or made[-1]
    )
    ran(name="few", val_examples=5, eval_batch=2, micro_batch=1)
    assert [(each.examples, each.batches) for each in made] == [(5, 3), (6, 3)]  # val, test


def test_a_goal_that_is_reached_exactly_ends_the_run_for_good(ran):
    changes = {"steps": 6, "val_examples": None, "task__examples": "[24,40,6]"}
    goal = validations(ran(name="goal", **changes), "accuracy")[2]
    assert goal > 0
    changes |= {"name": "reached", "stop_at": goal}
    run = ran(**changes)
    assert run.result["steps"] == 2
    (run.folder / "result.json").unlink()  # as if it was killed before
    assert ran(**changes).result["steps"] == 2


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_neither_loss_nor_gradient_may_be_infinite(place, monkeypatch, name):
    read = Trainer.read_sums
    monkeypatch.setattr(Trainer, "read_sums", lambda *a: read(*a) | {name: float("inf")})
    with pytest.raises(ValueError, match="by step 1: lower lr"):
        train(place, name=f"infinite-{name}")
