"""The attentions against published packages, where they are installed; skipped where they are not.

pip install --no-deps reformer-pytorch performer-pytorch linformer local-attention transformers
"""

import pytest
import torch
from torch import Tensor

from experiments.lra.models.attention import make_attention

B, H, N, D = 2, 3, 128, 16


def make(name: str, *, heads: int = H, **options):
    torch.manual_seed(1)
    attention = make_attention(name, heads=heads, head_dim=D, length=N, **options).eval()
    attention.redraw = False
    return attention


def inputs(heads: int = H) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(B, heads, N, D) for _ in range(3)]


@pytest.mark.parametrize("port", [False, True])
def test_performer_pytorch(port):
    """The Nystromformer port scales q and k before it calls the package, which scales them too."""
    theirs = pytest.importorskip("performer_pytorch")
    ours = make("performer", features=40, scale=1 / D if port else None)
    q, k, v = inputs()
    peer = theirs.FastAttention(D, nb_features=40)
    peer.projection_matrix = ours.projection
    before = D**-0.25 if port else 1.0
    expected = peer(before * q, before * k, v)
    torch.testing.assert_close(ours(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_linformer():
    theirs = pytest.importorskip("linformer")
    ours = make("linformer", rank=24)
    peer = theirs.LinformerSelfAttention(H * D, N, k=24, heads=H)
    with torch.no_grad():
        peer.proj_k.copy_(ours.project_k)
        peer.proj_v.copy_(ours.project_v)
    x = torch.randn(B, N, H * D)
    q, k, v = (
        layer(x).unflatten(2, (H, D)).transpose(1, 2) for layer in (peer.to_q, peer.to_k, peer.to_v)
    )
    out = peer.to_out(ours(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, peer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_local_attention(padded):
    theirs = pytest.importorskip("local_attention")
    ours = make("local", window=32)
    peer = theirs.LocalAttention(32, look_backward=0, look_forward=0, use_rotary_pos_emb=False)
    q, k, v = inputs()
    if not padded:
        torch.testing.assert_close(ours(q, k, v), peer(q, k, v), rtol=1e-4, atol=1e-5)
        return
    lengths = torch.tensor([N, 70], dtype=torch.int32)
    real = torch.arange(N) < lengths[:, None]
    keep = real[:, None, :, None]
    expected = peer(q, k, v, mask=real)
    torch.testing.assert_close(ours(q, k, v, lengths) * keep, expected * keep, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hashes", [1, 2])
def test_reformer_pytorch(hashes, monkeypatch):
    theirs = pytest.importorskip("reformer_pytorch")
    ours = make("reformer", bucket=16, hashes=hashes)
    peer = theirs.LSHAttention(bucket_size=16, n_hashes=hashes).eval()
    q, _, v = inputs()
    rotations = ours.rotations.view(1, D, hashes, -1)
    monkeypatch.setattr(torch, "randn", lambda shape, **_: rotations.view(shape))
    expected, _, _ = peer(q.flatten(0, 1), v.flatten(0, 1))
    out = ours(q, q, v)
    torch.testing.assert_close(out, expected.unflatten(0, (B, H)), rtol=1e-4, atol=1e-5)


def test_transformers_reformer(monkeypatch):
    theirs = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    config = pytest.importorskip("transformers").ReformerConfig(
        hidden_size=D, attention_head_size=D, num_attention_heads=1, num_buckets=8, num_hashes=2,
        lsh_attn_chunk_length=16, attn_layers=["lsh"], is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    peer = theirs.LSHSelfAttention(config).eval()
    ours = make("reformer", heads=1, bucket=16, hashes=2)
    x = torch.randn(B, N, D)
    q, v = (layer(x)[:, None] for layer in (peer.query_key, peer.value))
    rotations = ours.rotations.view(1, D, 2, -1)
    monkeypatch.setattr(torch, "randn", lambda shape, **_: rotations.view(shape))
    expected = peer(x).hidden_states
    q = q * D**0.5  # it does not divide the scores by sqrt(D) too
    torch.testing.assert_close(ours(q, q, v)[:, 0], expected, rtol=1e-4, atol=1e-5)
