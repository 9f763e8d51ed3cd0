"""Devices, and work in threads and processes."""

import os
import signal
import threading
import time

import pytest
import torch

from experiments.common.devices import device_name, find_device
from experiments.common.work import processes, threads


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
