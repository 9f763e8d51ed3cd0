"""The kind of row that experiments.papers.softmax writes."""

from dataclasses import dataclass

from experiments.common.records import TimedRow


@dataclass(frozen=True, kw_only=True)
class SoftmaxRow(TimedRow):
    """An algorithm on (batch, vocabulary) numbers in float32."""

    algorithm: str  # see `algorithms.ALGORITHMS`
    implementation: str  # triton | blocks
    batch: int
    vocabulary: int
    k: int  # of the top-k; 0 without one
    accesses: float | None = None  # of memory, for each element of x; None where not known
    error: float | None = None  # relative to float64
    gb_s: float | None = None  # bytes of the accesses over the time

    WHAT = "algorithm implementation batch vocabulary k".split()
    SOURCES = ("experiments/papers/softmax",)
    COMMAND = "python -m experiments.papers.softmax"

    @property
    def elements_s(self) -> float:
        """Elements of x a second."""
        return self.batch * self.vocabulary / self.ms * 1000
