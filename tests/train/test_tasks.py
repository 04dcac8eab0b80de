"""Task generators.  PROTECTS: a wrong answer key, a held-out sample that training has seen, or a symbol that the
shipped tokenizer spells differently from the generator would all be learned, or measured, without any error."""

from __future__ import annotations

import re
import string

import numpy as np
import pytest

from rlt_jax.train import tasks
from rlt_jax.train.data import (
    AHEAD,
    EASY_LAST,
    ENGLISH_EPOCHS,
    ENGLISH_MOST,
    Curriculum,
    DataSpec,
    EnglishPieces,
    make_chunk,
    pack,
    stream,
)
from rlt_jax.train.evaluate import EXAMPLES
from rlt_jax.train.tokenizer import VOCAB_SIZE, build_tokenizer, english_entries

PAIRS = dict(zip("([{<", ")]}>", strict=True))


@pytest.fixture(scope="module")
def symbols() -> tasks.Symbols:
    return tasks.Symbols.of(build_tokenizer())


def texts(samples: tasks.Samples) -> list[str]:
    """Prompt and answer as the user would see them, each sample ending with end of text."""
    tokenizer = build_tokenizer()
    found = []
    for row, n in zip(samples.tokens, samples.length, strict=True):
        assert row[n - 1] == 0, "end of text"
        assert (row[:n] >= 0).all(), "a hole inside a sample"
        assert (row[n:] == tasks.HOLE).all(), "tokens after the end"
        found.append(tokenizer.decode(row[: n - 1].tolist()))
    return found


def solve(prompt: str) -> str:
    """The answer, by plain Python on the text: shares nothing with the generators."""
    task, body = prompt.split(":", 1)
    body = body.removesuffix("=").strip()
    if task == "copy":
        return " " + body
    if task == "reverse":
        return " " + " ".join(reversed(body.split()))
    if task == "sort":
        return " " + " ".join(sorted(body.split()))
    if task == "close":
        stack = []
        for c in body:
            if c in PAIRS:
                stack.append(c)
            else:
                assert PAIRS[stack.pop()] == c, "the prompt itself must be well formed"
        return "".join(PAIRS[c] for c in reversed(stack))
    if task == "calc":
        out = []
        for item in body.split():
            assert item.endswith(";")
            name, expression = item[:-1].split(":")
            value = int(expression[0])
            for op, digit in re.findall(r"([+*-])(\d)", expression[1:]):
                value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[op] % 10
            assert len(expression) == 1 + 2 * len(re.findall(r"[+*-]\d", expression))
            out.append(f" {name}{value}")
        return "".join(out)
    assert task == "chain"
    table, queries = body.split(";")
    step = dict(pair.split() for pair in table.split(","))
    assert sorted(step) == sorted(step.values())
    out = []
    for query in queries.split():
        at = query[0]
        for _ in range(int(query[1:])):
            at = step[at]
        out.append(f" {query[0]} {at}")
    return "".join(out)


def test_the_solver_itself() -> None:
    assert solve("calc: a:3+5*2; b:7-9; =") == " a6 b8"
    assert solve("chain: d k, q d, w z, k a, z q, a m, m w; q3 a1 d2 k1 =") == " q a a m d a k a"
    assert solve("close:([(){<=") == ">}])"
    for prompt, answer in EXAMPLES.items():
        assert solve(prompt) == answer
    assert solve("sort: q d k =") == " d k q"


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("task", sorted(tasks.GENERATORS))
def test_every_answer_is_right_long_enough_and_spelt_as_the_tokenizer_spells_it(
    task: str, small: bool, symbols: tasks.Symbols
) -> None:
    samples = tasks.draw(symbols, task, np.random.default_rng(1), 400, small=float(small))
    assert len(samples.length) > 300
    if not small:
        assert (samples.length - samples.prompt >= 9).all(), "at least 8 answer tokens and end of text"
    tokenizer = build_tokenizer()
    for i, text in enumerate(texts(samples)):
        split = text.index("=") + 1
        assert text[split:] == solve(text[:split])
        assert tokenizer.encode(text[:split]).ids == samples.tokens[i, : samples.prompt[i]].tolist()
        assert tokenizer.encode(text).ids == samples.tokens[i, : samples.length[i] - 1].tolist()


@pytest.mark.parametrize("task", ["calc", "chain", "close"])
def test_difficulty_varies(task: str, symbols: tasks.Symbols) -> None:
    level = tasks.draw(symbols, task, np.random.default_rng(2), 600).level
    assert len(np.unique(level)) >= 7


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_small_lists_of_every_length_are_drawn_and_held_out(task: str, symbols: tasks.Symbols) -> None:
    """A model that never sees a short list answers it wrongly, however simple the task."""
    drawn = tasks.draw(symbols, task, np.random.default_rng(8), 600, small=0.5)
    assert set(range(1, 10)) <= set(drawn.level)
    few = tasks.held_out(symbols, task, 200, split_class=tasks.TEST_CLASS, seed=5, small=True)
    assert set(range(2, 8)) <= set(few.level) <= set(range(1, 8))
    assert len(set(texts(few))) == 200


def hops_asked(samples: tasks.Samples) -> list[int]:
    return [int(n) for text in texts(samples) for n in re.findall(r"\d", text.split("=")[0])]


def test_a_curriculum_asks_for_the_hops_it_says(symbols: tasks.Symbols) -> None:
    def chains(difficulty: tasks.Difficulty) -> list[int]:
        return hops_asked(tasks.draw(symbols, "chain", np.random.default_rng(9), 400, difficulty=difficulty))

    assert set(chains(tasks.Difficulty(most_hops=3))) == {1, 2, 3}
    assert set(chains(tasks.Difficulty(most_hops=5, frontier=1.0, frontier_queries=1.0))) == {5}
    frontier = chains(tasks.Difficulty(most_hops=3, frontier=0.6))
    usual = chains(tasks.JUDGED)
    assert set(frontier) == {1, 2, 3}
    assert set(usual) == set(range(1, tasks.MAX_HOPS + 1))
    assert np.mean(np.array(frontier) == 3) > 0.4 > 2 * np.mean(np.array(usual) == 3)


def test_the_curriculum_goes_on_when_its_hops_are_right_and_ends_in_time() -> None:
    spec = DataSpec(steps=1600, chunk_steps=16)  # 100 chunks
    curriculum = Curriculum(spec)
    assert [curriculum.most_hops(i) for i in (0, 30, 59, 60, 99)] == [1, 1, 1, 8, 8]
    assert curriculum.difficulty(60).frontier == 0
    assert curriculum.difficulty(60).most_hops == tasks.MAX_HOPS
    assert not curriculum.follow(8, [0.9] + 6 * [1.0]), "one hop is not right yet"
    assert curriculum.follow(16, [0.96] + 6 * [0.0])
    assert curriculum.changes == ((0, 1), (16 + AHEAD, 2))
    assert not curriculum.follow(17, 7 * [1.0]), "its data has not arrived"
    assert [curriculum.most_hops(i) for i in (23, 24)] == [1, 2]
    for index in range(24, 60, AHEAD):
        curriculum.follow(index, 7 * [1.0])
    assert [hops for _, hops in curriculum.changes] == [1, 2, 3, 4, 5, 6, 7]
    assert curriculum.difficulty(99) == tasks.Difficulty(easy=EASY_LAST), "of 1,584 steps"
    again = Curriculum(spec, curriculum.changes)
    assert [again.difficulty(i) for i in range(100)] == [curriculum.difficulty(i) for i in range(100)]
    assert not again.follow(56, 7 * [1.0]), "the one-loop model sees the same data, whatever it knows"


def test_the_stream_is_made_as_hard_as_the_curriculum_says(symbols: tasks.Symbols) -> None:
    spec, english = DataSpec(seq_len=128, rows=6, chunk_steps=2, steps=100), EnglishPieces(128)
    curriculum = Curriculum(spec)
    chunks = stream(spec, 3, threads=2, curriculum=curriculum)
    drawn = [next(chunks)]
    assert curriculum.follow(0, 7 * [1.0])
    drawn += [next(chunks) for _ in range(AHEAD + 2)]
    chunks.close()
    for index, chunk in enumerate(drawn):
        difficulty = curriculum.difficulty(index)
        assert difficulty.most_hops == (1 if index < AHEAD else 2)
        wanted = make_chunk(spec, symbols, english, 3, index, difficulty)
        assert all(np.array_equal(a, b) for a, b in zip(chunk.arrays(), wanted.arrays(), strict=True))


@pytest.mark.parametrize("small", [0.0, 1.0])
def test_no_query_of_a_chain_returns_to_its_start(small: float, symbols: tasks.Symbols) -> None:
    for text in texts(tasks.draw(symbols, "chain", np.random.default_rng(3), 200, small=small)):
        answer = text.split("=")[1].split()
        assert all(a != b for a, b in zip(answer[::2], answer[1::2], strict=True))


@pytest.mark.parametrize("task", sorted(tasks.GENERATORS))
def test_held_out_samples_are_disjoint_from_training_by_construction(task: str, symbols: tasks.Symbols) -> None:
    test = tasks.held_out(symbols, task, 100, split_class=tasks.TEST_CLASS, seed=5)
    validation = tasks.held_out(symbols, task, 100, split_class=tasks.VALIDATION_CLASS, seed=5)
    train = tasks.draw(symbols, task, np.random.default_rng(4), 2000)
    assert set(tasks.hash_class(test)) == {tasks.TEST_CLASS}
    assert set(tasks.hash_class(validation)) == {tasks.VALIDATION_CLASS}
    assert min(tasks.hash_class(train)) > max(tasks.TEST_CLASS, tasks.VALIDATION_CLASS)
    assert len(set(texts(test))) == 100, "distinct"
    again = tasks.held_out(symbols, task, 100, split_class=tasks.TEST_CLASS, seed=5)
    assert np.array_equal(test.tokens, again.tokens)


def test_the_class_depends_on_the_prompt_alone(symbols: tasks.Symbols) -> None:
    samples = tasks.draw(symbols, "calc", np.random.default_rng(6), 100)
    changed = samples.tokens.copy()
    changed[np.arange(len(samples.length)), samples.prompt + 1] = 7  # an answer token
    other = tasks.Samples(changed, samples.prompt, samples.length, samples.level)
    assert np.array_equal(tasks.hash_class(samples), tasks.hash_class(other))
    changed[:, 3] = 7  # a prompt token
    assert not np.array_equal(tasks.hash_class(samples), tasks.hash_class(other))


def test_tokenizer_round_trips_english_and_any_bytes() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    for text in [*english_entries()[:50], "Ünïcode – 漢字 🙂\n\ttabs", "3141592653"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("3141592653").ids) == 10
    for letter in string.ascii_lowercase:
        assert len(tokenizer.encode(f" {letter}").ids) == 1


def test_pack_fills_rows_without_overlap() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 400)
    row, offset, segment = pack(lengths, 20, 128)
    used = np.zeros((20, 128), int)
    for r, o, n in zip(row, offset, lengths, strict=True):
        if r >= 0:
            assert o + n <= 128
            used[r, o : o + n] += 1
    assert used.max() == 1
    assert used.mean() > 0.85
    assert segment[row >= 0].min() == 1


def test_chunk_is_reproducible_and_its_arrays_agree(symbols: tasks.Symbols) -> None:
    spec, english = DataSpec(seq_len=128, rows=6, chunk_steps=2, steps=8), EnglishPieces(128)
    chunk = make_chunk(spec, symbols, english, seed=3, index=5)
    for a, b in zip(chunk.arrays(), make_chunk(spec, symbols, english, seed=3, index=5).arrays(), strict=True):
        assert np.array_equal(a, b)
    other = make_chunk(spec, symbols, english, seed=3, index=6)
    assert not np.array_equal(chunk.tokens, other.tokens)
    assert chunk.tokens.shape == (2, 6, 128)
    tokenizer, seen, depths = build_tokenizer(), 0, set()
    for tokens, position, segment, weight, depth in zip(*(a.reshape(-1, 128) for a in chunk.arrays()), strict=True):
        for s in range(1, segment.max() + 1):
            mine = segment == s
            assert np.array_equal(position[mine], np.arange(mine.sum()))
            assert weight[mine][-1] == 0, "nothing follows the last token of a sample"
            text = tokenizer.decode(tokens[mine].tolist())
            if weight[mine].max() == 2:
                seen += 1
                prompt = text.index("=") + 1
                assert text[prompt:] == solve(text[:prompt])
                n = len(tokenizer.encode(text[:prompt]).ids)
                # the loss starts with the prediction made at "=", and prompts are read at full depth
                assert np.array_equal(
                    weight[mine] > 0, (np.arange(mine.sum()) >= n - 1) & (np.arange(mine.sum()) < mine.sum() - 1)
                )
                assert (depth[mine][:n] == spec.loops).all()
                depths |= set(depth[mine][n:].tolist())
    assert seen > 10
    assert depths == {1, 2, 3, 4}


def test_a_run_shows_every_piece_of_english_equally_often_and_never_more_than_the_cap() -> None:
    """Shown a hundred times and more, the book was learned by heart and held-out entries became worse than guesses."""
    english = EnglishPieces(256)
    spec = DataSpec(steps=10_000)
    shown = np.concatenate([english.of_chunk(spec, 0, i) for i in range(spec.chunks)])
    assert set(np.bincount(shown, minlength=len(english.length))) == {int(ENGLISH_EPOCHS)}
    first, second = shown[: len(english.length)], shown[len(english.length) : 2 * len(english.length)]
    assert not np.array_equal(first, second), "every pass has an order of its own"
    short = DataSpec(steps=32)
    tokens = sum(int(english.length[english.of_chunk(short, 0, i)].sum()) for i in range(short.chunks))
    assert 0.8 * ENGLISH_MOST < tokens / short.tokens <= 1.05 * ENGLISH_MOST


def test_a_chunk_places_all_of_its_english(symbols: tasks.Symbols) -> None:
    english, spec = EnglishPieces(128), DataSpec(seq_len=128, rows=32, chunk_steps=4, steps=8)
    chunk = make_chunk(spec, symbols, english, seed=0, index=1)
    pieces = english.of_chunk(spec, 0, 1)
    assert len(pieces) >= 3
    # a piece's last token has no loss, and English is told by its weight
    assert (chunk.weight == 1).sum() == (english.length[pieces] - 1).sum()
