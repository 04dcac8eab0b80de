"""Text that grows token by token.  PROTECTS: users never see half a character, half a stop string, or lost text."""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rlt_jax.errors import CheckpointError, InvalidRequest
from rlt_jax.text import OutputText, StopStrings, TextTokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "copy: abc = abc; sort: 3 1 2 = 1 2 3",
    "Füße, naïve café, 你好世界, привет, 🙂🙃👩‍👩‍👧",
]


@functools.cache
def byte_level() -> TextTokenizer:
    """Byte-level BPE with special tokens and one ordinary added token, as Ouro's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<think>", "two words", "你好吗"])
    return TextTokenizer(tokenizer)


@functools.cache
def byte_fallback() -> TextTokenizer:
    """SentencePiece style: words with U+2581 for spaces, unknown characters as <0xXX> tokens."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁fox", "a", "b", "▁a", "▁b", "é"]
    vocab = {w: i for i, w in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextTokenizer(tokenizer)


@functools.cache
def word_piece() -> TextTokenizer:
    vocab = {w: i for i, w in enumerate(["[UNK]", "run", "##ning", "dog", "##s", ".", "do", "not", "'"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return TextTokenizer(tokenizer)


@functools.cache
def words_without_decoder() -> TextTokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer(tokenizer)


def stream(tokenizer: TextTokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """Deltas of all tokens, the flush last, and the stop match."""
    text = OutputText(tokenizer, stop)
    deltas, match = [], None
    for i in ids:
        step = text.push(i)
        deltas.append(step.delta)
        if step.stop_match is not None:
            match = step.stop_match
            break
    deltas.append(text.finish())
    return deltas, match


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """The stated rule by brute force: the first end in the text; the longest string among those that end there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            best = max(ending, key=len)
            return end - len(best), best
    return None


# ---------------------------------------------------------------- incremental text


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 380), max_size=40))
@example([0, 1, 2])
def test_byte_level_stream_equals_whole_decode_for_any_ids(ids: list[int]) -> None:
    """Random ids are mostly broken UTF-8, specials and ids past the vocabulary: the hardest case."""
    assert "".join(stream(byte_level(), ids)[0]) == byte_level().decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abé 你🙂the fox\n", max_size=30))
@example(" the")
@example("🙂🙂 the")
def test_byte_fallback_stream_equals_whole_decode_for_any_text(text: str) -> None:
    ids = byte_fallback().encode(text)
    assert "".join(stream(byte_fallback(), ids)[0]) == byte_fallback().decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=12))
def test_word_piece_and_plain_words_stream_equals_whole_decode(ids: list[int]) -> None:
    for tokenizer in (word_piece(), words_without_decoder()):
        assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_no_delta_shows_part_of_a_character() -> None:
    text = "naïve 你好 🙂👩‍👩‍👧 end"
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text)
        assert len(ids) > len(text.split())
        deltas = stream(tokenizer, ids)[0]
        assert all("\ufffd" not in d for d in deltas), "a split character was shown"
        assert "".join(deltas) == tokenizer.decode(ids) == text


def test_a_character_appears_with_its_last_byte_not_later() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "é".encode()]
    text = OutputText(tokenizer)
    assert [text.push(i).delta for i in ids] == ["", "é"]
    assert text.finish() == ""


def test_broken_bytes_show_once_and_never_stall() -> None:
    """DecodeStream holds everything back from the first broken byte on, then fails; text after it must appear."""
    tokenizer = byte_fallback()
    bad, word = tokenizer.token_to_id("<0xFF>"), tokenizer.token_to_id("▁fox")
    text = OutputText(tokenizer)
    assert text.push(word).delta == "fox"
    assert [text.push(bad).delta for _ in range(3)] == ["\ufffd"] * 3
    assert text.push(word).delta == " fox"
    lead = tokenizer.token_to_id("<0xF0>")
    assert text.push(lead).delta == ""
    assert text.push(word).delta == "\ufffd fox"
    assert text.push(lead).delta == ""
    assert text.finish() == "\ufffd"


def test_special_tokens_and_unknown_ids_add_nothing_even_inside_a_character() -> None:
    tokenizer = byte_level()
    first, second = (tokenizer.token_to_id(c) for c in "Ã©")  # the two bytes of é
    ids = [first, tokenizer.token_to_id("<|im_end|>"), 10_000_000, second, tokenizer.token_to_id("<think>")]
    assert stream(tokenizer, ids)[0] == ["", "", "", "é", "<think>", ""]
    assert tokenizer.decode(ids) == "é<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids)


def test_many_threads_get_the_text_of_one() -> None:
    tokenizer = TextTokenizer(Tokenizer.from_str(byte_level()._tokenizer.to_str()))  # a cold byte table
    results: list[bool] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            text = " ".join(rng.choices(SENTENCES, k=3))
            ids = tokenizer.encode(text)
            results.append("".join(stream(tokenizer, ids)[0]) == text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert len(results) == 160
    assert all(results)


# ---------------------------------------------------------------- stop strings


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=24),  # two letters: partial matches inside partial matches are the rule
    stop=st.lists(st.text(alphabet="ab", min_size=2, max_size=6), max_size=4),
    data=st.data(),
)
def test_stop_rule_against_brute_force_for_any_split(text: str, stop: list[str], data: st.DataObject) -> None:
    finder, shown, at = StopStrings(stop), "", 0
    longest = max(map(len, stop), default=1)
    found = first_match(text, stop)
    while at < len(text) and finder.match is None:
        size = data.draw(st.integers(1, 6))
        shown += finder.push(text[at : at + size])
        at = min(len(text), at + size)
        visible = found[0] if found else len(text)
        assert shown == text[: len(shown)]
        assert len(shown) <= visible
        if finder.match is None:
            assert at - len(shown) <= longest - 1, "more held back than the longest stop string minus one"
            assert found is None or at < found[0] + len(found[1]), "a complete match went unnoticed"
            held = text[len(shown) : at]
            assert not held or any(s.startswith(held) for s in stop), "held back without a reason"
    if found:
        assert (finder.match, shown) == (found[1], text[: found[0]])
        assert finder.push("more") == ""
        assert finder.release() == ""
    else:
        assert finder.match is None
        assert shown + finder.release() == text


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(3, 360), max_size=30),
    stop=st.lists(st.sampled_from(["a", "th", "the ", "ü", "你", "x = ", "\ufffd\ufffd", " ", "oo", "🙂"]), max_size=3),
)
def test_deltas_are_the_whole_text_cut_at_the_first_match(ids: list[int], stop: list[str]) -> None:
    whole = byte_level().decode(ids)
    found = first_match(whole, stop)
    deltas, match = stream(byte_level(), ids, stop)
    assert "".join(deltas) == (whole[: found[0]] if found else whole)
    for delta in deltas:
        delta.encode("utf-8")
    if match is not None:
        assert found is not None
        assert match == found[1]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "match"),
    [
        ("abcd", ["abcd", "bc"], "a", "bc"),  # ends first, although the other begins first
        ("xab", ["ab", "b"], "x", "ab"),  # end together: the longest
        ("xab", ["b", "ab"], "x", "ab"),  # in whatever order they are given
        ("abc", ["abc", "ab"], "", "ab"),  # begin together: no waiting for the longer one
        ("aab", ["ab"], "a", "ab"),  # a failed beginning inside a true one
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("aabaaabaaac", ["aabaaac"], "aaba", "aabaaac"),
        ("abab", ["abac"], "abab", None),
        ("ab", [], "ab", None),
    ],
)
def test_stop_rule_by_example(text: str, stop: list[str], shown: str, match: str | None) -> None:
    finder = StopStrings(stop)
    got = "".join(finder.push(c) for c in text) + finder.release()
    assert (got, finder.match) == (shown, match)


def test_text_after_a_match_is_dropped() -> None:
    tokenizer = byte_level()
    text = OutputText(tokenizer, ["="])
    steps = [text.push(i) for i in tokenizer.encode("ab = cd")]
    assert "".join(s.delta for s in steps) == "ab "
    assert text.stopped
    assert text.finish() == ""
    assert text.push(5) == steps[-1]
    assert steps[-1].stop_match == "="


def test_a_stop_string_completed_by_the_flush_is_cut_too() -> None:
    tokenizer = byte_level()
    lead = tokenizer.token_to_id("Ã")
    text = OutputText(tokenizer, ["\ufffd"])
    assert text.push(lead).delta == ""
    assert text.finish() == ""
    assert text.stopped


@pytest.mark.parametrize(
    ("stop", "says"), [([""], "entry 0 is empty"), (["a", 3], "entry 1"), ("abc", "list of strings")]
)
def test_bad_stop_strings(stop: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        OutputText(byte_level(), stop)
    assert caught.value.field == "stop"


# ---------------------------------------------------------------- the tokenizer


def test_encode_follows_the_post_processor_and_reads_special_tokens() -> None:
    inner = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer = TextTokenizer(inner)
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [1, *plain]
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.vocab_size == tokenizer.max_token_id + 1


def test_truncation_and_padding_of_the_file_are_off() -> None:
    inner = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    text = SENTENCES[0] * 5
    assert TextTokenizer(inner).encode(text) == byte_level().encode(text)


@pytest.mark.parametrize(("text", "says"), [(b"abc", "found bytes"), ("a\ud800b", "lone surrogate")])
def test_text_that_cannot_be_encoded(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        byte_level().encode(text)
    assert caught.value.field == "prompt"


def test_from_file_round_trip_and_errors(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level()._tokenizer.to_str(), encoding="utf-8")
    assert TextTokenizer.from_file(path).encode(SENTENCES[2]) == byte_level().encode(SENTENCES[2])
    for content in (b"", b"{", b'{"version": "1.0"}', b"\xff\xfe", json.dumps([1]).encode()):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            TextTokenizer.from_file(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TextTokenizer.from_file(tmp_path / "absent.json")


def test_byte_level_inside_a_sequence_is_refused_by_name() -> None:
    inner = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(CheckpointError, match="ByteLevel, Strip"):
        TextTokenizer(inner)
    inner.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert TextTokenizer(inner).decode(byte_level().encode("é")) == "é"


def test_added_special_token_is_known_by_flag_not_by_name() -> None:
    inner = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    inner.add_special_tokens([AddedToken("<pause>", special=True)])
    tokenizer = TextTokenizer(inner)
    assert stream(tokenizer, [tokenizer.token_to_id("<pause>")])[0] == ["", ""]
