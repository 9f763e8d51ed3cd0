"""The kinds of rows of single calls: decoding, terms of the softmax, packed masks and picks."""

from dataclasses import dataclass

from experiments.common.records import PeerRow, TimedRow


@dataclass(frozen=True, kw_only=True)
class DecodeRow(PeerRow):
    """One decoding step of a provider: experiments.papers.decode."""

    provider: str
    version: str = ""  # of the package that a peer comes from, where that is not torch
    step: str  # decode | choose and decode: the selection of blocks is part of the time
    page: int  # tokens of a page; 0: a contiguous cache
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n: int  # keys of a sequence
    head_dim: int
    dtype: str
    round: int = 1
    caches: int | None = None  # that the timed calls take turns with
    error: float | None = None  # relative to float64
    read_mb: float | None = None  # keys and values that the queries see, q and out, in 1e6 bytes
    gbs: float | None = None  # 1e9 bytes of them a second
    copy_gbs: float | None = None  # of a copy on the device, bytes read and bytes written
    share: float | None = None  # gbs / copy_gbs

    WHAT = "provider step page batch heads kv_heads n_q n head_dim dtype round".split()
    COMMAND = "python -m experiments.papers.decode"

    @property
    def own(self) -> bool:
        """Whether the provider is one of ours."""
        return self.provider in ("triton", "cpu")


@dataclass(frozen=True, kw_only=True)
class PackedRow(TimedRow):
    """One way to make a mask, or attention with it: experiments.papers.packed_masks."""

    step: str
    n: int
    documents: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    share: float | None = None  # ms_median / attention forward and backward
    ms_graph: float | None = None  # median of a CUDA graph's replays; None where not captured
    graph_share: float | None = None  # as `share`

    WHAT = "step n documents batch heads head_dim dtype".split()
    COMMAND = "python -m experiments.papers.packed_masks"


@dataclass(frozen=True, kw_only=True)
class TermRow(TimedRow):
    """Attention with a term of the softmax, or without: experiments.papers.term_costs."""

    term: str  # none | sink | softcap | slopes | bias | all | max: the row maxima
    provider: str  # the backend
    direction: str  # forward | backward
    batch: int
    heads: int
    kv_heads: int
    n: int
    head_dim: int
    dtype: str
    block: int  # tokens of a block of the mask; 0 without one
    radius: int  # of the bias: longest distance with an entry of its own
    round: int = 1
    error: float | None = None  # relative to float64, the largest of output, dq, dk, dv and maxima
    term_error: float | None = None  # the same of the gradients of terms
    cost: float | None = None  # time over that of none in the same round, minus 1

    WHAT = (
        "term provider direction batch heads kv_heads n head_dim dtype block radius round"
    ).split()
    COMMAND = "python -m experiments.papers.term_costs"


@dataclass(frozen=True, kw_only=True)
class PickRow(PeerRow):
    """Attention to key blocks that each query picked: experiments.papers.picks."""

    provider: str
    version: str = ""  # of the package that a peer comes from
    direction: str  # forward | backward
    batch: int
    heads: int
    kv_heads: int
    n: int
    head_dim: int
    dtype: str
    round: int = 1
    share: float | None = None  # allowed (query, key) pairs / all pairs
    error: float | None = None  # relative to float64, the largest of output and gradients
    tflops: float | None = None  # of the allowed pairs: two products, backward five

    WHAT = "provider direction batch heads kv_heads n head_dim dtype round".split()
    COMMAND = "python -m experiments.papers.picks"

    @property
    def own(self) -> bool:
        """Whether the provider is one of ours."""
        return not self.provider.startswith(("fla", "cudnn"))
