"""Attention over a sequence that several devices share, for any block mask."""

from sparseflash.distributed.mesh import context_parallel
from sparseflash.distributed.plan import ContextParallel

__all__ = ["ContextParallel", "context_parallel"]
