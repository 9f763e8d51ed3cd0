"""Processes that a program may interrupt."""

import os
import signal
import threading
import time

import pytest

from experiments.common.processes import Context, processes


def interrupt() -> str:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    except KeyboardInterrupt:
        return "interrupted"
    return "went on"


def test_ctrl_c_does_not_reach_a_process(capfd):
    with processes(1) as pool, Context().Pool(1) as other:
        assert [pool.submit(interrupt).result(60), other.apply(interrupt)] == ["went on"] * 2
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupted_program_does_not_wait_for_its_processes(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored at the end
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        calls = [pool.submit(time.sleep, 3600) for _ in range(9)]
        while not calls[0].running():
            time.sleep(0.01)
        assert calls[-1].cancel()  # as map does with those that are left
        raise KeyboardInterrupt


def test_an_interrupt_while_a_process_starts_is_not_lost(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    before = Context.Process._Popen

    def start(process):
        signal.raise_signal(signal.SIGINT)
        return before(process)

    monkeypatch.setattr(Context.Process, "_Popen", staticmethod(start))
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        pool.submit(interrupt)
