"""Persistent grids whose programs claim work at uneven times: few that run many tiles, those that
begin late, after others have done most of the work, and those with tiles that take no time.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

import masks
import sparseflash
from sparseflash.backends.hopper import backward, forward, passes
from sparseflash.cache import cache
from sparseflash.dynamic.lengths import blocks_of, skip_padding
from sparseflash.testing import relative_error
from tests.gpu_calls import HOPPER, RESULTS, pairwise

pytestmark = HOPPER
N = 1024
PATTERNS = {
    "dense": None,
    "full blocks": masks.sliding_tiles((32, 32), (8, 16), (3, 2)) >> masks.tiled((32, 32), (8, 16)),
    "partial blocks": masks.local(100) | masks.butterfly(64),
    "padding": None,
    "padding, butterfly": masks.butterfly(64) | masks.local(64),
}
# head dim, batch, dropout: tiles enough for several rounds of every program
SHAPES = [(32, 96, 0.0), (32, 96, 0.1), (64, 64, 0.1), (64, 64, 0.0), (128, 48, 0.0)]


@triton.jit
def hold(Sink, least, step):
    """Keeps a multiprocessor busy: program i for least + i * step nanoseconds."""
    end = globaltimer() + least + tl.program_id(0) * step
    now = globaltimer()
    while now < end:
        now = globaltimer()
    tl.store(Sink + tl.program_id(0), now)


class Problem:
    """Inputs with scores as sharp as those of a trained model, new ones at every `draw`."""

    def __init__(self, name: str, head_dim: int, batch: int, dropout_p: float, deterministic: bool):
        # token by token, q, k and v side by side, as a projection leaves them
        fused = torch.zeros(batch, N, 3, 2, head_dim, dtype=torch.bfloat16, device="cuda")
        self.qkv = [t.transpose(1, 2).requires_grad_() for t in fused.unbind(2)]
        self.dout = torch.randn_like(self.qkv[0])
        self.seed = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.options = {
            "dropout_p": dropout_p, "seed": self.seed if dropout_p else None,
            "deterministic": deterministic, "backend": "hopper", "return_lse": True,
        }  # fmt: skip
        self.pattern, self.padded = PATTERNS[name], name.startswith("padding")
        self.lengths = torch.full((batch,), N, dtype=torch.int32, device="cuda")

    def draw(self) -> None:
        with torch.no_grad():
            for t in self.qkv:
                t.normal_(std=2)
            self.dout.normal_()
            self.seed.random_(2**40)
            self.lengths.random_(1, N + 1)

    def call(self):
        mask = self.pattern
        if self.padded:
            mask = skip_padding(blocks_of(mask, N, 2, self.qkv[0].device), self.lengths)
        out, lse = sparseflash.attention(*self.qkv, mask, **self.options)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, self.qkv, self.dout)


def assert_same(found, expected, deterministic: bool, what: str) -> None:
    for name, a, e in zip(RESULTS, found, expected, strict=True):
        if deterministic or name != "dq":  # dq is summed by atomics
            assert torch.equal(a, e), f"{what}: {name} differs by {relative_error(a, e):.3g}"
        else:
            assert relative_error(a, e) < 1e-2, f"{what}: {name} {relative_error(a, e):.3g}"


@pytest.fixture
def programs(monkeypatch):
    """A function that lets the grids be those of a GPU with so many multiprocessors."""

    def change(count: int) -> None:
        for module in (forward, backward, passes):
            monkeypatch.setattr(module, "multiprocessors", lambda device: count)
        cache.clear()

    yield change
    monkeypatch.undo()
    cache.clear()


@pairwise(**{"head_dim, batch, dropout_p": SHAPES}, name=PATTERNS, deterministic=[False, True])
def test_few_programs_that_run_all_tiles(head_dim, batch, dropout_p, name, deterministic, programs):
    problem = Problem(name, head_dim, batch, dropout_p, deterministic)
    problem.draw()
    expected = problem.call()
    for count in (1, 5):
        programs(count)
        assert_same(problem.call(), expected, deterministic, f"{count} multiprocessors")


@pairwise(
    **{"head_dim, batch, dropout_p": SHAPES},
    name=PATTERNS,
    deterministic=[False, True],
    captured=[False, True],
)
def test_programs_that_begin_late(head_dim, batch, dropout_p, name, deterministic, captured):
    problem = Problem(name, head_dim, batch, dropout_p, deterministic)
    side = torch.cuda.Stream()
    sink = torch.zeros(1024, dtype=torch.int64, device="cuda")
    # a whole multiprocessor each, or a half, beside which a program of ours may find room
    blockers = [(110, 16, 128), (131, 16, 128), (200, 8, 128), (250, 4, 128)]
    problem.draw()
    problem.call()
    graph, results = None, ()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = problem.call()

    def call():
        if graph is None:
            return problem.call()
        graph.replay()
        return [t.clone() for t in results]

    for round_ in range(12):
        count, warps, registers = blockers[round_ % len(blockers)]
        problem.draw()
        expected = problem.call()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold[(count,)](sink, 50_000, 4_000, num_warps=warps, maxnreg=registers)
        found = call()
        torch.cuda.synchronize()
        assert_same(found, expected, deterministic, f"round {round_}")


@pytest.mark.parametrize("name", ["padding", "padding, butterfly"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_every_item_is_claimed_however_short_they_are(head_dim, name):
    """A claim that gets lost shows in few calls, and in one tile of these."""
    problem = Problem(name, head_dim, 3072 // head_dim, 0.0, False)
    qkv = [t.detach() for t in problem.qkv]
    problem.draw()
    for round_ in range(600):
        problem.lengths.random_(1, N + 1)
        blocks = blocks_of(problem.pattern, N, 2, problem.lengths.device)
        mask = skip_padding(blocks, problem.lengths)
        out, lse = sparseflash.attention(*qkv, mask, backend="hopper", return_lse=True)
        begun = torch.arange(0, N, 128, device=lse.device) < problem.lengths[:, None]
        real = begun[:, None, :, None].expand(-1, 2, -1, 128).flatten(2)
        left_out = (lse.isfinite() != real) | lse.isnan() | out.isnan().any(-1)
        assert not left_out.any(), f"round {round_}: rows {left_out.nonzero()[::128].tolist()}"
