"""Processes that a program may interrupt."""

import os
import signal
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


def test_an_interrupted_program_does_not_wait_for_its_processes():
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        for _ in range(3):
            pool.submit(time.sleep, 60)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 30


def test_an_interrupt_while_a_process_starts_is_not_lost(monkeypatch):
    before = Context.Process._Popen

    def start(process):
        signal.raise_signal(signal.SIGINT)
        return before(process)

    monkeypatch.setattr(Context.Process, "_Popen", staticmethod(start))
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        pool.submit(interrupt)
