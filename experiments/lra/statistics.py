"""Differences between attentions with a paired 95 % interval, and the test examples they rest on.

Runs are paired by seed. Where two runs kept which test examples they answered rightly, and saw the
same data, they are also paired by example.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from experiments.lra.runs import Run

SEEDS, EXAMPLES = "s", "e"  # what an interval covers
LEVEL = 0.975  # both sides: 95 %


class Difference(NamedTuple):
    """A mean difference in points over the seeds that two cells share."""

    value: float
    half: float | None  # half of the 95 % interval; None for single runs without their examples
    seeds: int
    covers: str  # SEEDS, EXAMPLES, both, or neither


def difference(ours: Sequence[Run], others: Sequence[Run]) -> Difference | None:
    """Returns the accuracy of `ours` - that of `others`, None without a common tested seed.

    The variance of the mean is that of the seeds + that of the test examples, which every seed
    shares. It counts their interaction twice, so the interval is a little too wide (Owen, The
    pigeonhole bootstrap, 2007). Degrees of freedom are Welch and Satterthwaite's.
    """
    by_seed = {run.seed: run for run in others}
    pairs = [(run, by_seed[run.seed]) for run in ours if run.seed in by_seed]
    deltas, answers, data = [], [], set()
    for one, two in pairs:
        if one.accuracy is None or two.accuracy is None:
            continue
        deltas.append(one.accuracy - two.accuracy)
        if one.correct is not None and two.correct is not None and one.data == two.data:
            answers.append(100.0 * one.correct - 100.0 * two.correct)
            data.add(one.data)
    if not deltas:
        return None
    parts, covers = [], ""  # (variance of the mean, degrees of freedom)
    n = len(deltas)
    if n > 1:
        parts.append((float(np.var(deltas, ddof=1)) / n, n - 1))
        covers += SEEDS
    # seeds with test examples of their own already vary with them
    if len(answers) == n and len(data) == 1 and len(answers[0]) > 1:
        each = np.mean(answers, axis=0)
        parts.append((float(np.var(each, ddof=1)) / len(each), len(each) - 1))
        covers += EXAMPLES
    half = _half(parts) if parts else None
    return Difference(float(np.mean(deltas)), half, n, covers)


def _half(parts: Sequence[tuple[float, int]]) -> float:
    """Half of the 95 % interval of a sum of independent means."""
    total = sum(variance for variance, _ in parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(variance**2 / count for variance, count in parts)
    return student(freedom) * math.sqrt(total)


def student(freedom: float) -> float:
    """Returns the 97.5 % quantile of Student's t, for the degrees of freedom rounded down.

    Exact for 1 and 2, Cornish-Fisher's expansion above; the error is below 0.2 %.
    """
    n = max(1, math.floor(freedom + 1e-9))
    if n == 1:
        return math.tan(math.pi * (LEVEL - 0.5))
    if n == 2:
        return 2 * (LEVEL - 0.5) * math.sqrt(2 / (4 * LEVEL * (1 - LEVEL)))
    z = NormalDist().inv_cdf(LEVEL)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / n**power for power, term in enumerate(terms))
