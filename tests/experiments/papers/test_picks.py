"""The program that times picks: what the gate allows, what peers are given, and its rows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.bench.gate import Gate
from experiments.bench.timing import Times
from experiments.common.records import OK
from experiments.papers.attention.measure import Step, gate_error
from experiments.papers.picking import measure, providers
from experiments.papers.picking.cases import Inputs, Shape
from experiments.papers.picking.measure import Group, measured
from experiments.papers.picking.providers import PROVIDERS, Cudnn, Fla, SparseFlash
from experiments.papers.picking.report import tables
from experiments.papers.rows import PickRow
from sparseflash.testing import oracle

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NSA = Shape("nsa(4, 32)", 2, 32, 2, 200, 16, "float32")
MOBA = Shape("moba(128, 2)", 2, 4, 2, 300, 16, "float32")
SMALL = "lengths=[160] head_dim=16 device=cpu seconds=1e-3".split()
SMALL += ['selectors=["nsa(2, 32)"]']
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")


@pytest.mark.parametrize("shape", [NSA, MOBA], ids=str)
def test_the_gate_allows_what_the_selection_has(shape):
    inputs = Inputs(shape, CPU)
    case, rows = shape.picked(inputs.picks), np.arange(shape.n)
    dense = inputs.picks.selection(shape.heads).to_block_mask().to_dense()
    dense = np.broadcast_to(dense, (shape.batch, shape.heads, shape.n, shape.n))
    for b, head in np.ndindex(*dense.shape[:2]):
        assert (case.allowed(b, head, rows) == dense[b, head]).all()
    assert inputs.share == pytest.approx(dense.mean())


def test_program_and_resuming(measured_once):
    words = [*SMALL, "rounds=2", "providers=[picks,selection,causal,fla,cudnn]"]
    rows, printed, later = measured_once("papers.picks", PickRow, *words)
    ours = [row for row in rows if row.own]
    assert len(rows) == 2 * (4 * 2 + 1) and len(ours) == 12
    assert all(row.status == OK and row.error < 1e-5 and row.tflops > 0 for row in ours)
    assert [row.provider for row in rows[:1] + rows[9:10]] == ["picks", "selection"]
    shares = {row.share for row in ours if row.provider != "causal"}
    assert len(shares) == 1 and max(shares) < 0.5
    others = {row.status for row in rows if not row.own}
    assert others == {"unsupported: needs a CUDA device, not cpu"}
    causal = [row.share for row in ours if row.provider == "causal"]
    assert causal == pytest.approx([161 / 320] * 4)
    for row in ours:  # of the allowed pairs, two products forward and five backward
        work = 2 * (2 if row.direction == "forward" else 5) * 16 * 4 * 160**2 * row.share
        assert row.tflops == pytest.approx(work / row.ms / 1e9, rel=1e-4)
    assert {(row.heads, row.kv_heads) for row in rows} == {(4, 1)}
    assert "nsa(2, 32)" in printed and "measurements are left" not in printed
    assert later.count("backward") == 1


def test_a_table_mixes_no_dtypes():
    row = replace(Group(NSA, ("picks",), 1).rows(CPU, "")[0], status=OK)
    rows = [replace(row, dtype=d, ms_median=ms) for d, ms in (("float16", 1.0), ("float32", 3.0))]
    assert "1.000 / 0" in tables(rows) and "3.000 / 0" in tables(rows)
    rounds = [replace(row, round=i + 1, ms_median=ms) for i, ms in enumerate((1.0, 2.0, 9.0))]
    assert "2.000 / 0" in tables(rounds)


def test_each_direction_is_timed_and_counts_its_batch(monkeypatch):
    timed = []
    monkeypatch.setattr(
        measure, "time_call", lambda call, *_: timed.append(call()) or Times(1.0, 1.0, 1.0)
    )
    monkeypatch.setattr(measure, "version", lambda package: f"of {package}")
    rows = Group(NSA, ("picks", "fla"), 1).rows(CPU, "")
    assert [row.version for row in rows] == ["of "] * 2 + ["of fla-core"] * 2
    forward, backward = measured(NSA, CPU, 1e-3, rows[:2])
    assert isinstance(timed[0], torch.Tensor) and len(timed[1]) == 3
    work = 2e-9 * 16 * 2 * 32 * 200**2 * forward.share
    assert (forward.tflops, backward.tflops) == pytest.approx((2 * work, 5 * work))


def test_wrong_gradients_have_no_time(monkeypatch):
    right = SparseFlash.prepare

    def prepare(self, inputs):
        attend = right(self, inputs)
        # out as it is, but twice its gradients
        return lambda *qkv: 2 * attend(*qkv) - attend(*(t.detach() for t in qkv))

    monkeypatch.setattr(SparseFlash, "prepare", prepare)
    rows = measured(NSA, CPU, 1e-3, Group(NSA, ("picks",), 1).rows(CPU, ""))
    assert all(row.status.startswith("wrong result") for row in rows)


def test_a_wrong_result_has_no_time(monkeypatch):
    monkeypatch.setitem(PROVIDERS, "picks", SparseFlash("causal"))
    monkeypatch.setattr(SparseFlash, "gated_by", lambda self, i: i.shape.picked(i.picks))
    rows = measured(NSA, CPU, 1e-3, Group(NSA, ("picks",), 1).rows(CPU, ""))
    assert all(row.status.startswith("wrong result") and not row.ms_median for row in rows)


def test_a_shape_that_cannot_be_drawn_leaves_what_is_known(monkeypatch):
    def lacks(shape, device):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measure, "Inputs", lacks)
    known, missing = Group(NSA, ("picks",), 1).rows(CPU, "")
    known = replace(known, status=OK, ms_median=1.0)
    found = measured(NSA, CPU, 1e-3, [known, missing])
    assert found[0] == known and found[1].status == "out of memory: no room"


class FakePeer:
    """Both peers by their contracts, computed densely: the lists are checked."""

    def allowed(self, q, blocks, counts, size):
        n = q.shape[1]
        taken = torch.zeros(*counts.shape, -(-n // size), dtype=torch.bool)
        for place in np.ndindex(*counts.shape):
            listed = blocks[place][: counts[place]].long()
            assert len(listed.unique()) == len(listed)
            taken[place][listed] = True
        seen = taken.transpose(1, 2).repeat_interleave(size, 3)[..., :n].tril()  # (B, H, N, N)
        return seen.repeat_interleave(q.shape[2] // seen.shape[1], 1)

    def apply(self, q, k, v, blocks, counts, size, scale, ends):
        assert blocks.dtype == counts.dtype == torch.int64 and ends is None
        assert all(t.is_contiguous() for t in (q, k, v, blocks))
        mask = self.allowed(q, blocks, counts, size)
        out, _ = oracle(*(t.transpose(1, 2) for t in (q, k, v)), mask, scale)
        return out.transpose(1, 2).to(q)

    def selection_attention_wrapper(
        self, q, k, v, blocks, counts, ends, same, *, block_size, max_s_q, max_s_k, is_causal
    ):
        assert is_causal and max_s_q == max_s_k and q.ndim == 3 and ends is same
        assert blocks.dtype == counts.dtype == ends.dtype == torch.int32
        assert ends.tolist() == list(range(0, len(q) + 1, max_s_q))
        split = [t.unflatten(0, (-1, max_s_q)) for t in (q, k, v, blocks, counts)]
        mask = self.allowed(split[0], *split[3:], block_size)
        out, lse = oracle(*(t.transpose(1, 2) for t in split[:3]), mask)
        return out.transpose(1, 2).flatten(0, 1).to(q), lse, lse


@pytest.mark.parametrize("peer", [Fla(), Cudnn()], ids=["fla", "cudnn"])
@pytest.mark.parametrize("shape", [NSA, replace(NSA, selector="nsa(2, 64)", n=256)], ids=str)
def test_peers_get_the_lists_of_their_contracts(peer, shape, monkeypatch):
    fake = FakePeer()
    module = SimpleNamespace(ParallelNSAFunction=fake, NSA=fake)
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: module)
    inputs = Inputs(shape, CPU)
    step, gate = Step(peer.prepare(inputs), inputs.qkv), Gate(peer.gated_by(inputs), *inputs.qkv)
    assert gate.forward_error(step.forward()) < 1e-5
    if "backward" in peer.directions:
        assert gate_error(gate, step) < 1e-5


@pytest.mark.parametrize(
    ("peer", "changes", "reason"),
    [
        (Fla(), {}, None),
        (Fla(), {"heads": 8, "kv_heads": 2}, "groups of 16, 32, .. query heads, not of 4"),
        (Fla(), {"selector": "nsa(3, 32)"}, "1, 2, 4, .. blocks for each query, not 3"),
        (Fla(), {"selector": "moba(128, 1)"}, "a list for each key head, not 32 for 2"),
        (Cudnn(), {}, None),
        (Cudnn(), {"heads": 64}, "groups of up to 16 query heads, not 32"),
        (Cudnn(), {"selector": "nsa(3, 256)", "n": 600}, "blocks of 16, 32, 64 and 128, not 256"),
        (Cudnn(), {"selector": "moba(128, 1)"}, "a list for each key head, not 32 for 2"),
        (Cudnn(), {"dtype": "float32"}, "not float32"),
    ],
)
def test_peers_say_what_they_do_not_take(peer, changes, reason, monkeypatch):
    monkeypatch.setattr("experiments.bench.peers.cudnn.nvidia_capability", lambda device: (9, 0))
    for name in ("_fla", "_cudnn"):
        monkeypatch.setattr(providers, name, lambda: None)
    shape = replace(NSA, dtype="bfloat16")
    inputs = Inputs(replace(shape, **changes), CPU)
    inputs.device = CUDA
    found = peer.unsupported(inputs)
    assert found is None if reason is None else reason in (found or "")
