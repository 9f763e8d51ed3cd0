"""Safe and online softmax against float64, their rows and tables, in the interpreter."""

import pytest
import torch

from experiments.common.rows import frame
from experiments.studies.softmax import ALGORITHMS, error, make_call, tables
from tests.experiments.studies.conftest import ok

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")


def check(x):
    right = x.double().softmax(1)
    for algorithm in ("safe", "online", "torch"):
        result = make_call(algorithm, x)()
        assert torch.allclose(result.double(), right, rtol=1e-5, atol=1e-12), algorithm
        assert error(algorithm, result, x) < 1e-5
    assert error("online", torch.zeros_like(x), x) == pytest.approx(1.0)
    assert error("copy", make_call("copy", x)(), x) == 0


def test_against_float64():
    for shape in [(3, 10), (2, 1), (2, 9000)]:
        check(torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4)


def test_hard_rows():
    """Rising numbers, far from 0, equal ones, and -inf in whole blocks."""
    empty = torch.full((9000,), -torch.inf)
    empty[-20:] = torch.arange(20.0)
    check(torch.stack([torch.linspace(-3, 3, 9000) + 1000, torch.full((9000,), -1e4), empty]))


def test_rows_and_tables(measured):
    rows = measured("softmax", "vocabularies=[10,300]", "batches=[3]")
    assert [row.algorithm for row in rows] == [*ALGORITHMS] * 2 and ok(rows)
    row = next(r for r in rows if r.algorithm == "online")
    assert row.gb_s == pytest.approx(3 * 3 * 10 * 4 / row.ms_median / 1e6, rel=1e-4)
    made = tables(frame(rows))["softmax"]
    gain = next(r for r in rows if r.algorithm == "safe").ms_median / row.ms_median
    assert f" | {gain:.2f} | " in made.splitlines()[2]
    other = [row | {"device": "GPU B", "ms_median": row.ms_median / 2} for row in rows]
    both = tables(frame([*rows, *other]))
    assert len(both) == 2 and both["softmax: GPU B"] != made in both.values()


def test_a_cpu_alone_is_refused(study, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs a GPU, or TRITON_INTERPRET=1"):
        study("softmax").go()
