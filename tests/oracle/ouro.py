"""Serial Ouro with depth-aware KV.  Written from the paper and the recorded facts, not from the package.

Depths are one-based here ("after r loops"), as users see them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

LAST_EXITED = "last_exited"
SHARED = "shared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """When a decode token leaves the loop.  `trace[k]` is the depth of output k (the first comes from the prompt)."""

    name: str = "gate"  # gate · gate_delayed · latent · kl · argmax · fixed · trace
    threshold: float = 1.0  # a probability, of latent and kl a change of state or distribution, of argmax a count
    min_loops: int = 2
    max_loops: int = 4
    trace: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One output: where it came from and everything that decided it."""

    token: int
    depth: int
    logits: np.ndarray  # [V]
    scores: tuple[float, ...]  # what the policy saw after loops 1..depth of the fed token; () for the first output
    readouts: np.ndarray | None = None  # [depth, V] logits after every loop, where the policy is about them

    @property
    def log_probabilities(self) -> np.ndarray:
        return log_softmax(self.logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


Choose = Callable[[int, np.ndarray], int]  # (output index, logits [V]) -> token


def greedy(_: int, logits: np.ndarray) -> int:
    return int(np.argmax(logits))  # the lowest index wins ties


class OuroOracle:
    """The model and its generation loop.

    Args:
        directory: a checkpoint in Hugging Face layout.
        dtype: float64 to judge, float32 to see how far float32 itself moves.
        layout: LAST_EXITED or SHARED.
        replace: tensors to put in place of the checkpoint's (a constant gate, say).
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: type = np.float64,
        layout: str = LAST_EXITED,
        replace: Mapping[str, np.ndarray] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        from tests.oracle.checkpoint import read_tensors

        self.config = json.loads((directory / "config.json").read_text())
        found = dict(tensors if tensors is not None else read_tensors(directory)) | dict(replace or {})
        self.w = {name: np.asarray(value, dtype=dtype) for name, value in found.items()}
        self.dtype, self.layout = dtype, layout
        self.layers = self.config["num_hidden_layers"]
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config.get("num_key_value_heads", self.heads)
        self.head_dim = self.config.get("head_dim", self.config["hidden_size"] // self.heads)
        self.loops = self.config["total_ut_steps"]

    # ---- the model -------------------------------------------------------------------------------------------------

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, dtype=self.dtype)
        return x / np.sqrt(mean_square + self.dtype(self.config["rms_norm_eps"])) * self.w[name]

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [heads, D]: pair i turns with pair i + D/2."""
        half = self.head_dim // 2
        angle = position / self.config["rope_theta"] ** (np.arange(half) * 2 / self.head_dim)
        cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)

    def _loop(self, x: np.ndarray, position: int, r: int, memory: Memory) -> np.ndarray:
        """Loop number r (1-based) of one token: x [E] -> x [E]."""
        w = self.w
        for i in range(self.layers):
            at = f"model.layers.{i}."
            a = self._norm(x, at + "input_layernorm.weight")
            q, k, v = ((w[f"{at}self_attn.{n}_proj.weight"] @ a).reshape(-1, self.head_dim) for n in ("q", "k", "v"))
            q, k = self._rotate(q, position), self._rotate(k, position)
            memory.write(i, position, r, k, v)
            keys, values = memory.read(i, position, r)  # [positions, kv heads, D]
            group = self.heads // self.kv_heads
            keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
            score = np.einsum("hd,phd->hp", q, keys) / np.sqrt(self.dtype(self.head_dim))
            score = np.exp(score - score.max(axis=1, keepdims=True))
            weight = score / score.sum(axis=1, keepdims=True)
            out = np.einsum("hp,phd->hd", weight, values).reshape(-1)
            x = x + self._norm(w[at + "self_attn.o_proj.weight"] @ out, at + "input_layernorm_2.weight")
            m = self._norm(x, at + "post_attention_layernorm.weight")
            gate, up = w[at + "mlp.gate_proj.weight"] @ m, w[at + "mlp.up_proj.weight"] @ m
            m = w[at + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
            x = x + self._norm(m, at + "post_attention_layernorm_2.weight")
        return self._norm(x, "model.norm.weight")

    def _gate_logit(self, x: np.ndarray) -> float:
        return float(self.w["model.early_exit_gate.weight"][0] @ x + self.w["model.early_exit_gate.bias"][0])

    def _logits(self, x: np.ndarray) -> np.ndarray:
        return self.w["lm_head.weight"] @ x

    # ---- one request -----------------------------------------------------------------------------------------------

    def run(
        self,
        prompt: Sequence[int],
        outputs: int,
        policy: Policy,
        *,
        prefill_loops: int | None = None,
        choose: Choose = greedy,
        tokens: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
        stop: frozenset[int] = frozenset(),
    ) -> list[Step]:
        """Generate `outputs` tokens, or fewer when one of `stop` is chosen.

        With `tokens` and `depths` the run goes along them instead: step k is what the model says about output k given
        the history of the others, and its token and depth are the given ones.
        """
        prefill_loops = prefill_loops or self.loops
        memory = Memory(self, len(prompt) + outputs)
        for position, token in enumerate(prompt):
            x = self.w["model.embed_tokens.weight"][token]
            for r in range(1, prefill_loops + 1):
                x = self._loop(x, position, r, memory)
            memory.exit_depth[position] = prefill_loops
        steps = [self._step(0, x, prefill_loops, (), choose, tokens)]
        while len(steps) < outputs and steps[-1].token not in stop:
            k, position = len(steps), len(prompt) + len(steps) - 1
            x = self.w["model.embed_tokens.weight"][steps[-1].token]
            survival, cdf, pending = 1.0, [], None
            for r in range(1, self.loops + 1):
                x = self._loop(x, position, r, memory)
                survival *= 1.0 - _sigmoid(self._gate_logit(x))
                cdf.append(1.0 - survival)
                leaves, pending = wants_exit(policy, k, r, cdf[-1], pending)
                if r == depths[k] if depths is not None else leaves:
                    break
            memory.exit_depth[position] = r
            steps.append(self._step(k, x, r, tuple(cdf), choose, tokens))
        return steps

    def _step(self, k: int, x: np.ndarray, depth: int, cdf: tuple, choose: Choose, tokens: Sequence | None) -> Step:
        logits = self._logits(x)
        token = tokens[k] if tokens is not None else choose(k, logits)
        return Step(token=int(token), depth=depth, logits=logits, scores=cdf)


def wants_exit(policy: Policy, output: int, r: int, score: float, pending: int | None) -> tuple[bool, int | None]:
    """Whether a token leaves after loop r, and the depth at which a delayed exit has been announced."""
    if policy.name == "trace":
        return r >= policy.trace[output], None
    if r >= policy.max_loops:
        return True, pending
    if policy.name == "fixed":
        return False, None
    if policy.name in ("latent", "kl"):  # 0 is full depth, also where rounding makes a divergence negative
        return r >= policy.min_loops and policy.threshold > 0 and score < policy.threshold, None
    if policy.name == "argmax":
        return r >= policy.min_loops and score >= policy.threshold, None
    if policy.threshold >= 1:  # of a gate's probabilities
        return False, None
    if policy.name == "gate":
        return r >= policy.min_loops and score >= policy.threshold, None
    assert policy.name == "gate_delayed", policy.name
    if pending is not None:
        return r >= pending, pending
    return False, r + 1 if r >= policy.min_loops and score >= policy.threshold else None


def unchanged(best: Sequence[int]) -> int:
    """For how many entries at its end a list repeats the one before."""
    return next((n for n in range(len(best) - 1) if best[-1 - n] != best[-2 - n]), len(best) - 1)


class Memory:
    """Every version of every key and value: [layer, loop, position, kv heads, D]."""

    def __init__(self, model: OuroOracle, positions: int) -> None:
        shape = (model.layers, model.loops, positions, model.kv_heads, model.head_dim)
        self.keys, self.values = np.full(shape, np.nan, model.dtype), np.full(shape, np.nan, model.dtype)
        self.exit_depth = np.zeros(positions, int)  # one-based; 0 while a position is being computed
        self.shared = model.layout == SHARED

    def write(self, layer: int, position: int, r: int, key: np.ndarray, value: np.ndarray) -> None:
        self.keys[layer, r - 1, position], self.values[layer, r - 1, position] = key, value

    def read(self, layer: int, position: int, r: int) -> tuple[np.ndarray, np.ndarray]:
        """What loop r of `position` sees: itself at r, an earlier token at min(r, its exit) or, SHARED, at its exit."""
        version = self.exit_depth[: position + 1].copy()
        if not self.shared:
            version = np.minimum(version, r)
        version[position] = r
        where = (layer, version - 1, np.arange(position + 1))
        return self.keys[where], self.values[where]


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x))) if x >= 0 else float(np.exp(x) / (1 + np.exp(x)))
