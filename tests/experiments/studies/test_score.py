"""Functions of the scores: the gate refuses other formulas, and costs are over no rule."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.gate import Gate, WrongResult
from experiments.bench.step import Step, draw
from experiments.common.rows import OK, frame
from experiments.studies.score import NONE, RULES, SINK, attention, buckets, rule_of, tables

CPU = torch.device("cpu")
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
    assert "| 4.000 | +85.7 ! |" in tables(frame(rows))["terms"]
    failed = row | {"rule": "pair", "provider": "flex", "round": 1, "status": "failed: no compiler"}
    assert "no compiler" in tables(frame([*rows, failed]))["without"]
