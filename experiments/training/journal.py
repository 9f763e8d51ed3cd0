"""Names of `run_file`, for readers that still have them from here."""

from experiments.training.run_file import JOURNAL, rounded

__all__ = ["JOURNAL", "rounded"]
