"""Block-sparse linear layers on a GPU: the calls of the CPU's tests, compiled ones, CUDA graphs."""

import pytest
import torch

import masks
from sparseflash import BlockSparseMLP
from tests.gpu_calls import GPU, captured
from tests.sparseflash.test_linear import check_some

pytestmark = GPU
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("part", range(5))
def test_random_calls(part):
    with torch.device("cuda"):
        for seed in range(100 * part, 100 * part + 100):
            check_some(seed, DTYPES, [16, 32, 64, 128])


def make(dtype=torch.bfloat16) -> tuple[BlockSparseMLP, torch.Tensor]:
    rule = masks.random_blocks(0.4, block=64)
    mlp = BlockSparseMLP(256, 1024, mask=rule, block_size=64, device="cuda", dtype=dtype)
    return mlp, torch.randn(2, 700, 256, device="cuda", dtype=dtype, requires_grad=True)


def step(mlp, x) -> list[torch.Tensor]:
    out = mlp(x)
    return [out, *torch.autograd.grad(out.square().sum(), (x, *mlp.parameters()))]


def test_gradients_are_reproducible():
    mlp, x = make()
    assert all(map(torch.equal, step(mlp, x), step(mlp, x)))


def test_compiled(fresh_dynamo):
    mlp, x = make()
    torch.testing.assert_close(step(torch.compile(mlp, fullgraph=True), x), step(mlp, x))


def test_cuda_graph():
    mlp, x = make()
    wanted = step(mlp, x)
    graph, found = captured(lambda: step(mlp, x))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))
