"""The entry of programs: unknown options, bad values and sweeps end in a line, not a trace."""

import errno
import re
import signal
import time

import pytest
import torch

from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.common.work import processes
from experiments.lra.settings import Settings
from experiments.plot import Options
from experiments.table import Options as TableOptions

OPTIONS = {"plot": Options, "train": Settings, "table": TableOptions}


@pytest.fixture
def run(run_program):
    """Return a function that runs a program: exit status, stderr, and what its main was given."""

    def start(*words, name="plot", main=lambda *_: None):
        seen = []
        own = program(name, OPTIONS[name], made=name != "train")
        status, _, error = run_program(own(lambda *x: (seen.append(x), main(*x))), *words)
        return status, error, seen

    return start


def test_a_program_gets_its_options_and_its_command(run):
    status, _, [(options, command)] = run("out=a b", "rows=x.jsonl")
    assert status == 0 and options == Options("x.jsonl", "a b", True)
    assert command == "python -m experiments.plot 'out=a b' rows=x.jsonl"
    _, _, [(options, command)] = run("rows=${out}")
    assert options.rows == options.out and command.endswith(" 'rows=${out}'")


def test_what_cannot_be_read_is_one_line(run):
    for name, words, message in (
        ("plot", "rowz=x", "option='rowz'.*mean rows"),
        ("plot", "+rowz=x", "option='rowz'.*mean rows"),
        ("train", "model.dims=8", r"option='model.dims'.*mean model.dim\?"),
        ("plot", "rows=${nothing}", "'nothing' not found"),
        ("plot", "-m a.csv rows=a,b", "a.csv: give options as NAME=VALUE"),
        ("plot", "rows=local(8)", r"""'rows="local\(8\)"'"""),
        ("table", "runs=[a,local(8)]", r"""'runs=\["...","..."\]'"""),
        ("train", "--config-dir /nowhere task=mine", "/nowhere: there is no such folder"),
    ):
        status, error, seen = run(*words.split(), name=name)
        assert status == 2 and not seen and error.startswith("error: ") and error.count("\n") == 1
        assert re.search(message, error), error


def raises(error):
    def main(options, command):
        raise error

    return main


def test_errors_of_values_and_files_are_one_line_and_faults_keep_their_trace(run):
    for error, text in (
        (ValueError("out=3: give a folder"), "out=3: give a folder"),
        (OSError(errno.EROFS, "No", "a/b"), "cannot use a/b (No): name another place"),
    ):
        assert run(main=raises(error))[:2] == (2, f"error: {text}\n")
    before = signal.getsignal(signal.SIGINT)
    assert run(main=raises(KeyboardInterrupt()))[:2] == (130, "interrupted\n")
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL  # a second one ends it at once
    with pytest.raises(KeyError):
        run(main=raises(KeyError("a fault")))


def test_the_remaining_jobs_of_a_sweep_still_run(run, tmp_path):
    def main(options, command):
        if options.out == "a":
            raise ValueError("not a")

    status, error, seen = run("out=a,b", f"hydra.sweep.dir={tmp_path}", "-m", main=main)
    assert status == 2 and [options.out for options, _ in seen] == ["a", "b"]
    assert "failed: out=a\n" in error


# ---- devices and processes


def test_devices(monkeypatch):
    assert find_device("cpu") == torch.device("cpu")
    for count, default, gone in ((0, "cpu", "cuda"), (2, "cuda", "cuda:2")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert find_device(None).type == default
        with pytest.raises(ValueError, match=rf"device='{gone}': torch finds .*give device=cpu"):
            find_device(gone)
    assert find_device("cuda:1").index == 1
    for wrong in ("gpu", "mps", 3.5):
        with pytest.raises(ValueError, match=r"device=.*: choose from cpu, cuda"):
            find_device(wrong)
    assert device_name("cpu").endswith("threads)")


def test_an_interrupted_program_does_not_wait_for_its_processes():
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        call = pool.submit(time.sleep, 3600)
        while not call.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
