"""The layouts of `masks.presets.deepspeed`, for n x n blocks."""

import numpy as np

from masks.leaves.draws import Drawn, choose
from masks.leaves.graphs import union
from masks.runs import Ints

Span = tuple[Ints, Ints, Ints]  # (row index, first column, column to stop before), broadcasting
Ranges = tuple[tuple[int, int], ...]  # of blocks, each up to but without the second


class Fixed(Drawn):
    size: int
    count: int
    causal: bool
    horizontal: bool
    groups: int

    @property
    def per_head(self) -> bool:  # type: ignore[override]
        return self.groups > 1

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.groups

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        n = n_cols
        start = rows - rows % self.size
        first = self.size - (1 + head % self.groups) * self.count
        whole = n - n % self.size
        summaries = np.arange(first, whole, self.size)
        if whole < n:  # a short window; from the end, as a negative index would have it
            begin = min(whole + first, n - self.count)
            summaries = np.append(summaries, begin if begin >= 0 else max(0, n + begin))
        stops = np.minimum(summaries + self.count, n)
        spans = [_windows(rows, start, start + self.size, n, self.causal)]
        since = np.zeros_like(summaries) if not self.causal else summaries
        i, which = np.nonzero(rows[:, None] >= since)
        spans.append((i, summaries[which], stops[which]))
        if self.horizontal:
            of = np.searchsorted(summaries, rows, "right") - 1
            i = np.flatnonzero((of >= 0) & (rows < stops[of]))
            spans.append((i, np.array(0), np.array(n)))
        return union(spans, n)


class Variable(Drawn):
    random: int
    ranges: Ranges
    causal: bool
    windows: tuple[int, ...]
    horizontal: bool

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        n = n_cols
        if self.random > n:
            raise ValueError(f"{self} draws {self.random} of {n} blocks: give fewer random ones")
        i, col = choose(
            self.source.keys(head, rows), np.full(len(rows), self.random), np.full(len(rows), n)
        )
        bounds = np.cumsum((0, *self.windows))
        window = np.searchsorted(bounds, rows, "right") - 1
        last = self.windows[-1]
        beyond = np.maximum(rows - bounds[-1], 0) // last * last + bounds[-1]
        inside = window < len(self.windows)
        start = np.where(inside, bounds[np.minimum(window, len(self.windows))], beyond)
        stop = np.where(inside, np.append(bounds, 0)[window + 1], beyond + last)
        spans = [(i, col, col + 1), _windows(rows, start, stop, n, self.causal)]
        for first, end in self.ranges:
            if first < n:
                seen = rows >= first if self.causal else rows >= 0
                spans.append((np.flatnonzero(seen), np.array(first), np.array(end)))
                if self.horizontal:
                    whole = np.flatnonzero((rows >= first) & (rows < end))
                    spans.append((whole, np.array(0), np.array(n)))
        return union(spans, n)


class Sliding(Drawn):
    random: int
    ranges: Ranges
    causal: bool
    window: int
    min_blocks: int  # of a sequence

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        n = n_cols
        if n < self.min_blocks:
            raise ValueError(
                f"{self} needs {self.min_blocks} blocks of {self.block} tokens, but there are {n}: "
                "give a smaller block or fewer of them"
            )
        every = np.arange(len(rows))
        free = np.minimum(rows + 1, n) if self.causal else np.full(len(rows), n)
        i, col = choose(self.source.keys(head, rows), np.full(len(rows), self.random), free)
        radius = self.window // 2
        spans = [(i, col, col + 1), (every, rows - radius, rows + radius + 1)]
        for first, end in self.ranges:
            if first < n:
                whole = np.flatnonzero((rows >= first) & (rows < end))
                spans.append((every, np.array(first), np.array(end)))
                spans.append((whole, np.array(0), np.array(n)))
        if self.causal:
            spans = [(i, first, np.minimum(stop, rows[i] + 1)) for i, first, stop in spans]
        return union(spans, n)


def _windows(rows: Ints, start: Ints, stop: Ints, n: int, causal: bool) -> Span:
    """The window [start, stop) of every row."""
    stop = np.minimum(stop, n)
    return np.arange(len(rows)), start, np.minimum(stop, rows + 1) if causal else stop
