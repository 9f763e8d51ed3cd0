"""Rows of runs of language models, and the points of their curves."""

from dataclasses import dataclass

from experiments.common.records import Row

SOURCES = ("masks", "sparseflash", "experiments/lm", "experiments/training")
COMMAND = "python -m experiments.lm plan=PLAN"


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """One complete training run. Losses are in nats a token."""

    plan: str  # same | contexts | masks
    case: str  # what a table calls it
    model: str
    params: int
    provider: str  # of attention: sparse | standard | sdpa
    objective: str  # next | masked
    packed: bool
    positions: str  # learned | rotary
    data: str
    data_digest: str
    tokenizer: str
    train_tokens: int  # of the text
    val_tokens: int  # that are evaluated
    bytes_per_token: float | None
    context: int
    batch: int  # windows of a step
    steps: int
    seed: int
    precision: str
    recipe: str  # the settings that no other column has, as options
    mode: str  # eager, compile, compile by layers, graph, or both: compile+graph
    pairs: float | None  # allowed pairs / those of the dense mask
    train_loss: float  # mean of the last 100 steps
    val_loss: float
    late_loss: float | None  # at the last quarter of the positions
    ms_step: float  # forward, backward, clipping and AdamW
    saved_mib: float | None  # kept from forward to backward, without compilation
    peak_mib: float | None  # of a GPU, in training

    WHAT = (
        *(
            "plan",
            "model",
            "provider",
            "objective",
            "packed",
            "positions",
            "data_digest",
            "tokenizer",
        ),
        *("context", "batch", "steps", "seed", "precision", "recipe", "mode"),
    )
    SOURCES = SOURCES
    COMMAND = COMMAND

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.context * self.batch


@dataclass(frozen=True, kw_only=True)
class PointRow(Row):
    """One point of a curve of a run: the mean training loss up to a step, or the validation loss
    of the positions from the one before up to this one."""

    plan: str
    case: str
    model: str
    context: int
    seed: int
    curve: str  # step | position
    x: int
    loss: float

    WHAT = ("plan", "case", "model", "context", "seed", "curve", "x")
    SOURCES = SOURCES
    COMMAND = COMMAND
