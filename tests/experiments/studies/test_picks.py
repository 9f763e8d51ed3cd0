"""Picks: what the gate allows, what peers are given, and the rows."""

import numpy as np
import pytest
import torch

from experiments.bench import step
from experiments.bench.step import Times
from experiments.common.rows import Found
from experiments.studies.picks import PROVIDERS, Inputs, SparseFlash

CPU = torch.device("cpu")
NSA = Found(mask="nsa(4, 32)", batch=2, heads=32, kv_heads=2, n=200, head_dim=16, dtype="float32")
MOBA = Found(NSA | {"mask": "moba(128, 2)", "heads": 4, "n": 300})
SMALL = ["lengths=[160]", "head_dim=16", 'selectors=["nsa(2, 32)"]']


def test_the_gate_allows_what_the_selection_has():
    for shape in (NSA, MOBA):
        inputs = Inputs(shape, CPU)
        rows = np.arange(shape.n)
        dense = inputs.picks.selection(shape.heads).to_block_mask().to_dense()
        dense = np.broadcast_to(dense, (shape.batch, shape.heads, shape.n, shape.n))
        for b, head in np.ndindex(*dense.shape[:2]):
            assert (inputs.seen(b, head, rows) == dense[b, head]).all()
        assert inputs.share == pytest.approx(dense.mean())


def test_directions_are_timed_and_wrong_results_are_not(study, one, monkeypatch):
    timed = []
    monkeypatch.setattr(
        step, "measure", lambda call, *_: timed.append(call()) or Times(1.0, 1.0, 1.0)
    )
    run = study("picks", *SMALL, "providers=[picks]")
    forward, backward = one(run, NSA)
    assert isinstance(timed[0], torch.Tensor) and len(timed[1]) == 3
    work = 2e-9 * 16 * 2 * 32 * 200**2 * forward.share
    assert (forward.tflops, backward.tflops) == pytest.approx((2 * work, 5 * work))
    right = SparseFlash.prepare

    def twice(self, inputs, device):  # out as it is, but twice its gradients
        attend = right(self, inputs, device)
        return lambda *qkv: 2 * attend(*qkv) - attend(*(t.detach() for t in qkv))

    with monkeypatch.context() as patch:
        patch.setattr(SparseFlash, "prepare", twice)
        assert all(row.status.startswith("wrong result") for row in one(run, NSA))


def test_the_share_of_causal_attention_is_its_own(study, one):
    run = study("picks", *SMALL, "providers=[causal]")
    for row in one(run, run.study.cases(run)[0]):
        assert row.share == pytest.approx(161 / 320)


def test_peers_get_a_list_for_each_key_head():
    shape = Found(NSA | {"mask": "moba(128, 1)", "dtype": "bfloat16"})
    for peer in ("fla", "cudnn"):
        assert PROVIDERS[peer].unsupported(Inputs(shape, CPU), CPU, "forward")
    assert "not 32 for 2" in (Inputs(shape, CPU).other_heads() or "")
    blocks, counts = Inputs(NSA, CPU).token_major()  # as both take them
    lists = Inputs(NSA, CPU).picks
    for b, n, h in np.ndindex(*counts.shape):
        wanted = {x for x in lists.blocks[b % len(lists.blocks), h, n].tolist() if x != lists.none}
        assert {*blocks[b, n, h, : counts[b, n, h]].tolist()} == wanted
