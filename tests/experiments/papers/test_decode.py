"""The program that times decoding: bytes, the gate, the turns, and the arguments of FlashInfer."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.bench.cases import DENSE
from experiments.bench.timing import Times
from experiments.common.records import OK
from experiments.papers import decode
from experiments.papers.decoding import measure
from experiments.papers.decoding.cases import SELECTED, Inputs, Step
from experiments.papers.decoding.measure import base_row, groups, measured
from experiments.papers.decoding.providers import PROVIDERS, FlashInfer
from experiments.papers.decoding.report import tables
from experiments.papers.rows import DecodeRow
from sparseflash.testing import relative_error

CPU = torch.device("cpu")
STEP = Step(DENSE, 16, 2, 4, 2, 3, 192, 32, "float32", chosen=64)
SMALL = "lengths=[128] heads=4 kv_heads=2 head_dim=32 chosen=64 seconds=1e-3 device=cpu".split()
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")


def test_program_and_resuming(measured_once):
    rows, printed, later = measured_once("papers.decode", DecodeRow, *SMALL, "rounds=2")
    assert all(row.status == OK and row.error < 1e-5 and row.share > 0 for row in rows)
    assert {row.step for row in rows} == {"decode", "choose and decode"}
    assert {(row.provider, row.page) for row in rows} == {("cpu", 0), ("cpu", 16), ("sdpa", 0)}
    assert {row.round for row in rows} == {1, 2}
    assert (
        "dense, 1 queries, pages of 16 tokens" in printed and "measurements are left" not in printed
    )
    assert later.strip() == tables(rows).strip()


def test_a_table_mixes_no_shapes_versions_or_chosen_blocks():
    row = base_row(STEP, "cpu", "decode", 1, CPU, "")
    row = replace(row, status=OK, share=0.5, ms_median=1.0)
    half = replace(row, dtype="float16", ms_median=9.0)
    text = tables([row, half])
    assert "1000.0 us" in text and "9000.0 us" in text and "float16" in text
    assert "2000.0 us" in tables([replace(row, source="older"), replace(row, ms_median=2.0)])
    rounds = [replace(row, round=i + 1, ms_median=ms) for i, ms in enumerate((1.0, 2.0, 9.0))]
    assert "2000.0 us" in tables(rounds)
    few, many = (replace(row, mask=f"{SELECTED}({n})", ms_median=n) for n in (1, 3))
    assert "3000.0 us" in tables([few, many])


def test_a_table_has_the_median_share_and_whether_it_is_enough():
    row = replace(base_row(STEP, "cpu", "decode", 1, CPU, ""), status=OK, n=65536, ms_median=1.0)
    shares = (0.1, 0.81, 0.9)
    rows = [replace(row, round=i + 1, share=share) for i, share in enumerate(shares)]
    assert " us  81 %" in tables(rows) and "cpu reached, 81 %" in tables(rows)
    assert "cpu missed, 10 %" in tables(rows[:1])


def test_the_steps_of_the_options():
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "chosen": 64, "rounds": 1}
    options = sizes | {"lengths": [128], "n_q": [1, 4, 16], "pages": [0], "dtype": "float32"}
    options |= {"masks": None, "providers": None, "seconds": 1, "minutes": 1}
    found = {(step.mask.split("(")[0], step.n_q) for step in decode.planned(options)}
    dense, few = {(DENSE, n) for n in (1, 4, 16)}, {("sliding", 1), ("sliding", 16), (SELECTED, 1)}
    assert found == dense | few


def test_time_is_of_one_call_and_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(measure, "measure", lambda *given: Times(6.0, 4.0, 8.0))
    assert measure.time_of([lambda: STEP] * 2, CPU, 1e-3) == Times(3.0, 2.0, 4.0)
    copied = 2 * measure.COPIED["cpu"]
    assert measure.copy_gbs.__wrapped__("cpu") == pytest.approx(copied / 0.006 / 1e9)


def test_a_wrong_last_head_is_seen():
    inputs = Inputs(STEP, CPU)
    out = PROVIDERS["cpu"].prepare(inputs, False)[0]()
    assert measure.gate_error(inputs, out) < 1e-5
    out[-1, -1] += 1
    assert measure.gate_error(inputs, out) > 0.1


def test_choosing_is_part_of_the_time_where_a_row_says_so(monkeypatch):
    class Chosen(Inputs):
        def choose(self, which):
            calls.append(which)
            return super().choose(which)

    calls, step, times = [], replace(STEP, mask=SELECTED), []
    monkeypatch.setattr(measure, "Inputs", Chosen)

    def timed(called, device, seconds):
        calls.clear()
        called[0]()
        times.append(len(calls))
        return Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(measure, "time_of", timed)
    ways = ("decode", measure.CHOOSING)
    measured(step, CPU, 1e-3, [base_row(step, "cpu", way, 1, CPU, "") for way in ways])
    assert times == [0, 1]


def test_the_chosen_blocks_are_those_of_the_best_keys():
    step = replace(STEP, mask=SELECTED, page=0)
    inputs = Inputs(step, CPU)
    keys = inputs.caches[0][0]
    keys[:, :, 128:] = 5 * inputs.q.unflatten(1, (2, -1)).mean((2, 3))[:, :, None]
    assert (inputs.choose(0).codes == -1).nonzero()[:, 3].tolist() == [2] * 4


def test_a_new_version_of_a_peer_is_measured_again(monkeypatch):
    monkeypatch.setattr(measure, "version", lambda package: f"of {package}")
    row = base_row(STEP, "flashinfer", "decode", 1, CPU, "")
    assert row.version == "of flashinfer-python" and not row.own
    sdpa = base_row(STEP, "sdpa", "decode", 1, CPU, "")
    assert sdpa.key == replace(sdpa, source="other").key
    assert row.key == replace(row, source="other").key != replace(row, version="9").key


@pytest.mark.parametrize(
    "mask, keys", [(DENSE, 192), ("sliding(20)", 22), (SELECTED, 64), ("global_tokens(8)", 8)]
)
def test_bytes_are_those_of_the_keys_that_some_query_sees(mask, keys):
    step = replace(STEP, mask=mask)
    (row,) = measured(step, CPU, 1e-3, [base_row(step, "cpu", "decode", 1, CPU, "a command")])
    assert row.status == OK and row.density == pytest.approx(keys / 192)
    assert row.read_mb == pytest.approx(2 * 32 * 4 * 2 * (2 * keys + 4 * 3) / 1e6)
    assert row.gbs == pytest.approx(row.read_mb / row.ms)
    assert row.share == pytest.approx(row.gbs / row.copy_gbs)


def test_pages_and_contiguous_caches_choose_the_same_blocks():
    paged = Inputs(replace(STEP, mask=SELECTED), CPU)
    keys = [torch.stack([paged.keys_of(0, b, h)[0] for h in range(2)]) for b in range(2)]
    whole = Inputs(replace(STEP, mask=SELECTED, page=0), CPU)
    whole.q, whole.caches = paged.q, [(torch.stack(keys), torch.stack(keys))]
    assert torch.equal(paged.choose(0).codes, whole.choose(0).codes)
    assert paged.allowed(1, 1).sum(1).tolist() == [64] * 3


def test_a_wrong_result_is_not_timed(monkeypatch):
    def prepare(inputs, choosing):
        return [
            lambda call=call: 1.01 * call() for call in PROVIDERS["sdpa"].prepare(inputs, choosing)
        ]

    wrong = SimpleNamespace(prepare=prepare, missing=lambda device: None, package="")
    monkeypatch.setitem(measure.PROVIDERS, "wrong", wrong)
    step = replace(STEP, page=0)
    (row,) = measured(step, CPU, 1e-3, [base_row(step, "wrong", "decode", 1, CPU, "")])
    assert row.status.startswith("wrong result: error 0.01") and row.ms_median is None


def test_failures_and_missing_peers_are_rows():
    step = replace(STEP, page=0)
    names = ("triton", "flashinfer", "sdpa_flash")
    rows = [base_row(step, name, "decode", 1, CPU, "") for name in names]
    found = [row.status for row in measured(step, CPU, 1e-3, rows)]
    assert found[0].startswith("unsupported: backend 'triton' cannot decode")
    assert found[1:] == ["unsupported: needs a CUDA device, not cpu"] * 2


def test_every_group_begins_with_another_provider():
    steps = [replace(STEP, page=0), replace(STEP, page=0, n=384)]
    found = groups(steps, ["cpu", "sdpa", "flashinfer"], 2, CPU, "")
    assert [[row.provider for row in group.rows] for group in found] == [
        ["cpu", "sdpa"], ["sdpa", "cpu"], ["sdpa", "cpu"], ["cpu", "sdpa"],
    ]  # fmt: skip


@pytest.mark.parametrize("n_q", [1, 3])
def test_arguments_of_flashinfer(monkeypatch, n_q):
    """A stand-in that attends as its documentation says of these arguments."""

    class Wrapper:
        def __init__(self, workspace, layout, **options):
            assert layout == "NHD" and workspace.dtype == torch.uint8

        def plan(self, *given, q_data_type, causal=False):
            *starts, table, last, heads, kv_heads, head_dim, page = given
            assert (heads, kv_heads, head_dim, page) == (4, 2, 32, 16) and not causal
            assert [start.tolist() for start in starts] == ([[0, 3, 6]] if n_q > 1 else []) + [
                [0, 12, 24]
            ]
            assert last.tolist() == [16, 16] and q_data_type == torch.float32
            self.pages = table.view(2, -1).long()

        def run(self, q, caches):
            k, v = (cache[self.pages].flatten(1, 2).transpose(1, 2) for cache in caches)
            q = q.unflatten(0, (2, n_q)).transpose(1, 2)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

    names = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**dict.fromkeys(names, Wrapper)))
    inputs = Inputs(replace(STEP, n_q=n_q), CPU)
    (theirs,) = FlashInfer().prepare(inputs, False)
    (ours,) = PROVIDERS["cpu"].prepare(inputs, False)
    assert relative_error(theirs(), ours()) < 1e-5
