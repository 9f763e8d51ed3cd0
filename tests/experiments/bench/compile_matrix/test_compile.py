"""The kernels, compiled by the installed Triton: no faults, and no barrier that is lost.

An idle barrier is one whose memory Triton hands out again: once a claim of work was lost so.
"""

import pytest

from experiments.bench.compile_matrix.calls import representative
from experiments.bench.compile_matrix.chips import HOPPER
from experiments.bench.compile_matrix.run import compile_rows
from experiments.common.provenance import versions

pytest.importorskip("triton")
KERNELS = {
    "hopper": {"attention_forward", "backward_start", "backward_cols"},
    "fp8": {"attention_forward_fp8"},
    "triton": {"attention_forward", "backward_prepare", "backward_kv", "backward_q"},
}


@pytest.mark.slow
@pytest.mark.parametrize("call", representative(), ids=lambda call: f"{call.backend} {call.label}")
def test_kernels_compile_for_hopper_within_their_limits(call):
    (rows,) = compile_rows(versions()["triton"], None, HOPPER, [call], "a test")
    assert {row.kernel for row in rows} >= KERNELS[call.backend]
    for row in rows:
        assert not row.faults(), row
    if call.backend == "hopper":
        assert sum(bool(row.wgmma) for row in rows) >= 2  # forward, and a pass of the backward
