"""The table of embeddings, compiled and not."""

import pytest
import torch

from experiments.lra.models.embedding import COPIES, Embedding


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
