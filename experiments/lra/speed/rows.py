"""One row per measured training step of the Long Range Arena."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from experiments.common.records import OK, TimedRow

SWEEP = "sweep"  # the task of rows that differ only in their length


@dataclass(frozen=True, kw_only=True)
class StepRow(TimedRow):
    """One training step: forward, backward, clip and optimiser. `mask` is the one that it had."""

    task: str  # of the Long Range Arena, or "sweep"
    attention: str
    option: str  # mask= as given; empty for the default of the length
    length: int  # tokens of an example as padded
    pair: int  # 2 if an example is a pair of sequences, else 1
    batch: int  # examples of a step
    mean_length: float  # mean number of tokens of a sequence without padding
    layers: int
    dim: int
    heads: int
    precision: str  # bf16 | fp32
    mode: str  # how the step was to run: eager, graph, compile, compile+graph
    ran: str = ""  # how it ran, which differs if the compiler or the device refused
    tokens_per_s: float | None = None  # padded tokens
    peak_mib: float | None = None  # of the whole step with weights and optimiser state
    attention_ms: float | None = None  # forward and backward of one attention layer

    WORK: ClassVar = "task length pair batch layers dim heads precision device".split()
    WHAT = (*WORK[:-1], "attention", "option", "mode")
    SOURCES = (
        *("masks", "sparseflash", "experiments/lra/models", "experiments/training"),
        *("experiments/models", "experiments/training"),  # where the two were before
    )
    COMMAND = "python -m experiments.lra_speed"

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured. The mask follows from the option."""
        names = (*self.WHAT, "device", "torch", "triton", "source")
        return tuple(getattr(self, name) for name in names)

    @property
    def work(self) -> tuple[object, ...]:
        """What rows must share to be compared."""
        return tuple(getattr(self, name) for name in self.WORK)


def newest(found: Sequence[StepRow]) -> list[StepRow]:
    """Returns the last of the rows that differ only in versions, source or mode."""
    return list({(row.work, row.attention, row.option): row for row in found}.values())


def measured(found: Sequence[StepRow]) -> list[StepRow]:
    return [row for row in found if row.status == OK]
