"""Dropout of hidden states: what it drops, its gradient, what torch.compile keeps of it."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from experiments.lra.models.blocks import Dropout, draw_seeds
from experiments.lra.models.classifier import Classifier, ModelConfig

CPU = torch.device("cpu")


def dropped(p: float, seed: torch.Tensor, *shape: int) -> torch.Tensor:
    """float64 deviations of what is dropped from its mean, of all entries."""
    return (Dropout(p)(torch.ones(shape), seed) == 0).double() - p


def test_it_zeroes_a_share_of_p_and_scales_the_rest():
    torch.manual_seed(0)
    x = torch.randn(64, 512, 64)
    for p in (0.01, 0.1, 0.5, 0.9):
        out = Dropout(p)(x, draw_seeds(1, CPU)[0])
        zero = out == 0
        torch.testing.assert_close(out[~zero], x[~zero] / (1 - p))
        assert abs(zero.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / x.numel())
    drop = Dropout(0.5)
    torch.manual_seed(0)
    found = drop(x, None)  # without a seed it is that of torch
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(x, 0.5)) and torch.equal(drop.eval()(x, None), x)


def test_entries_go_alone():
    """At all distances below half of the entries, in rows, in columns, and of two seeds."""
    torch.manual_seed(0)
    n, p = 2**18, 0.1
    seeds = draw_seeds(3, CPU)
    for first, second in zip(seeds, seeds.roll(1, 0), strict=True):
        x = dropped(p, first, n)
        spectrum = torch.fft.rfft(x, 2 * n).abs() ** 2
        pairs = torch.arange(n, 0, -1)
        scores = (torch.fft.irfft(spectrum)[:n] / (p * (1 - p) * pairs.sqrt()))[1 : n // 2]
        assert scores.abs().max() < 6.5 and abs(scores.std() - 1) < 0.02
        assert abs((x * dropped(p, second, n)).sum()) < 5 * p * (1 - p) * math.sqrt(n)
        for width in (64, 128):
            for axis in (0, 1):
                sums = x.view(-1, width).sum(axis)
                expected = p * (1 - p) * n / len(sums)
                assert abs(sums.var() / expected - 1) < 6 * math.sqrt(2 / len(sums))


def test_either_half_of_a_seed_makes_another_choice():
    torch.manual_seed(0)
    seed, another = draw_seeds(2, CPU)
    for half in (0, 1):
        other = seed.clone()
        other[half] = another[half]
        differ = (dropped(0.5, seed, 2**16) != dropped(0.5, other, 2**16)).double().mean()
        assert abs(differ - 0.5) < 5 * 0.5 / 2**8


def test_the_gradient_drops_the_same_entries():
    torch.manual_seed(0)
    x = torch.randn(5, 7, 64, requires_grad=True)
    out = Dropout(0.3)(x, draw_seeds(1, CPU)[0])
    upstream = torch.randn(7, 5, 64).transpose(0, 1)  # another layout
    out.backward(upstream)
    torch.testing.assert_close(x.grad, torch.where(out == 0, 0.0, upstream / 0.7))


def test_a_compiled_one_is_the_same_and_keeps_no_choice():
    """The backward computes the choices again."""

    def noted(dtypes, tensor):
        dtypes.append(tensor.dtype)
        return tensor

    def layer(x, weight, seeds):
        for seed in seeds:
            x = drop(F.gelu(x @ weight), seed)
        return x

    torch.manual_seed(0)
    drop = Dropout(0.2)
    given = torch.randn(48, 32).double(), torch.randn(32, 32).double()
    seeds = draw_seeds(2, CPU)
    found = []
    for call in (layer, torch.compile(layer, dynamic=False)):
        x, weight = (t.clone().requires_grad_() for t in given)
        dtypes: list[torch.dtype] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(noted, dtypes), lambda t: t):
            out = call(x, weight, seeds)
        out.sin().sum().backward()
        assert dtypes and torch.bool not in dtypes
        found.append((out, x.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours)


def model(p: float = 0.2) -> Classifier:
    torch.manual_seed(0)
    config = ModelConfig(dropout=p, attention_dropout=0.0, dim=32)
    return Classifier(20, 40, 3, model=config)


def test_a_compiled_model_draws_a_seed_for_each_dropout(monkeypatch):
    seen = []

    def forward(self, x, seed):
        seen.append(seed)
        return x

    monkeypatch.setattr(Dropout, "forward", forward)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    net, x = model(), torch.ones(1, 40, dtype=torch.int16)
    for _ in range(3):
        net(x)
    assert len(seen) == 3 * (1 + 3 * net.config.layers)
    assert torch.stack(seen).unique(dim=0).shape == (len(seen), 2)
    seen.clear()
    net.eval()(x)
    assert seen and all(seed is None for seed in seen)


@pytest.mark.parametrize("backend", [None, "eager"], ids=["eager", "compiled"])
def test_a_model_drops_in_training_alone(backend):
    def call():
        return torch.compile(net, backend=backend)(x) if backend else net(x)

    net, x = model(), torch.ones(2, 40, dtype=torch.int16)
    assert not torch.equal(call(), call())
    torch.manual_seed(3)
    first = call()
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    net.eval()
    assert torch.equal(call(), call())
    net = model(0.0)
    state = torch.get_rng_state()
    assert torch.equal(call(), call()) and torch.equal(torch.get_rng_state(), state)
