"""The bundled model's tokenizer: a small byte-level BPE in which every symbol of the tasks is one token.

Words may take one leading space; digits, punctuation and other white space stand alone.  So `" a"`, `"7"`, `"("` and
`"="` are single tokens wherever they occur, and the task generators can write token ids without encoding text.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
VOCAB_SIZE = 1024
TASK_WORDS = ("copy", "reverse", "sort", "close", "calc", "chain")
_PIECES = r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s"
_ENGLISH = Path(__file__).parent / "data" / "english.txt"


def english_entries() -> list[str]:
    """The committed public-domain text, one dictionary entry per string."""
    return [entry.strip() for entry in _ENGLISH.read_text(encoding="utf-8").split("\n%\n") if entry.strip()]


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the BPE.  Id 0 is the end-of-text token; the 256 byte symbols follow."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@functools.cache
def build_tokenizer() -> Tokenizer:
    """The tokenizer of the bundled model, from the committed text alone: the same on every machine."""
    # The task vocabulary is repeated until its merges are certain: the task words and all letters after a space.
    letters = " " + " ".join(string.ascii_lowercase)
    tokenizer = train_tokenizer([*english_entries(), *([letters] * 200), *(list(TASK_WORDS) * 200)])
    for text in [f" {c}" for c in string.ascii_lowercase] + list(TASK_WORDS):
        if len(tokenizer.encode(text).ids) != 1:
            raise AssertionError(f"{text!r} must be one token of the task vocabulary")
    return tokenizer


def eos_id(tokenizer: Tokenizer) -> int:
    """The id of the end-of-text token."""
    found = tokenizer.token_to_id(EOS)
    if found is None:
        raise ValueError(f"the tokenizer has no {EOS!r}")
    return int(found)
