"""Cases of the gradient of a bias by distance, for the interpreter and for a GPU: which tiles are
near the diagonal, and in which lists they are.
"""

import masks
from tests.attention_cases import Case

_BLOCKS = masks.documents([64] * 6)
_SHORT = {"n_q": 200, "n_k": 200}
_SMALL = {"block_size": (32, 32), "radius": 20}
CASES = {
    "no near tile": {"mask": masks.causal() & ~masks.local(240), **_SMALL},
    "near tiles on one side": {"mask": masks.causal() & ~masks.local(16), **_SMALL},
    "all near and partial": {"mask": masks.local(16), **_SMALL},
    "all near and full": {"mask": _BLOCKS, "block_size": (64, 64), "radius": 40},
    "near full, far partial": {
        "mask": _BLOCKS | masks.global_tokens(9), "block_size": (64, 64), "radius": 7,
    },
    "near partial, far full": {
        "mask": masks.local(30) | masks.global_tokens(64), "block_size": (64, 64), "radius": 7,
    },
    "first and last diagonal": {"radius": 1, "n_q": 64, "n_k": 384},
    "no key at distance 0 of the first queries": {"radius": 30, "n_q": 384, "n_k": 90},
    "a radius beyond the ends": {"radius": 1000, "n_k": 300},
    "one query": {"n_q": 1, "radius": 128},
    "many parts": {
        "mask": masks.causal(), "block_size": (16, 16), "radius": 25, "n_q": 150, "n_k": 160,
    },
    "blocks that are not square": {
        "mask": masks.causal(), "block_size": (16, 64), "radius": 50, **_SHORT,
    },
    "blocks that are no powers of two": {
        "mask": masks.causal(), "block_size": (48, 80), **_SHORT,
    },
    "long lists": {
        "mask": masks.random_blocks(0.97, block=16), "block_size": (16, 16), "n_q": 20,
        "n_k": 2300, "radius": 90,
    },
    "wide tiles of dq": {"head_dim": 64, "radius": 60},
    "wide tiles of dq, lists": {
        "head_dim": 64, "radius": 128, "mask": masks.random_blocks(0.5, block=128),
    },
}  # fmt: skip


def case(name: str, **changes: object) -> Case:
    given = {"n_q": 384, "n_k": 384, "head_dim": 16, "terms": ("bias",), "kv_heads": 1}
    return Case(**(given | CASES[name] | changes))  # pyright: ignore[reportArgumentType]
