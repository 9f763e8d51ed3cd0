"""The dropout bits: those of the definition, exactly, and as good as independent coin tosses."""

import itertools
import math

import pytest
import torch

from sparseflash.dropout import (
    dropout_keys,
    keep_from_keys,
    keep_mask,
    keep_scale,
    keep_threshold,
)  # fmt: skip

LOW32 = 2**32 - 1


def mix(x: int) -> int:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & LOW32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & LOW32
    return x ^ (x >> 16)


def keep_by_definition(seed: int, b_h: int, q: int, k: int, dropout_p: float) -> bool:
    low, high = seed & LOW32, (seed >> 32) & LOW32
    head = mix(mix(low) ^ high ^ ((b_h * 0x9E3779B9) & LOW32))
    column = mix((head + 0x85EBCA6B) & LOW32)
    row_key, col_key = (q // 16 * 16 + q % 8) * 0x9E3779B1, (k // 16 * 16 + k % 8) * 0x85EBCA77
    x = ((row_key + head) & LOW32) ^ ((col_key + column) & LOW32)
    x *= 0xD2511F53
    x = (x & LOW32) ^ (x >> 32)
    x *= 0x846CA68B * (0x88F4DA73 if q & 8 else 1) * (0x5B010BA3 if k & 8 else 1)
    return (x & LOW32) >> 16 >= min(round(dropout_p * 2**16), 2**16 - 1)


@pytest.mark.parametrize("seed", [0, 1, 12345, -1, 2**40 + 7, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_bits_of_the_definition(seed, dropout_p):
    batch, heads, n_q, n_k = 2, 3, 19, 29
    places = itertools.product(range(batch * heads), range(n_q), range(n_k))
    expected = [keep_by_definition(seed, *place, dropout_p) for place in places]
    actual = keep_mask(torch.tensor([seed]), batch, heads, n_q, n_k, dropout_p)
    assert actual.flatten().tolist() == expected


def test_any_rows_and_columns_have_the_bits_of_the_whole():
    seed, rows, cols = torch.tensor([3]), torch.tensor([1, 0, 2]), torch.tensor([3, 1])
    whole = keep_mask(seed, 2, 2, 48, 64, 0.3).unflatten(-1, (4, 16)).unflatten(-3, (3, 16))
    row_key, col_key = (keys.unflatten(-1, (-1, 8)) for keys in dropout_keys(seed, 2, 2, 48, 64))
    row_key, col_key = row_key[..., rows, :].flatten(-2), col_key[..., cols, :].flatten(-2)
    expected = whole[:, :, rows][..., cols, :].flatten(-2).flatten(-3, -2)
    assert torch.equal(keep_from_keys(row_key, col_key, 0.3), expected)
    by_key = keep_from_keys(col_key, row_key, 0.3, transposed=True)
    assert torch.equal(by_key.mT, expected)


def test_threshold_and_scale():
    assert keep_threshold(0.0) == 0 and keep_scale(0.0) == 1
    assert keep_threshold(0.5) == 2**15 and keep_scale(0.5) == 2
    assert keep_threshold(1.0) == 2**16 - 1
    for p in (1e-6, 0.1, 0.3, 0.99999):  # what is kept is scaled by the rate at which it is kept
        assert keep_scale(p) * (1 - keep_threshold(p) / 2**16) == pytest.approx(1, rel=1e-15)
        assert abs(keep_threshold(p) / 2**16 - p) <= 2**-17 or p > 1 - 2**-16
    assert keep_mask(torch.tensor([1]), 1, 1, 64, 64, 0.0).all()


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.8])
@pytest.mark.parametrize("seed", [0, 1, 2**33])
def test_rates_of_all_of_rows_and_of_columns(seed, dropout_p):
    n = 512
    keep = keep_mask(torch.tensor([seed]), 2, 2, n, n, dropout_p).double()
    variance = dropout_p * (1 - dropout_p)
    assert abs(keep.mean().item() - (1 - dropout_p)) < 5 * math.sqrt(variance / keep.numel())
    for dim in (-1, -2):
        sums = keep.sum(dim)
        # 4 n sums whose variance is estimated to a relative sqrt(2 / (4 n)), about 3 %.
        assert abs(sums.var().item() / (n * variance) - 1) < 5 * math.sqrt(2 / sums.numel())


def test_no_two_entries_go_together_at_any_distance():
    # rows and columns are steps of a constant: the correlation at all distances, by its spectrum
    n, seeds, dropout_p = 1024, (6, 2**32 + 6), 0.1
    keep = torch.cat([keep_mask(torch.tensor([s]), 2, 2, n, n, dropout_p) for s in seeds])
    x = (keep.float() - (1 - dropout_p)) / math.sqrt(dropout_p * (1 - dropout_p))
    spectrum = torch.fft.rfft2(x)  # (seed and batch, head, ...)
    for apart in ((0, 0), (0, 1), (1, 0), (2, 1)):
        products = spectrum * spectrum.roll(apart, (0, 1)).conj()
        correlation = torch.fft.irfft2(products) / n  # in standard deviations
        if apart == (0, 0):
            correlation[..., 0, 0] = 0
        assert correlation.abs().max() < 6.5, apart  # of 8 million
