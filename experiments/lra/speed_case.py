"""One training step of one task with one attention, on random tokens: made, run, timed."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from experiments.bench.timing import MIB, Times
from experiments.lra.models.attention import make_attention
from experiments.lra.models.classifier import Classifier, ModelConfig
from experiments.lra.speed_rows import SWEEP
from experiments.lra.tasks.task import Split, Task, padded_length
from experiments.lra.training.config import PRECISIONS, Settings, compose_settings
from experiments.lra.training.data import DeviceSplit
from experiments.lra.training.device import autocast, capture, lacks_memory, warm_up
from experiments.lra.training.distributed import Group
from experiments.lra.training.evaluate import classify
from experiments.lra.training.model import make_model
from experiments.lra.training.step import Trainer, seed_everything

BATCHES = 4  # of random examples
ROUNDS = 5  # of steps at most, whose times give the median
AT_MOST = 200  # steps of a round
STEPS = 2000  # that a run plans at least: more than are timed


@dataclass(frozen=True)
class Shape:
    """What a task gives the model to work on."""

    vocab: int
    classes: int
    max_length: int  # unless the configuration of the task says otherwise
    pair: bool = False
    grid: bool = False
    lengths: tuple[int, ...] | None = None  # quantiles 0, 1/16, .. 1; None: every token counts
    joined: tuple[int, ...] = (1,)  # how many texts of these lengths make a sequence


# Tokens of ListOps trees as its generator accepts them, and bytes of IMDB's training reviews. The
# longest of these has 13,704; 5000 instead gives the right share (3 %) above 4096.
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


@dataclass(frozen=True)
class StepCase:
    """A training step to measure."""

    task: str  # a file of conf/task, or the sweep
    attention: str
    mask: str | None
    length: int | None  # of the sweep; None: the task's
    overrides: tuple[str, ...] = ()  # of conf/train.yaml

    def settings(self) -> Settings:
        """Those of a training run of this task with this attention.

        Raises ValueError for a mask or a value that does not exist.
        """
        words = [f"task={'text' if self.task == SWEEP else self.task}"]
        words += [f"attention={self.attention}"]
        settings = compose_settings([*words, *self.overrides])
        settings = replace(settings, steps=max(settings.steps, STEPS))
        if self.mask is None:
            return settings
        attention = settings.attention | {"mask": self.mask}
        return replace(settings, mask=self.mask, attention=attention)


def random_task(case: StepCase, settings: Settings) -> Task:
    """Random tokens in sequences as long as the task's, with random labels."""
    n = BATCHES * settings.batch
    draw = np.random.default_rng(0)
    if case.task == SWEEP:
        assert case.length is not None
        tokens = draw.integers(1, 257, (n, case.length)).astype(np.int16)
        split = Split(tokens, draw.integers(0, 2, n), None)
        return _task(SWEEP, 2, 257, case.length, False, None, split)
    shape = SHAPES[settings.task["name"]]
    length = padded_length(settings.task.get("max_length") or shape.max_length)
    side = round(length**0.5)
    rows = (n, 2) if shape.pair else (n,)
    kind = np.uint8 if shape.vocab <= 256 else np.int16
    tokens = draw.integers(0 if shape.grid else 1, shape.vocab, (*rows, length)).astype(kind)
    lengths = None
    if shape.lengths is not None:
        most = settings.task.get("max_length") or shape.max_length
        lengths = random_lengths(shape, rows, most, draw)
        tokens[np.arange(length) >= lengths[..., None]] = 0
    split = Split(tokens, draw.integers(0, shape.classes, n), lengths)
    grid = (side, side) if shape.grid else None
    return _task(settings.task["name"], shape.classes, shape.vocab, length, shape.pair, grid, split)


def _task(name, classes, vocab, length, pair, grid, split) -> Task:
    splits = {key: split for key in ("train", "val", "test")}
    return Task(name, "random", classes, vocab, length, pair, grid, splits, {})


def random_lengths(
    shape: Shape, rows: tuple[int, ...], most: int, draw: np.random.Generator
) -> np.ndarray:
    """int32, of the shape `rows`: lengths as the task has them, cut to `most`."""
    assert shape.lengths is not None
    parts = draw.choice(shape.joined, rows)
    levels = draw.random((max(shape.joined), *rows))
    texts = np.interp(levels, np.linspace(0, 1, len(shape.lengths)), shape.lengths)
    number = np.arange(max(shape.joined)).reshape(-1, *[1] * len(rows))
    found = np.where(number < parts, texts, 0).sum(0)
    return np.clip(np.rint(found), 1, most).astype(np.int32)


@dataclass(frozen=True)
class Measured:
    """What came out of a case."""

    times: Times
    peak_mib: float | None
    attention_ms: float
    mode: str


def measure(
    settings: Settings,
    task: Task,
    seconds: float,
    tell: Callable[[str], None],
    wait: Callable[[], None] = lambda: None,
) -> Measured:
    """Times the step of a training run, and its attention layer alone.

    wait: called when both are compiled and captured, before the first is timed.
    """
    device = torch.device(settings.device)
    clean(device)
    seed_everything(settings.seed, 0)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    trainer = _trainer(settings, task, device, tell)
    trainer.advance()
    peak = None
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated(device) - held) / MIB
    mode = _mode(compile=trainer.compiled, graph=trainer.captured)
    model, split, compiled = trainer.model, trainer.split, trainer.compiled
    assert isinstance(model, Classifier)
    config, states = model.config, model.states
    layer = None
    try:
        layer = attention_step(settings, config, states, split, compiled=compiled)
    except Exception as error:
        if not lacks_memory(error):  # there may be room for it without the step
            raise
    wait()
    times = step_times(trainer.advance, device, seconds)
    if layer is None:
        del trainer, model
        clean(device)
        layer = attention_step(settings, config, states, split, compiled=compiled)
    alone = step_times(layer, device, seconds / 2)
    return Measured(times, peak, alone.median, mode)


def _trainer(
    settings: Settings, task: Task, device: torch.device, tell: Callable[[str], None]
) -> Trainer:
    model = make_model(settings, task).to(device).train()
    split = DeviceSplit(task.splits["train"], device)
    trainer = Trainer(model, split, classify, settings, Group(0, 1, device))
    trainer.prepare(compile=settings.compile, graph=settings.graph, tell=tell)
    return trainer


def planned_mode(settings: Settings) -> str:
    """How the step is to run: eager, graph, compile or compile+graph."""
    return _mode(compile=settings.compile, graph=settings.graph)


def _mode(*, compile: bool, graph: bool) -> str:
    return "+".join(["compile"] * compile + ["graph"] * graph) or "eager"


def attention_step(
    settings: Settings, config: ModelConfig, states: int, split: DeviceSplit, *, compiled: bool
) -> Callable[[], object]:
    """Forward and backward of one attention layer on random q, k and v of the step's size."""
    device = torch.device(settings.device)
    options = {key: value for key, value in settings.attention.items() if key != "name"}
    layer = make_attention(
        settings.attention["name"],
        heads=config.heads,
        head_dim=config.head_dim,
        length=states,
        dropout=config.attention_dropout,
        class_token=config.pool == "cls",
        **options,
    )
    layer = layer.to(device).train()
    forward = torch.compile(layer, dynamic=False) if compiled else layer
    tokens, lengths, _ = split.batch(torch.arange(settings.batch, device=device))
    lengths = None if lengths is None else lengths.flatten()
    dtype = PRECISIONS[settings.precision]
    batch = tokens.numel() // tokens.shape[-1]
    shape = (batch, states, config.heads, config.head_dim)  # as a projection leaves it
    q, k, v, dout = (
        torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in ((q, v) if layer.shared_qk else (q, k, v))]
    wanted = [*inputs, *layer.parameters()]

    def body() -> None:
        with autocast(device, dtype):
            given = None if lengths is None else layer.plan(lengths, dtype)
            out = forward(*(inputs[0], inputs[0 if layer.shared_qk else 1], inputs[-1]), given)
        torch.autograd.grad(out, wanted, dout.to(out.dtype), allow_unused=True)

    if warm_up(body, device) and settings.graph:
        return capture(body, device).replay
    return body


def step_times(advance: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Milliseconds of a step over rounds of steps that together take about `seconds`."""

    def timed(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            advance()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / steps

    timed(1)
    begun = time.perf_counter()
    once = timed(1)
    steps = max(1, min(AT_MOST, round(seconds / ROUNDS / max(once, 1e-6))))
    found = [once] if steps == 1 else []
    # steps so slow that the rounds would take several times as long are taken less often
    while len(found) < ROUNDS and (not found or time.perf_counter() - begun < 3 * seconds):
        found.append(timed(steps))
    return Times(*(1000 * float(t) for t in np.quantile(found, [0.5, 0.2, 0.8])))


def clean(device: torch.device) -> None:
    """Gives back what an earlier case took: its memory, and compiled functions of other shapes."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
