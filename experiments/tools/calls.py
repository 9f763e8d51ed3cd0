"""The calls whose kernels are compiled: what models, benchmarks and tests launch."""

import re
from dataclasses import dataclass, replace
from typing import Any

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
    keyed: bool = False  # dropout with a table of keys in the place of a seed
    deterministic: bool = False
    lse_gradient: bool = False
    sink: bool = False
    score: str = ""  # one of `offline.SCORES`
    max_scores: bool = False
    n_q: int = 1  # of a step of decoding
    page: int = 0  # tokens of a page of its cache
    backward: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}, head dim {self.head_dim}"


BASES = {
    "hopper": Call("", "hopper", 0, kv_heads=4),  # heads of their own keys are compiled apart
    "triton": Call("", "triton", 0),
    "decode": Call("", "decode", 0, kv_heads=1, block_size=(64, 64)),
    "picks": Call("", "picks", 0, heads=16, kv_heads=1, block_size=(16, 64)),
}
# what the words of a name change, in their order; see also `call`
WORDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "dense": {"mask": None},
    "split rows": {"mask": GLOBAL, "n": 8192},
    "blocks of 16": {"block_size": (16, 16)},
    "blocks of 64": {"block_size": (64, 64)},
    "scattered blocks": {"mask": SCATTERED, "block_size": (64, 64), "n": 4096},
    **{
        f"scattered blocks of {size}": {
            "mask": f"random:0.3:block={size}",
            "block_size": (size, size),
            "n": 2048,
        }
        for size in (16, 32)
    },
    "blocks of 16 x 64": {"block_size": (16, 64)},
    "odd length": {"n": 4000},
    "1000 tokens": {"n": 1000},
    "grouped heads": {"kv_heads": 1},
    "two heads share": {"heads": 8, "kv_heads": 4},
    "four heads share": {"heads": 8, "kv_heads": 2},
    # forwards with three consumers: a wave of tiles of 192 queries, or two of tiles of 128
    "tall": {"n": 1100, "heads": 16, "kv_heads": 16},
    "tall rows": {"n": 17408, "heads": 1, "kv_heads": 1},
    "1152 tokens": {"n": 1152},
    "deterministic": {"deterministic": True},
    "dropout": {"dropout_p": 0.1},
    "keyed dropout": {"dropout_p": 0.1, "keyed": True},
    "LSE gradient": {"lse_gradient": True},
    "maxima": {"max_scores": True},
    "16 queries": {"n_q": 16},
    "global": {"mask": GLOBAL},
    "of each head": {"heads": 4, "kv_heads": 4, "block_size": (16, 256)},
    "of four heads": {"heads": 4, "kv_heads": 1},
    "picks": {},
    **{name: {"dtype": name} for name in ("float16", "float32")},
    "sink": {"sink": True},
    **{
        f"{name} rule": {"score": name}
        for name in ("cap", "slopes", "distance", "sloped", "window", "mixed")
    },
}
CALLS = {  # by backend and head dims
    "hopper": {
        "32 64 80 96 128 192 256": "dense; causal",
        "32 64 96 128 256": "split rows; dense, dropout",
        "32 64 96 128": "blocks of 64; causal, dropout; dense, grouped heads;"
        "causal, grouped heads; dense, deterministic; causal, deterministic;"
        "split rows, deterministic;"
        "blocks of 64, deterministic",
        "64 80 128 256": "split rows, dropout; split rows, dropout, deterministic;"
        "split rows, grouped heads",
        "64 128 256": "blocks of 16; grouped heads, dropout; grouped heads, keyed dropout;"
        "split rows, keyed dropout",
        "32 64 128 256": "scattered blocks, four heads share;"
        "scattered blocks of 32, four heads share",
        "64 128": "causal, float16; causal, LSE gradient; dense, sink; dense, maxima; causal, sink;"
        "causal, maxima; split rows, sink; split rows, maxima; causal, v of 256",
        "128": "scattered blocks of 16, four heads share, sink, maxima;"
        "scattered blocks; scattered blocks, odd length;"
        "scattered blocks, blocks of 16 x 64;"
        "scattered blocks, odd length, grouped heads; scattered blocks, odd length, v of 64;"
        "scattered blocks, odd length, two heads share, dropout, sink;"
        "blocks of 64, split rows, two heads share, maxima; split rows, v of 256;"
        "dense, 1000 tokens",
        "96": "scattered blocks, float16",
        "64": "tall; tall, dense, 1152 tokens; split rows, tall rows; tall, blocks of 64;"
        "tall, blocks of 16; tall, float16; tall, maxima; tall, dense, 1152 tokens, sink;"
        "split rows, tall rows, sink, maxima; causal, v of 96",
        "192": "split rows, v of 128",
        "64 192": "causal, v of 128",
        " 64": "causal, cap rule; causal, slopes rule; causal, distance rule; causal, window rule",
        "96 128": "causal, v of 64",
    },
    "triton": {
        "24 32 40 64 72 128 192 256": "causal",
        "32 64 128 256": "dense; causal, dropout; causal, keyed dropout; distance rule",
        "128": "causal, float16; causal, v of 64",
        "64": "blocks of 16; LSE gradient; maxima; sink",
        "64 128": "causal, float32; cap rule; slopes rule; window rule",
    },
    "decode": {
        "128": ";".join(
            f"{what}{more}"
            for what in ("dense", "causal", "dense, pages of 64", "dense, pages of 16", "global",
                         "global, pages of 16, float32")
            for more in ("", ", 16 queries")
        ),
        "32 64 80 128 256": "global, pages of 16; global, pages of 16, 16 queries",
    },
    "picks": {
        "32 64 128 192 256": "picks; of each head",
        "64 128 256": "picks, 1000 tokens",
        "128": "blocks of 16; of four heads; picks, float16, v of 64; picks, float32;"
        "of each head, float16, v of 64; of each head, float32",
    },
}  # fmt: skip


def call(backend: str, head_dim: int, name: str, **more: Any) -> Call:
    """Return the call of a name: words of `WORDS`, "v of N" and "pages of N"."""
    changes: dict[str, Any] = {"name": name, "head_dim": head_dim}
    for word in name.split(", "):
        if found := re.fullmatch(r"(v|pages) of (\d+)", word):
            changes["v_head_dim" if found[1] == "v" else "page"] = int(found[2])
        else:
            changes |= WORDS[word]
    return replace(BASES[backend], **changes, **more)


def calls(*backends: str) -> list[Call]:
    """Return every variant of the kernels of these backends that is in use."""
    return [
        call(backend, int(dim), name.strip())
        for backend in backends
        for dims, names in CALLS[backend].items()
        for name in names.split(";")
        for dim in dims.split()
    ]
