"""Checks of options name the option, the value and the remedy."""

import pytest
import torch

from experiments.common.config import as_list, choose, whole_number
from experiments.common.devices import device_name, find_device


def test_numbers():
    whole_number("n", 1)
    for value in (0, 1.5, "3", True, None):
        with pytest.raises(ValueError, match=r"n=.*: give a whole number, at least 1"):
            whole_number("n", value)


def test_choices():
    choose("dtype", "float16", ["float16"])
    with pytest.raises(ValueError, match=r"dtype='float61': choose from float16, int8 \(did you"):
        choose("dtype", "float61", ["float16", "int8"])


def test_one_or_a_list():
    assert (as_list(None), as_list(3), as_list("ab"), as_list([1])) == ([], [3], ["ab"], [1])


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
