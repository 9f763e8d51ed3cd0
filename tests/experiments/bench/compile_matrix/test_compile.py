"""The kernels, compiled by the installed Triton: no faults, and no barrier that is lost.

An idle barrier is one whose memory Triton hands out again: once a claim of work was lost so.
"""

import json

import pytest

from experiments.bench.compile_matrix.calls import representative
from experiments.bench.compile_matrix.chips import HOPPER
from experiments.bench.compile_matrix.rows import CompileRow
from experiments.bench.compile_matrix.run import compile_rows
from experiments.common.provenance import versions
from tests.processes import in_a_new_process

pytest.importorskip("triton")
KERNELS = {
    "hopper": {"attention_forward", "backward_start", "backward_cols", "backward_rows"},
    "triton": {"attention_forward", "backward_prepare", "backward_kv", "backward_q"},
    "picks": {
        "join_picks",
        "picks_forward",
        "picks_backward_q",
        "picks_backward_kv",
        "picks_add_parts",
        "gathered_forward",
        "gathered_backward_q",
        "merge_picks",
    },
}
# widths: of the products whose left operands are in registers
COMPILE = """
import json
import re
from experiments.bench.compile_matrix.calls import representative
from experiments.bench.compile_matrix.chips import CHIPS, HOPPER
from experiments.bench.compile_matrix.offline import compiled

product = re.compile(r"wgmma.mma_async.sync.aligned.m64n(\\d+)k16[^;]*[}], [{]")
known = set()
for call in representative():
    for kernel in compiled(call, CHIPS[HOPPER], known) if call.backend != "decode" else ():
        known.add(kernel.variant)
        about = {"backend": call.backend, "label": call.label, "kernel": kernel.name}
        about |= {"variant": kernel.variant, **kernel.report()}
        widths = product.findall(kernel.compiled.asm["ptx"])
        print(json.dumps([about, call.head_dim, widths]))
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper_within_their_limits():
    """In one process: a start takes seconds, and variants are shared."""
    found = [json.loads(line) for line in in_a_new_process("-c", COMPILE).splitlines()]
    origin = CompileRow.origin("cpu", "a test") | {"mask": "", "density": None, "status": "ok"}
    rows = [CompileRow(**origin, target=HOPPER, **about) for about, _, _ in found]
    assert [row for row in rows if row.faults()] == []
    for backend, kernels in KERNELS.items():
        assert {row.kernel for row in rows if row.backend == backend} >= kernels
    calls = [call for call in representative() if call.backend == "hopper"]
    for call in calls:
        made = [row for row in rows if row.label == call.label]
        assert sum(bool(row.wgmma) for row in made) > call.backward, call.label

    # No part of 32 columns is left. Those of 64 columns at head dim 192 are scores.
    wide = {(about["kernel"], dim): set(widths) for about, dim, widths in found if dim in (96, 192)}
    for kernel in ("attention_forward", "backward_cols"):
        assert "96" in wide[kernel, 96] and "32" not in wide[kernel, 96]
        assert "192" in wide[kernel, 192] and "128" not in wide[kernel, 192]


@pytest.mark.slow
def test_the_process_that_compiles_answers_with_rows():
    calls = [call for call in representative() if call.backend == "decode"]
    (rows,) = compile_rows(versions()["triton"], None, HOPPER, calls, "a test")
    assert [row for row in rows if row.faults()] == []
    assert {row.kernel for row in rows} == {"decode_parts", "merge_splits"}
