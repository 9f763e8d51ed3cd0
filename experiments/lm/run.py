"""A training run of a language model, in one or several sessions.

The step, checkpoints, clock, journal and processes are those of the Long Range Arena.
"""

import time
from contextlib import nullcontext
from typing import Any

from experiments.lm.prepare import explained_memory, read_corpus
from experiments.lm.result import summary
from experiments.lm.session import Session
from experiments.lm.settings import Settings, refuse_memory
from experiments.lra.result import read_result, refuse_other_settings
from experiments.training import state as checkpoint
from experiments.training.device import reset_memory, same_bits
from experiments.training.distributed import join
from experiments.training.journal import Progress
from experiments.training.step import micro_batches


def train(settings: Settings, command: str = "", begun: float | None = None) -> dict[str, Any]:
    """Trains until the last step or the time limit; returns the result.

    The same settings continue from the last checkpoint. A complete run is not trained again.

    Args:
        begun: when the time of `minutes` began (time.monotonic); None: now.

    Raises:
        ValueError: the data are missing, too short or of another vocabulary, the context does not
            fit the memory, or the loss is not finite.
        Interrupted: a signal stopped the run after its checkpoint was written.
    """
    begun = time.monotonic() if begun is None else begun
    group = join(settings.device)
    progress = Progress(group.leads)
    micro_batches(settings, group)  # type: ignore[arg-type]
    result = read_result(settings.folder)
    refuse_other_settings(settings)  # type: ignore[arg-type]
    if result is not None and result["complete"]:
        progress.say(
            f"{settings.folder} is complete since {result['date'][:16]}: {summary(result)}"
        )
        return result
    refuse_memory(settings, group.device, group.world)
    corpus = read_corpus(settings, group)
    reset_memory(group.device)
    lock = checkpoint.locked(settings.folder) if group.leads else nullcontext()
    with lock, same_bits(settings.deterministic), explained_memory(settings):
        return Session(settings, group, corpus, progress, begun, command).run()
