"""The kernels, compiled by the installed Triton: no faults, and no barrier that is lost.

An idle barrier is one whose memory Triton hands out again: once a claim of work was lost so.
"""

import json

import pytest

from experiments.common.provenance import versions
from experiments.common.rows import OK, Found
from experiments.tools.calls import call
from tests.processes import in_a_new_process

pytest.importorskip("triton")
from experiments.tools import compile_matrix as matrix
from experiments.tools import offline

ROW = Found(
    target="sm_90a", backend="hopper", label="causal, head dim 64", kernel="backward_cols",
    variant="a1", status=OK, registers=168, spilled_bytes=0, shared_bytes=1000, wgmma=96,
    serialized=False, idle_barriers=0, triton="3.6.0",
)  # fmt: skip
KERNELS = {
    "hopper": {"attention_forward", "backward_start", "backward_cols", "backward_rows"},
    "triton": {"attention_forward", "backward_prepare", "backward_kv", "backward_q"},
    "decode": {"decode_parts", "merge_splits"},
    "picks": {"join_picks", "picks_forward", "picks_backward_q", "picks_backward_kv",
              "picks_add_parts", "merge_picks"},
}  # fmt: skip
# Few calls: every kernel, each pass, and what claims work. Those for Hopper join several options
# each. The others have small heads, and scores small blocks, whose kernels compile fast.
REPRESENTATIVE = [
    call("hopper", 64, "scattered blocks, odd length, deterministic"),
    call("hopper", 64, "split rows, tall rows, sink, maxima", backward=False),
    call("hopper", 32, "blocks of 16, sloped rule"),
    call("triton", 32, "causal"),
    call("triton", 32, "blocks of 16, mixed rule"),
    call("decode", 32, "global, pages of 16, 16 queries"),
    call("picks", 32, "picks"),
    call("picks", 32, "of each head"),
]
COMPILE = """
import json
from experiments.tools.offline import CHIPS, HOPPER, compiled
from tests.experiments.tools.test_compile_matrix import REPRESENTATIVE

known = set()
for call in REPRESENTATIVE:
    for kernel in compiled(call, CHIPS[HOPPER], known):
        known.add(kernel.variant)
        about = {"backend": call.backend, "label": call.label, "kernel": kernel.name}
        about |= {"variant": kernel.variant, **kernel.report()}
        print(json.dumps(about))
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper_within_their_limits():
    """In one process: a start takes seconds, and variants are shared."""
    found = [json.loads(line) for line in in_a_new_process("-c", COMPILE).splitlines()]
    about = {"status": OK, "target": offline.HOPPER, **versions()}
    rows = [Found(**about, **line) for line in found]
    assert [row for row in rows if matrix.faults(row)] == []
    for backend, kernels in KERNELS.items():
        both = backend, "hopper"  # which compiles kernels of `triton` for scores
        assert {row.kernel for row in rows if row.backend in both} >= kernels
    for one in REPRESENTATIVE:
        if one.backend == "hopper":
            made = [row for row in rows if row.label == one.label]
            assert sum(bool(row.wgmma) for row in made) > one.backward, one.label


def test_faults():
    for change, fault in (
        ({}, ""),
        ({"status": "failed: no such name"}, "failed: no such name"),
        ({"serialized": True}, "serialised"),
        ({"idle_barriers": 2}, "2 barriers"),
        ({"shared_bytes": 227 * 1024 + 1}, "above 232448"),
        ({"target": "gfx942", "shared_bytes": 65537}, "above 65536"),
        ({"spilled_bytes": 5000}, "spills 5000 bytes"),
        ({"spilled_bytes": 5000, "label": "causal, float32, head dim 128"}, ""),
    ):
        found = " ".join(matrix.faults(Found(ROW | change)))
        assert fault in found and bool(fault) == bool(found), change


def test_a_table_names_the_worst_variant():
    worse = Found(ROW | {"variant": "a2", "registers": 240, "spilled_bytes": 16})
    assert "| 240 / 16 |" in matrix.tables([ROW, worse])["gpus"]
    known = {name: ROW[name] for name in ("target", "backend", "label", "triton")}
    assert "1 failed" in matrix.tables([Found(known, status="failed: by the compiler")])["gpus"]


def test_barriers_that_no_warps_use_are_found():
    text = """
  %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared>
  %idle = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared>
  %idle2 = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared>
  ttng.init_barrier %idle, 1
  ttg.warp_specialize(%q, %full)
  default { use %q }
  partition0(%a) { }
"""
    assert offline.idle_barriers(text) == ["%idle", "%idle2"]
