"""The error of attention with outliers: inputs, errors, rows and tables."""

import pytest
import torch

from experiments.common.rows import OK, Found, frame
from experiments.studies import accuracy
from experiments.studies.accuracy import METHODS, draw, tables
from sparseflash.testing import oracle

CPU = torch.device("cpu")


def test_a_thousandth_of_the_entries_is_far_out():
    case = Found(batch=1, heads=2, n=8192, head_dim=64, dtype="float16", outliers=0.001)
    q, k, v = draw(case, CPU)
    entries = torch.cat([t.float().flatten() for t in (q, k, v)])
    assert q.dtype == torch.float16 and not torch.equal(q, k) and not torch.equal(k, v)
    assert entries.mean().abs() < 0.01
    assert entries.var().item() == pytest.approx(1 + 0.001 * 100, rel=0.03)
    far = (entries.abs() > 5).float().mean().item()
    assert far == pytest.approx(0.001 * 0.62, rel=0.15)  # |N(0, 101)| > 5
    calm = draw(Found(case | {"outliers": 0.0}), CPU)[0].float()
    assert calm.abs().max() < 6 and calm.var().item() == pytest.approx(1, rel=0.02)


def test_the_error_is_the_root_of_the_mean_square(study, one, monkeypatch):
    shifted = METHODS["ours"]._replace(call=lambda q, k, v: oracle(q, k, v)[0] + 0.01)
    monkeypatch.setitem(METHODS, "ours", shifted)
    run = study("accuracy", "lengths=[64]", "head_dims=[16]", "dtypes=[float32]", "batch=2")
    (case,) = run.study.cases(run)
    (row,) = one(run, case, method="ours")
    assert row.rmse == pytest.approx(0.01, rel=1e-6)
    right = oracle(*draw(case, CPU))[0]
    assert row.relative == pytest.approx(0.01 / right.square().mean().sqrt().item(), rel=1e-6)


def test_a_softmax_in_float32_has_less_error_than_a_standard_one(measured):
    words = ["lengths=[512]", "head_dims=[64]", "dtypes=[float16,bfloat16,float32]", "heads=2"]
    rows = measured("accuracy", *words)
    rmse = {(r.method, r.dtype): r.rmse for r in rows if r.status == OK}
    for dtype in ("float16", "bfloat16"):
        assert rmse["ours", dtype] < rmse["standard", dtype] / 2
    assert rmse["ours", "bfloat16"] > 4 * rmse["ours", "float16"]
    assert rmse["ours", "float32"] < 1e-6
    refused = {r.status.split(":")[0] for r in rows if r.status != OK}
    assert refused <= {"failed", "unsupported"}
    made = tables(frame(rows))["rmse_d64"]
    assert "standard's / this, 512" in made and "| 3.2e-4 |" in made
    gain = f"{rmse['standard', 'float16'] / rmse['ours', 'float16']:.2f}x"
    assert f"{rmse['ours', 'float16']:.1e} | {gain} | 1.9e-4, FlashAttention-3" in made


def test_a_table_has_the_shape_and_outliers_of_the_last_row():
    row = {"method": "standard", "dtype": "float16", "batch": 1, "heads": 2, "n": 512}
    row |= {"head_dim": 64, "device": "a", "status": OK}
    some, none = (row | {"rmse": x, "outliers": x} for x in (1e-3, 0.0))
    few, wide = none | {"rmse": 2e-5}, some | {"n": 1024, "heads": 3}
    for rows in ([none, few], [some, few], [wide, few]):
        assert "| 2.0e-05 | 1.00x |" in tables(frame(rows))["rmse_d64"]
    assert "1.0e-03" in tables(frame([few, some]))["rmse_d64"]
    assert accuracy.SPREAD**2 == 100
