"""The only cache of the package: schedules, work lists, plans and kernel counters.

Keys are values (mask keys, shapes, strides, dtypes), never addresses. A limit on the number of
entries and one on the bytes of the tensors that they keep alive bound it: MAX_ENTRIES and
MAX_BYTES. The least recently used entry goes first.
"""

import itertools
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import masks.build

MAX_ENTRIES = 1024
MAX_BYTES = 2**30


class Cache:
    """Least recently used values, safe among threads.

    Entries may share tensors; the bytes of a shared tensor count once.
    """

    def __init__(self, max_entries: int, max_bytes: int):
        self.max_entries, self.max_bytes, self.bytes = max_entries, max_bytes, 0
        self._entries: dict[Hashable, _Entry] = {}
        self._users: dict[int, int] = {}  # id of a kept tensor -> entries that keep it
        self._lock = threading.Lock()
        self._clock = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        """The value of a key, or None."""
        entry = self._entries.get(key)  # atomic, so it needs no lock
        if entry is None:
            return None
        entry.used = next(self._clock)
        return entry.value

    def put(self, key: Hashable, value: Any, tensors: Iterable[Tensor] = ()) -> None:
        """Keep a value; tensors: all that it keeps alive."""
        with self._lock:
            self._drop(key)
            kept = list({id(t): t for t in tensors}.values())
            self._entries[key] = _Entry(value, kept, next(self._clock))
            for t in kept:
                users = self._users[id(t)] = self._users.get(id(t), 0) + 1
                self.bytes += t.nbytes if users == 1 else 0
            # The newest entry stays even if it alone is too large: it is in use.
            while len(self) > 1 and (len(self) > self.max_entries or self.bytes > self.max_bytes):
                self._drop(min(self._entries, key=lambda key: self._entries[key].used))

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._entries.clear()
            self._users.clear()
            self.bytes = 0

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        for t in entry.tensors if entry else ():
            self._users[id(t)] -= 1
            if not self._users[id(t)]:
                del self._users[id(t)]
                self.bytes -= t.nbytes


@dataclass(slots=True)
class _Entry:
    value: Any
    tensors: list[Tensor]
    used: int  # time of the last use


cache = Cache(MAX_ENTRIES, MAX_BYTES)


def clear_cache() -> None:
    """Free all that `attention` keeps between calls: block masks, schedules, work lists, plans.

    The next call of each kind builds them again. The cache is bounded: it keeps at most 1,024
    entries and about 1 GiB of device memory, and drops the least recently used ones first. Block
    masks on the host have a limit of their own, in `masks`.
    """
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()  # kernels of any stream may still read what is freed here
    cache.clear()
    masks.build.cache.clear()
