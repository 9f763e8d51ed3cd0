"""The three attentions are one function; packed documents do not see each other."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import masks
from experiments.lm.model import (
    ATTENTIONS,
    LanguageModel,
    mlp_density,
    picked_pairs,
    resolve,
    shares,
    with_room,
)
from experiments.lm.settings import POSITIONS, Sizes

VOCAB, N, END = 17, 48, 3
PACKED = "documents(((20, 28), (7, 41)))"  # other ones in every batch entry
MLP = {"mask": "butterfly(16)", "block_size": 16, "rank": 2}
MASKS = (None, "sliding:8", "butterfly(8) | sliding(4)", "bigbird(8, 1)", "strided:6", PACKED)


def model_of(provider, mask=None, **options):
    torch.manual_seed(0)
    return LanguageModel(Sizes(2, 32, 2), VOCAB, N, provider, resolve(mask), **options)


def tokens_of(seed=1, batch=2):
    return torch.randint(VOCAB, (batch, N), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_logits_and_gradients_of_the_three_attentions_agree(mask, packed):
    tokens, found = tokens_of(), {}
    for provider in ATTENTIONS:
        model = model_of(provider, mask, end=END if packed else None).double()
        logits = model(tokens)
        loss = model(tokens, tokens.roll(-1, 1)).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found[provider] = [logits, *gradients]
    for provider in ("sdpa", "sparse"):
        torch.testing.assert_close(found[provider], found["standard"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "provider, mask, positions, mlp",
    [("sparse", "sliding:8", POSITIONS[0], MLP), ("sdpa", None, POSITIONS[1], None)],
)
def test_one_compilation_serves_all_blocks(provider, mask, positions, mlp, monkeypatch):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    torch.manual_seed(0)
    sizes, tokens = Sizes(10, 32, 2, mlp=mlp), tokens_of()  # more than torch compiles of a function
    causal = resolve(mask)
    model = LanguageModel(sizes, VOCAB, N, provider, causal, positions=positions)
    for block in model.layers:  # what keeps its mask makes it before
        block.attention(torch.zeros(1, N, 32))
    found = []
    for forward in (model, model.by_layer()):
        loss = forward(tokens, tokens.roll(-1, 1)).mean()
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert counter.frame_count == 2  # a block and the head
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("provider", ATTENTIONS)
def test_a_packed_document_has_the_logits_that_it_has_alone(provider, positions):
    tokens = tokens_of().clamp(min=END + 1)
    tokens[:, 19] = END
    model = model_of(provider, end=END, positions=positions).eval()
    whole, alone = model(tokens)[:, 20:], model(tokens[:, 20:])
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-6)


def test_the_model_is_gpt2():
    model = model_of("sparse")
    names = {name for name, _ in model.named_parameters()}
    assert not any("head" in name for name in names)  # the embedding is the head
    assert model.tokens.weight.shape == (64, 32)  # the vocabulary rounded up
    assert abs(model.layers[0].attention.q.weight.std().item() - 0.02) < 0.002
    assert abs(model.layers[0].narrow.weight.std().item() - 0.01) < 0.001
    sizes = sum(p.numel() for p in LanguageModel(
        Sizes(12, 768, 12, 50_257), 257, 1024, "sparse", masks.causal()).parameters())  # fmt: skip
    assert sizes == 124_439_808 + (50_304 - 50_257) * 768


@pytest.mark.parametrize("rank", [0, 3])
def test_block_sparse_mlps(rank):
    """Beside the model with the same MLPs as dense layers."""
    torch.manual_seed(0)
    sizes = Sizes(3, 64, 2, mlp={"mask": "butterfly(16, 1)", "block_size": 16, "rank": rank})
    model = LanguageModel(sizes, VOCAB, N, "sparse", resolve(None))
    dense = LanguageModel(replace(sizes, mlp=None), VOCAB, N, "sparse", resolve(None))
    found = dict(model.state_dict())
    for i, block in enumerate(model.layers):
        assert block.mlp is not None
        nn.init.normal_(block.mlp.up.up) if rank else None
        for name, layer in (("widen", block.mlp.up), ("narrow", block.mlp.down)):
            scale = 6**-0.5 if name == "narrow" else 1
            assert layer.weight.std().item() == pytest.approx(0.02 * 2**0.5 * scale, rel=0.1)
            found |= {f"blocks.{i}.{name}.{k}": v for k, v in layer.to_dense().named_parameters()}
    dense.load_state_dict({name: found[name] for name in dense.state_dict()})
    tokens = tokens_of()
    torch.testing.assert_close(model(tokens), dense(tokens), rtol=1e-4, atol=1e-5)
    assert mlp_density(dense) == 1 and mlp_density(model) == 0.5 + rank * (64 + 256) / (64 * 256)
    kept, whole = (sum(p.numel() for p in m.parameters()) for m in (model, dense))
    assert whole - kept == (1 - mlp_density(model)) * 3 * 2 * 64 * 256


def test_moba_is_one_of_the_masks():
    tokens, changed = tokens_of(), tokens_of()
    model = model_of("sparse", "moba(16, 2)")
    loss = model(tokens, tokens.roll(-1, 1)).mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    changed[:, 33:] = 0
    torch.testing.assert_close(model(tokens)[:, :33], model(changed)[:, :33], rtol=0, atol=1e-6)
    dense = model_of("standard")(tokens)  # of two chunks nothing is left out, of a third one is
    torch.testing.assert_close(model(tokens)[:, :32], dense[:, :32], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 32:], dense[:, 32:], rtol=1e-3, atol=1e-4)
    assert picked_pairs(48, 16, 2) == 3 * 16 * 17 // 2 + 2 * 16 * 16
    assert picked_pairs(40, 16, 9) == 40 * 41 // 2
    with pytest.raises(ValueError, match="a multiple of 16"):
        resolve("moba(24, 2)")
    with pytest.raises(ValueError, match=r"moba\(32\): give moba\(CHUNK, K\)"):
        resolve("moba(32)")
    for n in (128, 125):  # with room for all blocks it is the same mask
        selector = replace(resolve("moba(32, 2)"), block_size=(16, 16))
        q, k = torch.randn(2, 2, 3, n, 8).unbind()
        found = [s(q, k).to_block_mask().to_dense() for s in (with_room(selector, q), selector)]
        assert (found[0] == found[1]).all()


def test_a_decoders_mask_is_causal_once_and_shares_count_against_it():
    for text in ("streaming(4, 8)", "causal()", "sliding(8)"):
        mask = resolve(text)
        assert str(mask).count("causal()") == 1 and resolve(str(mask)) == mask
    assert shares(model_of("sparse"))[1] == pytest.approx(1)
    density, pairs = shares(model_of("sparse", "sliding:8"))
    assert pairs == pytest.approx((8 * N - 28) / (N * (N + 1) / 2)) and density == 1
