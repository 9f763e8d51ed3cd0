"""Decoding: steps, bytes, the gate, chosen blocks, and the arguments of FlashInfer."""

import numpy as np
import pytest
import torch

from experiments.bench.cases import DENSE
from experiments.bench.step import Times
from experiments.common.rows import OK, Found, frame
from experiments.studies import decode
from experiments.studies.decode import PROVIDERS, SELECTED, Inputs, tables

CPU = torch.device("cpu")
STEP = Found(
    mask=DENSE, page=16, batch=2, heads=4, kv_heads=2, n_q=3, n=192, head_dim=32, dtype="float32"
)
CHOSEN = Found(STEP | {"mask": f"{SELECTED}(1)"})
SMALL = ["lengths=[128]", "heads=4", "kv_heads=2", "head_dim=32", "chosen=64"]


def test_a_table_has_medians_of_one_version_and_one_number_of_chosen_blocks():
    row = STEP | {"provider": "cpu", "step": "decode", "device": "a", "torch": "2", "triton": ""}
    row |= {"source": "s", "status": OK, "share": 0.5, "ms_median": 1.0, "round": 1}
    rounds = [row | {"round": i, "share": s, "ms_median": s} for i, s in enumerate((0.1, 0.8, 9))]
    older = row | {"source": "older", "ms_median": 9.0}
    assert "| 192 | 3 | 800.0 (80 %) |" in tables(frame([older, *rounds]))[DENSE]
    few, many = (row | {"mask": f"{SELECTED}({n})", "ms_median": n} for n in (1.0, 3.0))
    assert "3000.0 (50 %)" in tables(frame([few, many]))[SELECTED]


def test_a_wrong_head_is_seen_and_not_timed(study, one, monkeypatch):
    inputs = Inputs(STEP, CPU)
    out = PROVIDERS["cpu"].calls(inputs, False)[0]()
    assert inputs.gate.forward_error(out) < 1e-5
    out[-1, -1] += 1
    assert inputs.gate.forward_error(out) > 0.1
    right = PROVIDERS["cpu"].calls

    class Wrong(decode.Ours):
        def calls(self, *given):
            return [lambda call=call: 1.01 * call() for call in right(*given)]

    monkeypatch.setitem(PROVIDERS, "wrong", Wrong("wrong"))
    run = study("decode", *SMALL, "providers=[wrong]", "n_q=[1]")
    (found,) = one(run, run.study.cases(run)[0])
    assert found.status.startswith("wrong result: error 0.01") and found.ms_median is None


def test_choosing_is_part_of_the_time_where_a_row_says_so(study, one, monkeypatch):
    calls, times, right = [], [], Inputs.choose
    monkeypatch.setattr(Inputs, "choose", lambda self, i: (calls.append(i), right(self, i))[1])

    def timed(called, device, seconds):
        calls.clear()
        called[0]()
        times.append(len(calls))
        return Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(decode, "time_of", timed)
    run = study("decode", *SMALL, f"masks=[{SELECTED}]", "n_q=[1]", "pages=[0]")
    assert len(one(run, run.study.cases(run)[0])) == 2 and times == [0, 1]


def test_the_chosen_blocks_are_those_of_the_best_keys_in_pages_or_not():
    inputs = Inputs(Found(CHOSEN | {"page": 0}), CPU)
    keys = inputs.caches[0][0]
    keys[:, :, 128:] = 5 * inputs.q.unflatten(1, (2, -1)).mean((2, 3))[:, :, None]
    assert (inputs.choose(0).codes == -1).nonzero()[:, 3].tolist() == [2] * 4
    paged = Inputs(CHOSEN, CPU)
    inputs.q, inputs.caches = paged.q, [paged.dense(0)]
    del inputs.summaries
    assert torch.equal(paged.choose(0).codes, inputs.choose(0).codes)
    assert paged.allowed(1, 2, np.arange(3)).sum(1).tolist() == [64] * 3


def test_bytes_are_those_of_the_keys_that_some_query_sees(study, one):
    run = study("decode", *SMALL, "providers=[cpu]")
    for mask, keys in (
        (DENSE, 192),
        ("sliding(20)", 22),
        (CHOSEN["mask"], 64),
        ("global_tokens(8)", 8),
    ):
        (row, *_) = one(run, Found(STEP | {"mask": mask}), step="decode")
        assert row.status == OK and row.density == pytest.approx(keys / 192), mask
        assert row.read_mb == pytest.approx(2 * 32 * 4 * 2 * (2 * keys + 4 * 3) / 1e6)
        assert row.gbs == pytest.approx(row.read_mb / row.ms_median)
        assert row.share == pytest.approx(row.gbs / row.copy_gbs)
