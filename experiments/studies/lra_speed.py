"""Time of one training step of every Long Range Arena task with every attention.

The step is that of experiments.train: forward, backward, clip and AdamW, in a CUDA graph on a GPU,
at the reference batch, on random tokens as long as the task's. Then comes a sweep over lengths with
a fixed number of tokens a batch. See docs/guide/lra.md.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.bench.step import MIB, Times, times_of
from experiments.common import figures as f
from experiments.common.program import CONF
from experiments.common.rows import OK, Found, Row, found
from experiments.common.tables import MISSING, markdown
from experiments.lra import published as lra
from experiments.lra.cells import RowKey, sorted_rows
from experiments.lra.curves import groups, row_labels, row_styles
from experiments.lra.run import classify
from experiments.lra.settings import Settings, compose_settings
from experiments.lra.tasks.task import SPLITS, Split, Task, padded_length
from experiments.lra.weights import make_model, mask_of
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices
from experiments.training.device import reset_memory
from experiments.training.distributed import Group
from experiments.training.evaluate import DeviceSplit, seed_everything
from experiments.training.step import Trainer

KEY = "task attention option length pair batch layers dim heads precision mode".split()
SOURCES = ("masks", "sparseflash", "experiments/lra/models", "experiments/training")
ROWS = runner.Unmasked
WORK = "task length pair batch layers dim heads precision mode device gpu".split()  # to compare
ROUNDS = 5  # of steps at most; the time is their median
MAX_STEPS = 200  # of a round
MIN_PLANNED = 2000  # steps of the run, more than are timed
SWEEP = "sweep"  # the task of rows that differ only in their length
BATCHES = 4  # of random examples


@dataclass(kw_only=True)
class Options(runner.Options):
    tasks: list[str] = both([*lra.AVERAGED, *lra.PATH], [*lra.AVERAGED])  # files of conf/task
    attentions: list[str] = field(default_factory=lambda: [*lra.ATTENTIONS])
    masks: list[str | None] = field(default_factory=lambda: [None])  # of sparse; null: the default
    lengths: list[int] = both([2**i for i in range(10, 17)], [256, 512, 1024])  # same model
    tokens: int = both(131072, 2048)  # of a batch in the sweep, whatever the length
    options: list[str] = both([], ["batch=4"])  # of experiments.train, the same for all
    seconds: float = 0.3


@dataclass(frozen=True)
class StepCase:
    """A training step to measure."""

    task: str  # a file of conf/task, or the sweep
    attention: str
    mask: str | None
    length: int | None  # of the sweep; None: the task's
    overrides: tuple[str, ...] = ()  # of conf/train.yaml

    def settings(self) -> Settings:
        """Return the settings of a training run of this task with this attention.

        Raise ValueError for a mask or a value that does not exist.
        """
        words = [f"task={'text' if self.task == SWEEP else self.task}"]
        settings = compose_settings([*words, f"attention={self.attention}", *self.overrides])
        settings = replace(settings, steps=max(settings.steps, MIN_PLANNED))
        return settings if self.mask is None else replace(settings, mask=self.mask)

    def data(self, settings: Settings) -> Task:
        """Return random data in the sizes of the task."""
        name = SWEEP if self.task == SWEEP else settings.task["name"]
        return random_task(name, self.length or settings.task.get("max_length"), settings.batch)

    def row(self) -> Row:
        settings = self.settings()
        task, model = self.data(settings), settings.sizes
        lengths = task.splits["train"].lengths
        return {
            "task": self.task, "attention": self.attention, "option": self.mask or "",
            "length": task.length, "pair": 2 if task.pair else 1, "batch": settings.batch,
            "mean_length": float(task.length if lengths is None else np.mean(lengths)),
            "layers": model.layers, "dim": model.dim, "heads": model.heads,
            "precision": settings.precision,
            "mode": _mode(compile=settings.compile, graph=settings.graph),
        }  # fmt: skip


def cases(run: Run) -> list[StepCase]:
    o = run.options
    tasks = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    choices(o, tasks=tasks, attentions=lra.ATTENTIONS)
    kinds = [(n, mask) for n in o.attentions for mask in (o.masks if n == "sparse" else [None])]
    own = (*o.options, f"device={run.device}")
    made = [StepCase(task, *kind, None, own) for task in o.tasks for kind in kinds]
    for length in sorted(o.lengths):
        if o.tokens % length:
            raise ValueError(f"lengths: {length} does not divide tokens={o.tokens}")
        sized = (*own, "scale=full", f"batch={o.tokens // length}")
        made += [StepCase(SWEEP, *kind, length, sized) for kind in kinds]
    return made


def opened(case: StepCase, run: Run) -> Callable[[Row], dict[str, Any]]:
    def one(row: Row) -> dict[str, Any]:
        settings = case.settings()
        task, device = case.data(settings), torch.device(settings.device or "cpu")
        torch._dynamo.reset()  # compiled functions of an earlier case
        reset_memory(device)
        seed_everything(settings.seed, 0)
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        model = make_model(settings, task).to(device).train()
        split = DeviceSplit(task.splits["train"].arrays, device)
        trainer = Trainer(model, split, classify, settings, Group(0, 1, device))
        trainer.prepare(compile=settings.compile, graph=bool(settings.graph))
        trainer.advance()
        peak = None
        if device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated(device) - held) / MIB
        mask, density = mask_of(model, settings)
        ran = _mode(compile=trainer.compiled, graph=trainer.captured)
        times = step_times(trainer.advance, device, run.options.seconds)
        rate = 1000 * row["batch"] * row["pair"] * row["length"] / times.ms_median
        numbers = {"mask": mask or "", "density": density, "ran": ran, "peak_mib": peak}
        return numbers | times._asdict() | {"tokens_per_s": rate}

    return one


def _mode(*, compile: bool, graph: bool | None) -> str:
    return "+".join(["compile"] * compile + ["graph"] * bool(graph)) or "eager"


def step_times(advance: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Return milliseconds of a step, over rounds of steps that together take about `seconds`."""

    def timed(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            advance()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / steps

    timed(1)
    once = max(timed(1), 1e-6)
    steps = int(np.clip(seconds / ROUNDS / once, 1, MAX_STEPS))
    rounds = int(np.clip(3 * seconds / once / steps, 1, ROUNDS))  # fewer of very slow steps
    return times_of([1000 * timed(steps) for _ in range(rounds)])


# ---- random data in the sizes of the tasks


class Shape(NamedTuple):
    """The input that a task gives to the model."""

    vocab: int
    classes: int
    max_length: int  # unless the configuration of the task says otherwise
    pair: bool = False
    grid: bool = False
    lengths: tuple[int, ...] | None = None  # quantiles 0, 1/16, .. 1; None: no padding
    joined: tuple[int, ...] = (1,)  # how many texts of these lengths make a sequence


# Tokens of ListOps trees as its generator accepts them, and bytes of IMDB's training reviews. The
# longest review has 13,704; 5000 instead gives the right share (3 %) above 4096.
LISTOPS = (
    *(501, 547, 598, 650, 708, 771, 834, 901, 968),
    *(1050, 1130, 1225, 1330, 1443, 1578, 1754, 1998),
)
IMDB = (
    *(52, 393, 581, 656, 702, 753, 816, 890, 979),
    *(1082, 1217, 1386, 1614, 1920, 2369, 3166, 5000),
)
SHAPES = {
    "listops": Shape(17, 10, 2000, lengths=LISTOPS),
    "text": Shape(257, 2, 1000, lengths=IMDB),
    # papers are longer than the 4000 bytes that are read of them
    "retrieval": Shape(257, 2, 4000, pair=True, lengths=(4000, 4000)),
    "imdb_same_movie": Shape(257, 2, 4000, pair=True, lengths=IMDB, joined=(3, 4)),
    "image": Shape(256, 10, 1024, grid=True),
    **{f"pathfinder{n}": Shape(256, 2, n * n, grid=True) for n in (32, 64, 128, 256)},
}


@lru_cache(maxsize=1)  # the attentions of one task share its data
def random_task(name: str, length: int | None, batch: int) -> Task:
    """Return random tokens in sequences as long as the task's, with random labels.

    length: of the sweep, or the longest sequence of a task. None takes the task's own.
    """
    shape = SHAPES.get(name) or Shape(257, 2, 0)
    longest = length or shape.max_length
    length = longest if name == SWEEP else padded_length(longest)
    n, draw = BATCHES * batch, np.random.default_rng(0)
    rows = (n, 2) if shape.pair else (n,)
    kind = np.uint8 if shape.vocab <= 256 else np.int16
    tokens = draw.integers(0 if shape.grid else 1, shape.vocab, (*rows, length)).astype(kind)
    lengths = None
    if shape.lengths is not None:
        lengths = random_lengths(shape, rows, longest, draw)
        tokens[np.arange(length) >= lengths[..., None]] = 0
    split = Split(tokens, draw.integers(0, shape.classes, n), lengths)
    grid = (round(length**0.5),) * 2 if shape.grid else None
    splits: dict[str, Split] = {name: split for name in SPLITS}
    return Task(name, "random", classes=shape.classes, vocab=shape.vocab, splits=splits, grid=grid)


def random_lengths(
    shape: Shape, rows: tuple[int, ...], longest: int, draw: np.random.Generator
) -> np.ndarray:
    """Return int32 lengths of shape `rows`, distributed as the task's and cut to `longest`."""
    parts, most = draw.choice(shape.joined, rows), max(shape.joined)
    levels = np.linspace(0, 1, len(shape.lengths or ()))
    texts = np.interp(draw.random((most, *rows)), levels, shape.lengths or ())
    number = np.arange(most).reshape(-1, *[1] * len(rows))
    found = np.where(number < parts, texts, 0).sum(0)
    return np.clip(np.rint(found), 1, longest).astype(np.int32)


# ---- tables and the figure


def newest(frame: Any) -> list[Found]:
    """Return the last of the rows that differ only in versions or source, in the order of the
    paper's table; `gain` is the standard Transformer's time at the same work over that of the row.
    """
    rows = [Found(r | {"mask": r.mask or "", "option": r.option or ""}) for r in found(frame)]
    work = lambda row: tuple(row.get(name) for name in WORK)  # noqa: E731
    rows = [*{(work(row), row.attention, row.option): row for row in rows}.values()]
    base = {work(row): row.ms_median for row in reversed(rows) if row.attention == lra.BASE}
    for row in rows:
        theirs = base.get(work(row))
        row["gain"] = theirs / row.ms_median if theirs and row.ms_median else None
    return rows


def row_name(row: Found) -> str:
    """Return the name of an attention with its mask."""
    label = lra.ATTENTIONS.get(row.attention) or str(row.attention)
    return f"{label}, {row.option}" if row.option else label


def tables(frame: Any) -> dict[str, str]:
    """Return steps by task, with the geometric mean of the five tasks, and by length, on the device
    and in the precision of the last row: ms (speed-up) peak MiB.
    """
    rows, made = newest(frame), {}
    rows = [r for r in rows if (r.device, r.precision) == (rows[-1].device, rows[-1].precision)]
    if tasks := [row for row in rows if row.task != SWEEP]:
        first = {row.task: row for row in reversed(tasks)}
        shown = sorted(first, key=partial(lra.order, lra.LABELS))
        heads = {task: f"{lra.LABELS.get(task, task)} {_size(first[task])}" for task in shown}
        made["steps"] = markdown(_lines(tasks, "task", heads, mean=True))
    if sweep := [row for row in rows if row.task == SWEEP]:
        heads = {n: f.token_text(n) for n in sorted({row.length for row in sweep})}
        made["steps_by_length"] = markdown(_lines(sweep, "length", heads))
    return made


def _lines(
    rows: list[Found], across: str, heads: dict[Any, str], mean: bool = False
) -> list[list[str]]:
    """Return attentions down, and the values of a field with these heads across."""
    order = sorted(rows, key=lambda r: (lra.order(lra.ATTENTIONS, r.attention), r.option))
    lines = [["", *heads.values(), *["mean"] * mean]]
    for name in dict.fromkeys(map(row_name, order)):
        own = {row[across]: row for row in rows if row_name(row) == name}
        lines.append([name, *(_cell(own[at]) if at in own else MISSING for at in heads)])
        if mean:
            gains = [r.gain for r in own.values() if r.gain and r.task in lra.AVERAGED]
            some = f" ({len(gains)} of {len(lra.AVERAGED)})" * (len(gains) < len(lra.AVERAGED))
            text = f"{statistics.geometric_mean(gains):.2f}x{some}" if gains else MISSING
            lines[-1].append(text)
    return lines


def _size(row: Found) -> str:
    return f"({row.batch} x {'2 x ' if row.pair == 2 else ''}{f.token_text(row.length)})"


def _cell(row: Found) -> str:
    if row.status != OK:
        return row.status.partition(":")[0]
    text = f"{row.ms_median:.3g}" + (f" ({row.gain:.2f}x)" if row.gain else "")
    return text + (f" {row.peak_mib:.0f}" if row.peak_mib is not None else "")


def figures(frame: Any) -> dict[str, Figure]:
    """Return time and memory by length, on the device and in the precision of the last row."""
    rows = newest(frame)
    place = rows[-1].device, rows[-1].precision
    sweep = [r for r in rows if r.task == SWEEP and (r.device, r.precision) == place]
    several = len({row.length for row in sweep if row.status == OK}) > 1
    return {f.file_name("lra length", *place): draw_length(sweep)} if several else {}


def draw_length(rows: list[Found]) -> Figure:
    """Return time of a step and memory by length, with the tokens of a batch fixed.

    The standard Transformer is in every column of panels.
    """
    names = {"ms_median": "a training step (ms)", "peak_mib": "peak memory (MiB)"}
    key_of = lambda row: RowKey(row.attention, row.option, "")  # noqa: E731
    keys = sorted_rows(map(key_of, rows))
    labels, styles = row_labels(keys), row_styles(keys)

    def curve(key: RowKey, name: str) -> f.Curve:
        own = sorted((r for r in rows if key_of(r) == key), key=lambda r: r.length)
        y = {row.length: row[name] for row in own if row.get(name)}
        short = ", where it fits" if len(y) < len(own) else ""
        return f.Curve(labels[key] + short, styles[key], y)

    values = {
        text: {" " * i: [curve(key, name) for key in part] for i, part in enumerate(groups(keys))}
        for name, text in names.items()
        if any(row.get(name) for row in rows)
    }
    one, tokens = rows[0], {row.batch * row.length for row in rows}
    batch = f", {f.token_text(tokens.pop())} tokens a batch" if len(tokens) == 1 else ""
    model = f"{one.layers} layers, width {one.dim}, {one.heads} heads"
    return f.length_figure(values, f"{one.device}, {one.precision}; {model}{batch}")
