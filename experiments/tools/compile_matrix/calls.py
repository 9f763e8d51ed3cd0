"""The calls whose kernels are compiled: what models, benchmarks and tests launch."""

from dataclasses import dataclass, replace

SCATTERED = "random:0.3:block=64"  # neighbouring key blocks have little in common
GLOBAL = "local:256+global:128"  # its global rows are so long that they are split


@dataclass(frozen=True)
class Call:
    """A forward and, unless the backend has none or it is left out, a backward."""

    name: str
    backend: str  # hopper | triton | decode | picks
    head_dim: int
    v_head_dim: int | None = None  # None: head_dim
    dtype: str = "bfloat16"
    mask: str | None = "causal"  # None: dense attention
    block_size: tuple[int, int] = (128, 128)
    n: int = 1024
    heads: int = 4
    kv_heads: int = 2
    dropout_p: float = 0.0
    deterministic: bool = False
    lse_gradient: bool = False
    terms: tuple[str, ...] = ()  # fields of sparseflash.Terms
    max_scores: bool = False
    n_q: int = 1  # of a step of decoding
    page: int = 0  # tokens of a page of its cache
    backward: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}, head dim {self.head_dim}"


def hopper_calls() -> list[Call]:
    """Every variant of the kernels for Hopper that is in use."""
    base = Call("causal", "hopper", 64, kv_heads=4)  # heads of their own keys are compiled apart
    calls = []
    for head_dim in (32, 64, 96, 128):
        dense = replace(base, name="dense", head_dim=head_dim, mask=None)
        causal = replace(base, head_dim=head_dim)
        split = replace(causal, name="split rows", mask=GLOBAL, n=8192)
        small = replace(causal, name="blocks of 64", block_size=(64, 64))
        calls += [
            dense, causal, split, small,
            *(replace(c, name=f"{c.name}, deterministic", deterministic=True)
              for c in (dense, causal, split, small)),
            *(replace(c, name=f"{c.name}, dropout", dropout_p=0.1) for c in (dense, causal)),
            *(replace(c, name=f"{c.name}, grouped heads", kv_heads=1) for c in (dense, causal)),
        ]  # fmt: skip
    for head_dim in (64, 128):
        causal = replace(base, head_dim=head_dim)
        calls += [
            replace(causal, name="causal, float16", dtype="float16"),
            replace(causal, name="blocks of 16", block_size=(16, 16)),
            replace(causal, name="grouped heads, dropout", kv_heads=1, dropout_p=0.1),
            replace(causal, name="causal, LSE gradient", lse_gradient=True),
            *(replace(c, **more, name=f"{c.name}, {name}")
              for c in (
                  replace(causal, name="dense", mask=None), causal,
                  replace(causal, name="split rows", mask=GLOBAL, n=8192),
              )
              for name, more in (("sink", {"terms": ("sink",)}), ("maxima", {"max_scores": True}))),
        ]  # fmt: skip
    scattered = replace(base, name="scattered blocks of 64", head_dim=128, n=4096,
                        mask=SCATTERED, block_size=(64, 64))  # fmt: skip
    sliced = replace(scattered, name="scattered blocks of 64, odd length", n=4000)
    calls += [
        scattered,
        sliced,
        replace(scattered, head_dim=96, dtype="float16"),
        replace(sliced, name="scattered blocks of 64, grouped heads", kv_heads=1),
        replace(scattered, name="scattered blocks of 16 x 64", block_size=(16, 64)),
        replace(sliced, name="scattered blocks of 64, v of 64", v_head_dim=64),
        *(replace(scattered, name="two heads share", head_dim=d, heads=8, kv_heads=2)
          for d in (32, 64, 128, 256)),
        replace(sliced, name="two heads share, dropout, sink", heads=8, dropout_p=0.1,
                terms=("sink",)),
        replace(scattered, name="two heads share, split, maxima", heads=8, n=8192, mask=GLOBAL,
                max_scores=True),
    ]  # fmt: skip
    calls += tall_calls()
    split = replace(base, name="split rows", mask=GLOBAL, n=8192)
    dense256 = replace(base, name="dense", head_dim=256, mask=None)
    causal256 = replace(base, head_dim=256)
    return [
        *calls,
        dense256, causal256, replace(dense256, name="dense, dropout", dropout_p=0.1),
        replace(split, head_dim=256),
        replace(split, name="split rows, v of 128", head_dim=192, v_head_dim=128),
        replace(split, name="split rows, v of 256", head_dim=128, v_head_dim=256),
        *(replace(split, name=f"split rows, dropout{more}", head_dim=d, dropout_p=0.1,
                  deterministic=bool(more))
          for d in (64, 80, 128, 256) for more in ("", ", deterministic")),
        *(replace(split, name="split rows, grouped heads", head_dim=d, kv_heads=1)
          for d in (64, 80, 128, 256)),
        replace(causal256, name="blocks of 16", block_size=(16, 16)),
        replace(causal256, name="grouped heads, dropout", kv_heads=1, dropout_p=0.1),
        *(c for d in (80, 192)
          for c in (replace(base, head_dim=d), replace(base, name="dense", head_dim=d, mask=None))),
        replace(base, name="causal, v of 128", head_dim=192, v_head_dim=128),
        replace(base, name="causal, v of 256", v_head_dim=256),
        replace(base, name="causal, v of 128", v_head_dim=128),
        replace(base, name="causal, v of 64", head_dim=128, v_head_dim=64),
        replace(base, name="causal, v of 96", v_head_dim=96),
        replace(base, name="causal, v of 64", head_dim=96, v_head_dim=64),
        replace(base, name="causal, v of 256", head_dim=128, v_head_dim=256),
        replace(base, name="odd length", head_dim=128, mask=None, n=1000),
    ]  # fmt: skip


def tall_calls() -> list[Call]:
    """Return forwards with three consumers: a wave of tiles of 192 queries, or two of tiles of
    128.
    """
    causal = Call("causal, tall", "hopper", 64, n=1100, heads=16, kv_heads=16)
    dense = replace(causal, name="dense, tall", mask=None, n=1152)
    split = replace(causal, name="split rows, tall", mask=GLOBAL, n=17408, heads=1, kv_heads=1)
    return [
        dense, causal, split,
        replace(causal, name="blocks of 64, tall", block_size=(64, 64)),
        replace(causal, name="blocks of 16, tall", block_size=(16, 16)),
        replace(causal, name="causal, tall, float16", dtype="float16"),
        replace(causal, name="causal, tall, maxima", max_scores=True),
        replace(dense, name="dense, tall, sink", terms=("sink",)),
        replace(split, name="split rows, tall, sink, maxima", terms=("sink",), max_scores=True),
    ]  # fmt: skip


def portable_calls() -> list[Call]:
    """Return the portable kernels: full and partial blocks, dropout, and head dims that are
    padded.
    """
    base = Call("causal", "triton", 64)
    calls = [
        replace(base, name=name, head_dim=head_dim, mask=mask, dropout_p=dropout_p)
        for head_dim in (32, 64, 128, 256)
        for name, mask, dropout_p in (
            ("dense", None, 0.0), ("causal", "causal", 0.0), ("causal, dropout", "causal", 0.1),
        )
    ]  # fmt: skip
    return [
        *calls,
        replace(base, name="causal, float16", head_dim=128, dtype="float16"),
        replace(base, name="blocks of 16", block_size=(16, 16)),
        *(replace(base, head_dim=head_dim) for head_dim in (24, 40, 72, 192)),
        replace(base, name="causal, v of 64", head_dim=128, v_head_dim=64),
        *(replace(base, name="causal, float32", head_dim=d, dtype="float32") for d in (64, 128)),
        replace(base, name="causal, LSE gradient", lse_gradient=True),
        replace(base, name="causal, maxima", max_scores=True),
        *(
            replace(base, name=f"causal, {term}", head_dim=head_dim, terms=(term,))
            for term, head_dims in (
                ("sink", (64,)),
                ("softcap", (128, 256)),
                ("slopes", (64, 128)),
                ("bias", (32, 64, 128, 256)),
            )
            for head_dim in head_dims
        ),
        *decode_calls(),
        *picks_calls(),
    ]


def picks_calls() -> list[Call]:
    """Return lists of each query, shared by heads that fill a tile or not, of short and long
    blocks.
    """
    shared = Call("picks", "picks", 128, heads=16, kv_heads=1, block_size=(16, 64))
    few = replace(shared, name="picks of each head", heads=4, kv_heads=4, block_size=(16, 256))
    return [
        *(replace(call, head_dim=d) for call in (shared, few) for d in (32, 64, 128, 192, 256)),
        *(
            replace(shared, name="picks, a partial tile", head_dim=d, n=1000)
            for d in (64, 128, 256)
        ),
        replace(shared, name="picks, blocks of 16", block_size=(16, 16)),
        replace(few, name="picks of four heads", kv_heads=1, block_size=(16, 64)),
        *(
            replace(call, name=f"{call.name}, {name}", **more)
            for call in (shared, few)
            for name, more in (
                ("float16, v of 64", {"dtype": "float16", "v_head_dim": 64}),
                ("float32", {"dtype": "float32"}),
            )
        ),
    ]


def decode_calls() -> list[Call]:
    """Return steps of decoding with one query and with 16, of every kind of cache and mask."""
    dense = Call("decode", "decode", 128, mask=None, kv_heads=1, block_size=(64, 64))
    steps = [
        replace(dense, name=f"decode {name}, {n_q} queries", mask=mask, page=page, n_q=n_q)
        for n_q in (1, 16)
        for name, mask, page in (
            ("dense", None, 0), ("causal", "causal", 0), ("pages of 64", None, 64),
            ("pages of 16", None, 16), ("blocks", GLOBAL, 0), ("blocks, pages of 16", GLOBAL, 16),
        )
    ]  # fmt: skip
    widest = [s for s in steps if "blocks, pages" in s.name]
    return [
        *steps,
        *(replace(s, head_dim=head_dim) for head_dim in (32, 64, 80, 256) for s in widest),
        *(replace(s, name=f"{s.name}, float32", dtype="float32") for s in widest),
    ]


def representative() -> list[Call]:
    """Few calls that a test has time for: every kernel, each pass, and what claims work.

    Those for Hopper join several options each, and two have wide products of several parts.
    """
    return [
        Call("scattered blocks of 64, deterministic", "hopper", 96, mask=SCATTERED,
             block_size=(64, 64), n=4000, deterministic=True),
        Call("grouped heads, dropout", "hopper", 192, kv_heads=1, dropout_p=0.1),
        Call("split rows, dropout, deterministic, v of 64", "hopper", 128, v_head_dim=64,
             mask=GLOBAL, n=8192, kv_heads=4, dropout_p=0.1, deterministic=True),
        Call("split rows, tall, sink, maxima", "hopper", 64, mask=GLOBAL, n=17408, heads=1,
             kv_heads=1, terms=("sink",), max_scores=True, backward=False),
        Call("causal", "triton", 128),
        Call("decode, 16 queries", "decode", 128, mask=GLOBAL, kv_heads=1, n_q=16, page=16),
        Call("picks", "picks", 128, heads=16, kv_heads=1, block_size=(16, 64)),
        Call("picks of each head", "picks", 128, kv_heads=4, block_size=(16, 256)),
    ]  # fmt: skip
