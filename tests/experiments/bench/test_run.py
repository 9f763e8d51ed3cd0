"""Measuring: only a right provider is timed, beside the ideal time; what a run and a rerun do."""

from dataclasses import replace

import pytest
import torch

from experiments.bench import providers
from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.provider import DIRECTIONS
from experiments.bench.run import (
    KEY,
    TOO_FAST,
    Bench,
    Options,
    chosen,
    in_rounds,
    measurements,
    run,
    unstable,
)
from experiments.bench.step import expected_mib
from experiments.common.rows import OK, Rows, read
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
    assert row["extra_expected_mib"] == expected_mib(CASE, direction)


def nothing(case):
    return lambda q, k, v: torch.full_like(q, torch.nan)


def test_a_wrong_provider_has_no_time_and_one_that_raises_a_reason(measure):
    for make, direction in (
        (forgets_a_block, "forward"), (forgets_a_block, "backward"), (halves_dk, "backward"),
        (nothing, "forward"),
    ):  # fmt: skip
        row = measure(make, direction)
        assert row["status"].startswith("wrong result: error ") and row["error"] > 1e-4
        assert "ms_median" not in row and "tflops" not in row
    for error, status in (
        (ValueError("blocks of\n32"), "unsupported: blocks of 32"),
        (RuntimeError("boom"), "failed: boom"),
    ):

        def make(case, error=error):
            raise error

        assert measure(make, "forward")["status"] == status


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("provider", "changes"),
    [
        ("cpu", {"mask": DENSE}),
        ("cpu", {"mask": "random_blocks(0.3, block=32, per_head=True)"}),
        ("cpu", {"layout": "token_major"}),
        ("sdpa", {"mask": DENSE, "block_q": 0, "block_k": 0, "v_dim": 8}),
    ],
)
def test_ours_and_peers_pass_the_gate(provider, changes, direction):
    row = measured(replace(CASE, **changes), provider, direction)
    assert row["status"] == OK and row["tflops"] and row["ideal_ms"]
    assert changes.items() <= row.items()


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
    q, k, v = Bench(CPU, 0.01).inputs(case)
    assert len(seen) > 1 and not torch.equal(k, v) and q.shape == (2, 4, 200, 16)
    assert layout == "head_major" or q.stride() == (4 * 200 * 16, 16, 4 * 16, 1)
    # not of sampled rows alone
    assert direction == "forward" or gradients[-1].count_nonzero() == gradients[-1].numel()
    assert set(seen) == {(q.stride(), k.stride(), v.stride(), q.double().sum().item())}


def test_a_time_below_the_ideal_is_flagged(measure, monkeypatch):
    monkeypatch.setattr(Bench, "_ideal_ms", lambda *_: 1e6)
    row = measure(exact, "forward")
    assert row["status"] == OK and row["warning"] == TOO_FAST


# ---- what is measured


def test_what_is_of_interest_is_measured():
    dense = replace(CASE, mask="dense", block_q=0, block_k=0)
    tasks = measurements([dense, CASE], ["cpu", "sdpa"], ["forward"])
    found = [(t.case.mask, t.provider) for t in tasks]
    assert found == [("dense", "cpu"), ("dense", "sdpa"), (CASE.mask, "cpu")]
    causal = replace(CASE, mask=CAUSAL)
    tasks = measurements([causal, replace(causal, n_k=100)], ["sdpa"], ["forward"])
    assert [t.case.n_k for t in tasks] == [200]
    assert measured(causal, "sdpa", "forward")["status"] == OK


def test_what_does_not_exist_is_refused():
    for message, call in (
        ("providers='fast'", lambda: measurements([CASE], ["fast"], ["forward"])),
        (r"24.*multiples of 16", lambda: measurements([replace(CASE, block_q=24)], ["cpu"], [])),
        ("its own masks and shapes", lambda: chosen(Options(grid="page", heads=3), CPU)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_rerun_measures_only_what_is_missing(tmp_path, capsys):
    tasks = measurements([CASE], ["cpu"], DIRECTIONS)
    tasks += measurements([CASE], ["flex"], ["backward"])  # which it refuses on a CPU
    bench = Bench(CPU, seconds=0.01)
    first = run(tasks[:1], bench, Rows(tmp_path / "s.jsonl", KEY), "")
    for _ in range(2):
        again = run(tasks, bench, Rows(tmp_path / "s.jsonl", KEY), "")
    assert again[0]["date"] == first[0]["date"] and len(read(tmp_path / "s.jsonl")) == 3
    assert "(measured " in capsys.readouterr().out


def test_rounds_measure_all_again_and_begin_with_another_provider(tmp_path):
    cases = [replace(CASE, mask="dense"), CASE]
    tasks = in_rounds(measurements(cases, ["cpu", "reference"], DIRECTIONS), 3)
    assert [t.provider for t in tasks if t.direction == "forward" and t.case == CASE] == [
        *("cpu", "reference"), *("reference", "cpu"), *("cpu", "reference"),
    ]  # fmt: skip
    assert tasks[8].case == CASE and tasks[15].case == cases[0]  # dense comes last
    assert [t.round for t in tasks] == [1] * 8 + [2] * 8 + [3] * 8
    assert [t.direction for t in tasks[:4]] == ["forward", "backward"] * 2


def test_cells_whose_rounds_differ_are_measured_again(tmp_path):
    tasks = in_rounds(measurements([CASE], ["cpu", "reference"], ["forward"]), 2)
    times = {("cpu", 1): 1.0, ("cpu", 2): 1.1, ("reference", 1): 1.0, ("reference", 2): 1.3}
    rows = [{"status": OK, "ms_median": times[t.provider, t.round]} for t in tasks]
    again = unstable(tasks, rows)
    assert [(t.provider, t.round) for t in again] == [("reference", 1), ("reference", 2)]
    kept = Rows(tmp_path / "s.jsonl", KEY)
    run(again, Bench(CPU, 0.01), kept, "")
    run(again, Bench(CPU, 0.01), kept, "", again=True)
    assert len(kept.rows) == 4
