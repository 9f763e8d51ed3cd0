"""A made-up row of experiments.speed."""

from experiments.bench.rows import SpeedRow
from experiments.common.records import OK

ROW = SpeedRow(
    mask="local(64) | butterfly(32)",
    provider="cpu",
    direction="forward",
    batch=1,
    heads=2,
    kv_heads=2,
    n_q=256,
    n_k=256,
    head_dim=16,
    v_dim=16,
    dtype="float32",
    layout="head_major",
    block_q=32,
    block_k=32,
    density=0.25,
    elements=0.125,
    status=OK,
    error=1e-6,
    ms_median=2.0,
    ms_p20=1.5,
    ms_p80=2.5,
    tflops=0.5,
    extra_expected_mib=1.0,
    ideal_ms=1.0,
    device="some CPU (2 threads)",
    torch="2.13.0",
    triton="",
    source="abc",
    commit="",
    date="2026-01-01T00:00:00+00:00",
    command="python -m experiments.speed 'mask=\"a, b\"'",
)
