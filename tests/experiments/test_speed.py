"""Measuring: the gate, the plan, what a rerun skips, and the program from end to end."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from experiments import speed
from experiments.bench import providers
from experiments.bench.cases import Case
from experiments.bench.gate import Gate
from experiments.bench.rows import SpeedRow
from experiments.bench.speed_table import tables
from experiments.common.records import OK, Records, read
from sparseflash.testing import make_qkv, oracle

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("local(40) | global_tokens(10)", 2, 4, 2, 200, 200, 16, "float32", 32, 32)
CPU = torch.device("cpu")


def exact(case):
    mask = None if case.blocks is None else torch.from_numpy(case.blocks.to_dense())
    return lambda q, k, v: oracle(q, k, v, mask)[0].to(q.dtype)


def forgets_a_block(case):
    mask = torch.from_numpy(case.blocks.to_dense())
    mask[..., :32, :16] = False
    return lambda q, k, v: oracle(q, k, v, mask)[0].to(q.dtype)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def halves_dk(case):
    run = exact(case)
    return lambda q, k, v: run(q, HalfGradient.apply(k), v)


@dataclass(frozen=True)
class Injected:
    make: object
    dense_only = False

    def unsupported(self, case, device, direction):
        return None

    def prepare(self, case, device):
        return self.make(case)


@pytest.fixture
def measure(monkeypatch):
    def run(make, direction, case=CASE):
        monkeypatch.setitem(providers.PROVIDERS, "injected", Injected(make))
        task = speed.Task(case, "injected", direction)
        return speed.Bench(CPU, seconds=0.01).run(task, speed.empty_row(task, CPU, ""))

    return run


@pytest.mark.parametrize("direction", speed.DIRECTIONS)
def test_a_right_provider_is_timed(measure, direction):
    row = measure(exact, direction)
    assert row.status == OK and row.error < 1e-6
    assert 0 < row.ms_p20 <= row.ms_median <= row.ms_p80
    assert row.tflops == pytest.approx(CASE.flops(direction) / row.ms_median / 1e9)


@pytest.mark.parametrize(
    ("make", "direction"),
    [(forgets_a_block, "forward"), (forgets_a_block, "backward"), (halves_dk, "backward")],
)
def test_the_gate_catches_a_wrong_provider_and_gives_no_time(measure, make, direction):
    row = measure(make, direction)
    assert row.status.startswith("wrong result: error ") and row.error > 1e-4
    assert row.ms_median is None and row.tflops is None


def test_nan_is_a_wrong_result(measure):
    row = measure(lambda case: lambda q, k, v: torch.full_like(q, torch.nan), "forward")
    assert row.status.startswith("wrong result: error inf")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("blocks of\n32"), "unsupported: blocks of 32"),
        (RuntimeError("boom"), "failed: RuntimeError: boom"),
    ],
)
def test_a_provider_that_raises_gets_a_status_and_the_run_goes_on(measure, error, status):
    def make(case):
        raise error

    assert measure(make, "forward").status == status


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_samples_first_and_last_rows_and_slices(dtype):
    name = str(dtype).removeprefix("torch.")
    q, k, v = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=dtype, device="cpu")
    gate = Gate(replace(CASE, dtype=name), q, k, v)
    assert {0, 199} <= set(gate.rows.tolist())
    assert gate.slices == [(0, 0), (1, 1)]
    assert gate.verdict(gate.forward_error(exact(CASE)(q, k, v))) is None


@pytest.mark.parametrize("mask", ["dense", CASE.mask, "random_blocks(0.3, block=32)"])
def test_our_cpu_backend_passes_the_gate(mask):
    for direction in speed.DIRECTIONS:
        task = speed.Task(replace(CASE, mask=mask), "cpu", direction)
        row = speed.Bench(CPU, seconds=0.01).run(task, speed.empty_row(task, CPU, ""))
        assert row.status == OK


def test_plan_keeps_dense_only_providers_to_dense_cases():
    dense = replace(CASE, mask="dense", block_q=0, block_k=0)
    tasks = speed.plan([dense, CASE], ["cpu", "sdpa"], ["forward"])
    assert [(t.case.mask, t.provider) for t in tasks] == [
        ("dense", "cpu"),
        ("dense", "sdpa"),
        (CASE.mask, "cpu"),
    ]


def test_plan_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="no provider 'fast'; choose from reference, cpu"):
        speed.plan([CASE], ["fast"], ["forward"])
    with pytest.raises(ValueError, match="directions='sideways': choose from forward, backward"):
        speed.plan([CASE], ["cpu"], ["sideways"])
    with pytest.raises(ValueError, match=r"24.*multiples of 16"):
        speed.plan([replace(CASE, block_q=24)], ["cpu"], ["forward"])


def test_sdpa_says_where_it_cannot_run():
    find = providers.find
    assert "dense only" in find("sdpa").unsupported(CASE, CPU, "forward")
    dense = replace(CASE, mask="dense")
    assert "CUDA" in find("sdpa_flash").unsupported(dense, CPU, "forward")
    assert "no backward" in find("flex").unsupported(dense, CPU, "backward")


def test_a_rerun_measures_only_what_is_missing(tmp_path, capsys):
    tasks = speed.plan([CASE], ["cpu"], speed.DIRECTIONS)
    bench = speed.Bench(CPU, seconds=0.01)
    first = speed.run_tasks(tasks[:1], bench, Records(tmp_path / "s.csv", SpeedRow), "")
    again = speed.run_tasks(tasks, bench, Records(tmp_path / "s.csv", SpeedRow), "")
    assert again[0].date == first[0].date and len(read(tmp_path / "s.csv", SpeedRow)) == 2
    assert "(measured " in capsys.readouterr().out


def test_the_same_refusal_is_written_once(tmp_path):
    tasks = speed.plan([replace(CASE, mask="dense")], ["flex"], ["backward"])
    for _ in range(2):
        speed.run_tasks(tasks, speed.Bench(CPU, 0.01), Records(tmp_path / "s.csv", SpeedRow), "")
    assert [row.status[:11] for row in read(tmp_path / "s.csv", SpeedRow)] == ["unsupported"]


def test_table_compares_with_our_own_dense():
    tasks = speed.plan([replace(CASE, mask="dense"), CASE], ["cpu", "flex"], ["backward"])
    rows = [speed.empty_row(task, CPU, "") for task in tasks]
    times = {("dense", "cpu"): 8.0, (CASE.mask, "cpu"): 2.0}
    rows = [
        replace(row, status=OK, ms_median=times[row.mask, row.provider])
        if row.provider == "cpu"
        else replace(row, status="unsupported: on a CPU")
        for row in rows
    ]
    text = tables(rows)
    assert "8.000  (1.00x)" in text and "2.000  (4.00x)" in text
    assert "flex backward: unsupported: on a CPU" in text


def test_programs_from_end_to_end(tmp_path):
    """Two commands at a tiny size: CSV and table, then plots."""

    def run(module, *words):
        command = [sys.executable, "-m", f"experiments.{module}", f"csv={tmp_path}/s.csv", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    small = "seq_len=128 heads=1 head_dim=16 block_size=32 device=cpu providers=[cpu,sdpa]".split()
    done = run(
        "speed",
        'mask=[dense,"random:0.5:block=32","random:0.25:block=32",local:32]',
        "seconds=0.01",
        *small,
    )
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "s.csv", SpeedRow)
    assert len(rows) == 10 and {row.status for row in rows} == {OK}
    assert "random:0.5:block=32" in rows[0].command
    assert "random_blocks(0.25" in (tmp_path / "s.txt").read_text()

    drawn = run("plot", f"out={tmp_path}/plots")
    assert drawn.returncode == 0, drawn.stderr
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.split("-")[0] for name in names] == ["masks.png", "masks.svg"] + ["speedup"] * 2

    wrong = run("speed", "providers=[fast]")
    assert wrong.returncode != 0 and "no provider 'fast'; choose from" in wrong.stderr


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gets_the_same_mask(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    q, k, v = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=torch.float32, device=CPU)
    out = providers.find("flex").prepare(CASE, CPU)(q, k, v)
    torch.testing.assert_close(out, exact(CASE)(q, k, v), rtol=1e-5, atol=1e-5)
    # Whole blocks have nothing to look up.
    whole = replace(CASE, mask="random:0.5:block=32", n_q=192, n_k=192)
    q, k, v = make_qkv(2, 4, 192, 192, 16, kv_heads=2, dtype=torch.float32, device=CPU)
    seen = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_, **kw: seen.append(kw))
    providers.find("flex").prepare(whole, CPU)(q, k, v)
    assert seen[0]["block_mask"].mask_mod.__name__ == "noop_mask"
