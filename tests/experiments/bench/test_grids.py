"""The named grid, the bars made from its rows, warming up, and layouts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments import bars, speed
from experiments.bench import fa4, grids, warm
from experiments.bench import loop as bench
from experiments.bench.cases import CAUSAL, DENSE, Case, make_grid
from experiments.bench.speed_table import tables
from experiments.common.records import OK
from masks.interop.fa4 import BlockSparseTensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = Case("local(40) | global_tokens(10)", 2, 4, 2, 200, 200, 16, "float32", 32, 32)
EMPTY = dict.fromkeys("mask seq_len batch heads kv_heads head_dim v_dim dtype layout".split())
OPTIONS = {
    **EMPTY,
    "block_size": None,
    "grid": "limits",
    "providers": None,
    "directions": ["forward"],
}


def tasks_of(device, monkeypatch):
    monkeypatch.setattr(fa4, "missing", lambda: None)
    return speed.chosen_tasks(OPTIONS | {"directions": list(speed.DIRECTIONS)}, device)


def test_limits_holds_every_comparison(monkeypatch):
    tasks = tasks_of(CUDA, monkeypatch)
    assert len(set(tasks)) == len(tasks) < 300
    for head_dim in (128, 64):
        wide = {t for t in tasks if t.case.head_dim == head_dim and t.case.n_q == 16384}
        masks = {t.case.mask for t in wide if t.case.block_q in (0, 128)}
        assert {DENSE, CAUSAL, *(f"random_blocks({d})" for d in grids.DENSITIES)} <= masks
        assert {16, 32, 64, 128} <= {t.case.block_q for t in wide}
        cudnn = {t.case.mask for t in wide if t.provider == "sdpa_cudnn"}
        assert cudnn == {DENSE, CAUSAL}
    deterministic = [t for t in tasks if t.provider == "hopper_deterministic"]
    assert deterministic and {t.direction for t in deterministic} == {"backward"}
    long = {t.case for t in tasks if t.case.n_q >= 262144}
    assert {c.n_q for c in long} == {262144, 1048576} and all(c.density < 0.01 for c in long)


def test_masks_of_the_grid_have_the_text_that_rows_have(monkeypatch):
    for case in {t.case for t in tasks_of(CPU, monkeypatch)}:
        made = make_grid("cpu", mask=case.mask, seq_len=case.n_q).cases()[0]
        assert made.mask == case.mask


def test_named_grids_are_refused_where_they_make_no_sense():
    with pytest.raises(ValueError, match="grid='all': choose from limits"):
        speed.chosen_tasks(OPTIONS | {"grid": "all"}, CPU)
    with pytest.raises(ValueError, match="its own masks and shapes"):
        speed.chosen_tasks(OPTIONS | {"heads": 3}, CPU)
    assert {t.provider for t in speed.chosen_tasks(OPTIONS | {"providers": "sdpa"}, CPU)} == {
        "sdpa"
    }


def made_up_rows(monkeypatch):
    """Rows of the grid whose times follow from their work, peers twice as slow."""
    rows = []
    for task in tasks_of(CPU, monkeypatch):
        row = speed.empty_row(task, CPU, "")
        ms = task.case.flops(task.direction) / 1e8 * (1 if task.provider == "cpu" else 2)
        if task.case.block_q == 16:
            ms *= 4
        name = "sdpa_cudnn" if task.provider == "sdpa" else task.provider
        rows.append(replace(row, provider=name, status=OK, ms_median=ms, ideal_ms=ms / 2, tflops=1))
    return rows


def test_bars_compare_what_belongs_together(monkeypatch):
    rows = made_up_rows(monkeypatch)
    found = {}
    for score in bars.scores(rows, "cpu"):
        found.setdefault(score.bar, []).append(score)
    assert {s.value for s in found["sdpa_cudnn time / cpu time"]} == {2.0}
    assert {s.value for s in found["ideal time / time"]} == {0.5}
    even = found["even time / uneven time, at one density"]
    assert all(s.value == pytest.approx(1) for s in even)
    assert any(s.case.startswith("bigbird") for s in even)
    small = found["time at 128 / time at smaller blocks"]
    assert {round(s.value, 6) for s in small} == {0.25, 1.0}
    assert all((s.value < 0.5) == ("16x16" in s.case) for s in small)
    text = bars.report(rows, "cpu")
    assert "summary (above 1 is better)" in text and "own dense x density" in text
    with pytest.raises(ValueError, match=r"no measured row of 'hopper'; the file has cpu"):
        bars.report(rows, "hopper")


def test_tables_say_the_share_of_the_ideal(monkeypatch):
    row = made_up_rows(monkeypatch)[0]
    assert " 50%" in tables([row])
    other = tables([replace(row, v_dim=8, layout="token_major")])
    assert "v_dim 8" in other and "token_major" in other


def test_warming_up_gives_back_the_tasks(capfd):
    tasks = speed.plan([CASE, replace(CASE, mask="local(50)")], ["cpu", "sdpa"], speed.DIRECTIONS)
    assert len({warm.kind(t) for t in tasks}) == 2  # one a direction: both masks are partial
    assert warm.warm(tasks, CPU, 1, 60) == tasks
    assert "2 kinds of call" in capfd.readouterr().out
    assert warm.warm(tasks, CPU, 1, 0) == []


def test_only_a_lost_device_stops_a_run():
    assert warm.breaks_context("failed: AcceleratorError: CUDA error: an illegal memory access")
    assert not warm.breaks_context("failed: OutOfMemoryError: CUDA error: out of memory")
    assert not warm.breaks_context(OK)


@pytest.mark.parametrize("direction", speed.DIRECTIONS)
def test_a_token_major_layout_gives_the_same_result(direction):
    task = speed.Task(replace(CASE, layout="token_major"), "cpu", direction)
    measured = speed.Bench(CPU, 0.01)
    q = measured.inputs(*bench._inputs_of(task.case))[0]
    assert q.shape == (2, 4, 200, 16) and q.stride() == (4 * 200 * 16, 16, 4 * 16, 1)
    row = measured.run(task, speed.empty_row(task, CPU, ""))
    assert row.status == OK and row.layout == "token_major" and row.ideal_ms and row.fraction


@pytest.mark.parametrize("direction", speed.DIRECTIONS)
def test_values_may_have_a_head_dim_of_their_own(direction):
    case = replace(CASE, mask=DENSE, block_q=0, block_k=0, v_dim=8)
    task = speed.Task(case, "sdpa", direction)
    row = speed.Bench(CPU, 0.01).run(task, speed.empty_row(task, CPU, ""))
    assert row.status == OK and row.v_dim == 8 and row.tflops


def test_bad_layouts_and_value_dims_are_refused():
    with pytest.raises(ValueError, match="layout='up': choose from head_major, token_major"):
        make_grid("cpu", layout="up")
    with pytest.raises(ValueError, match="v_dim=-1: give a whole number"):
        make_grid("cpu", v_dim=-1)


def test_causal_is_for_every_peer():
    causal = replace(CASE, mask=CAUSAL)
    tasks = speed.plan([causal, replace(causal, n_k=100)], ["sdpa"], ["forward"])
    assert [t.case.n_k for t in tasks] == [200]
    row = speed.Bench(CPU, 0.01).run(tasks[0], speed.empty_row(tasks[0], CPU, ""))
    assert row.status == OK


def test_flash_attention_4_says_what_is_missing():
    provider = fa4.FlashAttention4()
    assert provider.unsupported(CASE, CPU, "forward") == "needs a CUDA device, not cpu"
    assert "takes bfloat16" in (provider.unsupported(CASE, CUDA, "forward") or "")
    if fa4.missing():
        half = replace(CASE, dtype="float16")
        assert "pip install flash-attn-4" in (provider.unsupported(half, CUDA, "forward") or "")


def test_flash_attention_4_gets_full_blocks_as_full_and_bits_for_partial_ones(monkeypatch):
    calls = []
    module = SimpleNamespace(
        BlockSparseTensorsTorch=BlockSparseTensors,
        flash_attn_func=lambda q, k, v, **options: calls.append(options) or (q, None),
    )
    monkeypatch.setattr(fa4.importlib, "import_module", lambda _: module)
    monkeypatch.setattr(fa4, "bit_lookup", lambda *sizes: sizes)

    def options(mask):
        q = torch.zeros(2, 4, 256, 16)
        case = replace(CASE, mask=mask, n_q=256, n_k=256)
        assert fa4.FlashAttention4().prepare(case, CPU)(q, q, q).shape == q.shape
        return calls.pop()

    assert options(DENSE) == {"deterministic": False}
    assert options(CAUSAL) == {"deterministic": False, "causal": True}
    found = options("random:0.5:block=32")
    lists = found["block_sparse_tensors"]
    assert "mask_mod" not in found and lists.block_size == (32, 32)
    assert not lists.mask_block_cnt.any() and set(lists.full_block_cnt.flatten().tolist()) == {4}

    found = options("local:40")
    code, bits = found["aux_tensors"]
    assert found["mask_mod"] == (32, 32, False, False)
    q, k = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    word = bits[code[0, 0, q // 32, k // 32].long(), q % 32, k % 32 // 32]
    assert torch.equal((word >> (k % 32) & 1).bool(), (q - k).abs() <= 40)
