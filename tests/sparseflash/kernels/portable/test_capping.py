"""Soft-capping in the portable kernels, in Triton's interpreter."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import masks
from tests import capping_cases
from tests.attention_cases import Case, check
from tests.op_cases import INTERPRETED

pytestmark = INTERPRETED

RAGGED = masks.causal(align="bottom_right") | masks.global_tokens(20)
NOTHING = masks.documents([40, 30]) & ~masks.local(0) & masks.causal()  # rows with no key


def test_capped_scores():
    for largest, cap in product(capping_cases.LARGEST, capping_cases.CAPS):
        capping_cases.check(largest, cap, False, "cpu")
    capping_cases.check_what_is_not_finite(False, "cpu")


CAPS = Case(70, 90, 16, heads=2, kv_heads=1, scale=1.0, block_size=(64, 64))


@pytest.mark.parametrize(
    "softcap, mask, scale",
    [
        (1e-30, None, 1.0),
        (50.0, RAGGED, 1.0),
        (1e30, RAGGED, 1.0),
        (200.0, None, 60.0),  # exponentials beyond float32
    ],
)
def test_softcap(softcap, mask, scale):
    """Scores about 4, up to 20: far beyond the cap, beside the bound of the polynomial, below it;
    float32 without running maxima up to 50; caps that in base 2, or at all, are no float32.
    """
    one = replace(CAPS, softcap=softcap, mask=mask, scale=scale)
    check(one, "triton", "cpu", slack=2.0 if scale > 1 else 1.0)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": torch.float16, "sink": True},
        {"max_scores": True, "sink": True},
        {"max_scores": True, "mask": NOTHING, "n_k": 70},
    ],
)
def test_softcap_beside_sinks_and_maxima(more):
    """Row maxima are those of the logits, also where the softmax needs none."""
    check(replace(CAPS, **({"softcap": 8.0, "mask": RAGGED} | more)), "triton", "cpu")
