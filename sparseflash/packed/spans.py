"""Spans of packed sequences in plain torch: what every token sees, or is seen by.

Spans are int32 (spans, 2, batch, n): the first token of a span and its end. Those of one token do
not touch. They come from tensors of offsets, such as `cu_seqlens`. Shapes are known to the host, so
nothing waits and torch.compile traces it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from masks.checks import integer
from sparseflash.checks import readable
from sparseflash.operators.twin import twin


def pad(offsets: Tensor, length: int) -> Tensor:
    """Offsets of one length for every step: the last one again and again, (..., length).

    It adds documents of no tokens to `cu_seqlens` (M + 1,).
    Raises ValueError where there are more than `length`.
    """
    check_integers("offsets", offsets)
    missing = integer("length", length, min=1) - offsets.shape[-1]
    if missing < 0:
        raise ValueError(
            f"offsets has {offsets.shape[-1]} numbers in a row, length is {length}: declare a"
            " greater one, or pack fewer documents"
        )
    return torch.cat([offsets, offsets[..., -1:].expand(*offsets.shape[:-1], missing)], -1)


def check_integers(name: str, given: Tensor) -> Tensor:
    """Return (batch, numbers), from that or from (numbers,); ValueError for other tensors."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is a {type(given).__name__}: give a tensor on the device of q")
    if given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {given.dtype}: give int32 or int64")
    if given.ndim not in (1, 2) or not given.shape[-1]:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}: give a number or more, or as many for every"
            " batch entry"
        )
    return given if given.ndim == 2 else given[None]


def check_offsets(name: str, given: Tensor, n: int) -> Tensor:
    """`check_integers` of offsets; where they are readable, they ascend from 0 to at most n."""
    rows = check_integers(name, given)
    if rows.shape[1] == 1:  # no documents: one without tokens
        rows = pad(rows, 2)
    if readable(rows):
        bad = (rows.diff() < 0).any(1) | (rows[:, 0] != 0) | (rows[:, -1] > n)
        if bad.any():
            row = rows[int(bad.nonzero()[0])]
            raise ValueError(
                f"{name} is {_shown(row)}: it must ascend from 0 to no more than {n}, the tokens"
            )
    return rows


def _shown(row: Tensor) -> str:
    numbers = [str(number) for number in row.tolist()]
    return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:4], "..", *numbers[-3:]])


def stretches(offsets: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number, start and stop of the document of tokens 0 to n - 1, int64 (batch, n);
    stop is start where they lie in none. offsets: (batch, documents + 1).
    """
    documents = offsets.shape[1] - 1
    number = last_begin(offsets, n)
    inside = number < documents
    number = number.clamp(0, documents - 1)
    start, stop = offsets.gather(1, number), offsets.gather(1, number + 1)
    return number, start, torch.where(inside, stop, start)


def last_begin(begins: Tensor, n: int) -> Tensor:
    """int64 (batch, n): for tokens 0 to n - 1, which of the ascending `begins` (batch, numbers) is
    the last one up to the token; -1 before the first.
    """
    token = torch.arange(n, dtype=begins.dtype, device=begins.device)
    # `begins - 1` is a tensor of its own: torch.compile on a GPU searches a slice, such as
    # begins[:, 1:], without its offset (torch 2.11 and 2.13).
    return torch.searchsorted(begins - 1, token.expand(len(begins), n).contiguous()) - 1


Span = tuple[Tensor, Tensor]  # int (batch, tokens) each: the first token that is seen, and the end


@twin(
    "packed",
    "(Tensor offsets, Tensor? offsets_k, SymInt n, SymInt n_k, SymInt left, SymInt right,"
    " bool shared, SymInt? length, Tensor? lengths) -> Tensor",
)
def document_spans(
    offsets: Tensor, offsets_k: Tensor | None, n: int, n_k: int, left: int, right: int,
    shared: bool, length: int | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Keys that the queries of `packed.documents` see.

    offsets_k: of the keys, where they are not those of the queries. The last query of a document
        then has the position of its last key.
    length, lengths: of the prefixes, one for all or (batch or 1, documents); both None: no prefix.
    """
    number, start, stop = stretches(offsets, n)
    token = torch.arange(n, device=offsets.device)
    others, second = (number > 0) & (start < stop), offsets[:, 1:2].minimum(token + 1)
    if offsets_k is not None:
        last, second = offsets_k.gather(1, number + 1), offsets_k[:, 1:2]
        token, empty = token + (last - stop), start == stop
        start = offsets_k.gather(1, number)
        stop = torch.where(empty, start, last)
    spans = []
    if shared:
        spans.append((torch.zeros_like(stop), torch.where(others, second, 0)))
    if lengths is not None:
        own = lengths.expand_as(offsets[:, 1:]).gather(1, number)
        spans.append((start, stop.minimum(start + own)))
    elif length is not None:
        spans.append((start, stop.minimum(start + length)))
    spans.append((start.maximum(token - left), stop.minimum(token + right + 1)))
    return apart(spans, n_k)


@twin("packed", "(Tensor offsets, SymInt n, SymInt size, bool interleaved) -> Tensor")
def diffusion_spans(offsets: Tensor, n: int, size: int, interleaved: bool) -> Tensor:
    """Keys that the queries of `packed.block_diffusion` see."""
    half = n // 2
    if interleaved:
        _, start, stop = stretches(2 * offsets, n)
        length, place = (stop - start) // 2, torch.arange(n, device=offsets.device) - start
        noisy = place < length
        place = torch.where(noisy, place, place - length)
        clean = start + length
    else:
        _, start, stop = (torch.cat([x, x], 1) for x in stretches(offsets, half))
        token = torch.arange(n, device=offsets.device)
        noisy = (token < half).expand_as(start)
        length, place = stop - start, token % half - start
        clean = half + start
    place = torch.where(length > 0, place, 0)
    before = place - place % size
    after = length.minimum(before + size)
    own = torch.where(noisy, after, before)
    spans = [(start + before, start + own), (clean, clean + torch.where(noisy, before, after))]
    return apart(spans, n)


@twin("packed", "(Tensor enter, Tensor leave, SymInt n) -> Tensor")
def tree_spans(enter: Tensor, leave: Tensor, n: int) -> Tensor:
    """Return the queries that see each key of `packed.prefix_tree`: from the key on to an end."""
    stop = leave.gather(1, last_begin(enter, n).clamp(min=0))
    key = torch.arange(n, dtype=torch.int32, device=stop.device).expand_as(stop)
    return torch.stack([key, stop.clamp(max=n).int().maximum(key)])[None]


def apart(spans: Sequence[Span], n: int) -> Tensor:
    """Return the same spans within 0..n, apart: what two of a token share, the later has.

    spans: in the order of their firsts. One that ends before it begins is empty.
    """
    found: list[Span] = []
    for first, stop in spans:
        first, stop = (end.clamp(0, n).int() for end in (first, stop))
        stop = stop.maximum(first)
        if found:
            before, end = found[-1]
            empty = first == stop
            join = (before < end) & (empty | (end >= first))
            first, stop = (
                torch.where(join, before, first),
                torch.where(join, torch.where(empty, end, end.maximum(stop)), stop),
            )
            found[-1] = before, torch.where(join, before, end)
        found.append((first, stop))
    return torch.stack([torch.stack(span) for span in found])
