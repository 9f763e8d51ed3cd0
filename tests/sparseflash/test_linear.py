"""Block-sparse linear layers against dense ones in float64: CPU, interpreter and GPU."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import masks
import sparseflash
from masks import BlockMask
from sparseflash import BlockSparseLinear, BlockSparseMLP
from sparseflash.linear import operator
from sparseflash.testing import relative_error
from tests.gpu_calls import GPU, captured
from tests.op_cases import INTERPRETED

LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
OPERATORS = (torch.ops.sparseflash.linear.default, torch.ops.sparseflash.linear_backward.default)


@pytest.fixture
def kernels(monkeypatch):
    """Let the Triton kernels compute on the CPU: in the interpreter, the conftest asks for it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(operator, "_has_kernels", lambda device: True)


def some_mask(rng: random.Random, rows: int, cols: int, block: int) -> BlockMask:
    """Return random blocks, with empty rows and columns among them."""
    layout = np.random.default_rng(rng.randrange(2**32)).random((rows, cols)) < rng.random()
    return BlockMask.from_layout(layout, block)


def some_x(rng: random.Random, width: int, dtype: torch.dtype) -> Tensor:
    """Return (.., width) of any strides."""
    n = rng.choice([0, 1, 5, 33, 70])
    form = rng.choice(["plain", "batch", "wide", "turned", "unaligned"])
    if form == "batch":
        return torch.randn(2, n, width, dtype=dtype)
    if form == "wide":
        return torch.randn(n, width + 16, dtype=dtype)[:, 16:]
    if form == "turned":
        return torch.randn(width, n, dtype=dtype).T
    return (
        torch.randn(n, width + 1, dtype=dtype)[:, 1:]
        if form == "unaligned"
        else torch.randn(n, width, dtype=dtype)
    )


def check(module: nn.Module, dense: nn.Module, x: Tensor) -> None:
    """Compare a module with a dense one in float64: result and all gradients.

    The gradients of weights are compared where the blocks are.
    """
    x = x.detach().requires_grad_()
    out = module(x)
    dout = torch.randn(out.shape[-1:] + out.shape[:-1], dtype=out.dtype).movedim(0, -1)
    found = torch.autograd.grad(out, (x, *module.parameters()), dout)
    wide = x.detach().double().requires_grad_()
    wanted_out = dense(wide)
    wanted = torch.autograd.grad(wanted_out, (wide, *dense.parameters()), dout.double())
    layers = [m for m in module.modules() if isinstance(m, BlockSparseLinear)]
    blocks = {id(layer.weight): layer for layer in layers}
    pairs = [(out, wanted_out), (found[0], wanted[0])]
    for p, a, b in zip(module.parameters(), found[1:], wanted[1:], strict=True):
        if id(p) in blocks:
            kept = nn.Linear(*b.T.shape, bias=False).to(b)
            kept.weight.data = b
            b = BlockSparseLinear.from_dense(kept, mask=blocks[id(p)].mask).weight
        pairs.append((a, b))
    for a, b in pairs:
        assert a.shape == b.shape and a.dtype == x.dtype
        if b.numel() and b.abs().max() > 0:
            assert relative_error(a, b) < LIMITS[x.dtype]
        else:
            assert not a.numel() or a.abs().max() == 0


def check_some(seed: int, dtypes: list[torch.dtype], blocks: list[int]) -> None:
    """Check a layer or an MLP of the seed."""
    rng, dtype = random.Random(seed), random.Random(seed).choice(dtypes)
    torch.manual_seed(seed)
    block, rows, cols = rng.choice(blocks), rng.randint(1, 4), rng.randint(1, 4)
    if rng.random() < 0.6:
        mask = some_mask(rng, rows, cols, block)
        layer = BlockSparseLinear(
            mask.n_k, mask.n_q, mask=mask, bias=rng.random() < 0.7, dtype=dtype
        )
        return check(layer, layer.to_dense().double(), some_x(rng, mask.n_k, dtype))
    finer = 1 + (block > 16 and rng.random() < 0.5)
    second = some_mask(rng, finer * cols, finer * rows, block // finer)
    pair = some_mask(rng, rows, cols, block), second
    act, gate = rng.choice(operator.ACTIVATIONS), rng.random() < 0.5
    options = {"activation": act, "gate": gate, "bias": rng.random() < 0.7}
    x = some_x(rng, cols * block, dtype)
    options["rank"] = rng.choice([0, 0, 5, block, block + 3])
    mlp = BlockSparseMLP(cols * block, rows * block, mask=pair, dtype=dtype, **options)
    for layer in (mlp.up, mlp.down) if options["rank"] else ():
        nn.init.normal_(layer.up)
    check(mlp, Dense(mlp), x)


class DenseLinear(nn.Module):
    """A layer in float64, of plain products."""

    def __init__(self, layer: BlockSparseLinear):
        super().__init__()
        wide = copy.deepcopy(layer).double()
        low = wide.up @ wide.down if wide.rank else 0
        self.weight = nn.Parameter(wide.to_dense().weight.detach() - low)
        self.bias, self.low, self.high = wide.bias, wide.down, wide.up

    def forward(self, x):
        weight = self.weight if self.low is None else self.weight + self.high @ self.low
        return nn.functional.linear(x, weight, self.bias)


class Dense(nn.Module):
    """An MLP in float64, of plain products."""

    def __init__(self, mlp: BlockSparseMLP):
        super().__init__()
        self.up, self.down = DenseLinear(mlp.up), DenseLinear(mlp.down)
        kinds = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU()}
        self.act, self.gate = kinds[mlp.activation], mlp.gate

    def forward(self, x):
        x = self.up(x)
        if not self.gate:
            return self.down(self.act(x))
        first, second = x.chunk(2, -1)
        return self.down(self.act(first) * second)


def test_random_calls():
    for seed in range(150):
        check_some(seed, [torch.float64, torch.float32, torch.bfloat16], [16, 32, 64])


@INTERPRETED
@pytest.mark.parametrize("part", range(2))
def test_random_calls_of_kernels(kernels, part):
    """float16 alone has descriptors."""
    for seed in range(10 * part, 10 * part + 10):
        check_some(seed, [torch.float32, torch.float16], [16, 32] if seed % 5 else [64])


@INTERPRETED
@pytest.mark.parametrize("swap, group", [(False, 1), (True, 2), (True, 4)])
def test_each_form_of_the_kernels(kernels, monkeypatch, swap, group):
    from sparseflash.linear import kernels as module

    tiles = module.Tiles(64, 32, 4, 3, swap, group, flip=swap)
    monkeypatch.setattr(module, "product_tiles", lambda *given: tiles)
    monkeypatch.setattr(module, "sampled_tiles", lambda *given: tiles)
    monkeypatch.setattr(module, "split", lambda *given: 2)
    for gate in (False, True):
        mlp = BlockSparseMLP(
            128, 192, mask=masks.random_blocks(0.6, block=64), block_size=64, gate=gate,
            dtype=torch.float16,
        )  # fmt: skip
        check(mlp, Dense(mlp), torch.randn(70, 128, dtype=torch.float16))


@INTERPRETED
def test_calls_of_other_layouts(kernels):
    """What is prepared for a call serves no other one."""
    half = {"dtype": torch.float16}
    mlp = BlockSparseMLP(32, 64, mask=masks.butterfly(16), block_size=16, gate=True, **half)
    wide, long = torch.randn(7, 48, **half), torch.randn(32, 7, **half)
    for x in (torch.randn(5, 32, **half), torch.randn(7, 32, **half), long.T, wide[:, 16:]):
        with torch.no_grad():
            wanted = mlp(x)
        check(mlp, Dense(mlp), x)
        assert torch.equal(mlp(x), wanted)
    up, bias = mlp.up, torch.randn(256, **half)[::2]
    found = [sparseflash.linear(x, up.weight, up.mask, b) for b in (bias, bias.clone())]
    assert torch.equal(*found)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", operator.ACTIVATIONS)
def test_gradcheck(activation, gate):
    options = {"block_size": 16, "mask": masks.butterfly(16, 1), "rank": 20 * gate}
    mlp = BlockSparseMLP(32, 64, activation=activation, gate=gate, **options).double()
    nn.init.normal_(mlp.up.weight)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in mlp.named_parameters()]

    def call(x, *values):
        return torch.func.functional_call(mlp, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *mlp.parameters()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype):
    """Compilers trace the operators by their fake results."""
    utils = ("test_schema", "test_faketensor")
    mlp = BlockSparseMLP(32, 64, mask=masks.butterfly(16), block_size=16, dtype=dtype)
    up, down = mlp.up, mlp.down
    x, none = torch.randn(5, 32, dtype=dtype), torch.empty(0, dtype=dtype)
    for second in ((down.weight, down.bias), (None, None)):
        for keep in (True, False):
            rest = up.mask.key, down.mask.key, "gelu" if down else "", False
            call = x, up.weight, up.bias, *second, *rest
            torch.library.opcheck(OPERATORS[0], (*call, keep), test_utils=utils)
        saved = (torch.randn(5, 64, dtype=dtype),) * 2 if second[0] is not None else (none, none)
        dy = torch.randn(5, 32 if second[0] is not None else 64, dtype=dtype)
        for wanted in ([True] * 5, [False, True, False, True, False]):
            wanted = wanted if second[0] is not None else [*wanted[:3], False, False]
            call = dy, x, up.weight.detach(), second[0], *saved, *rest, wanted
            torch.library.opcheck(OPERATORS[1], call, test_utils=utils)


def test_compiled(fresh_dynamo):
    layers = nn.Sequential(
        BlockSparseLinear(32, 64, mask="butterfly:16", block_size=16, rank=2),
        BlockSparseMLP(64, 32, mask=masks.local(20), block_size=16, rank=2),
    )
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 7):
        x = torch.randn(2, n, 32, requires_grad=True)
        found = torch.autograd.grad(compiled(x).square().sum(), (x, *layers.parameters()))
        wanted = torch.autograd.grad(layers(x).square().sum(), (x, *layers.parameters()))
        torch.testing.assert_close(found, wanted)


def test_autocast():
    mlp = BlockSparseMLP(32, 64, mask=masks.butterfly(16), block_size=16)
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and mlp.up.weight.grad.dtype == x.grad.dtype == x.dtype
    assert relative_error(out, mlp(x).double()) < 2e-2


def test_dense_and_back():
    mask = masks.random_blocks(0.4, block=16)
    layer = BlockSparseLinear(64, 96, mask=mask, block_size=16)
    dense = layer.to_dense()
    again = BlockSparseLinear.from_dense(dense, mask=layer.mask)
    torch.testing.assert_close(dict(again.state_dict()), dict(layer.state_dict()), rtol=0, atol=0)
    assert (dense.weight == 0).float().mean() == pytest.approx(1 - layer.mask.density)
    ranked = BlockSparseLinear(64, 96, mask=mask, block_size=16, rank=3).double()
    nn.init.normal_(ranked.up)
    x = torch.randn(5, 64, dtype=torch.float64)
    torch.testing.assert_close(ranked.to_dense()(x), ranked(x))


def test_from_dense_by_magnitude():
    dense = nn.Linear(64, 64)
    with torch.no_grad():
        dense.weight[16:32, 48:] *= 10
        dense.weight[:16, :16] *= 8
    layer = BlockSparseLinear.from_dense(dense, density=2 / 16, block_size=16)
    assert layer.blocks.tolist() == [[0, 0], [1, 3]]
    assert torch.equal(layer.weight[1], dense.weight[16:32, 48:])
    assert torch.equal(layer.bias, dense.bias)


def test_state_dict():
    options = {"block_size": 16, "bias": False}
    first, same = (BlockSparseLinear(64, 64, mask=masks.local(16), **options) for _ in range(2))
    assert sorted(first.state_dict()) == ["blocks", "weight"]
    same.load_state_dict(first.state_dict())
    assert torch.equal(same.weight, first.weight)
    count = first.mask.nnz
    layout = np.zeros((4, 4), bool)
    layout.flat[:count] = True
    other = BlockSparseLinear(64, 64, mask=BlockMask.from_layout(layout, 16), bias=False)
    before = other.weight.clone()
    with pytest.raises(RuntimeError, match="blocks of the state dict"):
        other.load_state_dict(first.state_dict())
    assert torch.equal(other.weight, before)


def test_layers_of_the_meta_device():
    """What loads weights late, or draws them late, has the blocks of the mask."""
    options = {"mask": "butterfly:16", "block_size": 16}
    first = BlockSparseLinear(64, 96, **options)
    with torch.device("meta"):  # the buffer too, which is made from an array
        assigned, loaded, drawn = (BlockSparseLinear(64, 96, **options) for _ in "123")
    assert assigned.blocks.is_meta
    for layer in (loaded, drawn):
        layer.to_empty(device="cpu").blocks.fill_(-1)
    assigned.load_state_dict(first.state_dict(), assign=True)
    loaded.load_state_dict(first.state_dict())
    drawn.reset_parameters()
    x = torch.randn(3, 64)
    for layer, wanted in ((assigned, first), (loaded, first), (drawn, drawn.to_dense())):
        torch.testing.assert_close(layer(x), wanted(x))


@pytest.mark.parametrize("density", [0.125, 0.5, 1.0])
def test_initial_variance(density):
    """The outputs have the variance of a dense layer's at every density, in every row of blocks."""
    torch.manual_seed(0)
    x = torch.randn(4096, 256)
    layout = masks.random_blocks(density, block=16).build(512, 256, block_size=16).layout()[0, 0]
    layout[:4] = 1  # rows with more inputs than others
    layer = BlockSparseLinear(256, 512, mask=BlockMask.from_layout(layout, 16), rank=4)
    variance = layer(x).var(0)
    dense = nn.Linear(256, 512)(x).var(0).mean().item()
    for part in (variance[:64], variance[64:]):
        assert part.mean().item() == pytest.approx(dense, rel=0.15)


def test_masks_of_weights():
    """A rule is stretched from corner to corner; blocks are whole; other forms are as they are."""
    band = BlockSparseLinear(64, 192, mask=masks.local(3), block_size=16).mask.layout()[0, 0] != 0
    found = [row.nonzero()[0].tolist() for row in band[::3]]
    assert found == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert (band.repeat(1, 0)[::3] == band[2::3]).all()
    turned = BlockSparseLinear(192, 64, mask=masks.local(3), block_size=16).mask.layout()[0, 0] != 0
    assert (turned == band.T).all()
    array = np.zeros((32, 48), bool)
    array[20, 40] = True
    layer = BlockSparseLinear(48, 32, mask=BlockMask.from_dense(array, 16))
    assert layer.blocks.tolist() == [[1, 2]]
    assert BlockSparseLinear(128, 256).mask.density == 1


def test_refusals():
    mask = masks.butterfly(32).build(64, block_size=32)
    weight, x = torch.randn(mask.nnz, 32, 32), torch.randn(3, 64)
    call = {"x": x, "weight": weight, "mask": mask, "bias": None}
    for name, value, words in (
        ("x", torch.randn(3, 65), "65"),
        ("x", x.double(), "float64"),
        ("x", x.to("meta"), "meta"),
        ("x", x.int(), "int32"),
        ("x", None, "NoneType"),
        ("weight", weight[1:], "3, 32, 32"),
        ("bias", torch.randn(3), "3"),
        ("mask", masks.butterfly(32), "build"),
        ("mask", masks.local(3).build(64, block_size=(32, 16)), r"\(32, 16\)"),
        ("mask", masks.local(3).build(64, block_size=256), "256"),
        ("mask", masks.local(3).build(60, block_size=16), "60"),
        ("mask", masks.heads(masks.local(3), masks.local(9)).build(64, heads=2), "2 heads"),
    ):
        with pytest.raises(ValueError, match=words):
            sparseflash.linear(**call | {name: value})
    for options, words in (
        ({"mask": mask}, "128"),
        ({"mask": mask, "block_size": 16}, "16"),
        ({"block_size": 48}, "48"),
        ({"block_size": 64, "in_features": 96}, "96"),
        ({"mask": np.ones((64, 128), bool), "block_size": 16}, "from_dense"),
        ({"mask": 3, "block_size": 16}, "int"),
        ({"mask": masks.bigbird(16), "block_size": 16}, "2 heads"),
        ({"in_features": 0}, "in_features"),
    ):
        given = {"in_features": 128, "out_features": 64, "block_size": None} | options
        with pytest.raises(ValueError, match=words):
            BlockSparseLinear(**given)
    for name, value in (("activation", "relu"), ("hidden", 64.0), ("gate", "no")):
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            BlockSparseMLP(128, **{name: value})
    for given in ({}, {"mask": mask, "density": 0.5}, {"density": 1.5}, {"density": "0.5"}):
        with pytest.raises(ValueError, match="density"):
            BlockSparseLinear.from_dense(nn.Linear(64, 64), **given)
    x.requires_grad_()
    out = sparseflash.linear(x, weight, mask).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out, x, create_graph=True)


# ---- on a GPU


def made(dtype=torch.bfloat16) -> tuple[BlockSparseMLP, torch.Tensor]:
    rule = masks.random_blocks(0.4, block=64)
    mlp = BlockSparseMLP(256, 1024, mask=rule, block_size=64, device="cuda", dtype=dtype)
    return mlp, torch.randn(2, 700, 256, device="cuda", dtype=dtype, requires_grad=True)


def step(mlp, x) -> list[torch.Tensor]:
    out = mlp(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *mlp.parameters()))]


class TestGPU:
    pytestmark = GPU

    @pytest.mark.parametrize("part", range(5))
    def test_random_calls_on_a_gpu(self, part):
        with torch.device("cuda"):
            for seed in range(100 * part, 100 * part + 100):
                check_some(seed, [torch.float32, torch.float16, torch.bfloat16], [16, 32, 64, 128])

    def test_gradients_are_reproducible(self):
        mlp, x = made()
        assert all(map(torch.equal, step(mlp, x), step(mlp, x)))

    def test_compiled_on_a_gpu(self, fresh_dynamo):
        mlp, x = made()
        torch.testing.assert_close(step(torch.compile(mlp, fullgraph=True), x), step(mlp, x))

    def test_a_cuda_graph(self):
        mlp, x = made()
        wanted = step(mlp, x)
        graph, found = captured(lambda: step(mlp, x))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, wanted))


def test_the_graph_keeps_the_mask():
    layout = np.tri(5, 3, -2, dtype=bool)
    x, weight = torch.randn(2, 48, requires_grad=True), torch.randn(int(layout.sum()), 16, 16)
    sparseflash.linear(x, weight, BlockMask.from_layout(layout, 16)).sum().backward()
    layer = BlockSparseLinear(48, 80, mask=BlockMask.from_layout(layout, 16), bias=False)
    layer.weight.data = weight
    torch.testing.assert_close(x.grad, layer.to_dense().weight.sum(0).expand(2, -1))
