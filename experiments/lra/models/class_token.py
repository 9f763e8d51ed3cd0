"""A class token has to see all of a sequence: the classifier learns from nothing else."""

from collections.abc import Sequence

from experiments.lra.models.attention import Attention
from masks.analysis.reach import MOST_TOKENS, reach


def refuse_a_blind_class_token(layers: Sequence[Attention]) -> None:
    """ValueError where the first token has not seen all others after these layers.

    Kinds whose pairs follow from the data pass. Above 32768 tokens blocks are counted, so that a
    single token may be missed.
    """
    patterns = [layer.pattern() for layer in layers]
    if None in patterns:  # one layer that sees all is enough
        return
    n, heads = layers[0].length, layers[0].heads
    blocks = [pattern.build(n, heads=heads) for pattern in patterns if pattern is not None]
    found = reach(blocks, len(blocks), exact=n <= MOST_TOKENS)
    seen, wanted = int(found.seen_keys[0]), int(found.wanted_keys[0])
    if seen < wanted:
        depth = "1 layer" if len(blocks) == 1 else f"{len(blocks)} layers"
        raise ValueError(
            f"pool is cls, and after {depth} of {patterns[0]} the class token has seen {seen} of"
            f" {wanted} {found.unit}: take model.pool=mean, or, of sparse attention, a mask that"
            " shows it all, as MASK|global:1"
        )
