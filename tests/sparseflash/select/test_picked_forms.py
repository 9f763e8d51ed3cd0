"""The two forms of attention to picked blocks: which is taken, and the lists of joined queries."""

import itertools

import pytest
import torch

from sparseflash import select
from sparseflash.kernels.launch import launch
from tests import picks_cases
from tests.op_cases import INTERPRETED
from tests.picks_cases import CASES

kernels = pytest.importorskip("sparseflash.kernels.tl.picks")
picked = pytest.importorskip("sparseflash.select.kernels.picked")
pytestmark = INTERPRETED


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, n_q, n_k, k", [(4, 18, 100, 3), (16, 17, 80, 5), (1, 5, 70, 4)])
def test_joined_lists(queries, n_q, n_k, k, causal):
    """Each block that queries of a tile picked comes once, with all of them, and no other."""
    block, lists, tiles = 16, 2, -(-n_q // queries)
    generator = torch.Generator().manual_seed(queries)
    count = -(-n_k // block)
    found = torch.rand(1, lists, n_q, count, generator=generator).argsort(-1)[..., :k]
    found[torch.rand(found.shape, generator=generator) < 0.3] = -1
    given = select.Picks.of(found, block, n_k, causal=causal).blocks
    which, who = torch.full((2, lists, tiles, queries * k), -7, dtype=torch.int32)
    counts = torch.full((lists, tiles), -7, dtype=torch.int32)
    launch(
        kernels.join_picks, (tiles, lists), given, which, who, counts, n_q, n_k, N_PICKS=k, PICKS=8,
        QUERIES=queries, BLOCK=block, CAUSAL=causal,
    )  # fmt: skip
    for z, tile in itertools.product(range(lists), range(tiles)):
        wanted = {}
        for i, query in enumerate(range(tile * queries, min(n_q, tile * queries + queries))):
            for number in found[0, z, query].tolist():
                if number >= 0 and (not causal or number * block <= query + n_k - n_q):
                    wanted[number] = wanted.get(number, 0) | 1 << i
        end = int(counts[z, tile])
        made = zip(which[z, tile, :end].tolist(), who[z, tile, :end].tolist(), strict=True)
        assert end == len(wanted) and dict(made) == wanted
        assert (which[z, tile, end:] == -7).all() and (who[z, tile, end:] == -7).all()


@pytest.mark.parametrize("most, queries", [(4096, 16), (16, 4), (1, 1)])
def test_long_lists_are_those_of_fewer_queries(most, queries, monkeypatch):
    ran = []
    monkeypatch.setattr(picked, "_gathers", lambda *given: False)
    monkeypatch.setattr(picked, "_MOST_JOINED", most)
    monkeypatch.setattr(picked, "launch", lambda kernel, *args, **options: (
        ran.append((kernel, options)), launch(kernel, *args, **options)))  # fmt: skip
    picks_cases.check(CASES["two lists a key head, more keys"], "cpu")
    by_queries = picked.picks_forward, picked.picks_backward_q
    sizes = [(o["QUERIES"], o["ROWS"]) for kernel, o in ran if kernel in by_queries]
    assert set(sizes) == {(queries, 16 // queries)}  # no product has fewer rows than 16
