"""Runtime and memory against length: gate, predictions, rows with reasons, tables and words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from experiments.bench.timing import Times
from experiments.common.records import OK, Records, read
from experiments.papers import attention_table
from experiments.papers.attention import length_report
from experiments.papers.attention import lengths as runs
from experiments.papers.attention.length_report import (
    crossings,
    draw_all,
    memory_of,
    named,
    table,
    tables,
)
from experiments.papers.attention.lengths import Run, settings
from experiments.papers.attention.measure import PaddedCase, PaddedGate, Step, draw, gate_error
from experiments.papers.attention.methods import CAUSAL, CPU_METHODS, METHODS, Setting
from experiments.papers.attention.rows import LengthRow
from sparseflash.testing import relative_error

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")
PLAIN = [name for name in CPU_METHODS if name != "compiled"]  # which would take seconds to compile
OPTIONS = {
    "lengths": [128], "variants": ["plain", "both"], "dropout": 0.1, "batch": 16, "heads": 8,
    "head_dim": 64, "peers_to": 65536, "causal": False,
}  # fmt: skip


def row(method="standard", n=1024, ms=1.0, **further) -> LengthRow:
    facts = {"dropout": 0.0, "padding": False, "batch": 1, "heads": 2, "head_dim": 16}
    facts |= {"direction": "both", "dtype": "float32", "mask": "", "density": None, "status": OK}
    facts |= LengthRow.origin("cpu", "") | further
    return LengthRow(method=method, n=n, ms_median=ms, **facts)


EXACT = [name for name in PLAIN if METHODS[name].exact]
ALL = [(name, False) for name in EXACT]
ALL += [(name, True) for name in EXACT if METHODS[name].kind in CAUSAL]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("method", "causal"), ALL)
def test_exact_attentions_pass_the_gate(method, causal, padding):
    further = {"dropout": 0.1, "padding": padding, "causal": causal}
    setting = Setting(method, 2, 2, 192, 16, "float32", **further)
    made = setting.make(CPU).eval()
    lengths = setting.lengths(CPU)
    case = setting.case(made)
    ends = () if lengths is None else tuple(lengths.tolist())
    case = PaddedCase(**{f: getattr(case, f) for f in case.__dataclass_fields__}, lengths=ends)
    qkv = draw(case, CPU)
    plan = None if lengths is None else made.plan(lengths, qkv[0].dtype)
    gate = PaddedGate(case, *qkv)
    assert gate_error(gate, Step(lambda q, k, v: made(q, k, v, plan), qkv)) < 1e-5
    assert (case.elements < 0.51) >= causal
    wrong = Step(lambda q, k, v: made(q, k, v, plan) * 1.01, qkv)
    assert gate.verdict(gate_error(gate, wrong))


def test_padding_hides_keys_and_their_queries():
    case = PaddedCase("dense", 2, 1, 1, 64, 64, 16, "float32", 0, 0, lengths=(50, 64))
    assert case.allowed(0, 0, np.arange(3)).sum() == 150
    gate = PaddedGate(case, *draw(case, CPU))
    assert int(gate.rows.max()) < 50


@pytest.mark.parametrize("method", [name for name in PLAIN if name not in ("linear", "performer")])
def test_dropout_is_applied_where_there_are_probabilities(method):
    outs = []
    for dropout in (0.0, 0.5):
        setting = Setting(method, 1, 1, 128, 16, "float32", dropout=dropout)
        torch.manual_seed(0)
        made = setting.make(CPU)
        with torch.no_grad():
            outs.append(made(*draw(setting.case(made), CPU)))
    assert relative_error(outs[1], outs[0]) > 0.1


def test_lengths_of_padding_are_those_of_the_paper():
    drawn = Setting("flash", 64, 1, 256, 16, "float32", padding=True).lengths(CPU)
    assert 236 <= int(drawn.min()) < int(drawn.max()) <= 256


def test_long_sequences_come_in_small_batches_and_without_peers():
    options = OPTIONS | {"lengths": [2**20, 65536], "variants": ["plain"]}
    found = settings(options, ["standard", "flash", "sparse"], "bfloat16")
    assert [(s.method, s.n, s.batch) for s in found] == [
        ("standard", 65536, 16), ("flash", 65536, 16), ("sparse", 65536, 16),
        ("flash", 2**20, 1), ("sparse", 2**20, 1),
    ]  # fmt: skip


def test_what_cannot_run_is_a_row_with_the_reason(tmp_path):
    records = Records(tmp_path / "rows.csv", LengthRow)
    run = Run(CPU, 1e-3, 1.0, records, "")
    too_long = Setting("standard", 16, 8, 65536, 64, "float32")
    assert all("out of memory: needs about" in r.status for r in run.go([too_long], None))
    cuda = Setting("sdpa_flash", 1, 1, 128, 16, "float32")
    assert all("needs a CUDA device" in r.status for r in run.go([cuda], None))
    assert len(records.rows) == 6
    assert len(list(run.go([too_long], None))) == 3 and len(records.rows) == 6


def test_causal_rows_and_head_dims_are_told_apart(tmp_path, monkeypatch):
    records = Records(tmp_path / "rows.csv", LengthRow)
    run = Run(CPU, 1e-4, 1.0, records, "")
    kinds = [{}, {"causal": True}, {"dropout": 0.1}, {"padding": True}]
    wanted = [
        Setting(name, 1, 1, 64, head_dim, "float32", **kind)
        for name in ("standard", "flash", "sparse")
        for head_dim in (16, 32)
        for kind in kinds
    ]
    rows = list(run.go(wanted, None))
    assert len({row.key for row in rows}) == len(rows) == 3 * len(wanted)
    assert all(row.status == OK for row in rows)
    assert sum(row.causal for row in rows) == len(rows) / 4
    assert {row.density for row in rows if row.causal and row.method == "flash"} == {1.0}
    assert list(run.go(wanted, None)) == rows and len(records.rows) == len(rows)
    found = named(rows)
    assert (
        found["ms_dropout_d16"]().count("\n") == 4 and "–" not in found["gain_plain_d16_causal"]()
    )
    texts = [found[f"ms_{name}"]() for name in ("plain_d16", "plain_d32", "plain_d16_causal")]
    assert len(set(texts)) == 3 and found["ms_plain_d128_causal"]() == "Not measured yet."
    text = tables(rows)
    assert "1 heads of 16" in text and "1 heads of 32" in text and "padding, causal" in text
    monkeypatch.setattr(
        length_report, "save", lambda figure, stem, **_: plt.close(figure) or [stem]
    )
    stems = [path.stem for path in draw_all(rows, tmp_path)]
    assert len(set(stems)) == 8 and sum("causal" in stem for stem in stems) == 4


def test_what_has_no_causal_form_is_a_row(tmp_path):
    run = Run(CPU, 1e-4, 1.0, Records(tmp_path / "rows.csv", LengthRow), "")
    for name in ("linformer", "chunks"):
        rows = list(run.go([Setting(name, 1, 1, 64, 16, "float32", causal=True)], None))
        assert all("not measured with a causal mask" in row.status and row.causal for row in rows)
        assert draw_all(rows, tmp_path) == [] and "| 64 |" in tables(rows)


def test_gains_are_over_standard_attention():
    rows = [row("standard", 128, 4.0), row("flash", 128, 1.0), row("flash", 256, 1.0)]
    assert named(rows)["gain_plain_d16"]().splitlines()[2:] == [
        "| standard | 1 | – |", "| ours, dense | **4** | – |",
    ]  # fmt: skip


def test_slow_calls_are_predicted(tmp_path):
    run = Run(CPU, 1e-3, 1.0, Records(tmp_path / "rows.csv", LengthRow), "")
    run.last = {("flash", "both", 0.0, False, 16, False): row("flash", 1024, 100.0)}
    for n, slow in ((2048, False), (4096, True), (512, False)):
        setting = Setting("flash", 1, 2, n, 16, "float32")
        assert bool(run.too_slow(setting, row("flash", n))) == slow
    assert run.too_slow(Setting("flash", 4, 2, 2048, 16, "float32"), row("flash", 2048))  # batch
    linear = Setting("linear", 1, 2, 4096, 16, "float32")
    run.last = {("linear", "both", 0.0, False, 16, False): row("linear", 1024, 100.0)}
    assert run.too_slow(linear, row("linear", 4096)) is None


def test_what_is_timed_has_dropout_and_is_compiled(tmp_path, monkeypatch):
    timed, compiled = [], []
    monkeypatch.setattr(
        runs, "time_call", lambda call, *_: timed.append(call) or Times(1.0, 1.0, 1.0)
    )
    monkeypatch.setattr(runs, "compiled", lambda made, device: compiled.append(made) or made)
    run = Run(CPU, 1e-4, 1.0, Records(tmp_path / "rows.csv", LengthRow), "")
    for method in ("standard", "compiled"):
        assert len(compiled) == 0
        list(run.go([Setting(method, 1, 1, 64, 16, "float32", dropout=0.5)], None))
    forward, backward, both = timed[:3]
    assert not torch.equal(forward(), forward()) and len(backward()) == len(both()) == 3
    assert len(compiled) == 1


def test_a_higher_limit_measures_what_was_left_out(tmp_path):
    records = Records(tmp_path / "rows.csv", LengthRow)
    settings = [Setting("flash", 1, 1, n, 16, "float32") for n in (32, 64)]
    low = list(Run(CPU, 1e-4, 1e-9, records, "").go(settings, None))
    assert [r.status == OK for r in low] == [True] * 3 + [False] * 3
    assert all("limit_s=1e-09" in r.status for r in low[3:])
    assert list(Run(CPU, 1e-4, 1e-9, records, "").go(settings, None)) == low
    assert len(records.rows) == 6
    high = list(Run(CPU, 1e-4, 10.0, records, "").go(settings, None))
    assert all(r.status == OK for r in high) and high[:3] == low[:3]
    assert high == list(Run(CPU, 1e-4, 10.0, records, "").go(settings, None))


def test_tables_have_the_dtype_and_heads_of_the_last_row():
    other = replace(row("standard", 256, 9.0), dtype="bfloat16", heads=5)
    assert "**9**" not in tables([other, row("standard", 128, 2.0)])
    assert "bfloat16" in tables([row("standard", 128, 2.0), other])


def test_a_failure_is_a_row_and_is_tried_again(tmp_path, monkeypatch):
    run = Run(CPU, 1e-3, 1.0, Records(tmp_path / "rows.csv", LengthRow), "")
    setting = Setting("local", 1, 1, 64, 16, "float32")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "draw", lambda *_: 1 / 0)
        assert all(r.status.startswith("failed: division") for r in run.go([setting], None))
    assert all(r.status == OK for r in run.go([setting], None))


def test_memory_of_ours_is_linear_and_of_standard_quadratic():
    def saved(method: str, n: int) -> float:
        setting = Setting(method, 1, 1, n, 16, "float32")
        made = setting.make(CPU)
        return Step(made, draw(setting.case(made), CPU)).saved_mib()

    assert saved("flash", 1024) == pytest.approx(2 * saved("flash", 512), rel=0.01)
    assert saved("sparse", 1024) == pytest.approx(saved("flash", 1024), rel=0.01)
    assert saved("standard", 1024) > 3.7 * saved("standard", 512)


def test_crossings_in_words():
    ours = [row("flash", n, t) for n, t in ((128, 3.0), (256, 4.0), (512, 5.0))]
    standard = [row("standard", n, t) for n, t in ((128, 1.0), (256, 5.0), (512, 20.0))]
    linear = [row("linear", n, 1.0) for n in (128, 256, 512)]
    slow = [row("smyrf", n, 50.0) for n in (128, 256)]
    assert crossings([*ours, *standard, *linear, *slow]) == [
        "ours, dense: from 256 tokens on, faster than standard.",
        "ours, dense: at every length that both ran, faster than Smyrf.",
        "ours, dense: at 512 tokens not faster than linear attention.",
    ]


def test_tables_and_figures(tmp_path):
    rows = [row("standard", n, n / 100, saved_mib=n**2 / 1e4) for n in (128, 256)]
    rows += [row("flash", n, n / 200, saved_mib=n / 100) for n in (128, 256)]
    rows.append(replace(row("standard", 512), status="out of memory: needs about 3 GiB of 2 free"))
    text = tables(rows)
    assert "| standard | 1.28 | 2.56 | – |" in text and "**0.64**" in text
    assert "| standard | out of memory | 512 |" in text
    assert table(rows, memory_of).count("**") == 4
    assert {path.suffix for path in draw_all(rows, tmp_path)} == {".png", ".svg"}


def test_the_figures_are_of_plain_rows_and_a_gain_is_best_where_it_is_most(tmp_path, monkeypatch):
    drawn = {}

    def draw(rows, label, value, stem):
        drawn[label] = [value(row) for row in rows]
        return []

    monkeypatch.setattr(length_report, "_draw", draw)
    others = {"direction": "forward"}, {"padding": True}, {"dropout": 0.1}
    rows = [row("flash", ms=9.0, saved_mib=9.0, **other) for other in others]
    rows += [row("standard", ms=3.0, saved_mib=5.0), row("flash", ms=1.0, saved_mib=4.0)]
    draw_all(rows, tmp_path)
    expected = {"ms, forward and backward": [3.0, 1.0], "MiB kept for the backward": [5.0, 4.0]}
    assert drawn == expected
    assert memory_of(replace(rows[-1], peak_mib=7.0)) == 7.0
    assert named(rows)["gain_plain_d16"]().endswith("| ours, dense | **3** |")
    reasons = [replace(row(n=n), status="out of memory: x") for n in (2048, 1024)]
    assert "| standard | out of memory: x | 1,024, 2,048 |" in tables(reasons)


@pytest.mark.slow
def test_program(tmp_path, run_program, monkeypatch):
    csv = tmp_path / "lengths.csv"
    words = ["lengths=[64]", "heads=1", "head_dim=16", "device=cpu", "seconds=1e-4"]
    words += [f"methods=[{','.join(PLAIN)}]", f"csv={csv}", f"plots={tmp_path}"]
    status, printed, error = run_program("papers.attention_table", *words)
    assert status == 0, error
    rows = read(csv, LengthRow)
    assert len(rows) == 2 * 3 * len(PLAIN) and all(r.status == OK for r in rows)
    assert all((r.error is not None) == METHODS[r.method].exact for r in rows)
    assert all((r.saved_mib is not None) == (r.direction == "both") for r in rows)
    assert all(r.peak_mib is None for r in rows)  # a CPU has none
    assert all(r.command.startswith(f"{LengthRow.COMMAND} ") for r in rows)
    assert "key padding" in printed and (tmp_path / "lengths.md").exists()
    assert len(list(tmp_path.glob("*.svg"))) == 2
    monkeypatch.setattr(attention_table, "draw_all", lambda rows, out: [])
    run_program("papers.attention_table", *words)
    assert len(read(csv, LengthRow)) == len(rows)
    words = [word for word in words if not word.startswith("methods")]
    run_program("papers.attention_table", *words, "methods=[flash]", "causal=true")
    assert sum(row.causal for row in read(csv, LengthRow)) == 6
    status, _, error = run_program("papers.attention_table", *words, "causal=2")
    assert status == 2 and "causal=2: give true or false" in error
