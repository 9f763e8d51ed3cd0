"""Terms of the softmax: the gate with their gradients, turns, and costs."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.gate import WrongResult
from experiments.common.rows import OK, frame
from experiments.studies import term_costs
from experiments.studies.term_costs import (
    CAPS,
    MAX,
    NONE,
    TERMS,
    Group,
    gate_errors,
    passed,
    step_of,
    tables,
)  # fmt: skip
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.experiments.studies.conftest import ok

CPU = torch.device("cpu")
CASE = Case(DENSE, 2, 4, 2, 96, 96, 16, "float32", 0, 0)
SPARSE = replace(CASE, mask="random_blocks(0.5, block=32)", block_q=32, block_k=32)
SMALL = ["batch=1", "heads=2", "seq_len=64", "head_dims=[16]", "block=32"]


def test_rows_of_every_term(measured):
    rows = measured("term_costs", *SMALL, "rounds=2")
    assert len(rows) == 2 * 2 * (2 * (1 + len(TERMS)) + 1) and ok(rows)
    assert {row.direction for row in rows if row.term == MAX} == {"forward"}
    assert {row.kv_heads for row in rows} == {2}  # heads
    assert all((row.term_error is not None) == (row.term in ("sink", "bias")) for row in rows)
    firsts = [row.term for row in rows if row["mask"] == DENSE][:: len(rows) // 4]
    assert firsts == [NONE, "sink"]  # each round begins with another term
    (table,) = tables(frame(rows)).values()
    assert table.count("\n") == 5 and "backward" in table


def test_the_gate_agrees_with_what_is_right_and_refuses_another_term():
    for case in (CASE, SPARSE):
        for term in (NONE, *TERMS, MAX):
            error, of_terms = gate_errors(case, step_of(case, "cpu", term, CPU))
            assert error < 1e-5 and (of_terms or 0) < 1e-5, term
            assert (of_terms is None) == (term in (NONE, *CAPS, "slopes", MAX))
    for term, other in ((NONE, "slopes"), *((cap, NONE) for cap in CAPS), ("slopes", NONE)):
        claimed = step_of(CASE, "cpu", term, CPU).terms
        wrong = replace(step_of(CASE, "cpu", other, CPU), terms=claimed)
        assert gate_errors(CASE, wrong)[0] > 1e-3, (term, other)
    step = step_of(SPARSE, "cpu", MAX, CPU)
    assert gate_errors(SPARSE, replace(step, maxima=lambda: step.maxima() + 0.1))[0] > 1e-2


@pytest.mark.parametrize(
    ("term", "place"), [(NONE, 0), ("sink", 1), ("bias", 2), ("sink", 3), ("bias", 3)]
)
def test_the_gate_refuses_a_wrong_gradient(term, place):
    """That of q, k or v, or that of the term."""
    step = step_of(CASE, "cpu", term, CPU)
    doubled = replace(step, attend=lambda q, k, v: step.attend(q, k, v))

    def both(dout):
        return tuple((1 + (i == place)) * grad for i, grad in enumerate(step.both(dout)))

    object.__setattr__(doubled, "both", both)
    error, of_terms = gate_errors(CASE, doubled)
    wrong, right = (of_terms, error) if place == 3 else (error, of_terms or 0)
    assert wrong == pytest.approx(1) and right < 1e-5


def test_only_what_passed_its_gate_is_timed(study, one, monkeypatch):
    assert passed(9e-3, 3e-2, 1e-2) == {"error": 9e-3, "term_error": 3e-2}
    for errors in ((2e-2, None), (9e-3, 5e-2), (float("nan"), None)):
        with pytest.raises(WrongResult, match="error"):
            passed(*errors, 1e-2)
    right = term_costs.gate_errors

    def errors(case, step):
        biased = step.terms is not None and step.terms.bias is not None
        return (1.0, 0.0) if biased else right(case, step)

    monkeypatch.setattr(term_costs, "gate_errors", errors)
    run = study("term_costs", *SMALL, "rounds=2")
    rows = one(run, Group(CASE, "cpu"))
    assert {row.term for row in rows if row.ms_median is None} == {"bias"}
    assert {row.status for row in rows if row.term == "bias"} == {
        "wrong result: error 1, limit 0.0001"
    }
    refused = one(run, Group(CASE, "triton"))
    assert all(r.status.startswith("unsupported") for r in refused if r.term != "bias")


def test_a_cost_is_over_no_term_in_the_same_round_and_shapes_are_apart():
    row = Group(CASE, "cpu").row() | {"direction": "forward", "device": "a", "torch": "2"}
    row |= {"triton": "", "source": "s", "status": OK}
    ms = {(NONE, 1): 1.0, ("sink", 1): 3.0, (NONE, 2): 7.0, ("sink", 2): 5.0}
    rows = [row | {"term": t, "round": n, "ms_median": x} for (t, n), x in ms.items()]
    (table,) = tables(frame(rows)).values()
    assert "| 4.000 | +85.7 ! |" in table  # the medians of 1 and 7, of +200 and -28.6 %
    wide = [r | {"heads": 8, "ms_median": 1.0} for r in rows]
    both = tables(frame([*rows, *wide]))
    assert len(both) == 2 and sum("+0.0 |" in text for text in both.values()) == 1


def test_places_of_sampled_queries():
    """The float64 oracle of a sample of rows is that of all of them."""
    q, k, v = make_qkv(1, 2, 20, 30, 8)
    rows = torch.tensor([0, 7, 19])
    for term in TERMS:
        terms = step_of(replace(CASE, heads=2), "cpu", term, CPU).terms
        whole, lse = oracle(q, k, v, terms=terms)
        some, some_lse = oracle(q[:, :, rows], k, v, terms=terms, place=rows - 20)
        assert relative_error(some, whole[:, :, rows]) < 1e-12
        assert relative_error(some_lse, lse[:, :, rows]) < 1e-12
