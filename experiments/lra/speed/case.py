"""One training step of one task with one attention, on random tokens: built, run and timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from experiments.bench.timing import MIB, Times
from experiments.common.records import OK
from experiments.lra.models.attention import make_attention
from experiments.lra.models.classifier import Classifier
from experiments.lra.objectives import classify
from experiments.lra.settings import Settings, compose_settings
from experiments.lra.speed.rows import SWEEP, StepRow
from experiments.lra.speed.shapes import random_task
from experiments.lra.tasks.task import Task
from experiments.lra.weights import make_model, mask_of
from experiments.training.data import DeviceSplit, seed_everything
from experiments.training.device import (
    DTYPES,
    autocast,
    capture,
    lacks_memory,
    reset_memory,
    warm_up,
)
from experiments.training.distributed import Group
from experiments.training.step import Trainer

ROUNDS = 5  # of steps at most; the time is their median
MAX_STEPS = 200  # of a round
MIN_PLANNED = 2000  # steps of the run, more than are timed


@dataclass(frozen=True)
class StepCase:
    """A training step to measure."""

    task: str  # a file of conf/task, or the sweep
    attention: str
    mask: str | None
    length: int | None  # of the sweep; None: the task's
    overrides: tuple[str, ...] = ()  # of conf/train.yaml

    def settings(self) -> Settings:
        """Returns the settings of a training run of this task with this attention.

        Raises ValueError for a mask or a value that does not exist.
        """
        words = [f"task={'text' if self.task == SWEEP else self.task}"]
        words += [f"attention={self.attention}"]
        settings = compose_settings([*words, *self.overrides])
        settings = replace(settings, steps=max(settings.steps, MIN_PLANNED))
        return settings if self.mask is None else replace(settings, mask=self.mask)

    def data(self, settings: Settings) -> Task:
        """Returns random data in the sizes of the task."""
        name = SWEEP if self.task == SWEEP else settings.task["name"]
        return random_task(name, self.length or settings.task.get("max_length"), settings.batch)

    def row(self, command: str) -> StepRow:
        """Returns the row of this case before it is measured."""
        settings = self.settings()
        task = self.data(settings)
        lengths = task.splits["train"].lengths
        model = settings.sizes
        return StepRow(
            task=self.task,
            attention=self.attention,
            option=self.mask or "",
            mask="",
            density=None,
            length=task.length,
            pair=2 if task.pair else 1,
            batch=settings.batch,
            mean_length=float(task.length if lengths is None else np.mean(lengths)),
            layers=model.layers,
            dim=model.dim,
            heads=model.heads,
            precision=settings.precision,
            mode=_mode(compile=settings.compile, graph=settings.graph),
            **StepRow.origin(settings.device, command),
        )


def measure_case(
    seconds: float, command: str, case: StepCase, wait: Callable[[], None] = lambda: None
) -> StepRow:
    """Returns the row of a case, with times or with the status that says why there are none.

    seconds: how long to time the step.
    wait: called when step and layer are compiled and captured, before the first is timed.
    """
    row = case.row(command)
    try:
        found = _measure(case, seconds, wait)
    except Exception as error:
        kind = "out of memory" if lacks_memory(error) else "failed"
        return replace(row, status=f"{kind}: {_summary(error)}")
    tokens = row.batch * row.pair * row.length
    return replace(row, status=OK, tokens_per_s=1000 * tokens / found["ms_median"], **found)


def _summary(error: Exception) -> str:
    """The first two sentences. Of a GPU: what was requested, and what it has."""
    text = " ".join(str(error).split()) or type(error).__name__
    return ". ".join(text.removeprefix("CUDA out of memory. ").split(". ")[:2])[:200]


def _measure(case: StepCase, seconds: float, wait: Callable[[], None]) -> dict:
    """Times the step of a training run, and its attention layer alone. Returns columns."""
    settings = case.settings()
    task, device = case.data(settings), torch.device(settings.device)
    clean(device)
    seed_everything(settings.seed, 0)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = make_model(settings, task).to(device).train()
    assert isinstance(model, Classifier)
    split = DeviceSplit(task.splits["train"], device)
    trainer = Trainer(model, split, classify, settings, Group(0, 1, device))
    trainer.prepare(compile=settings.compile, graph=settings.graph)
    trainer.advance()
    peak = None
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated(device) - held) / MIB
    mask, density = mask_of(model, settings)
    ran, compiled = _mode(compile=trainer.compiled, graph=trainer.captured), trainer.compiled
    layer = None
    try:
        layer = attention_step(settings, model, split, compiled=compiled)
    except Exception as error:
        if not lacks_memory(error):  # without the step there may be room for the layer
            raise
    wait()
    times = step_times(trainer.advance, device, seconds)
    if layer is None:
        del trainer
        clean(device)
        layer = attention_step(settings, model, split, compiled=compiled)
    alone = step_times(layer, device, seconds / 2)
    columns = {"mask": mask or "", "density": density, "ran": ran, "peak_mib": peak}
    return columns | times._asdict() | {"attention_ms": alone.ms_median}


def _mode(*, compile: bool, graph: bool) -> str:
    return "+".join(["compile"] * compile + ["graph"] * graph) or "eager"


def attention_step(
    settings: Settings, model: Classifier, split: DeviceSplit, *, compiled: bool
) -> Callable[[], object]:
    """Returns forward and backward of one attention layer on random q, k, v of the step's size."""
    device, config = torch.device(settings.device), model.config
    options = {key: value for key, value in settings.kind().items() if key != "name"}
    layer = make_attention(
        settings.attention["name"],
        heads=config.heads,
        head_dim=config.head_dim,
        length=model.states,
        dropout=config.attention_dropout,
        class_token=config.pool == "cls",
        **options,
    )
    layer = layer.to(device).train()
    forward = torch.compile(layer, dynamic=False) if compiled else layer
    tokens, lengths, _ = split.batch(torch.arange(settings.batch, device=device))
    lengths = None if lengths is None else lengths.flatten()
    dtype = DTYPES[settings.precision or "fp32"]
    batch = tokens.numel() // tokens.shape[-1]
    shape = (batch, model.states, config.heads, config.head_dim)  # the layout of a projection
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
    """Returns milliseconds of a step, over rounds of steps that together take about `seconds`."""

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
    steps = max(1, min(MAX_STEPS, round(seconds / ROUNDS / max(once, 1e-6))))
    found = [once] if steps == 1 else []
    # very slow steps get fewer rounds
    while len(found) < ROUNDS and (not found or time.perf_counter() - begun < 3 * seconds):
        found.append(timed(steps))
    median, p20, p80 = (1000 * float(t) for t in np.quantile(found, [0.5, 0.2, 0.8]))
    return Times(median, p20, p80, len(found))


def clean(device: torch.device) -> None:
    """Frees the memory of an earlier case, and its compiled functions."""
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    reset_memory(device)
