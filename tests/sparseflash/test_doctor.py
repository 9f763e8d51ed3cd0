"""python -m sparseflash.doctor: the report of this machine, and its test."""

import pytest
import torch

from sparseflash import doctor

pytestmark = pytest.mark.usefixtures("no_interpreter")


def test_reports_versions_and_backends_and_passes(capsys):
    assert doctor.main([]) == 0
    report = capsys.readouterr().out
    for part in (
        f"torch {torch.__version__}, triton ", "cpu: ", "forward: cpu", "backward: cpu",
        "  hopper: its kernels run on CUDA tensors",
    ):  # fmt: skip
        assert part in report
    tested = [line.split()[:2] for line in report.splitlines() if "limit 1e-04" in line]
    assert tested.count(["ok", "cpu,"]) == tested.count(["ok", "reference,"]) == 3
    assert report.endswith("the test passed\n")


@pytest.mark.parametrize("part", [0, 2], ids=["out", "dk"])
def test_a_wrong_result_fails(part, monkeypatch, capsys):
    def wrong(q, k, v, mask, backend):
        tensors = [q, k, v]
        if part:
            tensors[part - 1] = Skewed.apply(tensors[part - 1])
        out = right(*tensors, mask, backend=backend)
        return out if part else out + 0.01 * out.detach().roll(1)

    right = doctor.attention
    monkeypatch.setattr(doctor, "attention", wrong)
    assert doctor.main(["--device", "cpu"]) == 1
    report = capsys.readouterr().out
    assert report.count("FAILED cpu, ") == 3 and "please report" in report


def test_an_error_is_reported_and_fails(monkeypatch, capsys):
    def broken(*given, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(doctor, "attention", broken)
    assert doctor.main(["--device", "cpu"]) == 1
    assert "FAILED cpu, dense: RuntimeError: no such kernel" in capsys.readouterr().out


class Skewed(torch.autograd.Function):
    """The identity with a gradient that is one percent too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return 1.01 * gradient


def test_an_unknown_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--device", "cuda:77"])
    assert "invalid choice: 'cuda:77'" in capsys.readouterr().err
