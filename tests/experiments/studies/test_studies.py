"""Every study in a small form on a CPU, and the numbers of those without a file of their own."""

import shlex

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import masks
from experiments.bench.step import Times
from experiments.common.rows import OK, Found, frame
from experiments.lra.runs import read_runs
from experiments.studies import (
    accuracy,
    long_documents,
    mask_build,
    operators,
    packed_masks,
    softmax,
)
from experiments.studies.packed_masks import ATTENTION, KINDS
from experiments.study import studies
from sparseflash.schedule.blocks import Schedule
from sparseflash.testing import oracle
from tests.experiments.lra.made_runs import write_run
from tests.experiments.studies.conftest import ok

CPU = torch.device("cpu")
SMALL = {  # options, the number of rows, and of those that say why there is no time
    "accuracy": ("lengths=[64] head_dims=[16] dtypes=[float32]", 4, 0),
    "attention_table": ("lengths=[64] heads=1 head_dim=16 methods=[standard,flash]", 12, 0),
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


def test_the_study_archives_the_runs_of_documents_and_draws_each_set(tmp_path):
    source, rows = "Python packages 0123abcd, 6 labels, 10 + 5 + 5 files", f"{tmp_path}/s.jsonl.gz"

    def collect(**options):
        options |= {"name": "", "rows": rows}
        long_documents.collect(long_documents.Options(**options))

    for length, rate in {512: 0.5, 1024: 0.6, 16384: 0.75}.items():
        for attention, ms in (("flash", length / 100), ("sparse", 4.0)):
            about = {"source": source, "length": length, "ms": ms, "accuracy": rate}
            write_run(tmp_path / f"runs/{length}", "files", attention, **about)
    write_run(tmp_path / "runs", "listops", "flash")
    with pytest.raises(ValueError, match="runs: none has task=files"):
        collect(runs=[f"{tmp_path}/runs/listops"])
    held_out = {"settings": {"task": {"held_out": 0.1}}}
    for name, more in (("a", {}), ("b", held_out)):
        about = {"source": "official", "length": 1024, "accuracy": 0.6}
        write_run(tmp_path / f"runs/{name}", "text", "flash", **about, **more)
    collect(runs=[f"{tmp_path}/runs"])
    assert {run.task for run in read_runs(rows)} == {"files", "text"}
    assert "| 50.0 | 60.0 | 75.0 |" in long_documents.tables(frame(rows))["accuracy"]
    drawn = long_documents.figures(frame(rows))
    assert [*drawn] == [
        "long-documents-files-python-packages-0123abcd", "long-documents-text-official",
        "long-documents-text-official-10-held-out",
    ]  # fmt: skip
    x, y = drawn["long-documents-files-python-packages-0123abcd"].axes[1].lines[0].get_data()
    assert [*x] == [512, 1024, 16384] and y[-1] in (4.0, 163.84)


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
    made = accuracy.tables(frame(rows))["rmse_d64"]
    assert "standard's / this, 512" in made and "| 3.2e-4 |" in made
    gain = f"{rmse['standard', 'float16'] / rmse['ours', 'float16']:.2f}x"
    assert f"{rmse['ours', 'float16']:.1e} | {gain} | 1.9e-4, FlashAttention-3" in made


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
    other = [row | {"device": "GPU B", "ms_median": row.ms_median / 2} for row in rows]
    assert softmax.tables(frame([*other, *rows])) == softmax.tables(frame(rows))
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
