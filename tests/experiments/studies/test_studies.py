"""Every study in a small form on a CPU, and the numbers of those without a file of their own."""

import json
import shlex
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import masks
from experiments.bench.cases import DENSE, Case
from experiments.bench.gate import Gate, WrongResult
from experiments.bench.step import Step, Times, draw
from experiments.common.devices import device_name
from experiments.common.rows import OK, Found, Rows, frame
from experiments.lra.runs import read_runs
from experiments.studies import (
    accuracy,
    long_documents,
    mask_build,
    operators,
    packed_masks,
    regression,
    score,
    softmax,
)
from experiments.studies.packed_masks import ATTENTION, KINDS
from experiments.studies.score import NONE, RULES, SINK, attention, buckets, rule_of
from experiments.study import studies
from sparseflash.schedule.blocks import Schedule
from sparseflash.testing import oracle
from tests.experiments.bench.bench_cases import ROW
from tests.experiments.lra.made_runs import write_run
from tests.experiments.studies.conftest import ok

CPU = torch.device("cpu")
SMALL = {  # options, the number of rows, and of those that say why there is no time
    "accuracy": ("lengths=[64] head_dims=[16] dtypes=[float32]", 4, 0),
    "attention_table": ("lengths=[64] heads=1 head_dim=16 methods=[standard,flash]", 6, 0),
    "decode": ("lengths=[128] heads=4 kv_heads=2 head_dim=32 chosen=64 rounds=2", 36, 0),
    "io": ("heads=2 n=128 head_dim=16 sparse_n=128 densities=[0.5] methods=[standard,flash]", 4, 0),
    "linear": ("sizes=['32:64'] tokens=[40] blocks=[16] what=[up,mlp] densities=[0.5]", 20, 6),
    "lra_speed": (
        "tasks=[listops] lengths=[] attentions=[linear]"
        " \"options=['batch=2','task.max_length=64']\"", 1, 0,
    ),
    "mask_build": ("lengths=[500,1000] mask=[causal,random:0.1]", 8, 0),
    "memory": ("lengths=[32,64] dim=32 hidden=48 heads=2", 10, 0),
    "operators": ("models=[tiny]", 2, 0),
    "packed_masks": ("lengths=[256] heads=1 head_dim=16 documents=5 compiled=[]", 15, 0),
    "picks": (
        "lengths=[160] head_dim=16 'selectors=[\"nsa(2, 32)\"]' rounds=2"
        " providers=[picks,selection,causal,fla,cudnn]", 18, 6,
    ),
    "regression": ("cells=['eager calls',causal,nsa] rounds=1", 10, 2),
    "score": ("lengths=[64] head_dims=[16] densities=[1,0.5] rounds=1", 86, 4),
    "select": ("seq_len=128 heads=2 kv_heads=1 head_dim=16 density=0.25", 35, 0),
    "softmax": ("vocabularies=[10,300] batches=[3]", 8, 0),
}  # fmt: skip
APART = {"context_parallel", "long_documents", "which_mask"}  # ranks; training runs


def test_all_studies_are_here():
    assert {*studies()} == {*SMALL} | APART


@pytest.mark.parametrize("name", SMALL)
def test_a_study_measures_what_is_lacking_and_makes_tables(name, measured, study):
    words, count, refused = SMALL[name]
    rows = measured(name, *shlex.split(words))
    module = study(name).study
    without = [row for row in rows if row.status != OK]
    assert (len(rows), len(without)) == (count, refused)
    assert all(row.status.startswith("unsupported") for row in without)
    assert ok([row for row in rows if row.status == OK])
    assert all(text.count("\n") > 1 for text in module.tables(frame(rows)).values())
    if hasattr(module, "figures"):
        module.figures(frame(rows))


def test_options_are_refused(study):
    for given, message in {
        "decode lengths=[100]": "lengths=100: give multiples of 64",
        "decode heads=6 kv_heads=4": "heads=6.*kv_heads=4",
        "decode providers=[flashinfr]": "did you mean flashinfer",
        "picks 'selectors=[\"top_k(2)\"]'": "has no picks; give moba or nsa",
        "picks heads=3 kv_heads=2": "heads=3.*kv_heads=2",
    }.items():
        with pytest.raises(ValueError, match=message):
            study(*shlex.split(given)).go()


def test_a_step_is_counted_and_timed_by_class(measured):
    standard, ours = measured("operators", "models=[tiny]", "layers=1")
    (n, dim, vocab), products = (128, 32, 128), operators.PRODUCTS
    linear = 6 * n * dim * (12 * dim + vocab)  # three products of each weight
    assert ours.gflop[products] == pytest.approx(linear / 1e9)
    assert standard.gflop[products] == pytest.approx((linear + 12 * n**2 * dim) / 1e9)
    blocks = masks.causal().build(n)
    assert ours.gflop[operators.FUSED] == pytest.approx(14 * n**2 * dim * blocks.density / 1e9)
    assert ours.class_ms[operators.FUSED] > 0 == standard.class_ms[operators.FUSED]
    assert operators.class_of("aten::gelu_backward") == operators.ELEMENTWISE
    assert operators.class_of("aten::_softmax") == operators.SUMS


def test_rows_count_the_blocks(measured):
    documents = mask_build.DOCUMENTS
    for row in measured("mask_build", "lengths=[500,1000]", f"mask=[causal,'{documents}']"):
        built = mask_build.mask_of(row.mask, row.seq_len).build(row.seq_len, block_size=128)
        assert (row.nnz, row.density) == (built.nnz, built.density)
    seen = mask_build.mask_of(documents, 16384).build(16384, block_size=16).to_dense()[0]
    assert seen[0].diagonal().all() and 4 <= (seen[0].sum(1) == 1).sum() < 30


# ---- long documents


def test_the_study_archives_the_runs_of_documents(tmp_path):
    source, rows = "Python packages 0123abcd, 6 labels, 10 + 5 + 5 files", f"{tmp_path}/s.jsonl.gz"

    def collect(**options):
        options |= {"name": "", "rows": rows}
        long_documents.collect(long_documents.Options(**options))

    for length, rate in {512: 0.5, 1024: 0.6, 16384: 0.75}.items():
        for name, ms in (("flash", length / 100), ("sparse", 4.0)):
            about = {"source": source, "length": length, "ms": ms, "accuracy": rate}
            write_run(tmp_path / f"runs/{length}", "files", name, **about)
    write_run(tmp_path / "runs", "listops", "flash")
    with pytest.raises(ValueError, match="runs: none has task=files"):
        collect(runs=[f"{tmp_path}/runs/listops"])
    collect(runs=[f"{tmp_path}/runs"])
    assert {run.task for run in read_runs(rows)} == {"files"}
    assert "| 50.0 | 60.0 | 75.0 |" in long_documents.tables(frame(rows))["accuracy"]
    about = {"source": source, "length": 2048, "ms": 99.0, "device": "GPU B"}
    write_run(tmp_path / "runs/2048", "files", "flash", **about)  # no time of a curve of GPU A
    collect(runs=[f"{tmp_path}/runs"])
    (figure,) = long_documents.figures(frame(rows)).values()
    times = [line.get_xydata().tolist() for line in figure.axes[1].lines]
    assert [[512, 5.12], [1024, 10.24], [16384, 163.84]] in times
    assert "times of GPU A" in figure.get_suptitle()


# ---- numerical error


def test_a_thousandth_of_the_entries_is_far_out():
    case = Found(batch=1, heads=2, n=8192, head_dim=64, dtype="float16", outliers=0.001)
    q, k, v = accuracy.draw(case, CPU)
    entries = torch.cat([t.float().flatten() for t in (q, k, v)])
    assert q.dtype == torch.float16 and not torch.equal(q, k) and not torch.equal(k, v)
    assert entries.mean().abs() < 0.01
    assert entries.var().item() == pytest.approx(1 + 0.001 * 100, rel=0.03)
    far = (entries.abs() > 5).float().mean().item()
    assert far == pytest.approx(0.001 * 0.62, rel=0.15)  # |N(0, 101)| > 5
    calm = accuracy.draw(Found(case | {"outliers": 0.0}), CPU)[0].float()
    assert calm.abs().max() < 6 and calm.var().item() == pytest.approx(1, rel=0.02)


def test_the_error_is_the_root_of_the_mean_square(study, one, monkeypatch):
    shifted = accuracy.METHODS["ours"]._replace(call=lambda q, k, v: oracle(q, k, v)[0] + 0.01)
    monkeypatch.setitem(accuracy.METHODS, "ours", shifted)
    run = study("accuracy", "lengths=[64]", "head_dims=[16]", "dtypes=[float32]", "batch=2")
    (case,) = run.study.cases(run)
    (row,) = one(run, case, method="ours")
    assert row.rmse == pytest.approx(0.01, rel=1e-6)
    right = oracle(*accuracy.draw(case, CPU))[0]
    assert row.relative == pytest.approx(0.01 / right.square().mean().sqrt().item(), rel=1e-6)


def test_a_softmax_in_float32_has_less_error_than_a_standard_one(measured):
    words = ["lengths=[512]", "head_dims=[64]", "dtypes=[float16,bfloat16,float32]", "heads=2"]
    rows = measured("accuracy", *words)
    rmse = {(r.method, r.dtype): r.rmse for r in rows if r.status == OK}
    for dtype in ("float16", "bfloat16"):
        assert rmse["ours", dtype] < rmse["standard", dtype] / 2
    assert rmse["ours", "bfloat16"] > 4 * rmse["ours", "float16"]
    assert rmse["ours", "float32"] < 1e-6
    refused = {r.status.split(":")[0] for r in rows if r.status != OK}
    assert refused <= {"failed", "unsupported"}


# ---- safe and online softmax


def check_softmax(x):
    right = x.double().softmax(1)
    for algorithm in ("safe", "online", "torch"):
        result = softmax.make_call(algorithm, x)()
        assert torch.allclose(result.double(), right, rtol=1e-5, atol=1e-12), algorithm
        assert softmax.error(algorithm, result, x) < 1e-5
    assert softmax.error("online", torch.zeros_like(x), x) == pytest.approx(1.0)
    assert softmax.error("copy", softmax.make_call("copy", x)(), x) == 0


needs_the_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its kernels run in the interpreter here"
)


@needs_the_interpreter
def test_softmax_is_that_of_float64():
    """Also of rising numbers, far from 0, of equal ones, and of -inf in whole blocks."""
    for shape in [(3, 10), (2, 1), (2, 9000)]:
        check_softmax(torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4)
    empty = torch.full((9000,), -torch.inf)
    empty[-20:] = torch.arange(20.0)
    check_softmax(
        torch.stack([torch.linspace(-3, 3, 9000) + 1000, torch.full((9000,), -1e4), empty])
    )


@needs_the_interpreter
def test_softmax_has_its_bandwidth_and_speed_up(measured, study, monkeypatch):
    rows = measured("softmax", "vocabularies=[10,300]", "batches=[3]")
    row = next(r for r in rows if r.algorithm == "online")
    assert row.gb_s == pytest.approx(3 * 3 * 10 * 4 / row.ms_median / 1e6, rel=1e-4)
    gain = next(r for r in rows if r.algorithm == "safe").ms_median / row.ms_median
    assert f" | {gain:.2f} | " in softmax.tables(frame(rows))["softmax"].splitlines()[2]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs a GPU, or TRITON_INTERPRET=1"):
        study("softmax").go()


# ---- packed masks


def test_attention_goes_backward_and_masks_are_planned_and_compiled(study, one, monkeypatch):
    results = []

    def measure(call, device, seconds):
        results.append(call())
        return Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(packed_masks, "measure", measure)
    monkeypatch.setattr(torch, "compile", lambda make: lambda given: ("compiled", make(given)))
    small = ["lengths=[256]", "heads=1", "head_dim=16", "documents=5", "kinds=[documents]"]
    run = study("packed_masks", *small)
    found = one(run, run.study.cases(run)[0])
    gradients, ours, compiled, theirs, _ = results
    assert len(gradients) == 3 and isinstance(ours, Schedule) and isinstance(theirs, BlockMask)
    assert [type(r) is tuple and r[0] == "compiled" for r in results[1:]] == [False, True] * 2
    assert isinstance(compiled[1], Schedule) and found[0].step == ATTENTION
    assert packed_masks.tables(frame(found))["packed"].count("100.0") >= 2
    monkeypatch.setattr(packed_masks, "flex_blocks", lambda mask: 7)
    refused = one(run, run.study.cases(run)[0])
    assert all("7 of create_block_mask: they must agree" in row.status for row in refused)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_make_the_same_mask(kind):
    """Pair by pair, for some lengths and numbers of documents."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        n, documents = 2 * int(rng.integers(64, 900)), int(rng.integers(1, 30))
        given = torch.tensor(KINDS[kind].given(n, documents, rng), dtype=torch.int32)
        token = torch.arange(n)
        none = torch.zeros(1, dtype=torch.int32)
        seen = KINDS[kind].theirs(given, n)(none, none, token[:, None], token)
        found = KINDS[kind].ours(given, n).to_block_mask().to_dense()[0, 0]
        assert np.array_equal(found, seen.numpy())


# ---- functions of the scores: the gate refuses other formulas, and costs are over no rule

CASE = Case(DENSE, 1, 4, 2, 96, 96, 16, "float32", 0, 0)
SPARSE = replace(CASE, mask="random_blocks(0.5, block=32)", block_q=32, block_k=32)


@pytest.mark.parametrize("case", [CASE, SPARSE])
@pytest.mark.parametrize("rule", [*RULES[1:2], *RULES[3:]])
def test_the_gate_refuses_another_formula_and_a_wrong_gradient_of_a_table(case, rule):
    _, formula, shape = rule_of(rule, case)
    qkv, places = draw(case, CPU), buckets(CPU)
    given = (torch.rand(shape).requires_grad_(), places) if shape else ()
    step = Step(attention(rule, "cpu", case, CPU, *given), qkv, given[:1])
    own = {"tables": given, "sink": rule == SINK}
    assert step.error(Gate(case, *qkv, rule=partial(formula, torch), **own)) < 1e-5
    other = partial(rule_of(NONE, case)[1], torch)
    with pytest.raises(WrongResult):
        step.error(Gate(case, *qkv, rule=other, tables=given and given[:0]))
    if shape:
        wrong = replace(step)
        object.__setattr__(wrong, "both", lambda dout: (*step.both(dout)[:3], 2 * given[0]))
        with pytest.raises(WrongResult):
            wrong.error(Gate(case, *qkv, rule=partial(formula, torch), **own))


def test_a_cost_is_over_no_rule_in_the_same_round():
    row = CASE.row() | {"provider": "cpu", "direction": "forward", "device": "a", "torch": "2"}
    row |= {"triton": "", "source": "s", "status": OK}
    ms = {(NONE, 1): 1.0, ("t5", 1): 3.0, (NONE, 2): 7.0, ("t5", 2): 5.0}
    rows = [row | {"rule": r, "round": n, "ms_median": x} for (r, n), x in ms.items()]
    # the medians of 1 and 7, of +200 and -28.6 %
    assert "| 4.000 | +85.7 ! |" in score.tables(frame(rows))["terms"]
    again = [{**rows[0], "ms_median": 9.0}, *rows]  # measured again in a round: the last counts
    assert "| +85.7 ! |" in score.tables(frame(again))["terms"]
    failed = row | {"rule": "pair", "provider": "flex", "round": 1, "status": "failed: no compiler"}
    assert "no compiler" in score.tables(frame([*rows, failed]))["without"]


# ---- regressions


def run_of(process, cells, **more):
    """Rows of one run: times in rounds by cell and provider."""
    return [
        {**ROW, "cell": cell, "peer": name != "auto", "provider": name, "round": n, "ms_median": ms,
         "process": process, "torch": "2", **({"version": "1"} if name != "auto" else {}), **more}
        for cell, providers in cells.items()
        for name, times in providers.items()
        for n, ms in enumerate(times, 1)
    ]  # fmt: skip


@pytest.fixture
def compare(tmp_path, run_program):
    """Return what a run says of each cell against an earlier one, and its exit status."""

    def made(*runs):
        paths = [tmp_path / f"{len([*tmp_path.iterdir()]) + i}.jsonl" for i in range(2)]
        for path, rows in zip(paths, runs, strict=True):
            path.write_text("\n".join(map(json.dumps, rows)))
        words = f"against={paths[0]}", f"rows={paths[1]}", "fall=0.04", "device=cpu"
        status, text, _ = run_program("study", "name=regression", "measure=false", *words)
        lines = [[x.strip() for x in line.split("|")] for line in text.splitlines()]
        _, _, *lines = (line for line in lines if len(line) == 9)
        return {line[1]: tuple(line[5:-1]) for line in lines}, status

    return made


def test_a_cell_falls_by_its_ratio_to_the_same_peer_else_by_its_time(compare):
    before = {"slow": {"auto": [2, 2], "fa4": [2, 2]}, "own": {"auto": [1, 1]}}
    clock = {"slow": {"auto": [4, 4.2], "fa4": [4, 4.2]}, "own": {"auto": [1.03, 1.03]}}
    old, new = run_of("a", before), run_of("b", clock)
    assert compare(old, new) == ({"slow": ("fa4 1", "+0.0", ""), "own": ("time", "-2.9", "")}, 0)
    other = [r | {"version": "2"} if r["provider"] == "fa4" else r for r in new]
    found, status = compare(old, other)
    assert (found["slow"], status) == (("time", "-51.2", "fell"), 1)
    worse = run_of("b", clock | {"slow": {"auto": [4.4, 4.4], "fa4": [4, 4]}})
    assert compare([*worse, *old], [*old, *worse])[0]["slow"] == ("fa4 1", "-9.1", "fell")


def test_cells_are_over_others_and_those_without_a_result_fail_but_not_unstable_ones(compare):
    old = run_of("a", {"128": {"auto": [1]}, "shaky": {"auto": [1]}, "lost": {"auto": [1]}})
    old += run_of("a", {"16": {"auto": [2]}}, over="128")
    new = run_of("b", {"128": {"auto": [2]}, "shaky": {"auto": [1.4, 2]}, "new": {"auto": [1]}})
    new += run_of("b", {"16": {"auto": [4.4]}}, over="128")
    new += run_of("b", {"lost": {"auto": [None]}}, status="failed: boom")
    found, status = compare(old, new)
    said = {cell: (by, text) for cell, (by, _, text) in found.items()}
    assert status == 1 and said == {
        "128": ("time", "fell"), "16": ("128", "fell"), "lost": ("time", "failed: boom"),
        "shaky": ("time", regression.SHAKY), "new": ("time", "before: not measured"),
    }  # fmt: skip


def test_rows_that_cannot_be_compared_are_refused_before_a_measurement(study, tmp_path):
    rows = Rows(tmp_path / "before.jsonl")
    with pytest.raises(ValueError, match="measure first"):
        study("regression", f"against={tmp_path}/none.jsonl")
    for row, message in (({}, "another device"), ({"device": device_name("cpu")}, "none of these")):
        rows.append(run_of("a", {"causal": {"auto": [1]}})[0] | row)
        with pytest.raises(ValueError, match=f"against={rows.path} .*{message}"):
            study("regression", f"against={rows.path}", "cells=[causal]")
    with pytest.raises(ValueError, match="cells='casual'"):
        study("regression", "cells=[casual]")
    assert not (tmp_path / "rows.jsonl").exists()
