"""Embeddings: the table, compiled and not, and maps of waves of intensities."""

import math

import pytest
import torch

from experiments.lra.models.positions import COPIES, Embedding, SmoothEmbedding, waves


@pytest.mark.parametrize("shape", [(3, 2 * COPIES + 5), (2, 3, 7), (4, 1)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_compiled_it_is_the_same_function(shape, kind):
    torch.manual_seed(0)
    table = Embedding(251, 4).double()
    tokens = torch.randint(0, 251, shape).to(kind)
    tokens[..., ::2] = 250
    compiled = torch.compile(table, backend="aot_eager", dynamic=False)
    plain = torch.nn.functional.embedding(tokens, table.weight)
    found = compiled(tokens)
    assert torch.equal(found, plain)
    gradient = torch.randn_like(plain)
    (wanted,) = torch.autograd.grad(plain, table.weight, gradient)
    (got,) = torch.autograd.grad(found, table.weight, gradient)
    torch.testing.assert_close(got, wanted)


def test_neighbours_add_to_rows_of_their_own():
    """The gradient of one token at all places has no place wait for one near it."""
    rows = []

    class Read(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is torch.nn.functional.embedding:
                rows.append(args[0])
            return super().call_function(target, args, kwargs)

    table, tokens = Embedding(10, 2), torch.full((2, 3 * COPIES), 7)
    torch.compile(table, backend=lambda graph, _: Read(graph).run, dynamic=False)(tokens)
    (found,) = rows
    for first in range(2 * COPIES):
        assert len(found[0, first : first + COPIES].unique()) == COPIES


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
