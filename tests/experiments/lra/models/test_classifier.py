"""The encoder: sizes of the published settings, padding, pooling, pairs, hidden tokens."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.lra.models.attention import KINDS, NAMES, make_attention
from experiments.lra.models.classifier import Classifier, ModelConfig

LENGTHS = torch.tensor([40, 23], dtype=torch.int32)
CPU = {"flash": {"backend": "cpu"}, "sparse": {"backend": "cpu"}}


def make(
    attention: str = "standard", pair: bool = False, grid=None, pad_black: bool = False, **config
) -> Classifier:
    torch.manual_seed(0)
    model = ModelConfig(**{"dropout": 0.0, "attention_dropout": 0.0, **config})
    options = {"name": attention, **CPU.get(attention, {})}
    return Classifier(20, 40, 3, pair, grid, model, options, pad_black=pad_black)


def tokens(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(1, 20, (*shape, 40), dtype=torch.int16)


def seeded(model: Classifier, *given: torch.Tensor) -> torch.Tensor:
    """The logits, with hashes that are always the same."""
    torch.manual_seed(2)
    return model(*given)


def test_the_nystrom_setting_has_the_published_number_of_parameters():
    for *sizes, parameters in (
        (32, 2048, 10, False, 209_802),
        (512, 4096, 2, False, 370_562),
        (512, 4096, 2, True, 395_138),
        (512, 1024, 10, False, 174_986),
    ):
        assert sum(p.numel() for p in Classifier(*sizes).parameters()) == parameters


def test_it_is_the_nystrom_port():
    """The same layers in plain torch, from the same weights."""
    model = make().double()
    attention = nn.MultiheadAttention(64, 2, batch_first=True).double()
    layer = nn.TransformerEncoderLayer(
        64, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True
    ).double()
    with torch.no_grad():
        x = model.embedding.weight[tokens(2).long()] + model.positions
        hidden = torch.arange(40) >= LENGTHS[:, None]
        for block in model.blocks:
            layer.self_attn = attention
            three = block.attention.q, block.attention.k, block.attention.v
            attention.in_proj_weight.copy_(torch.cat([part.weight for part in three]))
            attention.in_proj_bias.copy_(torch.cat([part.bias for part in three]))
            attention.out_proj.load_state_dict(block.attention.out.state_dict())
            layer.linear1.load_state_dict(block.mlp[0].state_dict())
            layer.linear2.load_state_dict(block.mlp[3].state_dict())
            layer.norm1.load_state_dict(block.norm_attention.state_dict())
            layer.norm2.load_state_dict(block.norm_mlp.state_dict())
            layer.train()  # off the fused path, which zeroes padding
            x = layer(x, src_key_padding_mask=hidden)
        pooled = (model.norm(x) * ~hidden[:, :, None]).mean(1)
        expected = model.head[2](model.head[0](pooled).relu()).float()
    torch.testing.assert_close(model(tokens(2), LENGTHS), expected)


POOLS = ("mean", "mean_tokens", "max", "last", "cls")
# a class token sees one window of local attention
POOLED = [pair for pair in product(NAMES, POOLS) if pair != ("local", "cls")]


@pytest.mark.parametrize(("name", "pool"), POOLED)
def test_padding_changes_nothing(name, pool):
    model = make(name, dim=32, pool=pool, positions="none", rotary=True).eval()
    first, second = tokens(2), tokens(2)
    second[torch.arange(40) >= LENGTHS[:, None]] = 7
    assert not torch.equal(first, second)
    assert torch.equal(seeded(model, first, LENGTHS), seeded(model, second, LENGTHS))


SCATTERED = [name for name in NAMES if KINDS[name].cls.scattered]


@pytest.mark.parametrize(("name", "pool"), [*product(SCATTERED, ("mean", "max", "cls"))])
def test_black_pixels_can_be_padding(name, pool):
    """They are as padding at the end is, and change nothing wherever they are."""
    black, plain = (make(name, pool=pool, pad_black=on).double().eval() for on in (True, False))
    ends, anywhere = tokens(2), tokens(2)
    ends[torch.arange(40) >= LENGTHS[:, None]] = 0
    torch.testing.assert_close(black(ends), plain(ends, LENGTHS))
    anywhere[:, ::3] = 0
    before = black(anywhere)
    torch.nn.init.normal_(black.embedding.weight[0])
    torch.testing.assert_close(black(anywhere), before)
    assert not torch.allclose(plain(anywhere), before)
    if pool != "cls":
        nothing = black.head(torch.zeros(2, 64).double()).float()
        torch.testing.assert_close(black(torch.zeros_like(ends)), nothing)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_gradient(name):
    model = make(name).train()
    out = model(tokens(2), LENGTHS)
    assert out.shape == (2, 3) and out.dtype == torch.float32
    out.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def test_a_pair_is_two_sequences():
    model = make("linear", pair=True).eval()
    both, lengths = tokens(3, 2), torch.tensor([[40, 1], [9, 40], [40, 40]], dtype=torch.int32)
    out = model(both, lengths)
    assert out.shape == (3, 3)
    torch.testing.assert_close(model(both[1:2], lengths[1:2]), out[1:2])
    a, b = (model._pool(model.encode(both[:, i], n), n) for i, n in enumerate(lengths.T))
    features = torch.cat([a, b, a * b, a - b], 1)
    torch.testing.assert_close(model.head[2](model.head[0](features).relu()), out)


def test_pools():
    x = torch.randn(2, 40, 64)
    for pool, state in {
        "mean": lambda real: real.sum(0) / 40,
        "mean_tokens": lambda real: real.mean(0),
        "max": lambda real: real.max(0)[0],
        "last": lambda real: real[-1],
    }.items():
        model = make(pool=pool)
        for lengths in (LENGTHS, None):
            whole = torch.tensor([40, 40]) if lengths is None else lengths
            expected = [state(model.norm(row[:n])) for row, n in zip(x, whole, strict=True)]
            torch.testing.assert_close(model._pool(x, lengths), torch.stack(expected))


def test_the_google_setting():
    for positions, pool, pair in product(("learned", "sinusoidal"), ("mean", "cls"), (False, True)):
        model = make(setting="google", positions=positions, pool=pool, pair=pair)
        config = model.config
        assert model.positions.shape == (40 + (pool == "cls"), config.dim)
        assert model.blocks[0].attention.q.bias is None
        assert model(tokens(2, 2) if pair else tokens(2)).shape == (2, 3)
        bound = (6 / (config.dim + config.heads * config.head_dim)) ** 0.5
        weight = model.blocks[0].attention.q.weight.detach()
        assert 0.95 * bound < weight.abs().max() <= bound
        assert len(model.head) == (5 if pair else 3)


def test_layers_share_the_projection_of_linformer():
    model = Classifier(20, 40, 3, attention={"name": "linformer", "rank": 8, "shared": True})
    model.eval()
    first, second = (block.attention.attention for block in model.blocks)
    assert first.project is second.project
    model(tokens(2)).square().sum().backward()
    both = first.project.grad.clone()
    apart = copy.deepcopy(model)
    apart.zero_grad()
    apart.blocks[1].attention.attention.project = nn.Parameter(first.project.detach().clone())
    apart(tokens(2)).square().sum().backward()
    each = [block.attention.attention.project.grad for block in apart.blocks]
    torch.testing.assert_close(sum(each), both)


def test_a_class_token_that_does_not_see_all_tokens_is_refused():
    """Of 40 tokens and itself."""

    def made(attention: str = "sparse", layers: int = 1, **options) -> Classifier:
        model = ModelConfig(pool="cls", layers=layers)
        return Classifier(20, 40, 3, model=model, attention={"name": attention, **options})

    for options, words in (
        ({"attention": "local", "layers": 4, "window": 16}, "4 layers of .* seen 16 of 41 tok"),
        ({"mask": "local:8"}, r"1 layer of local\(8\) .* seen 9 of 41 tokens"),
        ({"mask": "causal", "layers": 4}, "seen 1 of 41 tokens: take model.pool=mean"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**options)
    for options in ({"mask": "local:8|global:1"}, {"mask": "local:8", "layers": 5},
                    {"mask": "layers(local:8,dense)", "layers": 2},
                    *({"attention": name} for name in NAMES if name != "local")):  # fmt: skip
        made(**options)
    for class_token in (False, True):  # of the default mask
        sizes = {"heads": 1, "head_dim": 8, "length": 2049}
        mask = make_attention("sparse", **sizes, class_token=class_token).pattern()
        assert mask is not None
        assert (mask.build(2049).reach(1, exact=True).seen_keys[0] == 2049) == class_token


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_hidden_tokens_are_predicted_unseen(pool):
    model = make("standard", lm_head=True, pool=pool).eval()
    hidden = torch.tensor([[3, 39], [0, 7]])
    first, second = tokens(2), tokens(2)
    second.scatter_(1, hidden, 0)
    out = model(first, places=hidden)
    assert out.shape == (2, 2, 20)
    assert torch.equal(out, model(second, places=hidden))
    other = model(first, places=hidden.flip(1))
    torch.testing.assert_close(other, out.flip(1))
    assert not torch.equal(model(first), model(second))


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_reads_nothing_back_from_the_device(name):
    model = make(name, dropout=0.1, attention_dropout=0.1)
    model(tokens(2), LENGTHS)  # the block lists of a mask are made at the first call
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(tokens(2)), mode.from_tensor(LENGTHS)
        model(*fake).sum().backward()


def test_errors():
    for make_it, message in (
        (lambda: ModelConfig(pool="sum"), "pool='sum'.*mean_tokens"),
        (lambda: make(grid=(5, 9)), "5 x 9"),
        (lambda: make()(tokens(2)[:, :39]), "has 39 tokens, the model 40"),
        (lambda: make()(tokens(2), places=torch.zeros(2, 1).long()), "lm_head"),
        (lambda: make(embedding="smooth"), "embedding=smooth.*images"),
        (lambda: make("flash", pad_black=True), "pad_black.*attention of linear, "),
        (lambda: make(pool="last", pad_black=True), "pad_black.*pool=mean"),
        (lambda: make(positions="waves"), "positions=waves.*images"),
        (lambda: make(positions="waves", grid=(5, 8), pool="cls"), "positions=waves.*images"),
    ):
        with pytest.raises(ValueError, match=message):
            make_it()


@pytest.mark.parametrize("positions", ["learned", "waves"])
def test_the_deviation_of_embeddings_can_be_given(positions):
    torch.manual_seed(0)
    model = make(grid=(5, 8), positions=positions, embedding="smooth", embedding_std=0.5)
    table = model.positions if positions == "learned" else getattr(model, positions)()
    assert 0.4 < table.std() < 0.6
    assert 0.4 < model.embedding(torch.arange(20)).std() < 0.6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", [None, (5, 8)])
def test_rotary_turns_what_every_attention_sees(name, grid):
    plain, turned = (make(name, grid=grid, rotary=rotary).eval() for rotary in (False, True))
    turned.load_state_dict(plain.state_dict())
    expected, found = seeded(plain, tokens(2)), seeded(turned, tokens(2))
    assert found.isfinite().all() and not torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("rotary", [False, True])
def test_without_positions_only_rotary_sees_the_order(rotary):
    model = make(positions="none", rotary=rotary).eval()
    first = tokens(2)
    same = torch.allclose(model(first), model(first.flip(1)), atol=1e-6)
    assert same != rotary and not any("positions" in name for name in model.state_dict())


def test_waves_and_rotary_give_dense_attention_the_same_answer_in_every_order_of_the_pixels():
    torch.manual_seed(0)
    config = ModelConfig(
        dropout=0.0, attention_dropout=0.0, positions="waves", rotary=True, embedding="smooth",
        embedding_std=0.5,
    )  # fmt: skip
    order = torch.randperm(40)
    by_rows = Classifier(20, 40, 3, grid=(5, 8), model=config).eval()
    mixed = Classifier(20, 40, 3, grid=(5, 8), model=config, order=order.numpy()).eval()
    mixed.load_state_dict(by_rows.state_dict())
    expected = by_rows(tokens(2))
    torch.testing.assert_close(mixed(tokens(2)[:, order]), expected)
    assert not torch.allclose(mixed(tokens(2)), expected, atol=1e-3)
