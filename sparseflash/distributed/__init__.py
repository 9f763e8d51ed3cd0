"""Attention over a sequence that several devices share, for any block mask."""

from sparseflash.distributed.plan import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
