"""Short runs of the program that checks random calls."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

import sparseflash
from tests.gpu.random_calls import check_calls
from tests.processes import in_a_new_process


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("options", ["--cases 60 --seed 10000", "--cases 8 --again 20"])
def test_random_calls_are_right_again_and_again(options):
    """In processes of their own: a hang must not end the tests."""
    in_a_new_process("-m", "tests.gpu.random_calls", *options.split(), "--patience", "180")


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are collected")
def test_the_tests_of_a_gpu_can_be_imported():
    for path in Path(__file__).parent.glob("*.py"):
        import_module(f"tests.gpu.{path.stem}")


def test_random_calls_on_a_cpu_are_right_and_a_wrong_one_is_told(monkeypatch):
    assert check_calls(range(4), 300, "cpu", 2) == (4, [])
    right = sparseflash.attention

    def wrong(*arguments, **options):
        out, *more = right(*arguments, **options)
        return out * 1.5, *more

    monkeypatch.setattr(sparseflash, "attention", wrong)
    ran, told = check_calls(range(2), 300, "cpu")
    assert ran == 0 and len(told) == 2 and all("AssertionError" in text for text in told)
