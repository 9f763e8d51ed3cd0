"""In what order the runs of a sweep run, how they stop, and what a failure stops."""

import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.lra.sweep import queue as queue_module
from experiments.lra.sweep.queue import Queue, Worker
from experiments.training.clock import Interrupted
from tests.experiments.lra.sweep.stand_in import events, limit, notes, wait


def test_data_first_then_as_many_as_there_are_places(make, tmp_path):
    runs = make({name: {"with": ["eps=0.3"]} for name in "abc"})
    Queue(runs, ["5", "7"]).run()
    told = events(tmp_path)
    assert told[:2] == ["a data begin", "a data end"] and sum("data" in x for x in told) == 2
    assert sorted(told[2:4]) == ["a begin", "b begin"] and told[-1] == "c end"
    assert {x["gpu"] for x in notes(tmp_path)[2:4]} == {"5", "7"}
    assert all(run.complete for run in runs)
    Queue(runs, ["5"]).run()  # there is nothing left to do
    assert events(tmp_path) == told


def test_a_run_waits_for_the_one_before_it_and_its_data_do_not(make, tmp_path):
    entries = {
        "easy": {"with": ["task=pathfinder32", "eps=0.5"]},
        "hard": {"with": ["task=pathfinder64"], "after": "easy"},
        "other": {"with": ["task=pathfinder32", "seed=1"]},
    }
    runs = make(entries)
    assert Queue(runs, [None]).state(runs[1]) == "waits for easy"
    Queue(runs, [None, None]).run()
    told = events(tmp_path)
    assert told.index("hard data begin") < told.index("easy end") < told.index("hard begin")
    assert told.index("other end") < told.index("easy end")


def test_what_fails_stops_those_after_it_alone(make, tmp_path, monkeypatch):
    monkeypatch.setenv("BROKEN", "bad,none data")
    entries = {
        "bad": {"with": ["task=image"]},
        "next": {"after": "bad", "with": ["task=pathfinder32", "eps=0.5"]},  # bad has failed then
        "last": {"after": "next", "with": ["task=pathfinder64"]},
        "none": {"with": ["task=text"]},
        "same": {"with": ["task=text", "seed=1"]},
        "fine": {"with": ["task=listops"]},
    }
    runs = make(entries)
    queue = Queue(runs, [None])
    queue.run()
    began = [x.removesuffix(" begin") for x in events(tmp_path) if x.endswith(" begin")]
    assert set(began) <= {"bad data", "bad", "next data", "none data", "fine data", "fine"}
    assert [run.name for run in runs if run.complete] == ["fine"]
    bad, *waits = [queue.state(run) for run in runs[:3]]
    none = [queue.state(run) for run in runs[3:5]]
    assert bad == "failed: exit status 1: hello"
    assert waits == ["waits for bad", "waits for next"]
    assert none == ["failed: its data could not be made: hello"] * 2
    queue.costs = {"none": 2.0, "last": 1.5, "fine": 8.0}
    left = "about 4 GPU minutes left, and 3 runs of unknown length"
    assert queue.report().splitlines()[-1] == f"1 of 6 runs complete, 3 failed; {left}"


def test_a_complete_run_with_other_settings_is_not_the_one_asked_for(make, tmp_path):
    Queue(make({"a": {}, "b": {}}), [None]).run()
    told = events(tmp_path)
    runs = make({"a": {"with": ["lr=0.5"]}, "next": {"after": "a"}, "b": {}})
    queue = Queue(runs, [None])
    before = list(map(queue.state, runs))  # which dry_run=true lists
    queue.run()
    a, next_, b = map(queue.state, runs)
    assert before == [a, next_, b]
    assert a.startswith(f"failed: {runs[0].settings.folder} holds a run with other settings (lr ")
    assert next_ == "waits for a" and b.startswith("test accuracy")
    assert queue.progress() == "1 of 3 runs complete, 1 failed" and events(tmp_path) == told


def test_a_killed_process_is_named_and_its_run_goes_on_later(make, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KILLED", "a")
    runs = make({"a": {}, "b": {}})
    queue = Queue(runs, [None])
    assert queue.report() == "a, b: not started\n0 of 2 runs complete"
    queue.run()
    assert queue.state(runs[0]) == "failed: exit status -9: hello" and runs[1].complete
    assert "\n1 of 2 runs complete, 1 failed\n" in capfd.readouterr().err
    monkeypatch.delenv("KILLED")
    Queue(runs, [None]).run()
    assert [run.complete for run in runs] == [True, True]
    began = [x for x in events(tmp_path) if x.endswith(" begin") and "data" not in x]
    assert began == ["a begin", "b begin", "a begin"]


def test_the_limit_stops_all_and_no_more_start(make, tmp_path, capfd):
    runs = make({"a": {"with": ["eps=60"]}, "b": {"with": ["eps=60"]}, "c": {}})
    queue = Queue(runs, [None, None])
    queue.ready.add(runs[0].data)
    at_work: list[bool] = []

    def begun() -> bool:
        if len(notes(tmp_path)) == 2:
            at_work.extend(run.at_work for run in runs)
        return bool(at_work)

    limit(queue, begun)
    queue.run()
    assert at_work == [True, True, False]
    assert sorted(events(tmp_path)) == ["a begin", "b begin"]
    assert not queue.workers and not queue.failed
    assert [queue.state(run) for run in runs] == ["not started"] * 3
    assert "[a] hello" in capfd.readouterr().err
    queue = Queue(runs, [None], minutes=0.01)  # too late for what would take longer
    queue.begun -= 0.4
    queue.run()
    assert len(events(tmp_path)) == 2


def test_what_does_not_stop_in_time_is_killed(make, tmp_path, monkeypatch):
    monkeypatch.setattr(queue_module, "GRACE", 0.3)
    monkeypatch.setenv("DEAF", "a")
    runs = make({"a": {"with": ["eps=60"]}})
    queue = Queue(runs, [None])
    queue.ready.add(runs[0].data)
    limit(queue, lambda: len(notes(tmp_path)) == 1)
    queue.run()
    wait(lambda: not runs[0].at_work)


def test_a_run_at_work_elsewhere_is_waited_for(make, tmp_path):
    """The other sweep completes one of its runs, and leaves the other one to this sweep."""
    runs = make({"done": {}, "left": {}, "own": {}})
    with ExitStack() as claims:
        for run in runs[:2]:
            assert claims.enter_context(run.claim())
        queue = Queue(runs, [None])
        assert [queue.state(run) for run in runs] == ["at work"] * 2 + ["not started"]

        def end() -> None:
            with claims:  # let go whatever happens: the queue would wait for ever
                wait(lambda: runs[2].complete)
                done = runs[0].settings.folder
                done.mkdir(parents=True)
                result = runs[2].settings.folder / "result.json"
                (done / "result.json").write_text(result.read_text())

        thread = threading.Thread(target=end)
        thread.start()
        queue.run()
        thread.join()
    began = [x for x in events(tmp_path) if x.endswith(" begin") and "data" not in x]
    assert began == ["own begin", "left begin"] and all(run.complete for run in runs)


def test_a_claim_outlives_its_sweep_and_not_its_process(make):
    (run,) = make({"a": {}})
    with run.claim() as claim:
        assert claim is not None
        process = subprocess.Popen(["sleep", "60"], pass_fds=[claim.fileno()])
    assert run.at_work
    process.kill()
    process.wait()
    assert not run.at_work


def test_a_signal_ends_the_processes(make, tmp_path):
    runs = make({"a": {"with": ["eps=60"]}})
    queue = Queue(runs, [None])
    queue.ready.add(runs[0].data)
    kill = subprocess.Popen(["sh", "-c", f"sleep 1; kill -TERM {os.getpid()}"])
    with pytest.raises(Interrupted) as stop:
        queue.run()
    kill.wait()
    assert stop.value.code == 128 + signal.SIGTERM
    assert not queue.workers and not queue.failed and events(tmp_path) == ["a begin"]


@pytest.mark.parametrize(("minutes", "late_after"), [(10, 9), (1, 0.5), (None, None)])
def test_runs_start_while_there_is_a_minute_or_half_of_a_short_limit(make, minutes, late_after):
    queue = Queue(make({"a": {}}), [None], minutes=minutes)
    for passed in (0, 0.4, 0.6, 8.9, 9.1):
        queue.begun = time.monotonic() - 60 * passed
        assert queue._late() == (late_after is not None and passed > late_after)


def test_data_are_of_the_scale_of_the_run(make, monkeypatch):
    """They are made on the CPU, where the scale would be small."""
    commands = []

    def started(command, **options):
        commands.append(command)
        return SimpleNamespace(stdout=())

    monkeypatch.setattr(queue_module.subprocess, "Popen", started)
    (run,) = make({"a": {"with": ["scale=auto"]}})
    full = replace(run, settings=replace(run.settings, scale="full"))
    Queue([full], [None])._open(full)
    assert commands[0][-3:] == ["data_only=true", "device=cpu", "scale=full"]


@pytest.mark.parametrize("code", [130, 143, -signal.SIGTERM, 129, 1, -signal.SIGKILL])
def test_a_run_that_a_signal_stopped_has_not_failed(make, code):
    runs = make({"a": {}})
    queue, process = Queue(runs, [None]), SimpleNamespace(returncode=code, stdout=())
    queue._note(Worker(runs[0], 0, process))  # pyright: ignore
    assert bool(queue.failed) == (code in (1, -signal.SIGKILL))
