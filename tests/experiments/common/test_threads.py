"""Threads that a program may interrupt."""

import threading

import pytest

from experiments.common.threads import cores, threads


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


def test_a_thread_a_core_by_default():
    with threads() as pool:
        assert pool._max_workers == cores() >= 1
