"""Waves of numbers, and the embedding of intensities that is made of them."""

import math

import torch

from experiments.lra.models.waves import SmoothEmbedding, waves


def test_waves():
    found = waves(torch.tensor([0.0, 1.0, 7.0]), 32.0, 4.0, 4)
    for i, value in enumerate((0.0, 1.0, 7.0)):
        for j, length in enumerate((32.0, 16.0, 8.0, 4.0)):
            angle = 2 * math.pi * value / length
            assert math.isclose(found[i, j], math.sin(angle), abs_tol=1e-5)
            assert math.isclose(found[i, 4 + j], math.cos(angle), abs_tol=1e-5)


def test_near_intensities_look_alike():
    torch.manual_seed(0)
    embedding = SmoothEmbedding(256, 64, 0.5)
    table = embedding(torch.arange(256))
    assert table.shape == (256, 64) and 0.4 < table.std() < 0.6
    distance = (table - table[100]).norm(dim=1)
    assert distance[100] == 0 and distance[101] < distance[105] < distance[120]
    assert distance[101] < 0.3 * distance[[0, 50, 150, 200]].min()
    tokens = torch.tensor([[3, 3], [255, 0]], dtype=torch.int32)
    assert torch.equal(embedding(tokens), table[tokens.long()])


def test_autocast_does_not_round_it():
    embedding = SmoothEmbedding(256, 64, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = embedding(torch.arange(256))
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, embedding(torch.arange(256)))
