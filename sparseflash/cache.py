"""What the package keeps between calls, and memory that outlives the call that allocates it.

`cache` holds schedules, tile lists, plans with their prepared launches, decoding steps and tables
of selectors. Keys are values (mask keys, shapes, strides, dtypes), never addresses.
MAX_ENTRIES and MAX_BYTES bound it, the latter in bytes of the tensors that entries keep alive; the
least recently used entry goes first. What a CUDA graph was captured with stays beyond the limits:
its replays read the same memory. A module that keeps something of its own (prepared launches
without a plan, counters, converted masks) registers its release with `on_clear`.
"""

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import masks.build
from masks.registry import Keyed, by_text

MAX_ENTRIES = 1024
MAX_BYTES = 2**30
Make = TypeVar("Make", bound=Callable[..., Any])
Value = TypeVar("Value")


class Cache:
    """Least recently used values, safe among threads.

    Entries may share tensors; the bytes of a shared tensor count once.
    """

    def __init__(self, max_entries: int, max_bytes: int):
        self.max_entries, self.max_bytes, self.bytes = max_entries, max_bytes, 0
        self._entries: dict[Hashable, _Entry] = {}
        self._pinned: dict[Hashable, _Entry] = {}  # what graphs were captured with
        self._users: dict[int, int] = {}  # id of a kept tensor -> entries that keep it
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries) + len(self._pinned)

    def get(self, key: Hashable) -> Any:
        """Return the value of a key, or None. The capture of a CUDA graph pins its entry."""
        entry = self._entries.get(key) or self._pinned.get(key)  # atomic, so they need no lock
        if entry is None:
            return None
        entry.used = _tick()
        if is_capturing():
            self._pin(key)
        return entry.value

    def put(self, key: Hashable, value: Any, tensors: Iterable[Tensor] = ()) -> None:
        """Keep a value; tensors: all that it keeps alive.

        Waits for the GPUs whose memory it frees: kernels of another stream may still read it.
        """
        with self._lock:
            freed = self._drop(key)
            kept = list({id(t): t for t in tensors}.values())
            self._entries[key] = _Entry(value, kept, _tick())
            for t in kept:
                users = self._users[id(t)] = self._users.get(id(t), 0) + 1
                self.bytes += t.nbytes if users == 1 else 0
            if is_capturing():  # which cannot wait: what is too much goes with the next entry
                return
            # The newest entry stays even if it alone is too large: it is in use.
            while len(self._entries) > 1 and self._full():
                freed += self._drop(min(self._entries, key=lambda key: self._entries[key].used))
            for device in {t.device for t in freed if t.is_cuda}:
                torch.cuda.synchronize(device)

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._entries.clear()
            self._pinned.clear()
            self._users.clear()
            self.bytes = 0

    def forget(self) -> None:
        """Drop every entry; graphs keep what they were captured with, which nothing else finds."""
        pinned = {object(): entry for entry in self._pinned.values()}
        self.clear()
        self._pinned.update(pinned)

    def _full(self) -> bool:
        return len(self._entries) > self.max_entries or self.bytes > self.max_bytes

    def _pin(self, key: Hashable) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._pinned[key] = entry  # before it goes: others look it up without the lock
                self._drop(key)

    def _drop(self, key: Hashable) -> list[Tensor]:
        """Drop an entry. Returns the tensors that no other one within the limits keeps."""
        entry, freed = self._entries.pop(key, None), []
        for t in entry.tensors if entry else ():
            self._users[id(t)] -= 1
            if not self._users[id(t)]:
                del self._users[id(t)]
                self.bytes -= t.nbytes
                freed.append(t)
        return freed


@dataclass(slots=True)
class _Entry:
    value: Any
    tensors: list[Tensor]
    used: int  # time of the last use


_ticks = itertools.count()


def _tick() -> int:
    return next(_ticks)


# What torch.compiler.assume_constant_result does, which takes seconds to import the compiler. A
# traced counter would make a compiled call compile again each time; torch 2.11 cannot trace it.
_tick._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

cache = Cache(MAX_ENTRIES, MAX_BYTES)


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportAttributeAccessIssue]


def are_fake() -> bool:
    """Whether FakeTensorMode makes all tensors, outside of a compiler."""
    return not torch.compiler.is_compiling() and torch._C._get_dispatch_mode(_FAKE) is not None


def cached(make: Make) -> Make:
    """`make`, whose results, with their tensors, are in the cache under its arguments.

    These must be hashable, and positional. Masks count by their text, since torch.compile cannot
    hash a block mask, and reads all keys of the cache. It does not trace what is missing. Under
    FakeTensorMode nothing is kept, nor found: real and fake tensors do not mix.
    """

    missing = untraced(make, "call the function once before you compile it")

    @functools.wraps(make)
    def find(*args: Any) -> Any:
        if are_fake():
            return make(*args)
        key = make, *(x.key if isinstance(x, Keyed) else x for x in args)
        found = cache.get(key)
        if found is None:
            found = missing(*args)
            held = vars(found) if is_dataclass(found) else found
            cache.put(key, found, [x for x in tree_leaves(held) if isinstance(x, Tensor)])
        return found

    return cast(Make, find)


def untraced(run: Make, why: str) -> Make:
    """Return `run`, which torch.compile calls between two graphs; why: it cannot have one."""

    @functools.wraps(run)
    def call(*args: Any, **options: Any) -> Any:
        loaded = "torch._dynamo" in sys.modules  # which takes seconds to import
        return (torch.compiler.disable(run) if loaded else run)(*args, **options)

    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    return cast(Make, call)


_further: list[Callable[[], None]] = []


def on_clear(release: Callable[[], None]) -> None:
    """Make `clear_cache` call `release`, which frees what a module keeps beside the cache."""
    _further.append(release)


def clear_cache() -> None:
    """Free all that is kept between calls: block masks, schedules, tile lists, plans, launches.

    The next call of each kind builds them again. The cache is bounded: it keeps at most 1,024
    entries and about 1 GiB of device memory, and drops the least recently used ones first. It keeps
    what a CUDA graph was captured with beyond that. After this call such graphs must not be
    replayed. Block masks on the host have a limit of their own, in `masks`. Compiled kernels and
    facts about the devices stay.
    """
    _wait()
    cache.clear()
    masks.build.clear()
    for release in _further:
        release()


@by_text
def _forget() -> None:
    """Forget the plans of a pattern's masks, since it was defined again."""
    _wait()
    cache.forget()


def _wait() -> None:
    """Kernels of any stream may still read what is freed after this."""
    if torch.cuda.is_initialized() and not is_capturing():
        torch.cuda.synchronize()


def persistent(make: Callable[[], Value], device: torch.device | str) -> Value:
    """Return make(), run without gradients, for a cache to keep.

    While torch.compile warms up or records a CUDA graph, the allocations of its thread belong to
    the pool of that graph, and torch refuses tensors that stay there. On a GPU a new thread
    therefore runs `make`. Raises RuntimeError while a CUDA graph is captured, because a capture
    cannot record an allocation that outlives it.
    """

    def without_gradients() -> Value:
        with torch.inference_mode(False), torch.no_grad():
            return make()

    device = torch.device(device)
    if device.type != "cuda":
        return without_gradients()

    def on_device() -> Value:
        with torch.cuda.device(device):
            made = without_gradients()
            torch.cuda.current_stream().synchronize()
        return made

    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first call with a mask builds its block lists, which a CUDA graph cannot"
                " capture; call attention once with this mask and these shapes before capturing"
            )
        torch.cuda.current_stream().synchronize()  # `make` may read tensors that are being written
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(on_device).result()
