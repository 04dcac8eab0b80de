"""Serial Nanbeige with depth-aware KV.  Written from the recorded facts, not from the package.

Only the generation loop's words (Policy, Step) and the store of every key and value (Memory, which is about loops and
positions, not about a model) are shared with the Ouro oracle; the equations are written out again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.checkpoint import read_tensors
from tests.oracle.ouro import LAST_EXITED, Choose, Memory, Policy, Step, greedy, wants_exit


class NanbeigeOracle:
    """The model and its generation loop.

    Args:
        directory: a checkpoint in Hugging Face layout; not read where config and tensors are given.
        config: fields to put in place of the directory's, or with `tensors` all of them.
        tensors: the weights, by their names in a checkpoint.
        dtype: float64 to judge, float32 to see how far float32 itself moves.
        layout: LAST_EXITED or SHARED.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        dtype: type = np.float64,
        layout: str = LAST_EXITED,
    ) -> None:
        found = json.loads((directory / "config.json").read_text()) if directory is not None else {}
        c = found | dict(config or {})
        weights = tensors if tensors is not None else read_tensors(directory)
        self.w = {name: np.asarray(value, dtype=dtype) for name, value in weights.items()}
        self.dtype, self.layout = dtype, layout
        self.layers = c["num_hidden_layers"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim, self.theta, self.eps = c["head_dim"], c["rope_theta"], c["rms_norm_eps"]
        self.loops = len(c["loop_loss_weights"]) + 1 if c.get("loop_loss_weights") else c["num_loops"]
        self.norm_once = c.get("skip_loop_final_norm", False)

    # ---- the model -------------------------------------------------------------------------------------------------

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.w[name] * x / np.sqrt((x @ x) / self.dtype(len(x)) + self.dtype(self.eps))

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [heads, D].  Elements i and i + D/2 are one complex number, turned by position / theta^(2 i / D)."""
        half = self.head_dim // 2
        turn = np.exp(1j * position * self.theta ** (-2.0 * np.arange(half) / self.head_dim))
        turned = (x[:, :half] + 1j * x[:, half:]) * turn
        return np.hstack([turned.real, turned.imag]).astype(self.dtype)

    def _loop(self, x: np.ndarray, position: int, r: int, memory: Memory) -> np.ndarray:
        """Loop number r (1-based) of one token: x [E] -> x [E]."""
        for i in range(self.layers):
            w = {name: self.w[f"model.layers.{i}.{name}.weight"] for name in _LAYER_MATRICES}
            normed = self._norm(x, f"model.layers.{i}.input_layernorm.weight")
            q = self._rotate((w["self_attn.q_proj"] @ normed).reshape(self.heads, self.head_dim), position)
            k = self._rotate((w["self_attn.k_proj"] @ normed).reshape(self.kv_heads, self.head_dim), position)
            v = (w["self_attn.v_proj"] @ normed).reshape(self.kv_heads, self.head_dim)
            memory.write(i, position, r, k, v)
            keys, values = memory.read(i, position, r)  # [positions, kv heads, D]
            mixed = []
            for h in range(self.heads):  # heads 0 .. H/K - 1 share the first kv head, and so on
                group = h * self.kv_heads // self.heads
                score = keys[:, group] @ q[h] / np.sqrt(self.dtype(self.head_dim))
                weight = np.exp(score - score.max())
                mixed.append(weight @ values[:, group] / weight.sum())
            x = x + w["self_attn.o_proj"] @ np.concatenate(mixed)
            normed = self._norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
            gate = w["mlp.gate_proj"] @ normed
            x = x + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["mlp.up_proj"] @ normed))
        return x if self.norm_once else self._norm(x, "model.norm.weight")

    def _logits(self, x: np.ndarray) -> np.ndarray:
        return self.w["lm_head.weight"] @ (self._norm(x, "model.norm.weight") if self.norm_once else x)

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
    ) -> list[Step]:
        """Generate `outputs` tokens; with `tokens` and `depths`, say what the model thinks along them."""
        prefill_loops = prefill_loops or self.loops
        memory = Memory(self, len(prompt) + outputs)

        def compute(token: int, position: int, leaves_after: Callable[[int], bool]) -> tuple[np.ndarray, int]:
            x = self.w["model.embed_tokens.weight"][token]
            for r in range(1, self.loops + 1):
                x = self._loop(x, position, r, memory)
                if leaves_after(r):
                    break
            memory.exit_depth[position] = r
            return x, r

        for position, token in enumerate(prompt):
            x, depth = compute(token, position, lambda r: r == prefill_loops)
        steps: list[Step] = []
        for k in range(outputs):
            if k:

                def leaves(r: int, k: int = k) -> bool:
                    return r == depths[k] if depths is not None else wants_exit(policy, k, r, 0.0, None)[0]

                x, depth = compute(steps[-1].token, len(prompt) + k - 1, leaves)
            logits = self._logits(x)
            token = tokens[k] if tokens is not None else choose(k, logits)
            # no gate: the probability of having left is zero after every loop
            steps.append(Step(token=int(token), depth=depth, logits=logits, scores=(0.0,) * depth if k else ()))
        return steps


_LAYER_MATRICES = (
    *(f"self_attn.{n}_proj" for n in "qkvo"),
    *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
)
