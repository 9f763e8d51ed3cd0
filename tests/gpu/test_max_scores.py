"""The largest logit of each query on a GPU, against float64."""

from dataclasses import replace

import torch

import masks
import sparseflash
from sparseflash.testing import logits, relative_error
from tests.attention_cases import LOW, Case, check
from tests.gpu.test_sinks import HOLE, NONE, PARTS, parts
from tests.gpu_calls import GPU, MASK, captured, inputs, pairwise

pytestmark = GPU


def attend(*args, **options):
    return sparseflash.attention(*args, return_max_scores=True, **options)


def wanted(q, k, mask, **options):
    dense = torch.from_numpy(mask.build(q.shape[2], k.shape[2]).to_dense()).to(q.device)
    return logits(q.detach(), k.detach(), dense, **options).amax(-1)


@pairwise(
    {
        "name": PARTS,
        "head_dim": [64, 128, 256],
        "sink": [False, True],
    }
)
def test_rows_in_parts(name, head_dim, sink, backend):
    """The kernel that merges the parts takes the largest of theirs."""
    options = {"dtype": torch.bfloat16, "sink": sink, "max_scores": True}
    case = replace(PARTS[name], head_dim=head_dim, **options)
    assert parts(case, "cuda") > 0  # the case is about them
    check(case, backend, "cuda")


@pairwise(
    {
        "mask": [HOLE, masks.heads(HOLE, NONE), NONE],
        "head_dim, width": [(32, 32), (128, 128), (64, 128), (192, 128)],
        "block": [(128, 128), (64, 64), (16, 32)],
        "sink": [False, True],
    }
)
def test_rows_with_nothing(mask, head_dim, width, block, sink, backend):
    """In whole tiles of them, and beside rows that attend to something."""
    options = {"mask": mask, "block_size": block, "sink": sink, "max_scores": True}
    check(Case(1000, 1000, head_dim, torch.float16, v_head_dim=width, **options), backend, "cuda")


@pairwise(
    {
        "mask": [None, masks.causal(align="bottom_right")],
        "dropout_p": [0.0, 0.3],
        "n_q, n_k": [(1000, 1000), (1, 700), (130, 2000)],
        "dtype": LOW,
    }
)
def test_grouped_heads_dropout_and_other_lengths(mask, dropout_p, n_q, n_k, dtype, backend):
    options = {"batch": 2, "heads": 6, "kv_heads": 2, "mask": mask, "dropout_p": dropout_p}
    check(Case(n_q, n_k, 64, dtype, max_scores=True, **options), backend, "cuda")


def test_cuda_graphs(backend):
    q, k, v = inputs(requires_grad=False)
    graph, (_, maxima) = captured(lambda: attend(q, k, v, MASK, backend=backend))
    for factor in (-1.0, 3.0):
        q.mul_(factor)
        graph.replay()
        assert relative_error(maxima, wanted(q, k, MASK)) < 1e-5
