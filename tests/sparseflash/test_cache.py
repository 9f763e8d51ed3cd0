"""What the cache keeps and drops, and when it waits for a GPU."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparseflash.cache as module
from sparseflash.cache import Cache


@pytest.fixture
def capture(monkeypatch):
    """Says whether a graph is captured."""
    state = {"on": False}
    monkeypatch.setattr(module, "is_capturing", lambda: state["on"])
    return lambda on: state.update(on=on)


def held(*sizes):
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def test_the_least_recently_used_goes_first():
    cache = Cache(max_entries=3, max_bytes=100)
    for key in "abc":
        cache.put(key, key.upper(), held(10))
    assert cache.get("a") == "A"
    cache.put("d", "D", held(10))
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    assert len(cache) == 3 and cache.bytes == 30
    cache.put("e", "E", held(1000))  # the newest stays, though it is too large
    assert [cache.get(key) for key in "abcde"] == [None] * 4 + ["E"]
    cache.put("e", "again", held(20))
    assert cache.get("e") == "again" and len(cache) == 1 and cache.bytes == 20


def test_bytes_of_shared_tensors_count_once():
    cache = Cache(max_entries=9, max_bytes=100)
    shared = held(60)
    cache.put("a", 1, shared)
    cache.put("b", 2, [*shared, *held(30)])
    assert cache.bytes == 90 and len(cache) == 2
    cache.put("c", 3, held(40))  # a alone frees nothing
    assert [cache.get(key) for key in "abc"] == [None, None, 3] and cache.bytes == 40


def test_what_a_graph_was_captured_with_stays(capture):
    cache = Cache(max_entries=2, max_bytes=100)
    cache.put("a", "A", held(90))
    cache.put("b", "B", held(5))
    capture(True)
    assert cache.get("a") == cache.get("a") == "A"
    capture(False)
    for number in range(5):
        cache.put(number, number, held(50))
    assert cache.get("a") == "A" and cache.get("b") is None
    assert len(cache) == 3 and cache.bytes == 100  # those of the graph do not count
    cache.put("a", "other", held(10))  # another thread made it as well
    assert cache.get("a") == "other" and len(cache) == 3
    cache.clear()
    assert cache.get("a") is None and len(cache) == cache.bytes == 0


def test_nothing_is_dropped_while_a_graph_is_captured(capture):
    cache = Cache(max_entries=2, max_bytes=100)
    capture(True)
    for number in range(4):
        cache.put(number, number, held(50))
    assert len(cache) == 4 and cache.bytes == 200
    capture(False)
    cache.put(4, 4, held(50))
    assert [cache.get(number) for number in range(5)] == [None, None, None, 3, 4]


def test_memory_of_a_gpu_is_freed_when_the_gpu_is_done(monkeypatch):
    cache, waits = Cache(max_entries=1, max_bytes=2**20), []
    with FakeTensorMode():
        first, second = (torch.empty(8, device="cuda:1") for _ in range(2))
    alive = weakref.ref(first)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append((device, alive())))
    cache.put("a", 1, [first])
    del first
    assert not waits
    cache.put("b", 2, [second])
    assert len(waits) == 1 and waits[0][0] == torch.device("cuda:1")
    assert waits[0][1] is not None  # it was still there
    waits.clear()
    assert alive() is None
    cache.put("c", 3, held(8))
    assert len(waits) == 1
    cache.put("d", 4, held(8))
    assert len(waits) == 1  # memory of the CPU needs no waiting
