"""Which versions of Triton the hopper backend runs with."""

import pytest
import torch

from sparseflash.backends import hopper
from sparseflash.backends import triton as portable
from sparseflash.backends.registry import reasons
from sparseflash.kernels.common.versions import OVERRIDE
from sparseflash.testing import make_qkv
from tests.problems import OnHopper, problem_of

pytest.importorskip("triton")


def answers(version: str, monkeypatch) -> dict[str, str | None]:
    """What the backends answer on a Hopper GPU with a version of Triton."""
    monkeypatch.setattr(hopper, "_triton", lambda: version)
    for module in (hopper, portable):
        monkeypatch.setattr(module, "nvidia_capability", lambda device: (9, 0))
    hopper.gluon_missing.cache_clear()
    q, k, v = make_qkv(1, 2, 64, 64, 64, dtype=torch.bfloat16)
    found = reasons(problem_of(*(t.as_subclass(OnHopper) for t in (q, k, v))), "backward")
    hopper.gluon_missing.cache_clear()
    return found


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0", "3.9.0+git1234", "3.9.1"])
def test_tested_versions_run(version, monkeypatch):
    assert answers(version, monkeypatch)["hopper"] is None


@pytest.mark.parametrize("version", ["2.1.0", "3.5.1", "3.10.0", "4.1.0"])
def test_other_versions_are_refused_and_the_triton_backend_runs(version, monkeypatch):
    found = answers(version, monkeypatch)
    assert found["triton"] is None and version in str(found["hopper"])


def test_a_variable_lets_newer_versions_run_and_older_ones_not(monkeypatch):
    monkeypatch.setenv(OVERRIDE, "1")
    assert answers("3.10.0", monkeypatch)["hopper"] is None
    assert answers("3.5.1", monkeypatch)["hopper"]
