"""What the gallery shows: an example of every pattern and transform, its count and its source."""

from typing import NamedTuple


class Entry(NamedTuple):
    """A row of the gallery.

    Attributes:
        code: a Python expression of `masks`, for N = 256 tokens.
        what: what it is good for, in a line.
        count: the allowed pairs as an expression of N and of the names in `given`; the generator
            compares it with the mask. Empty where there is no closed form.
        source: a paper or a library.
        given: the values of the names in `count`.
        head: which of two heads is drawn and counted, where they differ.
    """

    code: str
    what: str
    count: str = ""
    source: str = ""
    given: dict[str, int] = {}  # noqa: RUF012
    head: int = 0


BLOCKS = {"n": 16, "L": 4, "B": 16}

SECTIONS: dict[str, list[Entry]] = {
    "Bands and distances": [
        Entry("causal()", "no query sees ahead", "N*(N + 1)/2", "1706.03762"),
        Entry("local(24)", "a window to both sides", "N*(2*w + 1) - w*(w + 1)", "2004.05150",
              {"w": 24}),
        Entry("sliding(48)", "the last keys, causal", "N*w - w*(w - 1)/2", "2310.06825", {"w": 48}),
        Entry("dilated(48, 4)", "a window with gaps; join its residue classes with another mask",
              "N*(2*m + 1) - s*m*(m + 1)", "2004.05150", {"m": 12, "s": 4}),
        Entry("power_of_two()", "distances 0, 1, 2, 4, ..: few layers reach far",
              "N*(2*L + 1) - 2*(N - 1)", "2503.03588", {"L": 8}),
        Entry("log_sparse()", "the same, causal", "N*(L + 1) - (N - 1)", "1907.00235", {"L": 8}),
        Entry("diagonals((0, 16, 64))", "given distances", "3*N - 16 - 64"),
        Entry("strided(16)", "a window, and every 16th key before it; two layers see all",
              "N*l - l*(l - 1)/2 + N*(N/l - 1)/2", "1904.10509", {"l": 16}),
        Entry("fixed(16, 2)", "the query's chunk, and the ends of those before; two layers see all",
              "N*(l + 1)/2 + c*N*(N/l - 1)/2", "1904.10509", {"l": 16, "c": 2}),
    ],
    "Rows and columns": [
        Entry("sinks(8)", "the first keys, for everyone", "N*g", "2309.17453", {"g": 8}),
        Entry("keys_at((0, 100))", "vertical lines", "2*N", "2407.02490"),
        Entry("global_tokens(8)", "tokens that see and are seen; two layers see all",
              "2*N*g - g**2",
              "2004.05150", {"g": 8}),
        Entry("global_at((0, 100))", "the same, anywhere", "2*N*g - g**2", "2004.05150", {"g": 2}),
        Entry("global_rows(8)", "queries that see everything", "N*g", "", {"g": 8}),
        Entry("last_rows(8)", "the last queries see everything", "N*g", "", {"g": 8}),
        Entry("prefix_lm(64)", "a prompt that sees all of itself", "N*(N + 1)/2 + p*(p - 1)/2",
              "1910.10683", {"p": 64}),
        Entry("streaming(4, 48)", "sinks and a window, causal",
              "N*w - w*(w - 1)/2 + g*(N - w) - g*(g - 1)/2", "2309.17453", {"w": 48, "g": 4}),
        Entry("tri_shape(4, 48, 16)", "the same, and dense last rows", "", "TriangleMix"),
        Entry("vertical_slash((0, 40), (0, 1, 64))", "columns and diagonals, causal", "",
              "2407.02490"),
    ],
    "Graphs of token blocks": [
        Entry("butterfly(16)",
              "a hypercube: log2(n) layers see all; not together with causal alone",
              "n*(L + 1)*B**2", "2112.00029", BLOCKS),
        Entry("butterfly(16, levels=2)", "fewer strides: blocks in groups of four that never meet",
              "n*3*B**2", "2112.00029", BLOCKS),
        Entry("pixelfly(16)", "the butterfly and a global block", "(n*(L + 3) - 2*L - 2)*B**2",
              "2112.00029", BLOCKS),
        Entry("random_blocks(0.25, block=16)", "as many random blocks in every row", "n*4*B**2",
              "2007.14062", BLOCKS),
        Entry("random_regular(4, 16)", "a random graph with as many neighbours for all",
              "n*(4 + 1)*B**2", "2303.06147", BLOCKS),
        Entry("expander(4, 16)", "the same, drawn until it mixes well", "n*(4 + 1)*B**2",
              "2303.06147",
              BLOCKS),
        Entry("hubs(block=16)", "a few blocks see much, most see little"),
        Entry("bigbird(16)", "window, global and random blocks",
              "(2*n + 2*(4 + r) + (n - 4)*(5 + r))*B**2", "2007.14062", BLOCKS | {"r": 3}),
        Entry("longformer(48)", "a window and global tokens",
              "N*(2*w + 1) - w*(w + 1) + 2*(N - 1 - w)", "2004.05150", {"w": 24}),
        Entry("etc_(8, 24)", "global tokens in front of a long input", "", "2004.08483"),
    ],
    "Segments": [
        Entry("block_diagonal(48)", "chunks that see themselves", "(N // s)*s**2 + (N % s)**2", "",
              {"s": 48}),
        Entry("block_causal(32)", "chunks that see themselves and those before", "N*(N + s)/2",
              "2503.09573", {"s": 32}),
        Entry("documents((60, 100, 96))", "a packed batch", "60**2 + 100**2 + 96**2"),
        Entry("shared_prefix(32, (100, 124))", "several continuations of one prompt"),
        Entry("longnet(64, 4)", "every 4th token of a segment", "N*w/r**2", "2307.02486",
              {"w": 64, "r": 4}),
    ],
    "Images and video": [
        Entry("neighborhood((16, 16), 5)", "25 neighbours for every pixel, at the border too",
              "N*k**2", "2204.07143", {"k": 5}),
        Entry("local_2d((16, 16), 2)", "the same, cut at the border",
              "(W*(2*r + 1) - r*(r + 1))**2",
              "1906.05909", {"W": 16, "r": 2}),
        Entry("axial((16, 16))", "the pixel's row and column; two layers see all", "N*(2*W - 1)",
              "1912.12180", {"W": 16}),
        Entry("sliding_tiles((16, 16), 4, 3)", "whole tiles of a window", "N*(3*t)**2",
              "2502.04507",
              {"t": 4}),
    ],
    "Transforms": [
        Entry("neighborhood((16, 16), 5) >> tiled((16, 16), 4)",
              "tiles of the image in turn: fewer blocks",
              "N*25"),
        Entry("neighborhood((16, 16), 5) >> morton((16, 16))", "the image along a Z curve", "N*25"),
        Entry("neighborhood((16, 16), 5) >> hilbert((16, 16))", "the image along a Hilbert curve",
              "N*25"),
        Entry("strided(16) >> packed((60, 100, 96))", "the mask once in every document"),
        Entry("sliding(48) >> shift(64)", "64 tokens later"),
        Entry("local(20) >> snap(16)", "rounded to whole blocks, outward"),
        Entry("causal() >> permuted(tuple(range(255, -1, -1)))", "any order of the tokens",
              "N*(N + 1)/2"),
    ],
    "Composition": [
        Entry("(local(24) | butterfly(16)) & causal()", "or, and"),
        Entry("causal() - sliding(48)", "without"),
        Entry("heads(local(24), butterfly(16))",
              "another mask for every other head (drawn: head 1)",
              "n*(L + 1)*B**2", "", BLOCKS, 1),
        Entry("layers(local(24), butterfly(16)).layer(1)", "another mask for every other layer",
              "n*(L + 1)*B**2", "", BLOCKS),
        Entry("where(lambda q, k: (q - k) % 24 < 6)", "any formula"),
    ],
    "Presets": [
        Entry("deepspeed_fixed(4, 1)", "`FixedSparsityConfig`", "(n*(4 + n//4 - 1))*B**2",
              "DeepSpeed",
              BLOCKS),
        Entry("deepspeed_variable(1)", "`VariableSparsityConfig`", "", "DeepSpeed"),
        Entry("deepspeed_bigbird()", "`BigBirdSparsityConfig`", "", "DeepSpeed"),
        Entry("deepspeed_bslongformer()", "`BSLongformerSparsityConfig`", "(5*n - 6)*B**2",
              "DeepSpeed",
              BLOCKS),
        Entry("deepspeed_local_sliding_window()", "`LocalSlidingWindowSparsityConfig`",
              "(2*n - 1)*B**2",
              "DeepSpeed", BLOCKS),
        Entry("lra_local(50)", "Long Range Arena's local attention", "5*50**2 + 6**2",
              "2011.04006"),
        Entry("lra_fixed(50, 10)", "its Sparse Transformer", "", "2011.04006"),
        Entry("lra_longformer(48)", "its Longformer", "", "2011.04006"),
        Entry("lra_bigbird(16)", "its BigBird", "", "2011.04006"),
    ],
}  # fmt: skip
