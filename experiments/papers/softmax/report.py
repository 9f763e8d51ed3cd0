"""The tables and the figure of experiments.papers.softmax, from its rows alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.figures import PAGE, Style, curve, legend
from experiments.common.records import OK
from experiments.common.text_table import MISSING, markdown
from experiments.papers.softmax.algorithms import ALGORITHMS
from experiments.papers.softmax.rows import SoftmaxRow

BASE = {False: "safe", True: "safe_topk"}
LOOKS = {
    "copy": Style("0.5", "", ":"),
    "safe": Style("#D55E00", "s", "-"),
    "online": Style("#0072B2", "o", "-"),
    "torch": Style("#CC79A7", "D", "-."),
    "safe_topk": Style("#D55E00", "s", "-"),
    "safe_fused": Style("#E69F00", "^", "--"),
    "online_fused": Style("#0072B2", "o", "-"),
    "torch_topk": Style("#CC79A7", "D", "-."),
}

Shape = tuple[int, int]  # batch, vocabulary


def by_device(rows: Sequence[SoftmaxRow]) -> dict[str, list[SoftmaxRow]]:
    """The rows with a time of each device, which tables and figures do not mix."""
    found: dict[str, list[SoftmaxRow]] = {}
    for row in rows:
        if row.status == OK:
            found.setdefault(row.device, []).append(row)
    return found


def measured(
    rows: Sequence[SoftmaxRow], k: int | None = None
) -> dict[Shape, dict[str, SoftmaxRow]]:
    """The newest row with a time of each shape and algorithm, shapes in order.

    k: of the top-k; None: the smallest there is.
    """
    k = min(ks(rows), default=0) if k is None else k
    found: dict[Shape, dict[str, SoftmaxRow]] = {}
    for row in rows:
        if row.status == OK and row.k in (0, k):
            found.setdefault((row.batch, row.vocabulary), {})[row.algorithm] = row
    return dict(sorted(found.items()))


def table(rows: Sequence[SoftmaxRow], *, topk: bool) -> list[list[str]]:
    """Milliseconds, the speed-up over the slowest way, and the bandwidth as a share of a copy's."""
    names = [name for name, a in ALGORITHMS.items() if a.topk == topk and name != "copy"]
    fast = "online_fused" if topk else "online"
    head = ["batch", "V", *(f"{ALGORITHMS[name].title} (ms)" for name in names)]
    lines = [[*head, f"speed-up of {fast.split('_')[0]}", "its bandwidth / copy's"]]
    for (batch, vocabulary), by_name in measured(rows).items():
        times = [_ms(by_name.get(name)) for name in names]
        base, best, copy = (by_name.get(name) for name in (BASE[topk], fast, "copy"))
        speedup = f"{base.ms / best.ms:.2f}" if base and best else MISSING
        share = MISSING
        if best and copy and best.gb_s and copy.gb_s:
            share = f"{best.gb_s / copy.gb_s:.2f}"
        lines.append([str(batch), f"{vocabulary:,}", *times, speedup, share])
    return lines


def ks(rows: Sequence[SoftmaxRow]) -> list[int]:
    """The k of the top-k rows."""
    return sorted({row.k for row in rows if row.k and row.status == OK})


def larger_k_table(rows: Sequence[SoftmaxRow]) -> list[list[str]]:
    """Section 5.2: milliseconds of each k, and the speed-up over safe softmax, then top-k.

    Shapes with several k only.
    """
    names = [name for name, a in ALGORITHMS.items() if a.topk]
    lines = [["batch", "V", "k", *(f"{ALGORITHMS[name].title} (ms)" for name in names)]]
    lines[0].append("speed-up of online")
    found = {(*shape, k): some for k in ks(rows) for shape, some in measured(rows, k).items()}
    found = {key: some for key, some in found.items() if some.keys() & set(names)}
    for (batch, vocabulary, k), by_name in sorted(found.items()):
        if sum((b, v) == (batch, vocabulary) for b, v, _ in found) < 2:
            continue
        base, best = by_name.get(BASE[True]), by_name.get("online_fused")
        speedup = f"{base.ms / best.ms:.2f}" if base and best else MISSING
        times = [_ms(by_name.get(name)) for name in names]
        lines.append([str(batch), f"{vocabulary:,}", str(k), *times, speedup])
    return lines


def tables(rows: Sequence[SoftmaxRow]) -> Mapping[str, Callable[[], str]]:
    """The tables in Markdown, by the name that a page gives them: one a device, below its name
    where there are several.
    """
    makers = {
        "softmax": partial(table, topk=False),
        "topk": partial(table, topk=True),
        "larger_k": larger_k_table,
    }

    def text(make: Callable[[Sequence[SoftmaxRow]], list[list[str]]]) -> str:
        found = {device: make(some) for device, some in by_device(rows).items()}
        texts = {d: markdown(lines, left=()) for d, lines in found.items() if len(lines) > 1}
        if len(found) > 1:
            texts = {device: f"{device}:\n\n{table}" for device, table in texts.items()}
        return "\n\n".join(texts.values()) or "Not measured yet."

    return {name: partial(text, make) for name, make in makers.items()}


def draw(rows: Sequence[SoftmaxRow]) -> Figure:
    """Elements a second against the vocabulary: softmax above, with top-k below, by batch."""
    found = measured(rows)
    batches = sorted({batch for batch, _ in found})
    figure, panels = plt.subplots(
        2, len(batches), figsize=(PAGE, 4.2), squeeze=False, sharex="col", sharey="row"
    )
    for topk, line in enumerate(panels):
        for axes, batch in zip(line, batches, strict=True):
            what = "softmax and top-k" if topk else "softmax"
            axes.set_title(f"{what}, batch {batch}", loc="left")
            _panel(axes, {v: r for (b, v), r in found.items() if b == batch}, topk=bool(topk))
        line[0].set_ylabel("elements a second")
    for axes in panels[1]:
        axes.set_xlabel("vocabulary V")
    legend(figure, list(panels.flat), columns=3)
    return figure


def _panel(axes: Axes, by_size: dict[int, dict[str, SoftmaxRow]], *, topk: bool) -> None:
    axes.set(xscale="log", yscale="log")
    for name, look in LOOKS.items():
        if name != "copy" and ALGORITHMS[name].topk != topk:
            continue
        points = [
            (v, by_name[name].elements_s) for v, by_name in by_size.items() if name in by_name
        ]
        if points:
            x, y = zip(*points, strict=True)
            curve(axes, x, y, look, ALGORITHMS[name].title)


def _ms(row: SoftmaxRow | None) -> str:
    return MISSING if row is None else f"{row.ms:.3g}"
