"""The kinds of rows that measurements of speed write."""

from dataclasses import dataclass

from experiments.common.records import PeerRow, TimedRow


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
