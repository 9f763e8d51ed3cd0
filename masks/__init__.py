"""Attention masks that compose: shape-free expressions, and the exact block mask of a length."""

from masks import interop
from masks.algebra import Mask
from masks.block_lists import BlockLists
from masks.block_mask import BlockMask
from masks.patterns.array import mask_from
from masks.patterns.band import causal, local, sliding
from masks.patterns.bigbird import bigbird
from masks.patterns.bigbird_compat import bigbird_compat
from masks.patterns.block_diagonal import block_causal, block_diagonal
from masks.patterns.butterfly import butterfly, pixelfly
from masks.patterns.columns import keys_at, prefix_lm, sinks
from masks.patterns.dense import dense
from masks.patterns.distances import diagonals, dilated
from masks.patterns.documents import (
    documents,
    documents_from_ids,
    documents_from_offsets,
    shared_prefix,
)
from masks.patterns.expander import expander, random_regular
from masks.patterns.global_tokens import global_at, global_tokens
from masks.patterns.hubs import hubs
from masks.patterns.local_2d import axial, local_2d
from masks.patterns.log_sparse import log_sparse
from masks.patterns.longformer import etc_, longformer
from masks.patterns.longnet import longnet
from masks.patterns.neighborhood import neighborhood, sliding_tiles
from masks.patterns.power_of_two import power_of_two
from masks.patterns.random_blocks import random_blocks
from masks.patterns.row_bands import global_rows, last_rows
from masks.patterns.sparse_transformer import fixed, strided
from masks.patterns.streaming import streaming, tri_shape, vertical_slash
from masks.predicate.table import table
from masks.predicate.where import where
from masks.presets.deepspeed import (
    deepspeed_bigbird,
    deepspeed_bslongformer,
    deepspeed_fixed,
    deepspeed_local_sliding_window,
    deepspeed_variable,
)
from masks.presets.lra import lra_bigbird, lra_fixed, lra_local, lra_longformer, lra_strided
from masks.spec import parse, pattern, transform
from masks.structure import heads, layers
from masks.transforms.packed import packed
from masks.transforms.reorder import hilbert, morton, permuted, tiled
from masks.transforms.shift import shift
from masks.transforms.snap import snap

__all__ = [
    "BlockLists",
    "BlockMask",
    "Mask",
    "axial",
    "bigbird",
    "bigbird_compat",
    "block_causal",
    "block_diagonal",
    "butterfly",
    "causal",
    "deepspeed_bigbird",
    "deepspeed_bslongformer",
    "deepspeed_fixed",
    "deepspeed_local_sliding_window",
    "deepspeed_variable",
    "dense",
    "diagonals",
    "dilated",
    "documents",
    "documents_from_ids",
    "documents_from_offsets",
    "etc_",
    "expander",
    "fixed",
    "global_at",
    "global_rows",
    "global_tokens",
    "heads",
    "hilbert",
    "hubs",
    "interop",
    "keys_at",
    "last_rows",
    "layers",
    "local",
    "local_2d",
    "log_sparse",
    "longformer",
    "longnet",
    "lra_bigbird",
    "lra_fixed",
    "lra_local",
    "lra_longformer",
    "lra_strided",
    "mask_from",
    "morton",
    "neighborhood",
    "packed",
    "parse",
    "pattern",
    "permuted",
    "pixelfly",
    "power_of_two",
    "prefix_lm",
    "random_blocks",
    "random_regular",
    "shared_prefix",
    "shift",
    "sinks",
    "sliding",
    "sliding_tiles",
    "snap",
    "streaming",
    "strided",
    "table",
    "tiled",
    "transform",
    "tri_shape",
    "vertical_slash",
    "where",
]
