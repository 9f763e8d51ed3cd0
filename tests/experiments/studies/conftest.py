"""Studies on a CPU, with their rows in a folder of the test."""

from importlib import import_module

import pytest

from experiments.common.rows import OK, Found
from experiments.studies import runner
from experiments.studies.runner import Run
from experiments.study import options


@pytest.fixture(autouse=True)
def as_a_user(no_interpreter, one_thread, monkeypatch):
    """Call the CPU backend, not Triton's interpreter, on one thread, and measure nothing again."""
    monkeypatch.setattr(runner, "UNSTABLE", float("inf"))


@pytest.fixture
def study(tmp_path):
    """Return a function that makes a run of a study from its options."""

    def make(name, *words):
        module = import_module(f"experiments.studies.{name}")
        own = [f"name={name}", f"rows={tmp_path}/rows.jsonl", "device=cpu", "seconds=1e-3"]
        return Run(module, options(module, [*own, *words]), "a command")

    return make


@pytest.fixture
def measured(study):
    """Return a function that runs a study twice: its rows, which the second run leaves alone."""

    def run(name, *words):
        study(name, *words).go()
        first = study(name, *words)
        before = first.rows.path.read_bytes()
        first.go()
        assert first.rows.path.read_bytes() == before
        return [Found(row) for row in first.rows.rows]

    return run


@pytest.fixture
def one(study):
    """Return a function that measures rows of a case without a file: those of its first round."""

    def measure(run, case, **chosen):
        wanted = [r for r in run.wanted(case) if all(r[k] == v for k, v in chosen.items())]
        return [Found(row) for row in run.measured(case, wanted)]

    return measure


def ok(rows):
    """Return whether all rows have a time or an error below that of float32."""
    return all(row.status == OK and (row.error is None or row.error < 1e-4) for row in rows)
