"""Threads and processes that a program may interrupt."""

import os
import signal
import threading
import time

import pytest

from experiments.common.work import processes, progress, threads


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


def test_what_has_not_begun_is_dropped_after_an_error():
    began, running, go = [], threading.Semaphore(0), threading.Event()

    def wait(number: int) -> None:
        began.append(number)
        running.release()
        go.wait(60)

    with pytest.raises(KeyboardInterrupt), threads(2) as pool:
        for number in range(20):
            pool.submit(wait, number)
        for _ in range(2):
            assert running.acquire(timeout=60)
        threading.Timer(0.2, go.set).start()
        raise KeyboardInterrupt
    assert len(began) == 2


def test_progress_yields_all_items():
    for count in range(3):
        assert list(progress(iter(range(count)), count, "items")) == [*range(count)]
