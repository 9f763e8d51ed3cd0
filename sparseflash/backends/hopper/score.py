"""A score function as the kernels for Hopper take it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.kernels.common.launch import Launch
from sparseflash.kernels.common.shapes import cdiv
from sparseflash.kernels.portable.score import by_distance
from sparseflash.problem import Problem
from sparseflash.score.by_triton import KernelScore, kernel_score

_MARGIN = 256  # tokens of tiles beyond the last query or key
_BLOCK = 256  # distances of a program


class ScoreLaunch:
    """The arguments of a score, and the launch that looks its tables up by distance.

    That is done once for each distance, instead of each pair.
    """

    def __init__(self, problem: Problem, score: KernelScore):
        self.problem, self.score = problem, score
        self.middle = -(-problem.n_q // _MARGIN) * _MARGIN + _MARGIN  # the place of distance 0
        self.length = self.middle + -(-problem.n_k // _MARGIN) * _MARGIN + _MARGIN
        self.count = len(score.near)
        self._launch = Launch(by_distance, static=True)

    @classmethod
    def of(cls, problem: Problem) -> "ScoreLaunch | None":
        """Return that of a problem, or None."""
        text = problem.options.score
        return cls(problem, kernel_score(text, gluon=True)) if text else None

    def tensors(self, tables: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tables and, where some are read by distance, what is found there; and their
        shapes, which a launch depends on.
        """
        shapes = tuple(t.shape for t in tables)
        if not self.count:
            return tuple(tables), shapes
        problem, n_bh = self.problem, self.problem.batch * self.problem.heads
        shape = self.count, n_bh, self.length
        found = torch.empty(shape, dtype=torch.float32, device=problem.device)

        def arguments():
            args = (
                found, self.length, self.middle, problem.scale, problem.n_q, problem.n_k,
                problem.heads,
            )  # fmt: skip
            options = {"args": self.score.args(tables), "COUNT": self.count, "BLOCK": _BLOCK}
            options |= {"BANDS": self.score.bands, "num_warps": 4}
            return (cdiv(self.length, _BLOCK), n_bh), args, options

        self._launch((found, *tables), arguments, layout=shapes)
        return (*tables, found), shapes

    def options(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the arguments of a kernel; tensors: from `tensors`."""
        problem, n, more = self.problem, len(self.score.rule.kinds), ()
        if self.count:
            heads = problem.heads
            more = tensors[n], self.length, self.middle, heads, problem.batch * heads * self.length
        sizes = problem.n_q, problem.n_k
        return self.score.options(tensors[:n], *sizes, *more, *sizes)
