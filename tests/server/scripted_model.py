"""A tiny Ouro checkpoint with a tokenizer whose text is known before it runs.

Attention and MLP add nothing, so the hidden state stays the token's embedding, and the head is built to answer with a
chosen successor.  Tokens are single bytes: a character of several bytes takes several tokens, at depths of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import fixture_dir

# What follows "a", byte by byte; every byte occurs once, so each has one successor.  Then "a" again, for ever.
SCRIPT = "a→é日😀 stop!b"
# What follows "y" and then ends with the model's end-of-sequence id.
ENDING = "yz"
EOS = 0


def expected_text(start: str, tokens: int) -> str:
    """The text of `tokens` output tokens after a prompt that ends with `start`; unfinished characters become U+FFFD."""
    cycle = SCRIPT.encode()
    at = cycle.index(start.encode()) + 1
    return bytes(cycle[(at + i) % len(cycle)] for i in range(tokens)).decode(errors="replace")


def build_tokenizer() -> Tokenizer:
    """Byte-level, no merges, 256 tokens; the byte 0 is the special end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i + 1 for i, character in enumerate(c for c in alphabet if c != "Ā")}  # Ā stands for byte 0
    tokenizer = Tokenizer(models.BPE(vocab={"Ā": EOS, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["Ā"])
    return tokenizer


def write_scripted_model(folder: Path) -> Path:
    """Write the checkpoint into `folder`."""
    source = fixture_dir("ouro_tiny")
    tensors = {name: np.array(tensor) for name, tensor in load_file(source / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    tensors["model.norm.weight"][:] = 1
    embedding = tensors["model.embed_tokens.weight"]
    head = np.zeros_like(tensors["lm_head.weight"])
    tokenizer = build_tokenizer()

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    chain = tokens(SCRIPT)
    pairs = [
        *zip(chain, chain[1:] + chain[:1], strict=True),
        *zip(tokens(ENDING), [*tokens(ENDING)[1:], EOS], strict=True),
    ]
    for token, successor in pairs:
        head[successor] += embedding[token]
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def is_permutation() -> bool:
    """Whether every byte of the script has one successor (the premise of this file)."""
    script = SCRIPT.encode() + ENDING.encode()
    return len(set(script)) == len(script)


if __name__ == "__main__":
    print(json.dumps({"permutation": is_permutation(), "bytes": len(SCRIPT.encode())}))
