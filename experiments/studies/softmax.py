"""Safe and online softmax, and softmax fused with top-k (arXiv 1805.02867).

Triton kernels on a GPU, tiles in torch on a CPU, over vocabularies and batches; a copy and
torch.softmax stand beside them. A row has the error, the time, and the bandwidth that its memory
accesses make. See docs/results/papers.md.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments.bench.timing import measure
from experiments.common.devices import free_memory
from experiments.common.figures import PAGE, Style, curve, file_name, legend
from experiments.common.rows import OK, Found, Row, found
from experiments.common.tables import MISSING, markdown
from experiments.studies import runner, softmax_kernels
from experiments.studies.runner import Run, choices
from sparseflash.testing import relative_error

KEY = "algorithm implementation batch vocabulary k".split()
SOURCES = ("experiments/studies",)
LIMIT = 1e-5  # relative error against float64
CPU_GIB = 0.4  # larger shapes take a CPU minutes
Result = Tensor | tuple[Tensor, Tensor]


class Algorithm(NamedTuple):
    """One way to a softmax, or to the k largest probabilities and their indices."""

    title: str
    topk: bool
    accesses: int | None  # reads and writes of slow memory, for each element of x; None: unknown
    look: Style


ALGORITHMS = {
    "copy": Algorithm("copy", False, 2, Style("0.5", "", ":")),
    # maximum, sum, result read x; one write
    "safe": Algorithm("safe softmax", False, 4, Style("#D55E00", "s", "-")),
    # maximum and sum read x together
    "online": Algorithm("online softmax", False, 3, Style("#0072B2", "o", "-")),
    "torch": Algorithm("torch.softmax", False, None, Style("#CC79A7", "D", "-.")),
    # the result is read once more
    "safe_topk": Algorithm("safe, then top-k", True, 5, Style("#D55E00", "s", "-")),
    # maximum; sum and top-k
    "safe_fused": Algorithm("safe, fused with top-k", True, 2, Style("#E69F00", "^", "--")),
    "online_fused": Algorithm("online, fused with top-k", True, 1, Style("#0072B2", "o", "-")),
    "torch_topk": Algorithm("torch.softmax, torch.topk", True, None, Style("#CC79A7", "D", "-.")),
}
TORCH = ("copy", "torch", "torch_topk")
BASE, FAST = {False: "safe", True: "safe_topk"}, {False: "online", True: "online_fused"}


@dataclass(kw_only=True)
class Options(runner.Options):
    """The options of this study."""

    name: str = "softmax"
    vocabularies: list[int] = field(
        default_factory=lambda: [10, 100, 1000, 4000, 10000, 25000, 100000, 1000000]
    )
    batches: list[int] = field(default_factory=lambda: [10, 4000])  # rows of a vector batch
    k: list[int] = field(default_factory=lambda: [5])  # of the top-k; in Section 5.2 to 30
    algorithms: list[str] = field(default_factory=lambda: [*ALGORITHMS])
    implementation: str  # triton | blocks: tiles in torch
    limit_gib: float | None = None  # leave out what needs more; null: what suits the machine


DEFAULTS = {"cuda": Options(implementation="triton"), "cpu": Options(implementation="blocks")}
DEFAULTS["cpu"].seconds = 0.2


@dataclass(frozen=True)
class Case:
    """Shape of x, and how many of its largest probabilities are wanted."""

    batch: int
    vocabulary: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes of x and its softmax in float32."""
        return 2 * 4 * self.batch * self.vocabulary


def cases(run: Run) -> list[Case]:
    """Return the shapes that fit, and print which do not."""
    o, device = run.options, run.device.type
    choices(o, implementation=("triton", "blocks"), algorithms=ALGORITHMS)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if o.implementation == "triton" and device == "cpu" and not interpreted:
        raise ValueError("implementation='triton' needs a GPU, or TRITON_INTERPRET=1")
    if o.implementation == "blocks" and device != "cpu":
        raise ValueError("implementation='blocks' is made for a CPU; give device=cpu")
    limit = CPU_GIB if device == "cpu" else free_memory(run.device) / 2**31
    limit = limit if o.limit_gib is None else o.limit_gib
    made = [Case(*c) for c in product(o.batches, o.vocabularies, o.k) if c[2] <= c[1]]
    for case in made:
        if case.nbytes > limit * 2**30:
            print(f"left out: {case} needs {case.nbytes / 2**30:.2g} GiB, limit_gib={limit:.3g}")
    return [case for case in made if case.nbytes <= limit * 2**30]


def ways(case: Case, run: Run) -> list[Row]:
    """Return the algorithms; without top-k they are measured with the first k alone."""
    own = [n for n in run.options.algorithms if ALGORITHMS[n].topk or case.k == run.options.k[0]]
    return [
        {
            "algorithm": name,
            "implementation": "torch" if name in TORCH else run.options.implementation,
            "k": case.k if ALGORITHMS[name].topk else 0,
        }
        for name in own
    ]


def opened(case: Case, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures an algorithm."""
    generator = torch.Generator(run.device).manual_seed(0)
    x = torch.randn(case.batch, case.vocabulary, generator=generator, device=run.device)

    def one(row: Row) -> dict[str, Any]:
        call = make_call(row["algorithm"], row["implementation"], x, case.k)
        wrong = error(row["algorithm"], call(), x, case.k)
        if wrong > LIMIT:
            return {"status": f"wrong result: error {wrong:.2g}", "error": wrong}
        times, accesses = measure(call, x.device, run.options.seconds), accesses_of(row, x)
        gb_s = None if accesses is None else accesses * x.nbytes / times.ms_median / 1e6
        return {"error": wrong, "accesses": accesses, "gb_s": gb_s, **times._asdict()}

    return one


def make_call(algorithm: str, implementation: str, x: Tensor, k: int) -> Callable[[], Result]:
    """Return what is timed; it writes a softmax into memory that is there already."""
    y = torch.empty_like(x)
    if algorithm == "copy":
        return lambda: y.copy_(x)
    if algorithm == "torch":
        return lambda: torch.softmax(x, 1, out=y)
    if algorithm == "torch_topk":
        return lambda: torch.softmax(x, 1, out=y).topk(k, 1)
    run = softmax_kernels.run if implementation == "triton" else by_blocks
    return lambda: run(algorithm, x, y, k)


def error(algorithm: str, result: Result, x: Tensor, k: int) -> float:
    """Return the relative error of the first and the last row against float64.

    Of a top-k, also that of the probabilities at the indices.
    """
    rows = [0, len(x) - 1]
    right = x[rows].double()
    if algorithm != "copy":
        right = right.softmax(1)
    if isinstance(result, Tensor):
        return relative_error(result[rows], right)
    values, indices = result[0][rows], result[1][rows]
    best = right.topk(k, 1).values
    return max(relative_error(each, best) for each in (values, right.gather(1, indices)))


def accesses_of(row: Row, x: Tensor) -> float | None:
    """Return accesses for each element of x: counted by tiles, else what the code does."""
    if row["implementation"] != "blocks":
        return ALGORITHMS[row["algorithm"]].accesses
    blocks = Blocks(x, row["k"] or 1)
    blocks.run(row["algorithm"], torch.empty_like(x))
    return blocks.accesses / x.numel()


# ---- for a CPU: torch on tiles that fit its caches, with counted accesses

COLUMNS, ELEMENTS = 4096, 65_536  # of a tile, at most: 256 KiB
LOWEST = -3.0e38  # a maximum before the first element: finite, so that no NaN arises
Tile = tuple[slice, slice]


def by_blocks(algorithm: str, x: Tensor, y: Tensor, k: int) -> Result:
    """Return what an algorithm computes; y is room for a softmax."""
    return Blocks(x, k).run(algorithm, y)


class Blocks:
    """One call: x (batch, vocabulary), its running maximum and sum, and the k largest so far.

    A pass goes over the whole batch, tile by tile, so that every pass reads x from memory again. On
    a GPU thousands of rows do so at once.
    """

    def __init__(self, x: Tensor, k: int):
        self.x, self.accesses = x, 0
        self.m, self.total = x.new_full((len(x), 1), LOWEST), x.new_zeros(len(x), 1)
        self.values = torch.full((len(x), k), -torch.inf)
        self.indices = torch.zeros(len(x), k, dtype=torch.int64)
        self._buffer = x.new_empty(ELEMENTS)

    def run(self, algorithm: str, y: Tensor) -> Result:
        """Return the softmax in y, or the k largest probabilities and their indices."""
        online, topk = algorithm.startswith("online"), algorithm.endswith("fused")
        if not online:
            for tile, x in self.tiles(self.x):
                torch.maximum(self.m[tile[0]], x.amax(1, keepdim=True), out=self.m[tile[0]])
        for tile, x in self.tiles(self.x):
            top = x.amax(1, keepdim=True) if online or topk else x
            if online:
                self.rescale(tile, top)
            self.total[tile[0]] += self.exp(tile, x).sum(1, keepdim=True)
            if topk:
                self.insert(tile, x, top)
        if topk:
            return torch.exp(self.values - self.m) / self.total, self.indices
        factor = 1 / self.total
        for (tile, x), (_, out) in zip(self.tiles(self.x), self.tiles(y), strict=True):
            torch.mul(self.exp(tile, x), factor[tile[0]], out=out)
        if algorithm != "safe_topk":
            return y
        for tile, p in self.tiles(y):
            self.insert(tile, p, p.amax(1, keepdim=True))
        return self.values, self.indices

    def tiles(self, matrix: Tensor) -> Iterator[tuple[Tile, Tensor]]:
        """Yield all tiles, row by row, each about to be read or written once: a pass."""
        batch, vocabulary = matrix.shape
        columns = min(vocabulary, COLUMNS)
        rows = max(1, ELEMENTS // columns)
        for row, column in product(range(0, batch, rows), range(0, vocabulary, columns)):
            tile = slice(row, row + rows), slice(column, column + columns)
            self.accesses += matrix[tile].numel()
            yield tile, matrix[tile]

    def rescale(self, tile: Tile, top: Tensor) -> None:
        """Scale the sum to the maximum with a further tile: the online softmax."""
        m = self.m[tile[0]]
        m_new = torch.maximum(m, top)
        self.total[tile[0]] *= torch.exp(m - m_new)
        m.copy_(m_new)

    def exp(self, tile: Tile, x: Tensor) -> Tensor:
        """Return exp(x - m), in a buffer that stays in the cache."""
        room = self._buffer[: x.numel()].view(x.shape)
        return torch.sub(x, self.m[tile[0]], out=room).exp_()

    def insert(self, tile: Tile, x: Tensor, top: Tensor) -> None:
        """Take a tile into the k largest; only rows whose maximum belongs there are searched."""
        rows = torch.nonzero(top[:, 0] > self.values[tile[0], -1])[:, 0]
        if not len(rows):
            return
        k, at = self.values.shape[1], rows + tile[0].start
        values, indices = x[rows].topk(min(k, x.shape[1]))
        values = torch.cat([self.values[at], values], 1)
        indices = torch.cat([self.indices[at], indices + tile[1].start], 1)
        self.values[at], order = values.topk(k)
        self.indices[at] = indices.gather(1, order)


# ---- tables and figures

Shape = tuple[int, int]  # batch, vocabulary


def by_device(frame: Any) -> dict[str, list[Found]]:
    """Return the rows with a time of each device, which tables and figures do not mix."""
    devices: dict[str, list[Found]] = {}
    for row in found(frame[frame.status == OK]):
        devices.setdefault(row.device, []).append(row)
    return devices


def ks(rows: list[Found]) -> list[int]:
    """Return the k of the top-k rows."""
    return sorted({row.k for row in rows if row.k})


def measured(rows: list[Found], k: int | None = None) -> dict[Shape, dict[str, Found]]:
    """Return the newest row of each shape and algorithm, shapes in order.

    k: of the top-k; None: the smallest there is.
    """
    k = min(ks(rows), default=0) if k is None else k
    shapes: dict[Shape, dict[str, Found]] = {}
    for row in rows:
        if row.k in (0, k):
            shapes.setdefault((row.batch, row.vocabulary), {})[row.algorithm] = row
    return dict(sorted(shapes.items()))


def tables(frame: Any) -> dict[str, str]:
    """Return softmax, topk and larger_k, one table a device, below its name where there are
    several.
    """
    makers = {"softmax": _softmax, "topk": _topk, "larger_k": _larger_k}
    devices, made = by_device(frame), {}
    for name, make in makers.items():
        lines = {device: make(rows) for device, rows in devices.items()}
        texts = {d: markdown(some, left=()) for d, some in lines.items() if len(some) > 1}
        if len(devices) > 1:
            texts = {device: f"{device}:\n\n{text}" for device, text in texts.items()}
        if texts:
            made[name] = "\n\n".join(texts.values())
    return made


def _softmax(rows: list[Found], topk: bool = False) -> list[list[str]]:
    """Return milliseconds, the speed-up over the slowest way, and the bandwidth over a copy's."""
    names = [name for name, a in ALGORITHMS.items() if a.topk == topk and name != "copy"]
    head = ["batch", "V", *(f"{ALGORITHMS[name].title} (ms)" for name in names)]
    lines = [[*head, "speed-up of online", "its bandwidth / copy's"]]
    for (batch, vocabulary), by_name in measured(rows).items():
        best, copy, share = by_name.get(FAST[topk]), by_name.get("copy"), MISSING
        if best and copy and best.gb_s and copy.gb_s:
            share = f"{best.gb_s / copy.gb_s:.2f}"
        times = [_ms(by_name.get(name)) for name in names]
        lines.append([str(batch), f"{vocabulary:,}", *times, _gain(by_name, topk), share])
    return lines


def _topk(rows: list[Found]) -> list[list[str]]:
    return _softmax(rows, topk=True)


def _larger_k(rows: list[Found]) -> list[list[str]]:
    """Return Section 5.2: milliseconds of each k of shapes with several, and the speed-up over safe
    softmax, then top-k.
    """
    names = [name for name, a in ALGORITHMS.items() if a.topk]
    head = ["batch", "V", "k", *(f"{ALGORITHMS[name].title} (ms)" for name in names)]
    lines = [[*head, "speed-up of online"]]
    made = {(*shape, k): some for k in ks(rows) for shape, some in measured(rows, k).items()}
    made = {key: some for key, some in made.items() if some.keys() & {*names}}
    for (batch, vocabulary, k), by_name in sorted(made.items()):
        if sum((b, v) == (batch, vocabulary) for b, v, _ in made) > 1:
            times = [_ms(by_name.get(name)) for name in names]
            lines.append([str(batch), f"{vocabulary:,}", str(k), *times, _gain(by_name, True)])
    return lines


def _gain(by_name: dict[str, Found], topk: bool) -> str:
    base, best = by_name.get(BASE[topk]), by_name.get(FAST[topk])
    return f"{base.ms_median / best.ms_median:.2f}" if base and best else MISSING


def _ms(row: Found | None) -> str:
    return MISSING if row is None else f"{row.ms_median:.3g}"


def figures(frame: Any) -> dict[str, Figure]:
    """Return a figure a device: elements a second against the vocabulary, by batch; softmax above,
    with top-k below, where there are such rows.
    """
    return {file_name("softmax", device): _draw(rows) for device, rows in by_device(frame).items()}


def _draw(rows: list[Found]) -> Figure:
    shapes = measured(rows)
    batches = sorted({batch for batch, _ in shapes})
    names = {name for some in shapes.values() for name in some} - {"copy"}
    kinds = sorted({ALGORITHMS[name].topk for name in names})
    figure, panels = plt.subplots(
        len(kinds), len(batches), figsize=(PAGE, 2.1 * len(kinds)), squeeze=False, sharex="col",
        sharey="row",
    )  # fmt: skip
    for topk, line in zip(kinds, panels, strict=True):
        for axes, batch in zip(line, batches, strict=True):
            what = "softmax and top-k" if topk else "softmax"
            axes.set_title(f"{what}, batch {batch}", loc="left")
            _panel(axes, {v: r for (b, v), r in shapes.items() if b == batch}, topk)
        line[0].set_ylabel("elements a second")
    for axes in panels[-1]:
        axes.set_xlabel("vocabulary V")
    legend(figure, list(panels.flat), columns=3)
    return figure


def _panel(axes: Axes, by_size: dict[int, dict[str, Found]], topk: bool) -> None:
    axes.set(xscale="log", yscale="log")
    for name, algorithm in ALGORITHMS.items():
        if name != "copy" and algorithm.topk != topk:
            continue
        rows = [by_name[name] for by_name in by_size.values() if name in by_name]
        if rows:
            rate = [1000 * row.batch * row.vocabulary / row.ms_median for row in rows]
            curve(axes, [r.vocabulary for r in rows], rate, algorithm.look, algorithm.title)
