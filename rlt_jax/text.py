"""Between text and token ids: the tokenizer, text that grows token by token, and stop strings.  No jax here.

Incremental text is built from bytes: every token contributes some, and one incremental UTF-8 decoder turns them into
characters.  That costs the same for the millionth token as for the first, never raises, and never loses text.
(`tokenizers.DecodeStream` decodes a growing window again for every token and, where bytes never complete a character,
first stalls and then fails with "Invalid prefix encountered".)
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rlt_jax.errors import CheckpointError, InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextTokenizer:
    """A checkpoint's tokenizer.json.  Immutable after construction; every method may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take ownership of `tokenizer`.

        Raises:
            CheckpointError: its decoder mixes bytes and text in a way that cannot be decoded token by token.
        """
        # A tokenizer.json may carry the settings of somebody's training run; a prompt must never be cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._token_bytes: dict[int, bytes] = {}  # filled as tokens are met; racing threads store equal values
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        # a byte-level token covers as many bytes as it has characters, if nothing rewrites the text before
        exact = self._byte_level and tokenizer.normalizer is None
        self._longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1) if exact else None
        if "ByteLevel" in kinds and not self._byte_level:
            raise CheckpointError(
                f"tokenizer.json: field 'decoder' is the sequence {', '.join(kinds)}; "
                "ByteLevel is supported as the only decoder"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> TextTokenizer:
        """Read a tokenizer.json.

        Raises:
            CheckpointError: the file cannot be read or is not a tokenizer.
        """
        path = Path(path)
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise CheckpointError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from error
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def max_token_id(self) -> int:
        """The largest id it can produce, -1 for an empty vocabulary."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that stand for no text; `decode` and `OutputText` leave them out."""
        return self._special_ids

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in the text become their ids.

        Args:
            text: any text.
            add_special_tokens: let the tokenizer's post-processor add its own (a BOS, where it has one).  False for
                a rendered chat template, which spells its special tokens out.

        Raises:
            InvalidRequest: field "prompt": not a string, or one that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidRequest("prompt", f"must be a string or token ids, found {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "prompt", f"is not valid Unicode: lone surrogate {text[error.start]!r} at character {error.start}"
            ) from None
        # not `encode`, which holds the GIL: a long prompt would stop every thread of a server for seconds
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text` that costs nothing: what cannot fit need not be tokenised."""
        return -(-len(text) // self._longest_token) if self._longest_token else min(1, len(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of whole `token_ids`; bytes that form no character become U+FFFD, ids without a token nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, previous: int | None, token_id: int) -> bytes | None:
        """UTF-8 bytes that `token_id` adds after `previous` (None at the start); None if it adds no text by nature.

        Bytes of several tokens may form one character.  Only decoders that write spaces between words look at
        `previous`, and none of them looks further back.
        """
        if token_id in self._special_ids:
            return None
        known = self._token_bytes.get(token_id)
        if known is not None:
            return known
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_level:
            self._token_bytes[token_id] = known = _byte_level_bytes(token)
            return known
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            self._token_bytes[token_id] = known = bytes([int(match[1], 16)])
            return known
        return self._text_after(previous, token_id).encode("utf-8")

    def _text_after(self, previous: int | None, token_id: int) -> str:
        if previous is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        before = self._tokenizer.decode([previous], skip_special_tokens=False)
        both = self._tokenizer.decode([previous, token_id], skip_special_tokens=False)
        if both.startswith(before):
            return both[len(before) :]
        # A decoder that rewrites its past (CTC, clean-up of spaces): what was shown stays, nothing is lost.
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


@dataclasses.dataclass(frozen=True)
class TextStep:
    """What one token adds to the visible text.

    Attributes:
        delta: new text, never part of a character, never part of what may become a stop string.
        stop_match: the stop string that this token completed; `delta` then ends where the match begins.
    """

    delta: str
    stop_match: str | None = None


class OutputText:
    """The text of one request, token by token.  Not thread-safe; a handful of small objects per request.

    Which stop string wins: the one whose last character comes first in the text, and among those the longest.  This is
    the rule that needs no look-ahead: a match is reported by the very token that completes it, and the result does not
    depend on how the text is cut into tokens.  Text is held back only while it is the beginning of a stop string, so at
    most the longest stop string minus one character.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        """Start an empty text.

        Raises:
            InvalidRequest: field "stop": a stop string is empty or not a string.
        """
        self._tokenizer = tokenizer
        self._previous: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found; later tokens add nothing."""
        return self._stops.match is not None

    def push(self, token_id: int) -> TextStep:
        """Add one token.  Never raises for an id; ids without a token and special tokens add no text."""
        if self.stopped:
            return TextStep("", self._stops.match)
        added = self._tokenizer.token_bytes(self._previous, token_id)
        if added is None:
            return TextStep("")
        self._previous = token_id
        delta = self._stops.push(self._decoder.decode(added))
        return TextStep(delta, self._stops.match)

    def finish(self) -> str:
        """The rest of the text once no token follows: what was held back, and U+FFFD for an unfinished character."""
        if self.stopped:
            return ""
        delta = self._stops.push(self._decoder.decode(b"", final=True))
        return delta if self.stopped else delta + self._stops.release()


class StopStrings:
    """Finds stop strings in text that arrives in pieces (Knuth, Morris and Pratt, one automaton per string)."""

    def __init__(self, stop: Iterable[str]) -> None:
        stops = list(dict.fromkeys(_checked_stops(stop)))
        stops.sort(key=len, reverse=True)  # at one end position the first found is the longest
        self._stops = [(s, _failure_table(s)) for s in stops]
        self._matched = [0] * len(stops)  # per string: how many of its characters the text ends with
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """Take more text; returns what is now safe to show.  After a match: nothing more, ever."""
        if not self._stops:
            return text
        if self.match is not None:
            return ""
        for end, character in enumerate(text, start=1):
            for i, (stop, failure) in enumerate(self._stops):
                n = self._matched[i]
                while n and stop[n] != character:
                    n = failure[n]
                n += stop[n] == character
                if n == len(stop):
                    self.match = stop
                    seen = self._held + text[:end]
                    self._held = ""
                    return seen[: len(seen) - n]
                self._matched[i] = n
        seen = self._held + text
        safe = len(seen) - max(self._matched)
        self._held = seen[safe:]
        return seen[:safe]

    def release(self) -> str:
        """Give back what is held, because no more text will come."""
        held, self._held = self._held, ""
        return held


def _checked_stops(stop: Iterable[str]) -> Iterable[str]:
    if isinstance(stop, str):
        raise InvalidRequest("stop", f"must be a list of strings, found the string {stop!r}")
    for i, s in enumerate(stop):
        if not isinstance(s, str):
            raise InvalidRequest("stop", f"entry {i} must be a string, found {s!r}")
        if not s:
            raise InvalidRequest("stop", f"entry {i} is empty; a stop string has at least one character")
        yield s


def _failure_table(pattern: str) -> list[int]:
    """table[n]: length of the longest proper prefix of `pattern` that ends its first n characters (table[0] = 0)."""
    table = [0] * (len(pattern) + 1)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = table[n]
        n += pattern[i] == pattern[n]
        table[i + 1] = n
    return table


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Names of the decoders that run, in order."""
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return [d["type"] for d in (state["decoders"] if state["type"] == "Sequence" else [state])]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are their own byte, the rest moves to U+0100 onwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with any other character is its own text."""
    try:
        return bytes(_BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode("utf-8")
