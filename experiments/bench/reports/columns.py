"""What the tables of the pages share: the names of their columns, and the line above them."""

from collections.abc import Mapping, Sequence

from experiments.bench.cases import LAYOUTS
from experiments.bench.providers import find
from experiments.bench.reports.table import SHAPE, newest
from experiments.bench.rows import SpeedRow
from experiments.common.records import OK

COLUMNS = {  # every provider, ours first
    "hopper": "`hopper`",
    "cpu": "`cpu`",
    "hopper_deterministic": "deterministic",
    "triton": "`triton`",
    "reference": "`reference`",
    "fa4": "FlashAttention-4",
    "fa4_window": "its window",
    "fa4_varlen": "its varlen",
    "cudnn_blocks": "cuDNN Frontend",
    "cudnn_flex": "its intervals",
    "flashinfer": "FlashInfer",
    "vsa": "FastVideo",
    "sdpa_cudnn": "cuDNN, dense",
    "sdpa_flash": "FlashAttention-2, dense",
    "sdpa": "PyTorch, dense",
    "flex": "FlexAttention",
    "flex_autotuned": "autotuned",
    "flex_flash": "on FlashAttention-4",
}
BLOCK = ("block_q", "block_k")
RATES = "TFLOP/s of the computed blocks, forward / backward."


def measured(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    return [row for row in newest(rows) if row.status == OK]


def layout_text(row: SpeedRow) -> str:
    return "B, N, H, D" if row.layout == LAYOUTS[1] else "B, H, N, D"


def about(rows: Sequence[SpeedRow], cells: str = RATES) -> str:
    """What the rows share: device, shape, versions, dates, rounds; and what the cells hold."""
    tokens = sorted({r.n_q for r in rows})
    dates, rounds = sorted({r.date[:10] for r in rows}), sorted({r.round for r in rows})
    versions = {(find(r.provider), r.version) for r in rows if r.version}
    peers = sorted({f", {getattr(peer, 'package', '')} {version}" for peer, version in versions})
    spread = max(map(_range, rows))
    devices, dtypes, torches, tritons = (
        ", ".join(sorted({getattr(r, name) for r in rows}))
        for name in ("device", "dtype", "torch", "triton")
    )
    length = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
    date = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    many = str(rounds[-1]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    times = f"medians of {many} rounds, range {spread:.1f} % at most"
    if rounds == [1]:
        times = "one round"
    return (
        f"One {devices}, {dtypes}, {length} tokens. {cells}\n"
        f"torch {torches}, Triton {tritons}{''.join(peers)}, {date}, {times}."
    )


def _range(row: SpeedRow) -> float:
    """The range of the rounds as a share of the median, in percent."""
    if row.round == 1 or row.ms_p20 is None or row.ms_p80 is None:
        return 0.0
    return 100 * (row.ms_p80 - row.ms_p20) / row.ms


def by_direction(rows: Sequence[SpeedRow]) -> dict[str, SpeedRow]:
    """The rows of a provider in one line of a table. Raises ValueError for two of a direction, with
    what they differ in.
    """
    found: dict[str, SpeedRow] = {}
    for row in rows:
        other = found.setdefault(row.direction, row)
        pairs = {n: (getattr(other, n), getattr(row, n)) for n in (*SHAPE, "mask", *BLOCK)}
        if differ := [f"{n} ({a}, {b})" for n, (a, b) in pairs.items() if a != b]:
            raise ValueError(
                f"rows of {row.provider}, {row.mask}, {row.direction}, differ in "
                f"{', '.join(differ)} and would share a cell: keep those of one in the file"
            )
    return found


def both(by_direction: Mapping[str, str]) -> str:
    """Forward / backward; one of them alone is named."""
    if len(by_direction) == 2:
        return f"{by_direction['forward']} / {by_direction['backward']}"
    return next((f"{text} ({direction})" for direction, text in by_direction.items()), "")


def rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
