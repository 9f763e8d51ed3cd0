"""Runtime and memory against length: predictions, rows with reasons, tables and figures."""

import pytest
import torch

from experiments.bench.cases import Case
from experiments.bench.gate import Gate
from experiments.bench.peers.methods import (
    METHODS,
    BlockedGather,
    Setting,
    SlidingChunks,
)  # fmt: skip
from experiments.bench.step import draw
from experiments.common.rows import OK, Found, frame
from experiments.studies.attention_table import tables
from sparseflash.testing import relative_error

SMALL = ["lengths=[32,64]", "heads=1", "head_dim=16", "batch=1"]


def row(method="standard", n=1024, ms=1.0, **further) -> Found:
    facts = {"dropout": 0.0, "padding": False, "batch": 1, "heads": 2, "head_dim": 16}
    facts |= {"direction": "both", "dtype": "float32", "mask": "", "density": None, "status": OK}
    facts |= {"saved_mib": None, "peak_mib": None}
    return Found(facts | {"device": "a", "method": method, "n": n, "ms_median": ms} | further)


def test_a_table_mixes_neither_shapes_nor_variants_nor_kinds_of_memory():
    rows = [row("flash", n, n / 200, saved_mib=n / 100) for n in (128, 256)]
    other = row("standard", 256, 9.0, dtype="bfloat16", heads=5)
    assert "standard" not in tables(frame([other, *rows]))["ms_plain_d16"]
    made = tables(frame([*rows, *(r | {"dropout": 0.1, "ms_median": 7.0} for r in rows)]))
    assert made["ms_plain_d16"] == tables(frame(rows))["ms_plain_d16"] != made["ms_dropout_d16"]
    peaks = [row(n=n, saved_mib=1.0, peak_mib=peak) for n, peak in ((128, 9.0), (256, None))]
    assert "| standard | **9** | – |" in tables(frame(peaks))["memory_plain_d16"]


# ---- the attentions of the tables

CPU = torch.device("cpu")
PLAIN = [n for n, m in METHODS.items() if m.kernel is None and not m.compiled]
EXACT = [n for n in PLAIN if METHODS[n].exact]
FORMS = {"chunks": (SlidingChunks, {"window": 32}), "gather": (BlockedGather, {"block": 16})}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("method", EXACT)
def test_exact_attentions_pass_the_gate(method, padding):
    setting = Setting(method, 2, 2, 192, 16, "float32", dropout=0.1, padding=padding)
    step, error = setting.prepared(CPU)
    assert error < 1e-5 and step.saved_mib() > 0


def test_padding_hides_keys_and_their_queries():
    case = Case("dense", 2, 1, 1, 64, 64, 16, "float32", 0, 0)
    gate = Gate(case, *draw(case, CPU), lengths=(50, 64))
    assert int(gate.rows.max()) < 50
    for (_, _, dk, dv), length in zip(gate.expected, gate.lengths, strict=True):
        assert all((grad.any(1) == (torch.arange(64) < length)).all() for grad in (dk, dv))
    drawn = Setting("flash", 64, 1, 256, 16, "float32", padding=True).lengths(CPU)
    assert 236 <= int(drawn.min()) < int(drawn.max()) <= 256  # as in the paper


def test_dropout_is_applied_where_there_are_probabilities():
    for method in PLAIN:
        outs = []
        for dropout in (0.0, 0.5):
            setting = Setting(method, 1, 1, 128, 16, "float32", dropout=dropout)
            torch.manual_seed(0)
            made = setting.make(CPU)
            with torch.no_grad():
                outs.append(made(*draw(setting.case(made), CPU)))
        dropped = relative_error(outs[1], outs[0]) > 0.1
        assert dropped or method in ("linear", "performer"), method


@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_is_its_mask(form):
    for n in (7, 16, 31, 48, 161, 256):
        for padding in (False, True):
            cls, own = FORMS[form]
            made = cls(**own, heads=2, head_dim=8, length=n)
            torch.manual_seed(0)
            qkv = [torch.randn(2, 2, n, 8, requires_grad=True) for _ in range(3)]
            lengths = torch.tensor([n, max(1, n - 20)], dtype=torch.int32) if padding else None
            dense = torch.from_numpy(made.pattern().build(n, heads=2, block_size=16).to_dense())
            allowed = dense.expand(2, 2, n, n)
            queries = torch.ones(2, 1, n, 1, dtype=torch.bool)
            if lengths is not None:
                queries = (torch.arange(n) < lengths[:, None])[:, None, :, None]
                allowed = allowed & queries.mT | ~queries  # queries of padding mean nothing
            q, k, v = exact = [t.detach().double().requires_grad_() for t in qkv]
            scores = (q @ k.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
            true = (scores.softmax(-1) @ v).where(queries, 0)
            out = made(*qkv, lengths).where(queries, 0)
            assert relative_error(out, true) < 1e-5
            dout = torch.randn(out.shape)
            found = torch.autograd.grad(out, qkv, dout)
            for a, b in zip(found, torch.autograd.grad(true, exact, dout.double()), strict=True):
                assert relative_error(a, b) < 1e-5, (n, padding)
