"""Vision transformers in the style of timm: a small one of our own, and timm's where it imports."""

import copy

import pytest
import torch
from torch import nn

import masks
from sparseflash import select
from sparseflash.integrations.vit import use

GRID = (4, 4)
MASK = f"neighborhood({GRID}, 3) >> shift(1) | global(1)"  # a class token before the patches


class Attention(nn.Module):
    def __init__(self, dim=32, num_heads=4, norm=True, bias=False):
        super().__init__()
        self.num_heads, self.scale = num_heads, 0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(dim // num_heads) if norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // num_heads) if norm else nn.Identity()
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.gate = nn.Linear(dim, dim) if norm else None
        self.attn_drop, self.proj_drop = nn.Dropout(0.3), nn.Dropout(0.0)
        self.position_bias = nn.Parameter(torch.randn(7, 7)) if bias else None

    def forward(self, x, attn_mask=None, is_causal=False):
        batch, n, dim = x.shape
        qkv = self.qkv(x).view(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = self.q_norm(qkv[0]), self.k_norm(qkv[1]), qkv[2]
        if is_causal:
            attn_mask = torch.ones(n, n, dtype=torch.bool).tril()
        attn_mask = self.position_bias if self.position_bias is not None else attn_mask
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, scale=self.scale)
        out = self.norm(out.transpose(1, 2).reshape(batch, n, dim))
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        return self.proj(out)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(norm=norm, **options) for norm in (True, False))

    def forward(self, x, **given):
        for block in self.blocks:
            x = x + block(x, **given)
        return x


def results(model, x, **given):
    model.zero_grad()
    out = model(x, **given)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * max(1.0, y.abs().max().item()))


@pytest.fixture
def setting():
    torch.manual_seed(0)
    return Model().eval(), torch.randn(2, 17, 32)


def test_dense_causal_and_masked(setting):
    model, x = setting
    sparse, names = use(copy.deepcopy(model)), list(model.state_dict())
    assert list(sparse.state_dict()) == names
    pairs = torch.rand(2, 1, 17, 17) > 0.3
    for given in (
        {},
        {"is_causal": True},
        {"attn_mask": pairs},
        {"attn_mask": pairs[0, 0]},
        {"attn_mask": torch.where(pairs, 0.0, -torch.inf)},
    ):
        assert_same(results(sparse, x, **given), results(model, x, **given))
    allowed = torch.from_numpy(masks.parse(MASK).build(17).to_dense())
    use(use(sparse, "local(2)"), MASK)
    assert_same(results(sparse, x), results(model, x, attn_mask=allowed))
    both = allowed & pairs
    assert_same(results(sparse, x, attn_mask=pairs), results(model, x, attn_mask=both))


def test_a_mask_for_each_layer(setting):
    model, x = setting
    sparse = use(copy.deepcopy(model), "layers(local(3), global(2))")
    for block, text in zip(model.blocks, ("local(3)", "global(2)"), strict=True):
        pairs = torch.from_numpy(masks.parse(text).build(17).to_dense())
        block.register_forward_pre_hook(
            lambda _, args, kwargs, pairs=pairs: (args, {"attn_mask": pairs}), with_kwargs=True
        )
    assert_same(results(sparse, x), results(model, x))


def test_a_selector_that_takes_all_blocks_is_dense(setting):
    model, x = setting
    sparse = use(copy.deepcopy(model), select.top_k(1.0))
    assert_same(results(sparse, x), results(model, x))
    with pytest.raises(ValueError, match="within="):
        sparse(x, is_causal=True)


def test_dropout_is_for_training(setting):
    model, x = setting
    use(model, MASK)
    expected = model(x)
    assert (model.train()(x) - expected).abs().max() > 0.01
    torch.testing.assert_close(model.eval()(x), expected)


class Turned(Attention):
    def forward(self, x, rope=None):
        return super().forward(x if rope is None else x * rope)


def test_modules_that_compute_something_else_are_refused():
    with pytest.raises(ValueError, match="Turned"):
        use(Turned(), MASK)
    model = Model(bias=True).train()
    for scale in (1.0, 0.0):  # a bias that is still zero counts too
        for block in model.blocks:
            block.position_bias.data *= scale
        with pytest.raises(ValueError, match="softmax attention"):
            use(model, MASK)
    assert model.blocks[0].training and "forward" not in vars(model.blocks[0])
    model = nn.Sequential(Model(), nn.MultiheadAttention(32, 4))
    use(model[0], MASK)
    with pytest.raises(ValueError, match=r"MultiheadAttention without qkv.*use\(part"):
        use(model, MASK)
    with pytest.raises(ValueError, match="no attention with qkv, proj, num_heads"):
        use(nn.Linear(3, 3), MASK)
    with pytest.raises(ValueError, match=r"mask is a function; .* \(call it: causal"):
        use(Model(), masks.causal)


def test_a_model_of_timm():
    timm = pytest.importorskip("timm", exc_type=ImportError)  # it needs torchvision
    size = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **size).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = results(model, images)
    assert_same(results(use(model), images), expected)
    allowed = torch.from_numpy(masks.parse(MASK).build(17).to_dense())
    found = results(use(model, MASK), images)
    for block in model.blocks:
        del block.attn.forward
        own = type(block.attn).forward
        block.attn.forward = lambda x, own=own, attn=block.attn, **_: own(attn, x, allowed)
    assert_same(found, results(model, images))
