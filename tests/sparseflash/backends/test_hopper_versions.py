"""Which versions of Triton the hopper backend runs with, and the self-check of new ones."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from sparseflash.backends import cpu, hopper, reference
from sparseflash.backends import triton as portable
from sparseflash.backends.hopper import self_check, versions
from sparseflash.backends.registry import reasons
from sparseflash.testing import make_qkv
from tests.problems import OnHopper, problem_of

triton = pytest.importorskip("triton")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a Hopper GPU: its Triton, what its self-check finds, and how often it ran."""
    state = SimpleNamespace(triton="3.9.0", finds=None, runs=0, caches=tmp_path)

    def run(device):
        state.runs += 1
        return state.finds

    def forget():
        versions._verdict.cache_clear()
        hopper.gluon_missing.cache_clear()

    state.forget = forget
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hopper, "_triton", lambda: state.triton)
    for module in (hopper, portable):
        monkeypatch.setattr(module, "nvidia_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(versions, "run_self_check", run)
    forget()
    yield state
    forget()


def inputs():
    q, k, v = make_qkv(1, 2, 64, 64, 64, dtype=torch.bfloat16)
    return [t.as_subclass(OnHopper) for t in (q, k, v)]


def answer() -> str | None:
    return hopper.unsupported(problem_of(*inputs()), "forward")


def test_tested_versions_run_at_once_and_older_ones_are_refused(machine):
    for version in ("3.6.0", "3.8.0", "3.9.0+git1234", "3.9.1"):
        machine.triton = version
        assert answer() is None and hopper.note(torch.device("cuda", 0)) is None
    for version in ("2.1.0", "3.5.1"):
        machine.triton = version
        machine.forget()
        assert f"need Triton 3.6 or newer, this is {version}" in str(answer())
    assert machine.runs == 0


@pytest.mark.filterwarnings("ignore:Triton .* is not among the tested versions")
def test_a_new_version_runs_after_a_self_check_that_is_made_once(machine):
    version = machine.triton = "3.10.0"
    for _ in range(2):  # the second time as in another process
        assert answer() is None and answer() is None
        machine.forget()
    assert machine.runs == 1
    (file,) = machine.caches.rglob("*.json")
    changes = [file.unlink, lambda: setattr(machine, "triton", "4.1.0")]
    changes += [lambda text=text: file.write_text(text) for text in ("[]", "[" * 10_000, "{")]
    for change in changes:
        machine.triton = version
        change()
        machine.forget()
        assert answer() is None
    assert machine.runs == 1 + len(changes)


@pytest.mark.filterwarnings("ignore:Triton .* is not among the tested versions")
def test_a_failed_self_check_is_a_reason_and_the_triton_backend_runs(machine):
    machine.triton, machine.finds = "3.10.0", "dq at head dim 64 has the error 0.5, above 0.01"
    for _ in range(2):
        found = reasons(problem_of(*inputs()), "backward")
        assert found["triton"] is None
        assert "Triton 3.10.0 is not among" in str(found["hopper"])
        assert "failed: dq at head dim 64 has the error 0.5" in str(found["hopper"])
        machine.forget()
    assert machine.runs == 1


@pytest.mark.parametrize(
    "made, words",
    [
        (SimpleNamespace(stdout='noise\n{"reason": null}\n', stderr="", returncode=0), None),
        (SimpleNamespace(stdout='{"reason": "dk"}\n', stderr="", returncode=0), "dk"),
        (SimpleNamespace(stdout="", stderr="a\nillegal", returncode=-6), "status -6 (illegal)"),
        (subprocess.TimeoutExpired("python", 900), "did not end within 900 s"),
        (OSError("no python"), "did not start (no python)"),
    ],
)
def test_verdict_of_the_process(made, words, monkeypatch):
    def run(*command, **options):
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(subprocess, "run", run)
    found = versions.run_self_check(torch.device("cuda", 0))
    assert found is None if words is None else words in str(found)


@pytest.fixture
def small(monkeypatch):
    """The checks, small enough for a CPU."""
    checks = tuple(check._replace(n=300, head_dim=32) for check in self_check.CHECKS)
    monkeypatch.setattr(self_check, "CHECKS", checks)


@pytest.mark.parametrize("backend", [reference, cpu])
def test_a_right_backend_passes(backend, small, monkeypatch):
    monkeypatch.setattr(self_check, "hopper", backend)
    assert self_check.failure(torch.device("cpu")) is None


def test_a_wrong_tile_fails(small, monkeypatch):
    results = self_check._results
    monkeypatch.setattr(self_check, "hopper", cpu)
    for wrong, name in enumerate(("out", "lse", "dq", "dk", "dv")):

        def spoiled(backend, check, *inputs, wrong=wrong):
            found = results(backend, check, *inputs)
            if backend is cpu and check.deterministic:
                found[wrong][0, 0, 64:80] *= 2  # a few rows of a head
            return found

        monkeypatch.setattr(self_check, "_results", spoiled)
        found = str(self_check.failure(torch.device("cpu")))
        assert found.startswith(f"{name} at head dim 32 deterministic") and "above 0.01" in found
