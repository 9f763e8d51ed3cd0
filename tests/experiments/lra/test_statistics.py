"""Differences between attentions: worked out by hand, and how often their intervals hold."""

import numpy as np
import pytest
from scipy import stats

from experiments.common.files import pack, unpack
from experiments.lra.cells import difference, student
from experiments.lra.runs import Run, read_runs, write_archive
from tests.experiments.lra.made_runs import write_run


def run(seed, accuracy=None, right=None, data="a"):
    """Return a run with this accuracy, or with these test examples right."""
    result = {"accuracy": accuracy}
    if right is not None:
        result = {"accuracy": float(np.mean(right)), "correct": pack(np.asarray(right, bool))}
    session = {"processes": 1, "device": "", "date": "", "versions": {}}
    file = {"task": {"name": "text", "source": "", "baselines": {}}, "data": data}
    file |= {"settings": {"attention": {"name": "flash"}, "seed": seed}, "result": result}
    return Run("", file | {"sessions": [session], "mask": None, "complete": True}, [])


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_bits_come_back(n):
    values = np.random.default_rng(n).random(n) < 0.5
    assert np.array_equal(unpack(pack(values)), values)
    assert len(pack(values)) <= n / 6 + 12


def test_quantiles_of_student():
    for n in (1, 2, 3, 4, 7, 30, 24_999):
        assert student(n) == pytest.approx(stats.t.ppf(0.975, n), rel=2e-3)
    assert student(2.9) == student(2) and student(0.5) == student(1)


def test_seeds_are_paired():
    ours = [run(seed, x) for seed, x in enumerate((0.62, 0.65, 0.63))]
    others = [run(seed, x) for seed, x in enumerate((0.61, 0.62, 0.61, 0.99))]
    found = difference(ours, others)
    assert found is not None and found.half is not None
    assert (found.seeds, found.covers) == (3, "s")
    assert found.value == pytest.approx(2.0)  # of 1, 3 and 2 points
    assert found.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)  # their deviation is 1
    test = stats.ttest_rel([62, 65, 63], [61, 62, 61]).confidence_interval(0.95)
    assert (found.value - found.half, found.value + found.half) == pytest.approx(test, rel=1e-3)


def test_a_single_seed_is_paired_by_its_examples():
    right = np.arange(100) % 10
    ours, other = run(0, right=right < 6), run(0, right=right < 5)
    found = difference([ours], [other])
    assert found is not None and (found.seeds, found.covers) == (1, "e")
    assert found.value == pytest.approx(10.0)
    spread = 100 * (0.1 * 0.9 * 100 / 99) ** 0.5  # a tenth of the examples differs, by 100 points
    assert found.half == pytest.approx(stats.t.ppf(0.975, 99) * spread / 10, rel=1e-3)
    # a second seed with the same answers: the examples are no more than before
    more = difference([ours, run(1, right=right < 6)], [other, run(1, right=right < 5)])
    assert more is not None and (more.half, more.covers) == (pytest.approx(found.half), "se")


def test_what_cannot_be_paired():
    right = np.arange(8) < 4
    single = difference([run(0, 0.5)], [run(0, 0.4)])
    assert single is not None and (single.half, single.covers) == (None, "")
    assert difference([run(0, 0.5)], [run(1, 0.4)]) is None
    assert difference([run(0)], [run(0, 0.4)]) is None
    other_data = difference([run(0, right=right)], [run(0, right=right, data="b")])
    assert other_data is not None and other_data.covers == ""
    # examples count only where all seeds have them, of the same data
    for second in (run(1, 0.5), run(1, right=right, data="b")):
        pair = run(0, right=right), second
        part = difference(pair, pair)
        assert part is not None and part.covers == "s"
    same = difference([run(s, right=right) for s in (0, 1)], [run(s, right=right) for s in (0, 1)])
    assert same == (0.0, 0.0, 2, "se")


@pytest.mark.parametrize("seeds", [1, 3])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds):
    """Two attentions whose examples are hard in common, and whose seeds are good or bad."""
    rng, held, n = np.random.default_rng(seeds), 0, 400
    for _ in range(n):
        ease = rng.normal(size=600)
        pair = []
        for shift in (0.0, 0.3):
            luck = rng.normal(scale=0.15 * (seeds > 1), size=seeds)
            noise = rng.normal(size=(seeds, 600))
            right = noise + ease + shift + luck[:, None] > 0
            pair.append([run(seed, right=right[seed]) for seed in range(seeds)])
        found = difference(pair[1], pair[0])
        assert found is not None and found.half is not None
        scale = (2 + 0.15**2 * (seeds > 1)) ** 0.5
        truth = 100 * (stats.norm.cdf(0.3 / scale) - 0.5)
        held += abs(found.value - truth) < found.half
    assert 0.93 <= held / n <= 0.995


def test_archives_keep_the_examples(tmp_path):
    right = np.arange(1000) % 3 == 0
    more = {"correct": pack(right), "data": "d" * 12}
    write_run(tmp_path / "runs", "listops", "flash", more=more)
    path = tmp_path / "runs.jsonl"
    write_archive(read_runs(str(tmp_path / "runs")), path)
    (found,) = read_runs(str(path))
    assert found.correct is not None and np.array_equal(found.correct, right)
    assert found.data == "d" * 12
