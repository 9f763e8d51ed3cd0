"""Tables of speed: what stands where, rounds as one number, and what is left out."""

from experiments.bench.cases import DENSE
from experiments.bench.tables import SpeedRow, newest, report, tables
from tests.experiments.bench.bench_cases import ROW

BASE = ROW | {"n_q": 512, "n_k": 512, "ms_median": 1.0}
OWN = ("hopper", "hopper_deterministic", "cpu")


def row(provider, direction, tflops, mask=DENSE, density=1.0, **changes):
    peer = {} if provider in OWN else {"version": ""}
    what = {"provider": provider, "direction": direction, "tflops": tflops}
    return BASE | peer | what | {"mask": mask, "density": density} | changes


def in_rounds(provider, *times, **more):
    made = row(provider, "forward", 1.0, head_dim=128)
    return [
        made | {"round": n, "ms_median": ms, "tflops": 1000 / ms} | more
        for n, ms in enumerate(times, 1)
    ]


def test_rounds_are_their_median_with_the_range_of_each_column():
    text = tables([*in_rounds("hopper", 2.6, 2.4, 2.5), *in_rounds("fa4", 2.0)])["rates"]
    assert "medians of 1 to 3 rounds" in text
    assert text.partition("\n\n")[2].splitlines()[2:] == [
        "| none | 400 (forward) | 500 (forward) | 0.80 (forward) |",
        "| range of rounds, at most | 8.0 % | 0.0 % |  |",
    ]


def test_a_cell_whose_rounds_differ_is_left_out():
    rows = [*in_rounds("hopper", 2.5, 2.5), *in_rounds("fa4", 2.0, 2.5)]
    made = tables(rows)
    assert "FlashAttention-4" not in made["rates"]
    assert "~2.250" in report(rows) and "differ by more than 15 %" in report(rows)
    again = tables([*rows, *in_rounds("fa4", 2.0, 2.1)])  # measured again
    assert "FlashAttention-4" in again["rates"]


def test_a_ratio_between_two_gpus_or_processes_is_marked():
    for field in ("gpu", "process"):
        ours = in_rounds("hopper", 2.0, 2.0, **{field: "a"})
        same, other = (in_rounds("fa4", 3.0, 3.0, **{field: x}) for x in "ab")
        assert "| 1.50 (forward) |" in tables([*ours, *same])["rates"]
        assert "| 1.50* (forward) |" in tables([*ours, *other])["rates"]
        assert "of two GPUs or processes" in tables([*ours, *other])["rates"]
    assert (
        "2 GPUs"
        in tables([*in_rounds("hopper", 2.0, gpu="a"), *in_rounds("fa4", 3.0, gpu="b")])["rates"]
    )


def test_the_newest_versions_count():
    old = row("fa4", "forward", 1.0, version="4.0", ms_median=9.0)
    rows = [old | {"version": "4.1", "round": n, "ms_median": ms} for n, ms in ((1, 1), (2, 3))]
    rows[1]["source"] = "changed"  # on which a peer does not depend
    (found,) = newest([old, *rows])
    assert (found.ms, found.round, found.version) == (2.0, 2, "4.1")
    ours = row("cpu", "forward", 1.0, ms_median=9.0)
    assert [r.ms for r in newest([ours, ours | {"source": "b", "ms_median": 1.0}])] == [1.0]


# ---- for a terminal


def test_cells_have_the_speed_up_over_our_own_dense_attention_and_the_share_of_the_ideal():
    dense = ROW | {"mask": DENSE, "block_q": 0, "block_k": 0, "density": 1.0, "ms_median": 8.0}
    peer = dense | {"provider": "sdpa", "version": "", "ms_median": 1.0}
    failed = ROW | {"provider": "flex", "version": "", "status": "unsupported: on a CPU"}
    text = report([ROW, dense, peer, failed])
    assert "2.000  (4.00x)  50%" in text and "8.000  (1.00x)" in text
    assert "flex forward: unsupported: on a CPU" in text and "!" not in text
    assert "2.000  (4.00x)" in report([ROW, peer], known=[dense])
    assert "x)" not in report([ROW, peer])
    assert "(4.00x*)" in report([ROW | {"process": "a"}, dense | {"process": "b"}])


def test_a_mask_that_begins_with_random_blocks_is_structured():
    for more in ("", " & causal()", " | global_tokens(16)"):
        mask = f"random_blocks(0.5, block=32, per_head=True){more}"
        assert SpeedRow(ROW | {"mask": mask}).random == (not more)
