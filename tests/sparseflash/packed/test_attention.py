"""Attention over packed documents: exact, without waiting, in one graph for all lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import masks
import sparseflash
from sparseflash import packed
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.packed import sequences, spans
from sparseflash.packed.blocks import from_spans
from sparseflash.packed.spans import apart
from sparseflash.schedule.blocks import as_tensors
from sparseflash.testing import assert_close, make_qkv, oracle
from tests.op_cases import NoSync, assert_same, run
from tests.packing_cases import assert_packings, errors_of_packings

N = 150
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9, "prefix": 2},
    "shared": {"causal": True, "shared": True},
    "other keys": {"cu_seqlens_k": torch.tensor([0, 3, 40, 41, 70, N])},
    "prefixes": {"causal": True, "prefix": torch.tensor([2, 0, 30, 1, 4])},
}
MASKS = {
    name: lambda offsets, options=options: packed.documents(offsets, N, block_size=16, **options)
    for name, options in OPTIONS.items()
}


def tree(offsets: torch.Tensor):
    """A root, a child with a child of its own, and two more children."""
    end, third = offsets[5], offsets[3]
    leave = torch.stack([end, third, third, offsets[4], end])
    return packed.prefix_tree(offsets[:-1], leave, N, block_size=16)


MASKS["tree"] = tree
for way in ("streams", "interleaved"):
    MASKS[way] = lambda offsets, way=way: packed.block_diffusion(
        offsets // 2, N, 7, interleaved=way == "interleaved", block_size=16
    )
every_mask = pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)


def offsets_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, N - 8, (4,), generator=generator).sort().values
    return torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), N - 8)])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Nothing reads values of tensors."""
    for module in (sequences, spans):
        monkeypatch.setattr(module, "readable", lambda _: False)


@pytest.mark.parametrize(
    "make, backend", [(make, "cpu") for make in MASKS.values()] + [(MASKS["other keys"], "triton")]
)
def test_results_and_gradients(make, backend):
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("with a GPU, tests/gpu runs the kernels on it")
    q, k, v = make_qkv(1, 2, N, N, 16, kv_heads=1, requires_grad=True)
    mask = make(offsets_of(0))
    out, lse = sparseflash.attention(q, k, v, mask, return_lse=True, backend=backend)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    dense = torch.from_numpy(mask.to_block_mask().to_dense())
    expected, expected_lse = oracle(exact[0], exact[1], exact[2], dense)
    padding = ~dense[0, 0].any(-1)
    assert padding[-4:].all() and padding.sum() == 8
    assert not out[:, :, padding].any() and lse[:, :, padding].eq(-torch.inf).all()
    assert_close(out, expected, name="out")
    assert_close(lse, expected_lse, name="lse")
    weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
    found = torch.autograd.grad(out, (q, k, v), weight)
    wanted = torch.autograd.grad(expected, exact, weight.double())
    for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(a, b, name=name)


@every_mask
def test_nothing_waits_for_the_device(make, as_on_a_gpu):
    offsets = offsets_of(0)
    with NoSync():
        as_tensors(schedule_from_selection(make(offsets), N, N, 1, 2, "cpu"))


@pytest.mark.parametrize("name, planned", [("shared", False), ("tree", True), ("streams", False)])
@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_for_all_lengths(name, planned):
    """The mask is made inside of the graph, whose results are those of eager calls."""

    def step(q, k, v, offsets):
        mask = MASKS[name](offsets)
        if planned:
            mask = sparseflash.plan(mask, q, k, v, backend="cpu")
        return sparseflash.attention(q, k, v, mask, backend="cpu")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in range(3):
        qkv = make_qkv(1, 2, N, N, 16, kv_heads=1, seed=seed)
        offsets = offsets_of(seed)
        assert_same(run(compiled, qkv, offsets), run(step, qkv, offsets), tolerance=0)
    assert counter.frame_count == 1


def test_more_partial_blocks_than_room_are_an_error():
    """No bound of ours is met; a mask that went beyond one would be wrong without a word."""
    token = torch.arange(64)[None]
    with pytest.raises(RuntimeError, match="more than 3 partial blocks"):
        from_spans(apart([(0 * token, token + 1)], 64), (16, 16), room=3, max_blocks=16)


BY_ENTRY = masks.documents([[60, N - 60], [N]])
OF_LAYERS = {  # a mask, key heads, and the offsets of a packing of each entry, or of one for all
    "none": (None, 1, [[0, 20, N], [0, 30, N]]),
    "blocks": (masks.sliding(40).build(N), 1, [[0, 20, N], [0, 30, N]]),
    "heads": (masks.heads(masks.sliding(40), masks.local(9)), 2, [0, 20, N]),
    "both": (BY_ENTRY & masks.random_blocks(0.5, block=16, per_head=True), 2, [0, 20, N]),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mask, kv_heads, offsets", OF_LAYERS.values(), ids=OF_LAYERS)
def test_a_layer_takes_a_packed_mask(mask, kv_heads, offsets):
    """What both allow; compiled too, after any kind of mask."""
    layer = sparseflash.BlockSparseAttention(32, 2, kv_heads=kv_heads, mask=mask).double()
    x = torch.randn(2, N, 32, dtype=torch.float64)
    packing = packed.documents(torch.tensor(offsets), N, causal=True)
    found = layer(x, lengths=packing)
    assert torch.equal(layer(x, lengths=layer.plan(packing, N)), found)
    allowed = packing.to_block_mask().to_dense()
    if mask is not None:
        blocks = mask if isinstance(mask, masks.BlockMask) else mask.build(N, heads=2)
        allowed = allowed & blocks.to_dense()
    layer.mask = masks.mask_from(allowed)
    assert_close(found, layer(x), name="out")
    layer.mask = mask
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, lengths=packing), found, name="compiled")
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x, lengths=packing)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_returns_a_plan():
    q, k, v = make_qkv(1, 2, 64, 64, 16)

    def make(offsets: torch.Tensor):
        return sparseflash.plan(packed.documents(offsets, 64, causal=True), q, k, v)

    offsets = torch.tensor([0, 20, 64], dtype=torch.int32)
    made = torch.compile(make, fullgraph=True, backend="eager")(offsets)
    out, expected = (sparseflash.attention(q, k, v, plan) for plan in (made, make(offsets)))
    assert len(made.lists) == len(make(offsets).lists) and torch.equal(out, expected)


# ---- many packings against float64: the counterpart of those in tests/gpu


@pytest.mark.usefixtures("fresh_dynamo")
def test_random_packings_in_one_graph():
    assert_packings(*errors_of_packings(512, 12, 128, "cpu", "aot_eager", "cpu"), limit=1e-5)
