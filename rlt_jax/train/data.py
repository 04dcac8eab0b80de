"""Training batches: samples of all tasks and of English, packed into rows, made ahead of time on threads.

A chunk is the data of several optimizer steps (one dispatch).  It depends on (seed, chunk index) alone, so a run can
be repeated exactly, whatever the number of threads.  No jax here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Generator

import numpy as np

from rlt_jax.train.tasks import GENERATORS, Symbols, draw
from rlt_jax.train.tokenizer import build_tokenizer, english_entries, eos_id

# Samples of each kind per draw; the two tasks whose items need the most steps get the most.
MIXTURE = {"copy": 1.0, "reverse": 1.5, "sort": 1.5, "close": 2.0, "calc": 4.0, "chain": 4.0, "english": 0.35}
ENGLISH_WEIGHT, ANSWER_WEIGHT = 1, 2  # stored as small integers; the loss divides by ANSWER_WEIGHT
VALIDATION_EVERY = 20  # each 20th English entry is kept for validation
MIN_SEQ_LEN = 112  # the longest sample of any task fits
_OPEN_ROWS = 24
# Curriculum: share of the deep tasks' samples drawn at the lowest levels, falling over the first steps.  A hop or an
# operation must be learned before two of them can be.
EASY_FIRST, EASY_LAST, EASY_STEPS = 0.9, 0.15, 1500


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What a chunk holds.

    Attributes:
        seq_len: tokens per row.
        rows: rows per step.
        steps: steps per chunk.
        loops: the model's depth, which is the exit depth of prompts.
        mixed_share: share of samples whose later tokens exit at random depths (see `model.py`).
        tasks: which tasks take part.
    """

    seq_len: int = 256
    rows: int = 128
    steps: int = 16
    loops: int = 4
    mixed_share: float = 0.35
    tasks: tuple[str, ...] = tuple(GENERATORS)


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
        # A piece is as likely as it is long: every token is seen equally often.
        self.chance = self.length / self.length.sum()


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


def make_chunk(spec: DataSpec, symbols: Symbols, english: EnglishPieces, seed: int, index: int) -> Chunk:
    """The chunk with this index."""
    rng = np.random.default_rng([seed, index])
    easy = max(EASY_LAST, EASY_FIRST - (EASY_FIRST - EASY_LAST) * index * spec.steps / EASY_STEPS)
    kinds = [*spec.tasks, "english"]
    share = np.array([MIXTURE[k] for k in kinds])
    mean = {"copy": 29, "reverse": 29, "sort": 26, "close": 32, "calc": 60, "chain": 56, "english": 130}
    total_rows = spec.rows * spec.steps
    # a little more than fits, so that every row is full
    samples = 1.2 * total_rows * spec.seq_len / float(np.sum(share * [mean[k] for k in kinds])) + 4
    parts_tokens, parts_prompt, parts_length = [], [], []
    for kind, part in zip(kinds, share, strict=True):
        n = int(np.ceil(samples * part))
        if kind == "english":
            pick = rng.choice(len(english.length), size=n, p=english.chance)
            tokens, length = english.tokens[pick], english.length[pick]
            prompt = np.zeros(n, np.int32)
        else:
            drawn = draw(symbols, kind, rng, int(n * 1.14) + 1, easy=easy)
            tokens, length, prompt = drawn.tokens, drawn.length, drawn.prompt
            if length.max(initial=0) > spec.seq_len:
                raise ValueError(f"a sample of '{kind}' has {length.max()} tokens, a row {spec.seq_len}")
        width = max(0, spec.seq_len - tokens.shape[1])
        parts_tokens.append(np.pad(tokens, ((0, 0), (0, width)))[:, : spec.seq_len])
        parts_prompt.append(prompt)
        parts_length.append(length)
    tokens = np.concatenate(parts_tokens)
    prompt, length = np.concatenate(parts_prompt), np.concatenate(parts_length)
    order = rng.permutation(len(length))
    row, offset, segment = pack(length[order], total_rows, spec.seq_len)
    placed = row >= 0
    order, row, offset, segment = order[placed], row[placed], offset[placed], segment[placed]
    tokens, prompt, length = tokens[order], prompt[order], length[order]

    at = np.arange(spec.seq_len)[None, :]
    inside = at < length[:, None]
    flat = (row[:, None] * spec.seq_len + offset[:, None] + at)[inside]
    is_english = prompt == 0
    weight = np.where(is_english, ENGLISH_WEIGHT, ANSWER_WEIGHT)[:, None] * (at >= prompt[:, None] - 1)
    weight = np.where(at < length[:, None] - 1, weight, 0)  # the last token has no next one
    mixed = rng.random(len(length)) < spec.mixed_share
    depth = 1 + _random_depths(rng, at.shape[1] * len(length), spec.loops).reshape(len(length), -1)
    depth = np.where(mixed[:, None] & (at >= np.maximum(prompt, 1)[:, None]), depth, spec.loops)

    def place(values: np.ndarray, dtype: type) -> np.ndarray:
        out: np.ndarray = np.zeros(total_rows * spec.seq_len, dtype)
        out[flat] = np.broadcast_to(values, inside.shape)[inside]
        return out.reshape(spec.steps, spec.rows, spec.seq_len)

    exit_depth = place(depth, np.uint8)
    exit_depth[exit_depth == 0] = spec.loops
    return Chunk(
        tokens=place(tokens, np.uint16),
        position=place(at, np.uint16),
        segment=place(segment[:, None], np.uint8),
        weight=place(weight, np.uint8),
        exit_depth=exit_depth,
    )


def _random_depths(rng: np.random.Generator, n: int, loops: int) -> np.ndarray:
    """Zero-based exit loops: the first is rare (requests run at least two by default), the second the most likely."""
    chance = np.array([0.1, 0.4] + [0.5 / max(loops - 2, 1)] * (loops - 2) if loops > 1 else [1.0])
    return np.searchsorted(np.cumsum(chance / chance.sum())[:-1], rng.random(n, np.float32), side="right")


def stream(spec: DataSpec, seed: int, *, threads: int, ahead: int = 8, start: int = 0) -> Generator[Chunk]:
    """Chunks start, start + 1, ... in order, up to `ahead` of them prepared while the device works."""
    symbols, english = Symbols.of(build_tokenizer()), EnglishPieces(spec.seq_len)
    with concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="data") as pool:
        waiting: collections.deque[concurrent.futures.Future[Chunk]] = collections.deque()
        index = start
        try:
            while True:
                while len(waiting) < ahead:
                    waiting.append(pool.submit(make_chunk, spec, symbols, english, seed, index))
                    index += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
