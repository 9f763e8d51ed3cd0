"""Rows of experiments.lra_speed with made-up times."""

from dataclasses import replace

from experiments.common.records import OK
from experiments.lra.speed.rows import SWEEP, StepRow

ROW = StepRow(
    task="listops",
    attention="standard",
    option="",
    mask="",
    density=None,
    length=2048,
    pair=1,
    batch=32,
    mean_length=1050.0,
    layers=2,
    dim=64,
    heads=2,
    precision="bf16",
    mode="compile+graph",
    ran="compile+graph",
    status=OK,
    ms_median=8.0,
    ms_p20=7.5,
    ms_p80=8.5,
    tokens_per_s=1e6,
    peak_mib=1000.0,
    attention_ms=3.0,
    device="GPU A",
    torch="2.11.0",
    triton="3.6.0",
    source="abc",
    commit="",
    date="2026-01-01T00:00:00+00:00",
    command="python -m experiments.lra_speed",
)

# Speed-up of a step, growth of its time with the length, memory of 1k tokens a sequence.
KINDS = {
    "standard": (1.0, 1.0, 900.0),
    "flash": (2.6, 0.8, 300.0),
    "sparse": (3.2, 0.2, 300.0),
    "linformer": (2.5, 0.0, 320.0),
    "linear": (2.3, 0.0, 350.0),
    "performer": (1.8, 0.0, 500.0),
    "local": (1.7, 0.0, 400.0),
    "reformer": (1.3, 0.1, 800.0),
    "smyrf": (1.6, 0.1, 700.0),
}


def step_rows() -> list[StepRow]:
    """Every attention at every task, and a sweep in which the standard one runs out of memory."""
    rows = []
    sizes = {
        "listops": (2048, 32, 1),
        "text": (1024, 32, 1),
        "retrieval": (4096, 32, 2),
        "image": (1024, 256, 1),
        "pathfinder32": (1024, 256, 1),
        "pathfinder128": (16384, 64, 1),
    }
    for name, (speed, growth, memory) in KINDS.items():
        for task, (length, batch, pair) in sizes.items():
            tokens = length * batch * pair
            ms = tokens / 2**15 * (length / 1024) ** 0.5 / speed
            rows.append(_row(name, task, length, batch, pair, ms, memory * tokens / 2**15))
        for length in (1024 * 2**i for i in range(7)):
            ms = 8 / speed * (length / 1024) ** growth
            mib = memory * (length / 1024 if name == "standard" else 1)
            row = _row(name, SWEEP, length, 131072 // length, 1, ms, mib)
            if name == "standard" and length > 16384:
                empty = dict.fromkeys(
                    "ms_median ms_p20 ms_p80 tokens_per_s peak_mib attention_ms".split()
                )
                row = replace(row, status="out of memory: Tried to allocate 64 GiB", **empty)
            rows.append(row)
    return rows


def _row(name, task, length, batch, pair, ms, mib) -> StepRow:
    sizes = {"task": task, "length": length, "batch": batch, "pair": pair, "attention": name}
    times = {"ms_median": ms, "ms_p20": ms, "ms_p80": ms, "attention_ms": ms / 4, "peak_mib": mib}
    return replace(ROW, **sizes, **times)
