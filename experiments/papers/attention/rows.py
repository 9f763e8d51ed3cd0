"""The kinds of rows of the papers' tables of speed, bytes and memory."""

from dataclasses import dataclass

import masks
from experiments.common.records import Row, TimedRow

SOURCES = ("masks", "sparseflash", "experiments/papers", "experiments/lra/models")


@dataclass(frozen=True, kw_only=True)
class IoRow(TimedRow):
    """Work, bytes and time of forward and backward together: experiments.papers.io."""

    part: str  # shape | block | sparsity
    method: str
    batch: int
    heads: int
    n: int
    head_dim: int
    dtype: str
    block: int  # tokens of a block of the mask; 0 without one
    gflop: float  # of the matrix products, by the formula
    model_gb: float  # HBM traffic by the formula, in 1e9 bytes
    counted_gb: float | None = None  # HBM traffic by hardware counters
    forward_model_gb: float | None = None  # the same of the forward alone
    forward_counted_gb: float | None = None
    saved_mib: float | None = None  # what autograd keeps for the backward
    peak_mib: float | None = None  # on a GPU, inputs included
    error: float | None = None  # relative to float64, of the gradients

    WHAT = "part method batch heads n head_dim dtype block".split()
    SOURCES = SOURCES
    COMMAND = "python -m experiments.papers.io"


@dataclass(frozen=True, kw_only=True)
class LengthRow(TimedRow):
    """An attention at one length and direction: experiments.papers.attention_table."""

    method: str
    direction: str  # forward | backward | both
    dropout: float
    padding: bool  # key padding: lengths of up to 20 tokens less
    batch: int
    heads: int
    n: int
    head_dim: int
    dtype: str
    saved_mib: float | None = None  # what autograd keeps for the backward; with "both" only
    peak_mib: float | None = None  # of forward and backward on a GPU, inputs included
    error: float | None = None  # relative to float64, of attentions that are exact

    WHAT = "method direction dropout padding batch heads n head_dim dtype".split()  # and the mask
    SOURCES = SOURCES
    COMMAND = "python -m experiments.papers.attention_table"

    @property
    def causal(self) -> bool:
        """Whether a query sees keys up to its own only, as the end of the mask says."""
        return self.mask.endswith(str(masks.causal()))


@dataclass(frozen=True, kw_only=True)
class MemoryRow(TimedRow):
    """A training step of a stack of Llama layers: experiments.papers.memory."""

    attention: str  # standard | ours
    checkpoint: str  # none | layers | selective
    batch: int
    n: int
    dim: int
    hidden: int
    heads: int
    layers: int  # of the stack that is timed
    dtype: str
    peak_mib: float | None = None  # of a step, beyond weights and their gradients
    layer_mib: float | None = None  # what a further layer adds to it
    formula_mib: float | None = None  # what a further layer keeps, by the formula
    scaled_gb: float | None = None  # peak of 32 layers, in 1e9 bytes
    counted: str = ""  # allocator: of the GPU | storages: those that operators return

    WHAT = "attention checkpoint batch n dim hidden heads layers dtype".split()
    SOURCES = SOURCES
    COMMAND = "python -m experiments.papers.memory"


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Row):
    """The error of an attention's output against float64: experiments.papers.accuracy."""

    method: str
    batch: int
    heads: int
    n: int
    head_dim: int
    dtype: str
    outliers: float  # share of the entries that are
    status: str = ""  # ok, or the reason why there is no error
    rmse: float | None = None
    relative: float | None = None  # to the root mean square of the output

    WHAT = "method batch heads n head_dim dtype outliers".split()
    SOURCES = SOURCES
    COMMAND = "python -m experiments.papers.accuracy"
