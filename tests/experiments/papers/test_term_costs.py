"""The program that times terms of the softmax: the gate with their gradients, turns, and costs."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.timing import Times
from experiments.common.records import OK
from experiments.papers.costs import measure
from experiments.papers.costs.calls import ALL, CAPS, MAX, NONE, TERMS, gate_errors, step_of
from experiments.papers.costs.measure import Group, measured, verdict, warm
from experiments.papers.costs.report import table
from experiments.papers.rows import TermRow
from sparseflash.testing import make_qkv, oracle, relative_error

CPU = torch.device("cpu")
CASE = Case(DENSE, 2, 4, 2, 96, 96, 16, "float32", 0, 0)
SPARSE = replace(CASE, mask="random_blocks(0.5, block=32)", block_q=32, block_k=32)
SMALL = "batch=1 heads=2 seq_len=64 head_dims=[16] block=32 device=cpu seconds=1e-3".split()
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")


def test_program_and_resuming(measured_once):
    rows, printed, later = measured_once("papers.term_costs", TermRow, *SMALL, "rounds=2")
    assert len(rows) == 2 * 2 * (2 * (1 + len(TERMS)) + 1)
    assert {row.direction for row in rows if row.term == MAX} == {"forward"}
    assert all(row.status == OK and row.error < 1e-5 for row in rows)
    assert all((row.cost is None) == (row.term == NONE) for row in rows)
    assert {row.kv_heads for row in rows} == {2}  # heads
    learned = ("sink", "bias")
    assert all((row.term_error is not None) == (row.term in learned) for row in rows)
    assert "backward" in printed and "measurements are left" not in printed
    assert later.strip() == table(rows).strip()


@pytest.mark.parametrize("case", [CASE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("term", [NONE, *TERMS, ALL, MAX])
def test_the_gate_agrees_with_what_is_right(case, term):
    error, of_terms = gate_errors(case, step_of(case, "cpu", term, 7, CPU))
    assert error < 1e-5 and (of_terms or 0) < 1e-5
    assert (of_terms is None) == (term in (NONE, *CAPS, "slopes", MAX))


def test_the_gate_refuses_wrong_maxima():
    step = step_of(SPARSE, "cpu", MAX, 7, CPU)
    wrong = replace(step, maxima=lambda: step.maxima() + 0.1)
    assert gate_errors(SPARSE, wrong)[0] > 1e-2


@pytest.mark.parametrize(
    "term, other", [(NONE, "slopes"), *((cap, NONE) for cap in CAPS), ("slopes", NONE)]
)
def test_the_gate_refuses_another_term(term, other):
    claimed = step_of(CASE, "cpu", term, 7, CPU).terms
    assert gate_errors(CASE, replace(step_of(CASE, "cpu", other, 7, CPU), terms=claimed))[0] > 1e-3


@pytest.mark.parametrize(
    ("term", "place"), [(NONE, 0), ("sink", 1), ("bias", 2), ("sink", 3), ("bias", 3)]
)
def test_the_gate_refuses_a_wrong_gradient(term, place):
    """That of q, k or v, or that of the term."""
    step = step_of(CASE, "cpu", term, 7, CPU)
    doubled = replace(step, attend=lambda q, k, v: step.attend(q, k, v))

    def both(dout):
        return tuple((1 + (i == place)) * grad for i, grad in enumerate(step.both(dout)))

    object.__setattr__(doubled, "both", both)
    error, of_terms = gate_errors(CASE, doubled)
    wrong, right = (of_terms, error) if place == 3 else (error, of_terms or 0)
    assert wrong == pytest.approx(1) and right < 1e-5


def test_limits():
    assert verdict(9e-3, 3e-2, "bfloat16") == OK
    assert verdict(2e-2, None, "bfloat16") == "wrong result: error 0.02, limit 0.01"
    assert verdict(9e-3, 5e-2, "bfloat16").startswith("wrong gradient of a term: error 0.05")
    assert verdict(float("nan"), None, "bfloat16").startswith("wrong result")


def test_turns_and_costs(monkeypatch):
    """Each round begins with another term, and a cost is that of its own round."""
    times = iter(range(1, 100))
    monkeypatch.setattr(measure, "measure", lambda *given: Times(*[float(next(times))] * 3))
    group = Group(CASE, "cpu", (NONE, "sink"), 7, rounds=2)
    rows = group.rows(CPU, "")
    assert [row.term for row in rows] == [NONE, NONE, "sink", "sink", "sink", "sink", NONE, NONE]
    found = measured(group, CPU, 1e-3, rows)
    assert [row.cost for row in found[2:4]] == [3 / 1 - 1, 4 / 2 - 1]
    assert [row.cost for row in found[4:6]] == [pytest.approx(5 / 7 - 1), pytest.approx(6 / 8 - 1)]
    assert "+85.7 !" in table(found)  # the median of 3 / 1 and 5 / 7
    assert " 4.000 " in table(found)  # without terms: of 1 and 7


def test_each_call_is_timed_after_its_gate(monkeypatch):
    def step(case, backend, term, radius, device):
        return SimpleNamespace(
            calls=lambda ways: {way: lambda way=way: done.append((term, way)) for way in ways}
        )

    def timed(call, device, seconds):
        call()
        return Times(1.0, 1.0, 1.0)

    done, errors = [], {NONE: (0.0, None), "sink": (0.0, 0.0), "bias": (1.0, 0.0)}
    monkeypatch.setattr(measure, "step_of", step)
    monkeypatch.setattr(measure, "gate_errors", lambda case, step: errors[next(terms)])
    monkeypatch.setattr(measure, "measure", timed)
    terms, group = iter(errors), Group(CASE, "cpu", tuple(errors), 7, rounds=1)
    found = measured(group, CPU, 1e-3, group.rows(CPU, ""))
    assert done == [(row.term, row.direction) for row in found if row.status == OK]
    assert {row.term for row in found if row.ms_median is None} == {"bias"}


def test_a_table_mixes_no_shapes():
    row = replace(Group(CASE, "cpu", ("sink",), 7, rounds=1).rows(CPU, "")[0], status=OK)
    rows = [replace(row, heads=h, ms_median=1.0, cost=cost) for h, cost in ((2, 0.1), (4, 0.5))]
    assert "+10.0 !" in table(rows) and "+50.0 !" in table(rows)


def test_a_backend_that_refuses_is_a_row():
    group = Group(CASE, "triton", (NONE, "sink"), 7, rounds=1)
    found = measured(group, CPU, 1e-3, group.rows(CPU, ""))
    assert all(row.status.startswith("unsupported") and row.cost is None for row in found)


def test_groups_reach_other_processes(monkeypatch):
    """What is compiled before arrives whole, though its mask was built already."""
    done = []

    class Pool:
        def __init__(self, workers):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, call, *given):
            call, given = pickle.loads(pickle.dumps((call, given)))
            call(*given)
            done.append(given[1])
            return self

        def exception(self):
            return None

    monkeypatch.setattr(measure, "processes", Pool)
    group = Group(SPARSE, "cpu", (NONE, *TERMS), 7, rounds=1)
    group.rows(CPU, "")
    warm([group], CPU, 2)
    assert done == [NONE, *TERMS]


def test_places_of_sampled_queries():
    """The float64 oracle of a sample of rows is that of all of them."""
    q, k, v = make_qkv(1, 2, 20, 30, 8)
    terms = step_of(replace(CASE, heads=2), "cpu", ALL, 4, CPU).terms
    rows = torch.tensor([0, 7, 19])
    whole, lse = oracle(q, k, v, terms=terms)
    some, some_lse = oracle(q[:, :, rows], k, v, terms=terms, place=rows - 20)
    assert relative_error(some, whole[:, :, rows]) < 1e-12
    assert relative_error(some_lse, lse[:, :, rows]) < 1e-12
