"""The runner: turns, rows of failures, going on where a run stopped, and the program."""

import sys
import types
from dataclasses import dataclass

import pytest
import torch
from matplotlib import pyplot as plt

from experiments import study as program
from experiments.common.rows import OK, read
from experiments.studies import runner
from experiments.studies.runner import Run, grid, in_turn


@dataclass(kw_only=True)
class Options(runner.Options):
    """The options of the study of these tests."""

    sizes: list[int] = runner.both([1, 2], [1, 2])


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return a study of numbers whose calls are noted, and a function that runs it."""
    made = types.ModuleType("experiments.studies.toy", "A study of numbers.")
    made.__dict__.update(
        Options=Options,
        KEY=["provider", "n", "round"], calls=[], opens=[], fails={},
        cases=lambda run: grid(n=run.options.sizes),
        ways=lambda case, run: [{"provider": name} for name in ("ours", "peer")],
        tables=lambda f: {"all": "\n".join(f"{r.n} {r.status}" for r in f.itertuples())},
    )  # fmt: skip

    def opened(case, run):
        made.opens.append(case.n)
        if ("open", case.n) in made.fails:
            raise made.fails["open", case.n]

        def one(row):
            made.calls.append((row["provider"], row["n"]))
            if (row["provider"], row["n"]) in made.fails:
                raise made.fails[row["provider"], row["n"]]
            return {"ms_median": float(row["n"])}

        return one

    made.opened = opened
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(program, "studies", lambda: {"toy": "A study of numbers."})

    def go(*words):
        words = ["name=toy", f"rows={tmp_path}/toy.jsonl", "device=cpu", *words]
        Run(made, program.options(made, words), "a command").go()
        return read(tmp_path / "toy.jsonl")

    made.go = go
    return made


def test_each_round_begins_with_another_provider(toy):
    rows = toy.go("rounds=3", "sizes=[5]")
    first, second, third = ([r["provider"] for r in rows[i : i + 2]] for i in (0, 2, 4))
    assert first == third == ["ours", "peer"] and second == ["peer", "ours"]
    assert [row["round"] for row in rows] == [1, 1, 2, 2, 3, 3] and toy.opens == [5, 5, 5]
    ways = [{"p": name, "way": way} for name in "abc" for way in (1, 2)]
    assert [w["p"] for w in in_turn(ways, 1, "p")] == list("bbccaa")


def test_failures_are_tried_again_and_reasons_stay(toy):
    toy.fails = {
        ("ours", 1): ValueError("takes no ones"), ("peer", 1): RuntimeError("a fault"),
        ("open", 2): torch.OutOfMemoryError("no room"),
    }  # fmt: skip
    reasons = ["unsupported: takes no ones", "failed: a fault", *["out of memory: no room"] * 2]
    assert [row["status"] for row in toy.go()] == reasons
    assert [row["status"] for row in toy.go()] == reasons  # the same failure stands once
    toy.fails, toy.calls[:] = {}, []
    assert toy.go()[-1]["status"] == OK and toy.calls == [("peer", 1)]


def test_a_lost_gpu_ends_the_run(toy):
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    toy.fails = {("ours", 1): lost}
    assert len(toy.go()) == 1


def test_nothing_to_measure_is_an_error(toy):
    with pytest.raises(ValueError, match="these options leave nothing to measure"):
        toy.go("sizes=[]")


def test_numbers_out_of_range_and_runs_without_a_result_are_errors(toy, run_program, tmp_path):
    for word in ("sizes=[1,0]", "seconds=-1", "rounds=0"):
        with pytest.raises(ValueError, match=f"{word[:5]}.*: give a number above 0"):
            toy.go(word)
    assert not (tmp_path / "toy.jsonl").exists()
    toy.fails = {("open", n): ValueError("takes no numbers") for n in (1, 2)}
    status, _, told = run_program("study", "name=toy", f"rows={tmp_path}/toy.jsonl", "device=cpu")
    assert status == 2 and "has no result: unsupported: takes no numbers" in told
    with pytest.raises(ValueError, match="sizes=128x512: give two numbers, such as 64:8"):
        runner.pair("sizes", "128x512")


def test_a_figure_of_the_whole_is_not_lost_to_a_part(toy, tmp_path, run_program):
    drawn = []

    def figures(rows):
        drawn.append(len(rows))
        return {"toy": plt.figure()}

    toy.figures = figures
    words = ["name=toy", f"rows={tmp_path}/toy.jsonl", "device=cpu"]
    assert run_program("study", *words)[0] == 0
    status, printed, _ = run_program("study", *words, "sizes=[3]")
    assert status == 0 and drawn == [4, 6] and "3 ok" in printed
    part = [f"rows={tmp_path}/part.jsonl" if word.startswith("rows") else word for word in words]
    run_program("study", *part, "sizes=[4]")
    paths = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    assert paths == ["part/toy.png", "toy/toy.png"]
