"""Making and breaking the files of a checkpoint; shared by the tests of loading, finding and saving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlt_jax.errors import CheckpointError
from rlt_jax.models.checkpoint import load_checkpoint

FIXTURE = Path(__file__).parent.parent / "fixtures" / "ouro_tiny"
VOCAB = 256


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a safetensors header in place of the old one; the data stays."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header = change(header) or header
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def tokenizer_json(vocab_size: int = VOCAB, special: tuple[str, ...] = ("<|endoftext|>", "<|im_end|>")) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(["sort: 3 1 2 = 1 2 3", "copy: abc = abc"], trainer)
    return tokenizer.to_str()


def refused(path: Path, *says: str) -> str:
    """Loading fails with a CheckpointError that says all of `says`; returns the message."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    for words in says:
        assert words in str(caught.value)
    return str(caught.value)
