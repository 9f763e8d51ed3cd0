"""Tensors of offsets, such as `cu_seqlens`: their checks, and the stretch that a token lies in."""

from typing import NamedTuple

import torch
from torch import Tensor

from masks.checks import integer
from sparseflash.checks import readable


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


def check_integers(name: str, given: Tensor, least: int = 1) -> Tensor:
    """(batch, numbers), from that or from (numbers,).

    Raises ValueError for other tensors, and for fewer than `least` numbers in a row.
    """
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is a {type(given).__name__}: give a tensor on the device of q")
    if given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {given.dtype}: give int32 or int64")
    if given.ndim not in (1, 2) or given.shape[-1] < least:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}: give at least {least} numbers, or as many for"
            " every batch entry"
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


class Stretches(NamedTuple):
    """Of every token, int64 (batch, n): the number of its document, and where that lies."""

    number: Tensor
    start: Tensor
    stop: Tensor  # start where the token lies in no document


def stretches(offsets: Tensor, n: int) -> Stretches:
    """Return the documents that tokens 0 to n - 1 lie in; offsets: (batch, documents + 1)."""
    documents = offsets.shape[1] - 1
    number = last_begin(offsets, n)
    inside = number < documents
    number = number.clamp(0, documents - 1)
    start, stop = offsets.gather(1, number), offsets.gather(1, number + 1)
    return Stretches(number, start, torch.where(inside, stop, start))


def last_begin(begins: Tensor, n: int) -> Tensor:
    """int64 (batch, n): for tokens 0 to n - 1, which of the ascending `begins` (batch, numbers) is
    the last one up to the token; -1 before the first.
    """
    token = torch.arange(n, dtype=begins.dtype, device=begins.device)
    # `begins - 1` is a tensor of its own: torch.compile on a GPU searches a slice, such as
    # begins[:, 1:], without its offset (torch 2.11 and 2.13).
    return torch.searchsorted(begins - 1, token.expand(len(begins), n).contiguous()) - 1
