"""Embeddings and positions: tables, maps of waves, and how they move to a finer grid."""

import math

import pytest
import torch

from experiments.lra.models.positions import (
    COPIES,
    AxialRotary,
    Embedding,
    SmoothEmbedding,
    WavePositions,
    sinusoids,
    upsample_positions,
    waves,
)


def test_each_position_is_duplicated_onto_the_pixels_inside_it():
    table = torch.arange(6.0)[:, None] + torch.tensor([0.0, 100.0])
    finer = upsample_positions(table, (2, 3), (4, 9)).view(4, 9, 2)
    for y in range(4):
        for x in range(9):
            assert torch.equal(finer[y, x], table[(y // 2) * 3 + x // 3])
    assert torch.equal(upsample_positions(table, (2, 3), (2, 3)), table)


def test_orders_of_the_pixels():
    by_pixel = torch.arange(4.0)[:, None]
    from_order, to_order = [2, 0, 3, 1], torch.randperm(16).numpy()
    orders = {"from_order": from_order, "to_order": to_order}
    finer = upsample_positions(by_pixel[from_order], (2, 2), (4, 4), **orders)
    expected = upsample_positions(by_pixel, (2, 2), (4, 4))[to_order]
    assert torch.equal(finer, expected)
    cls = torch.tensor([[9.0]])  # its row stays first
    with_cls = upsample_positions(torch.cat([cls, by_pixel[from_order]]), (2, 2), (4, 4), **orders)
    assert torch.equal(with_cls, torch.cat([cls, expected]))
    with pytest.raises(ValueError, match="no multiple"):
        upsample_positions(torch.zeros(4, 1), (2, 2), (4, 5))


def test_waves_suit_images_of_every_size():
    """Neighbours look alike; a step of a pixel, and a corner, are the same at two sizes."""
    torch.manual_seed(0)
    order = torch.randperm(32 * 64).numpy()
    small, large = WavePositions((32, 64), 64, order, 0.5), WavePositions((64, 128), 64, std=0.5)
    large.load_state_dict(small.state_dict())
    by_pixel = torch.empty(32 * 64, 64)
    by_pixel[torch.from_numpy(order)] = small()
    by_pixel, table = by_pixel.view(32, 64, 64), large().view(64, 128, 64)
    assert 0.4 < table.std() < 0.6
    assert torch.allclose(table[0, 0], by_pixel[0, 0], atol=1e-5)
    distance = (table[:, 50] - table[20, 50]).norm(dim=1)
    assert distance[20] == 0 and distance[21] < distance[22] < distance[40:].mean()
    pixels = small.row_waves.shape[1] // 2  # waves whose lengths are in pixels
    assert torch.allclose(small.row_waves[:, :pixels], large.row_waves[:32, :pixels], atol=1e-5)
    assert torch.allclose(small.row_waves[:, pixels:], large.row_waves[::2, pixels:], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotary_scores_go_by_the_places_of_tokens_to_each_other(dtype):
    torch.manual_seed(0)
    rows, columns, dim = 6, 10, 16
    order = torch.randperm(rows * columns)
    turn = AxialRotary((rows, columns), dim, order.numpy())
    q, k = torch.randn(2, dim, dtype=dtype)
    many = torch.stack([q, k]).expand(1, rows * columns, 2, dim)
    turned = torch.empty(rows * columns, 2, dim, dtype=dtype)
    turned[order] = turn(many)[0]
    after = AxialRotary((rows, columns), dim, order.numpy(), before=1)
    found = after(torch.cat([many[:, :1], many], 1))[0]
    assert torch.equal(found[0], many[0, 0]) and torch.equal(found[1:], turned[order])
    tolerance = 1e-5 if dtype == torch.float64 else 0.05
    lengths = (turned.float().norm(dim=-1) / many[0].float().norm(dim=-1)) - 1
    assert turned.dtype == dtype and lengths.abs().max() < tolerance
    turned = turned.float().view(rows, columns, 2, dim)
    scores = torch.einsum("abd,efd->abef", turned[:, :, 0], turned[:, :, 1])
    torch.testing.assert_close(
        scores[1:, 2:, 1:, 2:], scores[:-1, :-2, :-1, :-2], rtol=0, atol=20 * tolerance
    )
    assert scores[0, 0].std(0).min() > 0.1 and scores[0, 0].std(1).min() > 0.1


def test_rotary_wavelengths():
    one = torch.eye(16)[None, None, :1].expand(1, 600, 1, 16)
    cos = AxialRotary((600, 1), 16)(one)[0, :, 0, 0]
    expected = torch.cos(torch.arange(600) * torch.pi / 2)  # the shortest: 4 pixels
    torch.testing.assert_close(cos, expected, rtol=0, atol=1e-3)
    longest = AxialRotary((600, 1), 16).cos[:, 7]
    assert longest[512] > 0.9999 and longest[256] < -0.9999


def test_sinusoids_and_waves():
    table = sinusoids(50, 8)
    for p in (0, 1, 49):
        for i in range(4):
            angle = p * 10_000 ** (-i / 3)
            assert table[p, i] == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[p, 4 + i] == pytest.approx(math.cos(angle), abs=1e-5)
    found = waves(torch.tensor([0.0, 1.0, 7.0]), 32.0, 4.0, 4)
    for i, value in enumerate((0.0, 1.0, 7.0)):
        for j, length in enumerate((32.0, 16.0, 8.0, 4.0)):
            angle = 2 * math.pi * value / length
            assert found[i, j] == pytest.approx(math.sin(angle), abs=1e-5)
            assert found[i, 4 + j] == pytest.approx(math.cos(angle), abs=1e-5)


# ---- embeddings


@pytest.mark.parametrize("shape", [(3, 2 * COPIES + 5), (2, 3, 7)])
def test_compiled_it_is_the_same_function(shape):
    torch.manual_seed(0)
    table = Embedding(251, 4).double()
    tokens = torch.randint(0, 251, shape).int()
    tokens[..., ::2] = 250
    compiled = torch.compile(table, backend="aot_eager", dynamic=False)
    plain = torch.nn.functional.embedding(tokens, table.weight)
    found = compiled(tokens)
    assert torch.equal(found, plain)
    gradient = torch.randn_like(plain)
    grads = [torch.autograd.grad(out, table.weight, gradient)[0] for out in (found, plain)]
    torch.testing.assert_close(*grads)


def test_near_intensities_look_alike():
    torch.manual_seed(0)
    embedding = SmoothEmbedding(256, 64, 0.5)
    with torch.autocast("cpu", torch.bfloat16):  # which does not round it
        table = embedding(torch.arange(256))
    assert table.shape == (256, 64) and table.dtype == torch.float32 and 0.4 < table.std() < 0.6
    distance = (table - table[100]).norm(dim=1)
    assert distance[100] == 0 and distance[101] < distance[105] < distance[120]
    assert distance[101] < 0.3 * distance[[0, 50, 150, 200]].min()
    tokens = torch.tensor([[3, 3], [255, 0]], dtype=torch.int32)
    assert torch.equal(embedding(tokens), table[tokens.long()])
