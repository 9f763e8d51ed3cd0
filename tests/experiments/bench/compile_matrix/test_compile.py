"""The kernels, compiled by the installed Triton: no faults, and no barrier that is lost.

An idle barrier is one whose memory Triton hands out again: once a claim of work was lost so.
"""

import pytest

from experiments.bench.compile_matrix.calls import representative
from experiments.bench.compile_matrix.chips import HOPPER
from experiments.bench.compile_matrix.run import compile_rows
from experiments.common.provenance import versions
from tests.processes import in_a_new_process

pytest.importorskip("triton")
KERNELS = {
    "hopper": {"attention_forward", "backward_start", "backward_cols", "backward_rows"},
    "triton": {"attention_forward", "backward_prepare", "backward_kv", "backward_q"},
    "decode": {"decode_parts", "merge_splits"},
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


@pytest.mark.slow
def test_kernels_compile_for_hopper_within_their_limits():
    calls = representative()  # in one process: a start takes seconds, and variants are shared
    found = list(compile_rows(versions()["triton"], None, HOPPER, calls, "a test"))
    rows = [row for made in found for row in made]
    assert [row for row in rows if row.faults()] == []
    for backend, kernels in KERNELS.items():
        assert {row.kernel for row in rows if row.backend == backend} >= kernels
    for call, made in zip(calls, found, strict=True):
        if call.backend == "hopper":
            assert sum(bool(row.wgmma) for row in made) >= 2, call.label  # forward, and a backward


WIDTHS = """
import re
from experiments.bench.compile_matrix.calls import Call
from experiments.bench.compile_matrix.chips import CHIPS, HOPPER
from experiments.bench.compile_matrix.offline import compiled

product = re.compile(r"wgmma.mma_async.sync.aligned.m64n(\\d+)k16[^;]*[}], [{]")
for head_dim in 96, 192:
    for kernel in compiled(Call("dense", "hopper", head_dim), CHIPS[HOPPER], set()):
        print(kernel.name, head_dim, *product.findall(kernel.compiled.asm["ptx"]))
"""


@pytest.mark.slow
def test_products_of_96_and_192_columns_are_joined():
    """Of the products with left operands in registers, no part of 32 columns is left. Those of 64
    columns at head dim 192 are scores.
    """
    lines = [line.split() for line in in_a_new_process("-c", WIDTHS).splitlines()]
    found = {(name, head_dim): set(widths) for name, head_dim, *widths in lines}
    for name in ("attention_forward", "backward_cols"):
        assert "96" in found[name, "96"] and "32" not in found[name, "96"]
        assert "192" in found[name, "192"] and "128" not in found[name, "192"]
