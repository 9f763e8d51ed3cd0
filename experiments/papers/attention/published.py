"""What the papers report, with the hardware, and readings of the four numbers of memory."""

from typing import NamedTuple

from experiments.papers.attention.stack import Sizes


class Published(NamedTuple):
    """A line of Figure 2 (left) of FlashAttention: GPT-2 medium, forward and backward, A100."""

    gflop: float
    hbm_gb: float
    ms: float


FIGURE_2 = {"standard": Published(66.6, 40.3, 41.7), "flash": Published(75.2, 4.4, 7.3)}
FIGURE_2_SHAPE = {"batch": 64, "heads": 16, "n": 1024, "head_dim": 64}
FIGURE_2_DEVICE = "A100"

# Activation memory of a 7B model at 4096 tokens, as lectures give it, in GB.
SEVEN_B = Sizes(batch=1, n=4096, dim=4096, hidden=11008, heads=32)
LAYERS = 32


class Reading(NamedTuple):
    """A configuration whose formula gives a published number, and what it has to assume."""

    published_gb: float
    configuration: str
    assumption: str
    formula_gb: float


def readings(sizes: Sizes = SEVEN_B, layers: int = LAYERS) -> list[Reading]:
    """The published numbers beside the nearest formulas, in 1e9 bytes.

    Their statement names the model and the length, not what is counted: these are readings.
    """
    unit, hidden, scores = sizes.tokens_bytes, sizes.hidden_bytes, sizes.score_bytes
    # The layer at work is that of `layer_bytes`, without the matrix or the LSE.
    linear = sizes.layer_bytes("ours") - sizes.lse_bytes
    gradients = 2 * unit + 3 * hidden  # of x and out, and of gate, up and their product
    found = [
        (
            68.0, "standard", "only scores and probabilities, bf16, of all layers",
            layers * 2 * scores,
        ),
        (
            11.0, "FlashAttention", "per layer x, q, k, v, out, gate and up; norms are repeated",
            layers * (5 * unit + 2 * hidden + sizes.lse_bytes),
        ),
        (
            6.2, "standard, checkpointed",
            "the inputs of all layers; one layer with S, P, dP and dS and its gradients",
            layers * unit + linear + 4 * scores + gradients,
        ),
        (
            2.1, "FlashAttention, checkpointed",
            "the inputs of all layers; one layer with its gradients",
            layers * unit + linear + sizes.lse_bytes + gradients,
        ),
    ]  # fmt: skip
    return [Reading(gb, name, why, total / 1e9) for gb, name, why, total in found]


class Saved(NamedTuple):
    """A model of Korthikanti et al. (arXiv 2205.05198), and the published share of the activations
    that selective recomputation saves.
    """

    heads: int
    n: int
    dim: int
    share: float


SELECTIVE = {
    "GPT-3, 175B": Saved(96, 2048, 12_288, 0.70),
    "MT-NLG, 530B": Saved(128, 2048, 20_480, 0.65),
}


def layer_units(heads: int, n: int, dim: int) -> tuple[float, float]:
    """Bytes a layer keeps over n * batch * dim: of attention's scores, and of all the rest.

    Equation 1 of Korthikanti et al.: s b h (34 + 5 a s / h), 16-bit with dropout.
    """
    return 5 * heads * n / dim, 34.0


def attention_share(heads: int, n: int, dim: int) -> float:
    """The share of a layer's activations that recomputing attention's scores saves."""
    scores, rest = layer_units(heads, n, dim)
    return scores / (scores + rest)
