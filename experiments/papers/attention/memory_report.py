"""Rows of experiments.papers.memory as a table, a figure and beside what is published."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib import pyplot as plt

from experiments.common.figures import (
    PAGE,
    Style,
    curve,
    file_name,
    legend,
    length_axis,
    plain_log_axis,
    reference,
    save,
    style,
)
from experiments.common.records import OK, torches
from experiments.common.text_table import markdown, short
from experiments.papers.attention.published import (
    LAYERS,
    SELECTIVE,
    SEVEN_B,
    attention_share,
    layer_units,
    readings,
)
from experiments.papers.attention.rows import MemoryRow

NAMES = {
    ("standard", "none"): ("standard", Style("#000000", "o", "-")),
    ("standard", "layers"): ("standard, checkpointed", Style("#7F7F7F", "o", "--")),
    ("ours", "none"): ("ours", Style("#D55E00", "D", "-")),
    ("ours", "layers"): ("ours, checkpointed", Style("#0072B2", "D", "--")),
    ("ours", "selective"): ("ours, out and LSE kept", Style("#009E73", "^", "-.")),
}


def newest(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """One row a configuration and length: the last, on the device of the last row."""
    last = rows[-1]
    sizes = lambda r: (r.device, r.batch, r.dim, r.hidden, r.heads, r.dtype)  # noqa: E731
    here = [row for row in rows if sizes(row) == sizes(last)]
    return list({(row.attention, row.checkpoint, row.n): row for row in here}.values())


def tables(rows: Sequence[MemoryRow]) -> str:
    """The measured table, the growth with the length, and the published numbers."""
    rows = newest(rows)
    last = rows[-1]
    head = (
        f"Layers of dim {last.dim}, SwiGLU {last.hidden}, {last.heads} heads, {last.dtype}, "
        f"batch {last.batch}; {last.device}, torch {torches(rows)}."
    )
    parts = [head, measured_table(rows), "\n".join(f"- {text}" for text in growth(rows))]
    parts += [published_table(), gpu_formula_table(), selective_table()]
    return "\n\n".join(parts) + "\n"


def named(rows: Sequence[MemoryRow]) -> dict[str, Callable[[], str]]:
    """The tables that a page may hold: stacks, published, formula and selective."""
    found = {"stacks": partial(measured_table, newest(rows))}
    found |= {"published": published_table, "formula": gpu_formula_table}
    return found | {"selective": selective_table}


def measured_table(rows: Sequence[MemoryRow]) -> str:
    """A line for each configuration and length."""
    lines = [
        ["stack", "tokens", "peak MiB", "a layer", "by the formula", f"{LAYERS} layers, GB", "ms"]
    ]
    for key, (name, _) in NAMES.items():
        own = [row for row in rows if (row.attention, row.checkpoint) == key]
        for row in sorted(own, key=lambda r: r.n):
            cells = [row.peak_mib, row.layer_mib, row.formula_mib, row.scaled_gb, row.ms_median]
            texts = [*map(short, cells)]
            if row.status != OK:
                texts[0] = row.status.split(":")[0]
            lines.append([f"{name} ({row.layers} layers)", f"{row.n:,}", *texts])
    return markdown(lines)


def selective_table() -> str:
    """The share of activations that selective recomputation saves, by the formula and published."""
    lines = [["model", "heads", "tokens", "dim", "5 a s / h", "share saved", "published"]]
    for name, (heads, n, dim, published) in SELECTIVE.items():
        scores, _ = layer_units(heads, n, dim)
        shares = (
            f"{100 * attention_share(heads, n, dim):.1f} %",
            f"{100 * published:.0f} %",
        )
        lines.append([name, f"{heads}", f"{n:,}", f"{dim:,}", f"{scores:g}", *shares])
    return markdown(lines)


def growth(rows: Sequence[MemoryRow]) -> list[str]:
    """How the peak grows when the length doubles for the last time, for each configuration."""
    found = []
    for key, (name, _) in NAMES.items():
        own = [r for r in rows if (r.attention, r.checkpoint) == key and r.status == OK]
        own = sorted(own, key=lambda r: r.n)
        if len(own) > 1 and own[-2].peak_mib and own[-1].peak_mib:
            by = own[-1].peak_mib / own[-2].peak_mib
            found.append(
                f"{name}: {own[-2].n:,} to {own[-1].n:,} tokens take {by:.2f} times as much."
            )
    return found


def published_table() -> str:
    """The published numbers, the formulas that are nearest to them, and what these assume."""
    lines = [["published GB", "formula GB", "ratio", "configuration", "what has to be assumed"]]
    lines += [
        [
            f"{r.published_gb:g}", f"{r.formula_gb:.2f}", f"{r.formula_gb / r.published_gb:.2f}",
            r.configuration, r.assumption,
        ]
        for r in readings()
    ]  # fmt: skip
    return markdown(lines, left=(3, 4))


def gpu_formula_table() -> str:
    """What the layers here keep at the sizes of the published numbers, by the formula."""
    lines = [["7B at 4,096 tokens", "kept by 32 layers, GB"]]
    for (attention, checkpoint), (name, _) in NAMES.items():
        kept = LAYERS * SEVEN_B.layer_bytes(attention, checkpoint) / 1e9
        lines.append([name, f"{kept:.2f}"])
    return markdown(lines)


def draw(rows: Sequence[MemoryRow], out: Path) -> list[Path]:
    """Peak memory and time of a step against length."""
    found = [row for row in newest(rows) if row.status == OK]
    if not found:
        return []
    lengths = sorted({row.n for row in found})
    with style():
        figure, panels = plt.subplots(1, 2, figsize=(PAGE, 2.6))
        for key, (name, look) in NAMES.items():
            own = sorted(
                (r for r in found if (r.attention, r.checkpoint) == key), key=lambda r: r.n
            )
            if own:
                n = [row.n for row in own]
                curve(panels[0], n, [row.peak_mib or 0 for row in own], look, name)
                curve(panels[1], n, [row.ms for row in own], look, name)
        first = min((row for row in found if row.peak_mib), key=lambda r: (r.n, r.peak_mib or 0))
        linear = [(first.peak_mib or 0) * n / first.n for n in lengths]
        reference(panels[0], lengths, linear, "linear")
        for axes, label in zip(panels, ("peak MiB of a step", "ms of a step"), strict=True):
            length_axis(axes, lengths)
            plain_log_axis(axes)
            axes.set_ylabel(label)
        legend(figure, list(panels), columns=3)
        return save(figure, out / file_name("activations", found[0].device), option="plots")


def describe(row: MemoryRow) -> str:
    """A row as one line."""
    text = f"{row.attention:8} {row.checkpoint:9} N {row.n:<6}"
    if row.status != OK:
        return f"{text} {row.status}"
    peak, layer, formula = row.peak_mib or 0, row.layer_mib or 0, row.formula_mib or 0
    sizes = f"peak {peak:9.1f} MiB  a layer {layer:8.2f}, by the formula {formula:8.2f}"
    return f"{text} {sizes}  {LAYERS} layers {row.scaled_gb:7.3f} GB  {row.ms:9.2f} ms"
