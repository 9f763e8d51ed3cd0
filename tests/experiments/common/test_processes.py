"""Processes that a program may interrupt."""

import os
import signal
import time

import pytest

from experiments.common.processes import processes


def interrupt() -> str:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    except KeyboardInterrupt:
        return "interrupted"
    return "went on"


def test_ctrl_c_does_not_reach_a_process():
    with processes(1) as pool:
        assert pool.submit(interrupt).result(60) == "went on"


def test_an_interrupted_program_does_not_wait_for_its_processes():
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        call = pool.submit(time.sleep, 3600)
        while not call.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
