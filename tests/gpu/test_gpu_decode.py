"""Steps of decoding on a GPU, against the float64 oracle."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import assert_close
from tests.attention_cases import LOW
from tests.decode_cases import Step, random_step
from tests.gpu_calls import GPU, no_waiting

pytestmark = GPU

RECENT = masks.local(500) & masks.causal() | masks.global_tokens(3)
ROOM = 3840  # a multiple of all page sizes


def check_step(step):
    """Half inputs may be off by as much as rounding p, v and out of this precision moves them."""
    (out, lse), (expected, expected_lse) = step.run(backend="triton"), step.exact()
    if step.dtype == torch.float32:
        assert_close(out, expected, name="out")
        assert_close(lse, expected_lse, name="lse")
    else:
        eps = torch.finfo(step.dtype).eps
        assert (out - expected).abs().max() <= 2 * eps * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert not out[lse == -torch.inf].any()


@pytest.mark.parametrize("seed", range(500, 530))
def test_decode_random_steps(seed):
    check_step(random_step(seed, dtype=[*LOW, torch.float32][seed % 3], device="cuda"))


@pytest.mark.parametrize("page", [0, 16, 48, 64])
@pytest.mark.parametrize("mask", [None, masks.causal(), RECENT], ids=str)
def test_decode_many_queries_and_pages(mask, page):
    step = Step(
        16, ROOM, 128, (ROOM, 2500, 3), mask, heads=32, kv_heads=8, page=page,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    check_step(step)


@pytest.mark.parametrize("page", [16, 64])
def test_decode_pages_change_no_bit(page):
    shape = {"heads": 8, "kv_heads": 2, "splits": 7, "dtype": torch.bfloat16, "device": "cuda"}
    contiguous = Step(4, ROOM, 128, (ROOM, 77), RECENT, **shape).run()
    in_pages = Step(4, ROOM, 128, (ROOM, 77), RECENT, page=page, **shape).run()
    for a, b in zip(in_pages, contiguous, strict=True):
        assert torch.equal(a, b)


def decode_step(page=0):
    """The call, and the lengths it reads."""
    step = Step(1, ROOM, 64, (ROOM,), RECENT, dtype=torch.float16, page=page, device="cuda")
    (q, k, v), options = step.arguments()

    def call():
        return sparseflash.decode(q, k, v, RECENT, **options)

    return call, options["lengths"]


def test_decode_graph_serves_growing_lengths():
    call, lengths = decode_step(page=16)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for end in (0, 1, 600, ROOM):
        lengths.fill_(end)
        graph.replay()
        assert torch.equal(out, call()), end


def test_decode_waits_for_nothing():
    call, _ = decode_step()
    call()
    with no_waiting():
        call()
