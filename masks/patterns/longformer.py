"""Windows with global tokens: Longformer (arXiv 2004.05150) and ETC (arXiv 2004.08483)."""

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.band import local
from masks.patterns.distances import dilated
from masks.patterns.global_tokens import global_at, global_tokens
from masks.spec import pattern


@pattern()
def longformer(window: int, dilation: int = 1, global_tokens: tuple[int, ...] = (0,)) -> Mask:
    """A window of window // 2 keys to either side, and tokens that see all and are seen by all.

    The window of Beltagy et al. (arXiv 2004.05150) counts keys: with the query itself an inner row
    has window // 2 * 2 + 1 of them, every `dilation`-th token. Dilation differs from head to head
    in the upper layers there: `heads(longformer(w), longformer(w, 2))`. The projections that
    global tokens have of their own in Longformer are no matter of the mask. Its text is that of
    the union, such as `local(256) | global_at((0,))`.

    With w = window // 2 and no dilation, n(2w + 1) - w(w + 1) of n x n pairs are in the window, and
    a global token adds 2n - 1 less those of them that the window or another one has.

    Args:
        window: keys, >= 1.
        dilation: >= 1; the window then reaches window // 2 * dilation tokens.
        global_tokens: tuple of token numbers; () gives the window alone.
    """
    radius = integer("window", window, least=1) // 2
    dilation = integer("dilation", dilation, least=1)
    inner = local(radius) if dilation == 1 else dilated(radius * dilation, dilation)
    return inner if global_tokens == () else inner | global_at(global_tokens)


@pattern("etc")
def etc_(n: int, radius: int) -> Mask:
    """`n` global tokens in front of a long input, whose tokens see `radius` others to either side.

    Extended Transformer Construction (Ainslie et al., arXiv 2004.08483) with both inputs in one
    sequence: global-to-global, global-to-long and long-to-global attention are dense, long-to-long
    is local. Its structured masks of the global parts are further terms for `&`, and BigBird's ETC
    adds `bigbird(window=1, global_blocks=0)` for random blocks. The text is that of
    `global_tokens(n) | local(radius)`.

    Of N x N pairs, with m = N - n > radius long tokens, n(2N - n) + m(2r + 1) - r(r + 1) are
    allowed.

    Args:
        n: global tokens, >= 0.
        radius: tokens, >= 0.
    """
    return global_tokens(n) | local(integer("radius", radius, least=0))
