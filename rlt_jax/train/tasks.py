"""The reasoning tasks, as vectorised generators of token ids.

    copy: q d k a w z m e = q d k a w z m e
    reverse: q d k a w z m e = e m z w a k d q
    sort: q d k a w z m e = a d e k m q w z
    close:([(){<{[<([{<=>}])>]}>}])                              every bracket still open, innermost first
    calc: a:3+5*2; b:7-9; c:4*1-2; d:1*8+6-3*3; = a6 b8 c2 d3     left to right, modulo 10
    chain: d k, c d, w z, k a, z q, a m, q c, m w; q3 a1 d2 k5 = q k a m d a k q

`chain` gives a mapping that is one cycle over its letters, in shuffled order, and asks several (letter, hops) queries;
the answer repeats each queried letter and then says where that many hops lead.  Difficulty is drawn per sample (the
most hops or operations any of its items may need) and then per item, so one answer mixes tokens that need one loop
with tokens that need all of them.  Everything after `=` is the answer, then end of text.  The answers that the model is
judged by have at least 8 tokens; training also draws small samples (lists of 1 to 7, few items), so that a short prompt
is not a foreign one.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from rlt_jax.train.tokenizer import eos_id

HOLE = -1  # an absent token in the ragged matrices below
MAX_HOPS = 7
MAX_OPERATIONS = 7
SPLIT_CLASSES = 16  # hash classes of a prompt: 0 is the test set, 1 the validation set, the others training
TEST_CLASS, VALIDATION_CLASS = 0, 1


@dataclasses.dataclass(frozen=True)
class Symbols:
    """Token ids of the task vocabulary.  Every symbol is one token (checked when the table is made)."""

    eos: int
    letters: np.ndarray  # [26]  " a" ... " z"
    digits: np.ndarray  # [10]
    operators: np.ndarray  # [3]  + - *
    openers: np.ndarray  # [4]  ( [ { <
    closers: np.ndarray  # [4]  ) ] } >
    words: dict[str, int]  # task name -> its first token
    colon: int
    comma: int
    semicolon: int
    equals: int
    space: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Symbols:
        def one(text: str) -> int:
            ids = tokenizer.encode(text).ids
            if len(ids) != 1:
                raise ValueError(f"{text!r} is {len(ids)} tokens; the tasks need it to be one")
            return int(ids[0])

        def many(texts: list[str]) -> np.ndarray:
            return np.array([one(t) for t in texts], np.int32)

        return cls(
            eos=eos_id(tokenizer),
            letters=many([f" {c}" for c in string.ascii_lowercase]),
            digits=many(list(string.digits)),
            operators=many(list("+-*")),
            openers=many(list("([{<")),
            closers=many(list(")]}>")),
            words={name: one(name) for name in GENERATORS},
            colon=one(":"),
            comma=one(","),
            semicolon=one(";"),
            equals=one("="),
            space=one(" "),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard samples are.  The defaults are what the model is judged by; a curriculum draws others.

    Attributes:
        easy: share of the samples of calc and chain at level 1 or 2.
        most_hops: highest level of chain.
        frontier: share of the samples of chain at just that level, or at the highest that a small mapping has.
        frontier_queries: share of their queries that ask for just so many hops; the others ask for that or fewer.
    """

    easy: float = 0.0
    most_hops: int = MAX_HOPS
    frontier: float = 0.0
    frontier_queries: float = 0.6


JUDGED = Difficulty()


@dataclasses.dataclass(frozen=True)
class Samples:
    """Left-justified samples of one task."""

    tokens: np.ndarray  # [N, W] int32  prompt, answer, eos; HOLE beyond
    prompt: np.ndarray  # [N] int32  prompt tokens
    length: np.ndarray  # [N] int32  all tokens
    level: np.ndarray  # [N] int32  difficulty drawn for the sample

    def take(self, index: np.ndarray) -> Samples:
        return Samples(self.tokens[index], self.prompt[index], self.length[index], self.level[index])


def compact(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move every row's tokens left over its holes; returns the rows and their lengths."""
    present = rows != HOLE
    out = np.full_like(rows, HOLE)
    column = np.cumsum(present, axis=1) - 1
    row = np.broadcast_to(np.arange(rows.shape[0])[:, None], rows.shape)
    out[row[present], column[present]] = rows[present]
    return out, present.sum(axis=1).astype(np.int32)


def _assemble(s: Symbols, word: str, prompt: np.ndarray, answer: np.ndarray, level: np.ndarray, gap: bool) -> Samples:
    n = prompt.shape[0]

    def column(*ids: int) -> np.ndarray:
        return np.broadcast_to(np.array(ids, np.int32), (n, len(ids)))

    head = column(s.words[word], s.colon)
    tail = column(s.space, s.equals) if gap else column(s.equals)
    full_prompt = np.concatenate([head, prompt, tail], axis=1)
    tokens, length = compact(np.concatenate([full_prompt, answer, column(s.eos)], axis=1))
    return Samples(tokens, (full_prompt != HOLE).sum(axis=1).astype(np.int32), length, level.astype(np.int32))


def _cut(values: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Keep the first `count` items (axis 1) of each row; the rest become holes."""
    keep = np.arange(values.shape[1])[None, :] < count[:, None]
    return np.where(keep.reshape(keep.shape + (1,) * (values.ndim - 2)), values, HOLE)


def _counts(rng: np.random.Generator, usual: tuple[int, int], few: tuple[int, int], small: np.ndarray) -> np.ndarray:
    """Items of each sample, from the range `usual`, or `few` where small [N]; both ranges with their last number."""
    return np.where(
        small, rng.integers(few[0], few[1] + 1, len(small)), rng.integers(usual[0], usual[1] + 1, len(small))
    )


def _distinct_letters(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    return np.argsort(rng.random((n, 26), np.float32), axis=1)[:, :width].astype(np.int32)


def _sequence(s: Symbols, rng: np.random.Generator, small: np.ndarray, word: str) -> Samples:
    n, most = len(small), 13 if word == "sort" else 16
    if word == "sort":
        items = _distinct_letters(rng, n, most)
    else:
        items = rng.integers(0, 26, (n, most)).astype(np.int32)
    count = _counts(rng, (8, most), (1, 7), small)
    items = _cut(items, count)
    if word == "copy":
        answer = items
    elif word == "reverse":
        answer = items[:, ::-1]
    else:
        answer = np.sort(np.where(items == HOLE, 99, items), axis=1)
        answer = np.where(answer == 99, HOLE, answer)

    def ids(x: np.ndarray) -> np.ndarray:
        return np.where(x == HOLE, HOLE, s.letters[x])

    return _assemble(s, word, ids(items), ids(answer), count, gap=True)


def _close(s: Symbols, rng: np.random.Generator, small: np.ndarray) -> Samples:
    """Brackets: a stack machine run on all rows at once; `closed` pairs are opened and closed again on the way."""
    n = len(small)
    still_open = _counts(rng, (8, 12), (1, 7), small)
    closed = rng.integers(0, 9, n)
    width = 12 + 2 * 8
    prompt = np.full((n, width), HOLE, np.int32)
    stack = np.zeros((n, 12 + 8), np.int32)
    depth = np.zeros(n, np.int64)
    opens_left, closes_left = still_open + closed, closed.copy()
    rows = np.arange(n)
    for t in range(width):
        running = opens_left + closes_left > 0
        may_close = running & (depth > 0) & (closes_left > 0)
        # closing as likely as its share of what is left keeps pairs spread over the prompt
        chance = closes_left / np.maximum(opens_left + closes_left, 1)
        close = may_close & ((rng.random(n) < chance * 1.3) | (opens_left == 0))
        open_ = running & ~close
        kind = rng.integers(0, 4, n)
        top = stack[rows, np.maximum(depth - 1, 0)]
        prompt[:, t] = np.where(close, s.closers[top], np.where(open_, s.openers[kind], HOLE))
        stack[rows[open_], depth[open_]] = kind[open_]
        depth = depth + open_ - close
        opens_left = opens_left - open_
        closes_left = closes_left - close
    answer = _cut(stack[:, :12], depth)
    position = depth[:, None] - 1 - np.arange(12)[None, :]
    answer = np.where(position >= 0, s.closers[np.take_along_axis(stack, np.maximum(position, 0), axis=1)], HOLE)
    return _assemble(s, "close", prompt, answer, closed, gap=False)


def _levels(rng: np.random.Generator, n: int, most: int, easy: float) -> np.ndarray:
    """Difficulty of each sample: uniform in 1..most, but 1 or 2 for a share `easy` of them."""
    level = rng.integers(1, most + 1, n)
    return np.where(rng.random(n) < easy, rng.integers(1, min(most, 2) + 1, n), level)


def _calc(s: Symbols, rng: np.random.Generator, small: np.ndarray, difficulty: Difficulty) -> Samples:
    n, items, width = len(small), 7, MAX_OPERATIONS
    count = _counts(rng, (4, items), (1, 3), small)
    level = _levels(rng, n, MAX_OPERATIONS, difficulty.easy)
    count = np.minimum(count, np.where(level > 3, 5, items))
    names = _distinct_letters(rng, n, items)
    fewest = np.where(small, 0, 1)  # a small sample may ask for a number as it stands
    operations = rng.integers(fewest[:, None], level[:, None] + 1, (n, items))
    first = rng.integers(0, 10, (n, items))
    operator = rng.integers(0, 3, (n, items, width))
    operand = rng.integers(0, 10, (n, items, width))
    # a product with 0 or 5 forgets what came before it: draw those rarely, or depth would not matter
    forgets = (operator == 2) & (operand % 5 == 0) & (rng.random(operand.shape) < 0.8)
    operand = np.where(forgets, 3, operand)
    value = first
    for k in range(width):
        a, b = value, operand[:, :, k]
        result = np.choose(operator[:, :, k], [a + b, a - b, a * b]) % 10
        value = np.where(k < operations, result, a)
    used = np.arange(width)[None, None, :] < operations[:, :, None]
    steps = np.stack([s.operators[operator], s.digits[operand]], axis=-1)
    steps = np.where(used[..., None], steps, HOLE).reshape(n, items, 2 * width)
    letter = s.letters[names][..., None]
    colon = np.full((n, items, 1), s.colon, np.int32)
    # the semicolon is where a result can stand: a digit cannot know that it is the last one
    end = np.full((n, items, 1), s.semicolon, np.int32)
    prompt = _cut(np.concatenate([letter, colon, s.digits[first][..., None], steps, end], axis=-1), count)
    answer = _cut(np.concatenate([letter, s.digits[value][..., None]], axis=-1), count)
    return _assemble(s, "calc", prompt.reshape(n, -1), answer.reshape(n, -1), level, gap=True)


def _chain(s: Symbols, rng: np.random.Generator, small: np.ndarray, difficulty: Difficulty) -> Samples:
    n, letters, queries = len(small), 10, 8
    size = _counts(rng, (MAX_HOPS + 1, letters), (2, MAX_HOPS), small)
    count = np.minimum(_counts(rng, (4, queries), (1, 3), small), size)
    frontier = rng.random(n) < difficulty.frontier
    level = np.where(frontier, difficulty.most_hops, _levels(rng, n, difficulty.most_hops, difficulty.easy))
    level = np.minimum(level, size - 1)  # so no query comes back to its start
    cycle = _distinct_letters(rng, n, letters)
    index = np.arange(letters)[None, :]
    following = np.take_along_axis(cycle, (index + 1) % size[:, None], axis=1)
    order = np.argsort(np.where(index < size[:, None], rng.random((n, letters)), 9.0), axis=1)
    table = np.stack([np.take_along_axis(cycle, order, 1), np.take_along_axis(following, order, 1)], axis=-1)
    comma = np.full((n, letters, 1), s.comma, np.int32)
    table = _cut(np.concatenate([s.letters[table], comma], axis=-1), size).reshape(n, -1)
    table[np.arange(n), 3 * size - 1] = s.semicolon
    start = np.argsort(np.where(index < size[:, None], rng.random((n, letters)), 9.0), axis=1)[:, :queries]
    hops = rng.integers(1, level[:, None] + 1, (n, queries))
    at_the_frontier = frontier[:, None] & (rng.random((n, queries)) < difficulty.frontier_queries)
    hops = np.where(at_the_frontier, level[:, None], hops)
    begin = np.take_along_axis(cycle, start, 1)
    end = np.take_along_axis(cycle, (start + hops) % size[:, None], 1)
    asked = _cut(np.stack([s.letters[begin], s.digits[hops]], axis=-1), count).reshape(n, -1)
    answer = _cut(np.stack([s.letters[begin], s.letters[end]], axis=-1), count).reshape(n, -1)
    return _assemble(s, "chain", np.concatenate([table, asked], axis=1), answer, level, gap=True)


# name -> generator(symbols, rng, small [N] bool: which samples are small, difficulty)
GENERATORS: dict[str, Callable[[Symbols, np.random.Generator, np.ndarray, Difficulty], Samples]] = {
    "copy": lambda s, rng, small, _: _sequence(s, rng, small, "copy"),
    "reverse": lambda s, rng, small, _: _sequence(s, rng, small, "reverse"),
    "sort": lambda s, rng, small, _: _sequence(s, rng, small, "sort"),
    "close": lambda s, rng, small, _: _close(s, rng, small),
    "calc": _calc,
    "chain": _chain,
}


def hash_class(samples: Samples) -> np.ndarray:
    """A class in [0, SPLIT_CLASSES) from the prompt's tokens alone: the same prompt is always on the same side."""
    state = np.full(samples.tokens.shape[0], 0x9E3779B97F4A7C15, np.uint64)
    for t in range(int(samples.prompt.max(initial=0))):
        mixed = (state ^ samples.tokens[:, t].astype(np.uint64)) * np.uint64(0xFF51AFD7ED558CCD)
        mixed ^= mixed >> np.uint64(32)
        state = np.where(t < samples.prompt, mixed, state)
    return ((state >> np.uint64(17)) % np.uint64(SPLIT_CLASSES)).astype(np.int32)


def draw(
    s: Symbols, task: str, rng: np.random.Generator, n: int, *, difficulty: Difficulty = JUDGED, small: float = 0.0
) -> Samples:
    """About n training samples, a share `small` of them with few items; held-out classes are dropped."""
    samples = GENERATORS[task](s, rng, rng.random(n) < small, difficulty)
    return samples.take(hash_class(samples) > VALIDATION_CLASS)


def held_out(
    s: Symbols,
    task: str,
    n: int,
    *,
    split_class: int,
    seed: int,
    small: bool = False,
    difficulty: Difficulty = JUDGED,
) -> Samples:
    """Exactly n distinct samples of a held-out class, all usual or all small; the same for the same arguments."""
    rng = np.random.default_rng([seed, split_class, sorted(GENERATORS).index(task)])
    drawn = (2 * n + 40) * SPLIT_CLASSES  # twice what is expected to be enough
    found = GENERATORS[task](s, rng, np.full(drawn, small), difficulty)
    found = found.take(hash_class(found) == split_class)
    prompts = np.where(np.arange(found.tokens.shape[1])[None, :] < found.prompt[:, None], found.tokens, HOLE)
    _, first = np.unique(prompts, axis=0, return_index=True)
    found = found.take(np.sort(first)[:n])
    if len(found.prompt) < n:
        raise ValueError(f"only {len(found.prompt)} of {n} distinct held-out samples of '{task}'")
    return found
