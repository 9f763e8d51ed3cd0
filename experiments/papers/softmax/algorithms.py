"""The algorithms of the paper, by name: what they do and how often they touch an element of x.

Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.
"""

from typing import NamedTuple


class Algorithm(NamedTuple):
    """One way to a softmax, or to the k largest probabilities and their indices."""

    title: str
    topk: bool
    accesses: int | None  # reads and writes of slow memory, for each element of x; None: unknown


ALGORITHMS = {
    "copy": Algorithm("copy", False, 2),
    "safe": Algorithm("safe softmax", False, 4),  # maximum, sum, result read x; one write
    "online": Algorithm("online softmax", False, 3),  # maximum and sum read x together
    "torch": Algorithm("torch.softmax", False, None),
    "safe_topk": Algorithm("safe, then top-k", True, 5),  # the result is read once more
    "safe_fused": Algorithm("safe, fused with top-k", True, 2),  # maximum; sum and top-k
    "online_fused": Algorithm("online, fused with top-k", True, 1),
    "torch_topk": Algorithm("torch.softmax, torch.topk", True, None),
}
