"""Measuring: only a right provider is timed, beside the ideal time; what a run and a rerun do."""

from dataclasses import replace

import pytest
import torch

from experiments.bench import providers
from experiments.bench import run as speed
from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.provider import DIRECTIONS
from experiments.bench.run import KEY, TOO_FAST, Options, cases, ways
from experiments.bench.step import draw
from experiments.common.rows import OK
from experiments.studies.runner import Run
from tests.experiments.bench.bench_cases import (
    CASE,
    CPU,
    Injected,
    exact,
    forgets_a_block,
    halves_dk,
    measured,
)


@pytest.fixture
def measure(monkeypatch):
    def run(make, direction, case=CASE):
        monkeypatch.setitem(providers.PROVIDERS, "injected", Injected("injected", make=make))
        return measured(case, "injected", direction)

    return run


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_right_provider_is_timed(measure, direction):
    row = measure(exact, direction)
    assert row["status"] == OK and row["error"] < 1e-6 and "warning" not in row
    assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
    assert row["tflops"] == pytest.approx(CASE.flops(direction) / row["ms_median"] / 1e9)


def nothing(case):
    return lambda q, k, v: torch.full_like(q, torch.nan)


def test_a_wrong_provider_has_no_time_and_one_that_raises_a_reason(measure):
    for make, direction in (
        (forgets_a_block, "forward"), (forgets_a_block, "backward"), (halves_dk, "backward"),
        (nothing, "forward"),
    ):  # fmt: skip
        row = measure(make, direction)
        assert row["status"].startswith("wrong result: error ") and row["error"] > 1e-4
        assert row.get("ms_median") is None and row.get("tflops") is None
    for error, status in (
        (ValueError("blocks of\n32"), "unsupported: blocks of 32"),
        (RuntimeError("boom"), "failed: boom"),
    ):

        def make(case, error=error):
            raise error

        assert measure(make, "forward")["status"] == status


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_timed_has_the_layout_and_the_values_of_the_row(
    measure, direction, layout, monkeypatch
):
    """The gate looks at one call; the timed ones must be like it."""
    case, seen, gradients = replace(CASE, layout=layout), [], []

    def make(case):
        def run(q, k, v):
            seen.append((q.stride(), k.stride(), v.stride(), q.double().sum().item()))
            out = exact(case)(q, k, v)
            if out.requires_grad:
                out.register_hook(gradients.append)
            return out

        return run

    measure(make, direction, case)
    q, k, v = draw(case, CPU)
    assert len(seen) > 1 and not torch.equal(k, v) and q.shape == (2, 4, 200, 16)
    assert layout == "head_major" or q.stride() == (4 * 200 * 16, 16, 4 * 16, 1)
    # not of sampled rows alone
    assert direction == "forward" or gradients[-1].count_nonzero() == gradients[-1].numel()
    assert set(seen) == {(q.stride(), k.stride(), v.stride(), q.double().sum().item())}


def test_a_time_below_the_ideal_is_flagged(measure, monkeypatch):
    monkeypatch.setattr(speed, "ideal_ms", lambda *_: 1e6)
    row = measure(exact, "forward")
    assert row["status"] == OK and row["warning"] == TOO_FAST


# ---- what is measured


@pytest.fixture
def asked(tmp_path):
    """Return a function that makes a run of short measurements from its options."""

    def make(**options):
        own = {"device": "cpu", "seconds": 0.01, "rows": f"{tmp_path}/s.jsonl", "rounds": 1}
        return Run(speed, Options(**own | {"seq_len": 64, "head_dim": 16} | options), "")

    return make


def test_what_is_of_interest_is_measured(asked):
    run = asked(mask=[DENSE, "local:16", CAUSAL], providers=["cpu", "sdpa"])
    found = [(a.case.mask, a.providers) for a in cases(run)]
    both = ("cpu", "sdpa")
    assert found == [(DENSE, both), ("local(16)", ("cpu",)), (CAUSAL, both)]
    assert [w["direction"] for w in ways(cases(run)[1], run)] == [*DIRECTIONS]
    assert measured(cases(run)[2].case, "sdpa", "forward")["status"] == OK


def test_cells_whose_rounds_differ_are_measured_again(asked, monkeypatch):
    times = {("cpu", 1): 1.0, ("cpu", 2): 1.1, ("reference", 1): 1.0, ("reference", 2): 1.3}
    calls = []

    def opened(what, run):
        def one(row):
            calls.append((row["provider"], row["round"]))
            return {"ms_median": times[calls[-1]]}

        return one

    monkeypatch.setattr(speed, "opened", opened)
    options = {"mask": [DENSE], "providers": ["cpu", "reference"], "directions": ["forward"]}
    asked(**options, rounds=2).go()
    assert calls[4:] == [("reference", 1), ("reference", 2)] and {*KEY} > {"round"}
