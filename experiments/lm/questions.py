"""Tasks whose answers stand in the sequence: mqar, MAD's six, passkeys, variables.

A task is a text, NAME or NAME:AMOUNT, such as mqar:16. Its sequences are made for any length, and
follow from (seed, split, number of the part) alone. The answer of a question is the token that
should follow at its place.

    mqar:PAIRS       multi-query associative recall by the rule of Zoology (arXiv 2312.04927): key
                     and value in turn, then every key once more at gaps that follow a power law
    recall:NOISE     MAD's in-context recall (arXiv 2403.17844): 8 keys and 8 values come again and
                     again, each later time a question; NOISE percent of the pairs are noise
    fuzzy:TOKENS     MAD's fuzzy recall: keys and values of 1 to TOKENS different tokens each, of 7
                     and 8. All splits have keys of all lengths; MAD tests the longest
    copy:TOKENS      MAD's selective copying: repeat in order the tokens that stand among blanks
    memory           MAD's memorisation: values of keys that are the same in all sequences, which
                     needs no attention
    compress         MAD's compression: the last token's vector alone tells a decoder
                     (`LanguageModel`) each token before it
    passkey:DIGITS   the digits behind a mark, in a text that repeats itself (RULER, arXiv
                     2404.06654). passkey:5@4096 hides them in a document of 4096 tokens, of which
                     the sequence is the last ones: without the digits, if they stand before it
    variables:HOPS   RULER's variable tracking: 4 chains of HOPS assignments and a value each, and
                     at the end the value of the last variable of each
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np

from experiments.common.config import choose

SPLITS = ("train", "val", "test")
NONE = -1  # the answer where nothing is asked
PART = 1024  # sequences that are drawn at a time
POWER = 0.01  # of Zoology's gaps
DIGITS, MARK, ASK, FILLER = 10, 10, 11, 25  # tokens of passkey: digits, marks, then the text
CHAINS, NAMES, VALUES = 4, 32, 32  # of variables
FUZZY = 7, 8  # tokens of fuzzy that keys and values are made of
COMPRESS = "compress"


class Questions(NamedTuple):
    """Sequences, and questions at places in them."""

    tokens: np.ndarray  # int16 (n, length)
    places: np.ndarray  # int32 (n, questions)
    answers: np.ndarray  # int16 (n, questions), NONE where nothing is asked
    # int32 (n, questions): where the answer stands before, the last time; NONE: nowhere
    sources: np.ndarray


Draw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Synthetic:
    """A task of a length."""

    name: str
    amount: int
    length: int
    document: int = 0  # tokens, of which the sequence is the last ones; 0: it is whole

    @cached_property
    def vocab(self) -> int:
        """Ids of its tokens. Zoology wants more than the length."""
        sizes = {"mqar": 2 * self.length, "recall": 32, "copy": 16, "memory": 256}
        return (sizes | {"fuzzy": sum(FUZZY), COMPRESS: 16}).get(self.name, 128)

    @cached_property
    def chance(self) -> float:
        """The accuracy of a guess among the answers that a reader without memory of pairs has."""
        if self.name == "fuzzy":  # tokens of a value differ; so many values have a token i
            each = [(self.amount - i, FUZZY[1] - i) for i in range(self.amount)]
            return sum(have / among for have, among in each) / sum(have for have, _ in each)
        among = {"mqar": self.amount, "recall": 8, "copy": 14, "memory": 127, COMPRESS: 15}
        return 1 / (among | {"passkey": DIGITS, "variables": CHAINS})[self.name]

    def make(self, split: str, count: int, seed: int = 0) -> Questions:
        """Return the first `count` sequences of a split; the splits are of different streams."""
        draw, parts = TASKS[self.name].draw, []
        kinds = np.int16, np.int32, np.int16, np.int32
        for number in range(-(-count // PART)):
            rng = np.random.default_rng([seed, SPLITS.index(split), number])
            parts.append(map(np.ndarray.astype, draw(rng, PART, self), kinds))
        return Questions(*(np.concatenate(arrays)[:count] for arrays in zip(*parts, strict=True)))


def asks(text: str) -> bool:
    """Return whether a text names a task."""
    return text.partition(":")[0] in TASKS


def synthetic(text: str, length: int) -> Synthetic:
    """Return the task of a text such as mqar:16.

    Raises ValueError for an amount, or a length, that the task cannot have.
    """
    name, _, amount = text.partition(":")
    amount, _, document = amount.partition("@")
    choose("data", name, TASKS)
    kind = TASKS[name]
    if document and not (name == "passkey" and document.isdecimal() and int(document) >= length):
        raise ValueError(
            f"data={text} with context={length}: give passkey:DIGITS a document of {length} or more"
            " tokens, and other tasks none"
        )
    if amount and not (amount.isdecimal() and kind.amounts[0] <= int(amount) <= kind.amounts[1]):
        raise ValueError(
            f"data={text}: give {name} an amount between {kind.amounts[0]} and {kind.amounts[1]}"
        )
    task = Synthetic(name, int(amount or kind.amount), length, int(document or 0))
    least = kind.least(task.amount)
    if length < least or length % 2 or task.vocab > 2**15:
        raise ValueError(
            f"data={text} with context={length}: give an even one, {least} to 16384 tokens"
        )
    return task


def _mqar(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    n, pairs, vocab = task.length, task.amount, task.vocab
    keys = _distinct(rng, count, np.arange(1, vocab // 2), pairs)
    values = _distinct(rng, count, np.arange(vocab // 2, vocab), pairs)
    space = (n - 2 * pairs) // 2
    # the largest of Gumbel noise on log p are a draw by p without replacement
    log_p = (POWER - 1) * np.log(np.arange(1, space + 1))
    places = 2 * (pairs + _largest(rng, log_p + rng.gumbel(size=(count, space)), pairs))
    tokens = rng.integers(0, vocab, (count, n))
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(tokens, places, keys, 1)
    return tokens, places, values, np.broadcast_to(np.arange(1, 2 * pairs, 2), keys.shape)


def _recall(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    pairs, size = task.length // 2, 8
    keys = rng.integers(0, size, (count, pairs))
    value_of = size + rng.integers(0, size, (count, size))
    values = np.take_along_axis(value_of, keys, 1)
    noise = rng.random((count, pairs)) < task.amount / 100
    last = _before(np.where(noise, size + np.arange(pairs), keys))
    asked = last >= 0
    tokens = np.stack([keys, values], 2)
    other = rng.integers(2 * size, 4 * size, tokens.shape)
    tokens = np.where(noise[:, :, None], other, tokens).reshape(count, -1)
    places = np.broadcast_to(np.arange(0, task.length, 2), (count, pairs))
    return tokens, places, np.where(asked, values, NONE), 2 * last + 1


def _fuzzy(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    n, most, rows = task.length, task.amount, np.arange(count)[:, None]
    pairs = n // 2  # of 2 tokens or more: the last ones are cut off
    (keys, p), (values, q) = (_words(size, most) for size in FUZZY)
    drawn = rng.choice(len(keys), (count, pairs), p=p)
    value_of = rng.choice(len(values), (count, len(keys)), p=q)
    value = values[value_of[rows, drawn]]
    value[value >= 0] += FUZZY[0]
    words = np.concatenate([keys[drawn], value], 2)  # (count, pairs, 2 * most)
    there, last = words >= 0, _before(drawn)
    place = there.reshape(count, -1).cumsum(1).reshape(words.shape) - 1  # in the sequence
    asked = (last >= 0)[:, :, None] & (np.arange(2 * most) >= most)  # the tokens of values
    kept = there & (place < n)
    tokens, asked, sources = (a[kept].reshape(count, n) for a in (words, asked, place[rows, last]))
    places = np.broadcast_to(np.arange(n - 1), (count, n - 1))
    return tokens, places, np.where(asked, tokens, NONE)[:, 1:], sources[:, 1:]


def _words(size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (words, most): all words of 1 to `most` different ids below `size`, -1 after the last;
    and their probabilities, by which all lengths are as frequent.
    """
    words = [w for many in range(1, most + 1) for w in permutations(range(size), many)]
    lengths = np.array([len(w) for w in words])
    padded = np.array([w + (-1,) * (most - len(w)) for w in words])
    return padded, 1 / (most * np.bincount(lengths)[lengths])


def _before(keys: np.ndarray) -> np.ndarray:
    """Return for each key of a row the place of the same key before, the last time; else -1."""
    order = np.argsort(keys, axis=1, kind="stable")
    same = np.diff(np.take_along_axis(keys, order, 1), axis=1) == 0
    last = np.full(keys.shape, -1)
    np.put_along_axis(last, order[:, 1:], np.where(same, order[:, :-1], -1), 1)
    return last


def _compress(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    n = task.length
    tokens = rng.integers(0, task.vocab - 1, (count, n))
    tokens[:, -1] = task.vocab - 1
    before = np.broadcast_to(np.arange(n - 1), (count, n - 1))
    return tokens, np.full_like(before, n - 1), tokens[:, :-1], before


def _copy(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    n, many, blank, copy = task.length, task.amount, 14, 15
    tokens = np.full((count, n), blank)
    wanted = rng.integers(0, blank, (count, many))
    at = np.sort(_distinct(rng, count, np.arange(n - many - 1), many), 1)
    np.put_along_axis(tokens, at, wanted, 1)
    tokens[:, n - many - 1] = copy
    return tokens, np.broadcast_to(np.arange(n - many, n), (count, many)), wanted, at


def _memory(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    half = task.vocab // 2 - 1
    value_of = half + np.random.default_rng(12345).permutation(half)  # the same in all splits
    keys = rng.integers(0, half, (count, task.length // 2))
    tokens = np.stack([keys, np.full_like(keys, task.vocab - 1)], 2).reshape(count, -1)
    places = np.broadcast_to(np.arange(1, task.length, 2), keys.shape)
    return tokens, places, value_of[keys], np.full_like(keys, -1)


def _passkey(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    n, many = task.length, task.amount
    text = np.arange(n) + rng.integers(0, FILLER, (count, 1))  # begins anywhere
    tokens = ASK + 1 + text % FILLER
    digits = rng.integers(0, DIGITS, (count, many))
    whole = task.document or n
    at = rng.integers(0, whole - 2 * many, (count, 1)) + np.arange(many + 1) - (whole - n)
    at[at[:, 0] < 0] = NONE
    there = at[:, 0] >= 0
    key = np.concatenate([np.full((count, 1), MARK), digits], 1)
    tokens[np.flatnonzero(there)[:, None], at[there]] = key[there]
    tokens[:, n - many] = ASK
    tokens[:, n - many + 1 :] = digits[:, :-1]
    return tokens, np.broadcast_to(np.arange(n - many, n), (count, many)), digits, at[:, 1:]


def _variables(rng: np.random.Generator, count: int, task: Synthetic) -> Draw:
    n, steps, first = task.length, task.amount + 1, NAMES + VALUES
    let, ask, filler = first, first + 1, first + 2
    names = _distinct(rng, count, np.arange(NAMES), CHAINS * steps).reshape(count, CHAINS, steps)
    values = NAMES + _distinct(rng, count, np.arange(VALUES), CHAINS)
    right = np.concatenate([values[:, :, None], names[:, :, :-1]], 2)  # of "let NAME = RIGHT"
    # the chains in any order, each in its own
    turn = rng.permuted(np.tile(np.repeat(np.arange(CHAINS), steps), (count, 1)), axis=1)
    order = np.argsort(turn, axis=1, kind="stable").argsort(1)
    free = (n - 2 * CHAINS) // 3
    slots = np.sort(_distinct(rng, count, np.arange(free), CHAINS * steps), 1) * 3
    tokens = filler + (np.arange(n) + rng.integers(0, FILLER, (count, 1))) % FILLER
    for i, word in enumerate((np.full_like(turn, let), names, right)):
        word = np.take_along_axis(word.reshape(count, -1), order, 1)
        np.put_along_axis(tokens, slots + i, word, 1)
    asked = rng.permuted(np.tile(np.arange(CHAINS), (count, 1)), axis=1)
    tokens[:, n - 2 * CHAINS :: 2] = ask
    tokens[:, n - 2 * CHAINS + 1 :: 2] = np.take_along_axis(names[:, :, -1], asked, 1)
    places = np.broadcast_to(np.arange(n - 2 * CHAINS + 1, n, 2), asked.shape)
    begun = np.argsort(turn, axis=1, kind="stable")[:, ::steps]  # slots of each "let NAME = value"
    sources = np.take_along_axis(np.take_along_axis(slots, begun, 1) + 2, asked, 1)
    return tokens, places, np.take_along_axis(values, asked, 1), sources


def _distinct(rng: np.random.Generator, count: int, of: np.ndarray, many: int) -> np.ndarray:
    """Return (count, many): rows of different members of `of`, in random order."""
    return of[_largest(rng, rng.random((count, len(of)), np.float32), many)]


def _largest(rng: np.random.Generator, values: np.ndarray, many: int) -> np.ndarray:
    """Return (count, many): the places of the largest values of each row, in random order."""
    size = values.shape[1]
    if many < size:
        return rng.permuted(np.argpartition(values, size - many, 1)[:, size - many :], axis=1)
    return rng.permuted(np.broadcast_to(np.arange(size), values.shape).copy(), axis=1)


class Kind(NamedTuple):
    draw: Callable[[np.random.Generator, int, Synthetic], Draw]
    amount: int  # unless the text says it
    amounts: tuple[int, int]
    least: Callable[[int], int]  # tokens of a sequence, by the amount


TASKS = {
    "mqar": Kind(_mqar, 16, (1, 4096), lambda pairs: max(8, 4 * pairs)),
    "recall": Kind(_recall, 0, (0, 90), lambda noise: 32),
    "fuzzy": Kind(_fuzzy, 3, (1, 3), lambda _: 32),
    "copy": Kind(_copy, 16, (1, 1024), lambda many: 2 * many + 2),
    "memory": Kind(_memory, 0, (0, 0), lambda _: 2),
    COMPRESS: Kind(_compress, 0, (0, 0), lambda _: 2),
    "passkey": Kind(_passkey, 5, (1, 64), lambda many: 2 * many + 2),
    "variables": Kind(_variables, 2, (1, 7), lambda hops: 3 * CHAINS * (hops + 1) + 2 * CHAINS),
}
