"""The kinds of rows that measurements of speed write."""

import re
from dataclasses import dataclass

from experiments.common.records import PeerRow, TimedRow

SLACK = 1.05  # what a time may gain on the ideal one by noise
OWN = ("reference", "cpu", "triton", "hopper", "hopper_deterministic")  # our own providers


@dataclass(frozen=True, kw_only=True)
class SpeedRow(PeerRow):
    """A provider at one case and direction: experiments.speed."""

    provider: str
    version: str = ""  # of the package that a peer comes from, where that is not torch
    direction: str  # forward | backward
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    v_dim: int
    dtype: str
    layout: str  # of q, k and v in memory: head_major | token_major
    block_q: int  # 0 without a mask
    block_k: int
    density: float  # non-empty blocks / all blocks
    elements: float  # allowed (query, key) pairs / all pairs
    round: int = 1  # which of the repeats of a run, see `speed_run.in_rounds`
    error: float | None = None  # relative to float64
    tflops: float | None = None  # over the blocks that are computed
    extra_mib: float | None = None  # peak memory beyond the inputs
    extra_expected_mib: float | None = None  # what the results alone take
    ideal_ms: float | None = None  # the least time on this device (sparseflash.cost)
    warning: str = ""  # why the row may be wrong

    WHAT = (
        "provider direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout "
        "block_q block_k round"
    ).split()

    @property
    def own(self) -> bool:
        """Whether the provider is one of ours."""
        return self.provider in OWN

    @property
    def random(self) -> bool:
        """Whether the mask is one of random blocks, equally many in every row."""
        return bool(re.fullmatch(r"random_blocks\([^()]*\)", self.mask))

    @property
    def fraction(self) -> float | None:
        """The ideal time as a share of the measured one."""
        return self.ideal_ms / self.ms if self.ideal_ms and self.ms_median else None


@dataclass(frozen=True, kw_only=True)
class BuildRow(PeerRow):
    """A builder of a block mask, in a process of its own: experiments.mask_build."""

    builder: str
    seq_len: int
    block: int
    ms_first: float | None = None  # in a new process; flex_compiled compiles here
    import_mib: float | None = None  # peak resident memory before it,
    peak_mib: float | None = None  # and with it
    device_mib: float | None = None  # peak on the GPU
    runs: int | None = None
    tiles: int | None = None
    nnz: int | None = None  # non-empty blocks

    WHAT = ("builder", "seq_len", "block")
    COMMAND = "python -m experiments.mask_build"

    @property
    def own(self) -> bool:
        """Whether the builder is not one of FlexAttention's."""
        return not self.builder.startswith("flex")


@dataclass(frozen=True, kw_only=True)
class SelectRow(TimedRow):
    """A step of a selector, whose text is `mask`: experiments.selection."""

    step: str  # selection | schedule | forward | backward | chain
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    dtype: str
    block_q: int
    block_k: int
    partial: float  # blocks with a bit tile / all blocks
    share: float | None = None  # (selection + schedule) / forward; with the step "chain" only
    ms_graph: float | None = None  # median of a CUDA graph's replays; None where not captured
    graph_share: float | None = None  # as `share`

    WHAT = "step batch heads kv_heads n_q n_k head_dim dtype block_q block_k".split()
    COMMAND = "python -m experiments.selection"


@dataclass(frozen=True, kw_only=True)
class TileRow(TimedRow):
    """A Triton kernel with one choice of tiles: experiments.tune."""

    kernel: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    tflops: float

    WHAT = "kernel head_dim block_m block_n num_warps num_stages max_registers".split()
    COMMAND = "python -m experiments.tune"
