"""Training batches: samples of all tasks and of English, packed into rows, made ahead of time on threads.

A chunk is the data of several optimizer steps (one dispatch).  It depends on the seed, its index and how hard the
curriculum says its samples are, whatever the number of threads: with a curriculum's changes given, a run sees the same
data again.  No jax here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Generator, Iterable, Sequence

import numpy as np

from rlt_jax.train.tasks import GENERATORS, JUDGED, MAX_HOPS, SPLIT_CLASSES, Difficulty, Symbols, draw
from rlt_jax.train.tokenizer import build_tokenizer, english_entries, eos_id

# Samples of each task per draw; the two tasks whose items need the most steps get the most.
MIXTURE = {"copy": 1.0, "reverse": 1.5, "sort": 1.5, "close": 2.0, "calc": 4.0, "chain": 4.0}
SMALL_SHARE = 0.15  # of the samples of every task has few items; see tasks.py
# A small book is learned by heart if it is shown often: each piece of it is shown this many times in a whole run, and
# in a run too short for that English has the share ENGLISH_MOST of all tokens.
ENGLISH_EPOCHS, ENGLISH_MOST = 4.0, 0.05
ENGLISH_WEIGHT, ANSWER_WEIGHT = 1, 2  # stored as small integers; the loss divides by ANSWER_WEIGHT
VALIDATION_EVERY = 20  # each 20th English entry is kept for validation
MIN_SEQ_LEN = 112  # the longest sample of any task fits
_OPEN_ROWS = 24
# Mean tokens of a sample, to know how many are needed; measured, and exact enough for that.
MEAN_TOKENS = {"copy": 27, "reverse": 27, "sort": 24, "close": 30, "calc": 55, "chain": 52}
AHEAD = 8  # chunks made ahead of the device
# Share of the samples of calc and chain drawn at the lowest levels: it falls over the first steps, to one that stays.
# An operation must be learned before two of them can be.
EASY_FIRST, EASY_LAST, EASY_STEPS = 0.9, 0.15, 1500
# Curriculum of chain.  Hops are learned one after the other, each suddenly, and too seldom seen the next one may never
# be: so chains ask for up to one hop more than is known, and mostly for that.
FRONTIER_SHARE = 0.6  # of the samples of chain ask for the most hops
LEARNED = 0.95  # share of right answers at which a number of hops counts as known
CURRICULUM_END = 0.6  # of the run: from here on all hops are asked for, while the learning rate falls


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What a chunk holds.

    Attributes:
        seq_len: tokens per row.
        rows: rows per step.
        chunk_steps: steps per chunk.
        steps: steps of the whole run, rounded up to whole chunks: over these English is spread.
        loops: the model's depth, which is the exit depth of prompts.
        mixed_share: share of samples whose later tokens exit at random depths (see `model.py`).
        tasks: which tasks take part.
    """

    seq_len: int = 256
    rows: int = 128
    chunk_steps: int = 16
    steps: int = 10_000
    loops: int = 4
    mixed_share: float = 0.35
    tasks: tuple[str, ...] = tuple(GENERATORS)

    @property
    def chunks(self) -> int:
        """Chunks of the whole run."""
        return -(-self.steps // self.chunk_steps)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, padding counted."""
        return self.chunks * self.chunk_steps * self.rows * self.seq_len


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Arrays [steps, rows, seq_len]; padding has segment 0 and weight 0."""

    tokens: np.ndarray  # uint16
    position: np.ndarray  # uint16  from 0 in every sample, as at inference
    segment: np.ndarray  # uint8   samples of one row are numbered from 1 and do not see each other
    weight: np.ndarray  # uint8   of the loss on the *next* token: 0, ENGLISH_WEIGHT or ANSWER_WEIGHT
    exit_depth: np.ndarray  # uint8   one-based depth at which later tokens find this token's KV to end

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.position, self.segment, self.weight, self.exit_depth


class Curriculum:
    """How hard the samples of each chunk are: by its index, and by when the model knew each number of hops.

    The model being trained moves it on.  A run that must see the same data, as the one-loop model's must, is given the
    changes of another: then it is fixed.

    Attributes:
        spec: the run that it is for.
        fixed: whether its changes were given.
    """

    def __init__(self, spec: DataSpec, changes: Iterable[tuple[int, int]] | None = None) -> None:
        """Begin with one hop, or replay `changes`: (first chunk, most hops), the first at chunk 0.

        Raises:
            ValueError: changes that are not ascending from chunk 0, or with hops outside [1, MAX_HOPS + 1].
        """
        self.spec, self.fixed = spec, changes is not None
        self._changes = [(0, 1)] if changes is None else [(first, hops) for first, hops in changes]
        firsts, hops = [first for first, _ in self._changes], [most for _, most in self._changes]
        ascending = firsts == sorted(set(firsts)) and hops == sorted(hops)
        if firsts[:1] != [0] or not ascending or not all(1 <= most <= MAX_HOPS + 1 for most in hops):
            raise ValueError(
                f"curriculum: changes must be (first chunk, hops in [1, {MAX_HOPS + 1}]), ascending from chunk 0, "
                f"found {self._changes}"
            )

    @property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """(first chunk, most hops) in the order they came; MAX_HOPS + 1 hops: no frontier any more."""
        return tuple(self._changes)

    def most_hops(self, index: int) -> int:
        """What chains of the chunk with this index ask for at most; MAX_HOPS + 1: all, without a frontier."""
        if index >= int(CURRICULUM_END * self.spec.chunks):
            return MAX_HOPS + 1
        return max(hops for first, hops in self._changes if first <= index)

    def follow(self, index: int, right: Sequence[float]) -> bool:
        """After chunk `index` was trained on: go on from the first chunk not yet begun if its most hops are right.

        Args:
            index: of the last chunk trained on.
            right: share of right answers by hops, from one hop on.

        Returns:
            Whether it goes on.
        """
        hops = self.most_hops(index)
        if self.fixed or hops > MAX_HOPS or hops < self._changes[-1][1] or right[hops - 1] < LEARNED:
            return False
        self._changes.append((index + AHEAD, hops + 1))
        return True

    def difficulty(self, index: int) -> Difficulty:
        """Of the samples of the chunk with this index."""
        easy = max(EASY_LAST, EASY_FIRST - (EASY_FIRST - EASY_LAST) * index * self.spec.chunk_steps / EASY_STEPS)
        hops = self.most_hops(index)
        if hops > MAX_HOPS:
            return Difficulty(easy=easy)
        return Difficulty(easy=easy, most_hops=hops, frontier=FRONTIER_SHARE)


class EnglishPieces:
    """The English text as pieces of at most `seq_len` tokens; only the last piece of an entry ends the text."""

    def __init__(self, seq_len: int, *, validation: bool = False) -> None:
        tokenizer = build_tokenizer()
        eos = eos_id(tokenizer)
        pieces: list[list[int]] = []
        for i, entry in enumerate(english_entries()):
            if (i % VALIDATION_EVERY == 0) != validation:
                continue
            ids = [*tokenizer.encode(entry).ids, eos]
            pieces += [ids[at : at + seq_len] for at in range(0, len(ids), seq_len)]
        pieces = [p for p in pieces if len(p) >= 8]
        self.length = np.array([len(p) for p in pieces], np.int32)
        self.tokens = np.zeros((len(pieces), seq_len), np.int32)
        for row, piece in enumerate(pieces):
            self.tokens[row, : len(piece)] = piece

    def epochs(self, spec: DataSpec) -> float:
        """How many times a run of this kind shows the text."""
        return min(ENGLISH_EPOCHS, ENGLISH_MOST * spec.tokens / int(self.length.sum()))

    def of_chunk(self, spec: DataSpec, seed: int, index: int) -> np.ndarray:
        """Pieces of one chunk: whole passes over the text, each in an order of its own, spread evenly over the run."""
        pieces, index = len(self.length), index % spec.chunks  # stage II may be the longer one
        total = int(self.epochs(spec) * pieces)
        shown = np.arange(total * index // spec.chunks, total * (index + 1) // spec.chunks)
        passes = {e: np.random.default_rng([seed, e, 1]).permutation(pieces) for e in np.unique(shown // pieces)}
        return np.array([passes[i // pieces][i % pieces] for i in shown], np.int64)


def pack(lengths: np.ndarray, rows: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First fit over a few open rows: (row, offset, segment) of each sample; row -1 where nothing was left for it."""
    row_of, offset_of, segment_of = (np.full(len(lengths), -1, np.int64) for _ in range(3))
    opened: list[list[int]] = []  # [row, used, samples]
    next_row = 0
    for i, n in enumerate(lengths.tolist()):
        for slot in opened:
            if slot[1] + n <= seq_len:
                break
        else:
            if len(opened) == _OPEN_ROWS or next_row == rows:
                if not opened:
                    break
                opened.remove(max(opened, key=lambda o: o[1]))
            if next_row == rows:
                continue
            slot = [next_row, 0, 0]
            opened.append(slot)
            next_row += 1
        row_of[i], offset_of[i], segment_of[i] = slot[0], slot[1], slot[2] + 1
        slot[1] += n
        slot[2] += 1
    return row_of, offset_of, segment_of


def make_chunk(
    spec: DataSpec, symbols: Symbols, english: EnglishPieces, seed: int, index: int, difficulty: Difficulty = JUDGED
) -> Chunk:
    """The chunk with this index."""
    rng = np.random.default_rng([seed, index])
    share = np.array([MIXTURE[task] for task in spec.tasks])
    total_rows = spec.rows * spec.chunk_steps
    pieces = english.of_chunk(spec, seed, index)
    room = total_rows * spec.seq_len - int(english.length[pieces].sum())
    # a little more than fits, so that every row is full
    samples = 1.2 * room / float(np.sum(share * [MEAN_TOKENS[task] for task in spec.tasks])) + 4
    parts_tokens = [english.tokens[pieces]]
    parts_prompt = [np.zeros(len(pieces), np.int32)]
    parts_length = [english.length[pieces]]
    for task, part in zip(spec.tasks, share, strict=True):
        n = int(np.ceil(samples * part) * SPLIT_CLASSES / (SPLIT_CLASSES - 2)) + 1  # two classes are held out
        drawn = draw(symbols, task, rng, n, difficulty=difficulty, small=SMALL_SHARE)
        if drawn.length.max(initial=0) > spec.seq_len:
            raise ValueError(f"a sample of '{task}' has {drawn.length.max()} tokens, a row {spec.seq_len}")
        width = max(0, spec.seq_len - drawn.tokens.shape[1])
        parts_tokens.append(np.pad(drawn.tokens, ((0, 0), (0, width)))[:, : spec.seq_len])
        parts_prompt.append(drawn.prompt)
        parts_length.append(drawn.length)
    tokens = np.concatenate(parts_tokens)
    prompt, length = np.concatenate(parts_prompt), np.concatenate(parts_length)
    # English first: all of its pieces find a place; the rows are shuffled afterwards
    order = np.concatenate([np.arange(len(pieces)), len(pieces) + rng.permutation(len(length) - len(pieces))])
    row, offset, segment = pack(length[order], total_rows, spec.seq_len)
    placed = row >= 0
    order, row, offset, segment = (
        order[placed],
        rng.permutation(total_rows)[row[placed]],
        offset[placed],
        segment[placed],
    )
    tokens, prompt, length = tokens[order], prompt[order], length[order]

    at = np.arange(spec.seq_len)[None, :]
    inside = at < length[:, None]
    flat = (row[:, None] * spec.seq_len + offset[:, None] + at)[inside]
    is_english = prompt == 0
    weight = np.where(is_english, ENGLISH_WEIGHT, ANSWER_WEIGHT)[:, None] * (at >= prompt[:, None] - 1)
    weight = np.where(at < length[:, None] - 1, weight, 0)  # the last token has no next one
    mixed = rng.random(len(length)) < spec.mixed_share
    depth = _random_depths(rng, (len(length), at.shape[1]), spec.loops)
    depth = np.where(mixed[:, None] & (at >= np.maximum(prompt, 1)[:, None]), depth, spec.loops)

    def place(values: np.ndarray, dtype: type) -> np.ndarray:
        out: np.ndarray = np.zeros(total_rows * spec.seq_len, dtype)
        out[flat] = np.broadcast_to(values, inside.shape)[inside]
        return out.reshape(spec.chunk_steps, spec.rows, spec.seq_len)

    exit_depth = place(depth, np.uint8)
    exit_depth[exit_depth == 0] = spec.loops
    return Chunk(
        tokens=place(tokens, np.uint16),
        position=place(at, np.uint16),
        segment=place(segment[:, None], np.uint8),
        weight=place(weight, np.uint8),
        exit_depth=exit_depth,
    )


def _random_depths(rng: np.random.Generator, shape: tuple[int, int], loops: int) -> np.ndarray:
    """One-based exit loops: the first is rare (requests run at least two by default), the second the most likely."""
    chance = np.array([0.1, 0.4] + [0.5 / max(loops - 2, 1)] * (loops - 2) if loops > 1 else [1.0])
    drawn, depth = rng.random(shape, np.float32), np.ones(shape, np.uint8)
    for bound in np.cumsum(chance / chance.sum())[:-1].astype(np.float32):
        depth += drawn >= bound
    return depth


def stream(spec: DataSpec, seed: int, *, threads: int, curriculum: Curriculum | None = None) -> Generator[Chunk]:
    """Chunks 0, 1, ... in order, up to AHEAD of them prepared while the device works.

    `curriculum` is asked on the caller's thread, when a chunk is begun; None: samples as the model is judged by.
    """
    symbols, english = Symbols.of(build_tokenizer()), EnglishPieces(spec.seq_len)
    with concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="data") as pool:
        waiting: collections.deque[concurrent.futures.Future[Chunk]] = collections.deque()
        index = 0
        try:
            while True:
                while len(waiting) < AHEAD:
                    difficulty = JUDGED if curriculum is None else curriculum.difficulty(index)
                    waiting.append(pool.submit(make_chunk, spec, symbols, english, seed, index, difficulty))
                    index += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
