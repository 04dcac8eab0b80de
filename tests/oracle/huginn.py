"""Serial Huginn and its retrofits, with compute-skipping generation.  Written from the recorded facts, not the package.

Entry points:

* ``HuginnOracle(directory, layout=..., planes=...).run(prompt, outputs, policy, prefill_loops=..., ...)`` is the
  generation of one request, with the arguments and result of the other oracles (a list of `Step`).
* ``judge(oracle, prompt, policy, tokens=, depths=, logprobs=, prefill_loops=, distance=, **request)`` compares what an
  engine did with the oracle run along the engine's own tokens and depths; `request` is what else `run` takes
  (``chunk=``, ``initial_state=``).
* ``HuginnOracle(directory).trajectory(tokens, loops)`` is the dense model: every state and logit of every position.

Plain dense NumPy.  Rows of a prompt are computed together, loop by loop; everything else is one position at a time.
Every version of every key and value is kept, so that each KV layout is one rule (`visible_loop`).  Loops are zero-based
inside this file and in that rule; exit depths, and all that `Policy` and `Step` say, count loops.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.checkpoint import read_tensors
from tests.oracle.ouro import LAST_EXITED, SHARED, Choose, Policy, Step, greedy, log_softmax, unchanged, wants_exit

DROP = "drop"
RING = "ring"
LAYOUTS = (LAST_EXITED, SHARED, DROP, RING)

HUGINN, LLAMA, OLMO2 = "huginn", "llama", "olmo2"  # the block variants

InitialState = Callable[[int], np.ndarray]  # position -> [E], the state before loop 0


def visible_loop(layout: str, loop: int, exit_depth: int, planes: int = 1) -> int | None:
    """Which loop's K/V a token at `loop` sees of an earlier token that ran `exit_depth` loops; None: it sees nothing.

    A ring has `planes` planes: loop d writes plane d mod planes, so a plane holds the last loop that fell on it.  Where
    the earlier token never reached the plane, its deepest plane is read.
    """
    assert exit_depth >= 1
    if layout == LAST_EXITED:
        return min(loop, exit_depth - 1)
    if layout == DROP:
        return loop if exit_depth > loop else None
    if layout == SHARED:
        return exit_depth - 1
    assert layout == RING, layout
    plane = min(loop % planes, exit_depth - 1)
    return max(written for written in range(exit_depth) if written % planes == plane)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The dense model over T positions, with the readout made after every loop."""

    embedded: np.ndarray  # [T, E], scaled
    injected: np.ndarray  # [T, E], out of the prelude
    states: np.ndarray  # [loops + 1, T, E], before loop 0 and after every loop
    logits: np.ndarray  # [loops, T, V]
    memory: Memory


class HuginnOracle:
    """The model and its generation loop.

    Args:
        directory: a checkpoint in Hugging Face layout; not read where config and tensors are given.
        config: fields to put in place of the directory's, or with `tensors` all of them.
        tensors: the weights, by their names in a checkpoint.
        dtype: float64 to judge, float32 to see how far float32 itself moves.
        layout: one of LAYOUTS.
        planes: how many planes a RING has; not given for other layouts.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        dtype: type = np.float64,
        layout: str = LAST_EXITED,
        planes: int | None = None,
    ) -> None:
        found = json.loads((directory / "config.json").read_text()) if directory is not None else {}
        c = found | dict(config or {})
        weights = tensors if tensors is not None else read_tensors(directory)
        self.w = {name: np.asarray(value, dtype=dtype) for name, value in weights.items()}
        self.dtype = dtype
        if layout not in LAYOUTS or (layout == RING) != (planes is not None):
            raise ValueError(
                f"layout must be one of {LAYOUTS}, with planes if and only if it is a ring: {layout=} {planes=}"
            )
        self.layout, self.planes = layout, planes or 1
        self.width, self.eps = c["n_embd"], c["norm_eps"]
        self.layers = {
            "prelude": c["n_layers_in_prelude"],
            "core_block": c["n_layers_in_recurrent_block"],
            "coda": c["n_layers_in_coda"],
        }
        self.heads = c["n_heads"]
        self.kv_heads = c.get("num_key_value_heads") or self.heads
        self.head_dim = c.get("head_dim") or self.width // self.heads
        self.loops = c["mean_recurrence"]
        self.embed_scale = (c.get("init_values") or {}).get("embed_scale", self.width**0.5)
        first = "transformer.core_block.0"
        self.block = (
            HUGINN if f"{first}.norm_3.weight" in self.w
            else OLMO2 if f"{first}.attn.q_norm.weight" in self.w
            else LLAMA
        )  # fmt: skip
        self.head = self.w["transformer.wte.weight" if c["tie_embeddings"] else "lm_head.weight"]
        theta = c["rope_base"] if self.block == HUGINN else c.get("rope_theta") or c["rope_base"]
        self.frequencies = scaled_frequencies(theta, self.head_dim, c.get("rope_scaling"))

    # ---- the model: x is [T, E], the rows of positions start .. start + T - 1 ----------------------------------------

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=self.dtype)
        return x / np.sqrt(mean_square + self.dtype(self.eps)) * self.w[f"{name}.weight"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T

    def _rotate(self, x: np.ndarray, start: int) -> np.ndarray:
        """x [T, heads, D].  Huginn turns neighbours (2i, 2i + 1), the retrofits the halves (i, i + D/2)."""
        positions = np.arange(start, start + len(x))
        turn = np.exp(1j * positions[:, None] * self.frequencies)[:, None, :]
        if self.block == HUGINN:
            z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([z.real, z.imag], axis=-1).reshape(x.shape).astype(self.dtype)
        half = self.head_dim // 2
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1).astype(self.dtype)

    def _attention(self, x: np.ndarray, at: str, start: int, history: History) -> np.ndarray:
        count, q_width, kv_width = len(x), self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = np.split(self._linear(x, f"{at}.attn.Wqkv"), [q_width, q_width + kv_width], axis=1)
        if self.block == OLMO2:
            q, k = self._norm(q, f"{at}.attn.q_norm"), self._norm(k, f"{at}.attn.k_norm")
        q = q.reshape(count, self.heads, self.head_dim)
        k, v = (y.reshape(count, self.kv_heads, self.head_dim) for y in (k, v))
        if f"{at}.attn.qk_bias" in self.w:
            q, k = q + self.w[f"{at}.attn.qk_bias"][0], k + self.w[f"{at}.attn.qk_bias"][1]
        q, k = self._rotate(q, start), self._rotate(k, start)
        past_k, past_v = history(k, v)
        keys, values = np.concatenate([past_k, k]), np.concatenate([past_v, v])  # [S + T, kv heads, D]
        future = np.arange(len(keys)) > len(past_k) + np.arange(count)[:, None]  # [T, S + T]
        out = np.empty_like(q)
        for h in range(self.heads):  # heads 0 .. H/K - 1 share the first kv head, and so on
            group = h * self.kv_heads // self.heads
            score = np.where(future, -np.inf, q[:, h] @ keys[:, group].T / np.sqrt(self.dtype(self.head_dim)))
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            out[:, h] = weight @ values[:, group] / weight.sum(axis=1, keepdims=True)
        return self._linear(out.reshape(count, q_width), f"{at}.attn.proj")

    def _mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = np.split(self._linear(x, f"{at}.mlp.fc"), 2, axis=1)
        return self._linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.proj")

    def _blocks(self, x: np.ndarray, stage: str, start: int, memory: Memory, loop: int = 0) -> np.ndarray:
        for i in range(self.layers[stage]):
            at = f"transformer.{stage}.{i}"

            def history(k: np.ndarray, v: np.ndarray, i: int = i) -> tuple[np.ndarray, np.ndarray]:
                return memory.exchange(stage, i, loop, start, k, v)

            def attention(y: np.ndarray, at: str = at, history: History = history) -> np.ndarray:
                return self._attention(y, at, start, history)

            norms = [f"{at}.norm_{n}" for n in (1, 2, 3, 4)]
            if self.block == HUGINN:
                x = self._norm(attention(self._norm(x, norms[0])) + x, norms[1])
                x = self._norm(self._mlp(self._norm(x, norms[2]), at) + x, norms[3])
            elif self.block == LLAMA:
                x = x + attention(self._norm(x, norms[0]))
                x = x + self._mlp(self._norm(x, norms[1]), at)
            else:
                x = x + self._norm(attention(x), norms[0])
                x = x + self._norm(self._mlp(x, at), norms[1])
        return x

    def _embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.w["transformer.wte.weight"][np.asarray(tokens, int)] * self.dtype(self.embed_scale)

    def _start(self, start: int, count: int, initial_state: InitialState | None) -> np.ndarray:
        if initial_state is None:
            return np.zeros((count, self.width), self.dtype)
        return np.stack([np.asarray(initial_state(start + t), self.dtype) for t in range(count)])

    def _loop(self, state: np.ndarray, injected: np.ndarray, start: int, loop: int, memory: Memory) -> np.ndarray:
        x = self._linear(np.concatenate([state, injected], axis=1), "transformer.adapter")
        return self._blocks(x, "core_block", start, memory, loop)

    def _readout(self, state: np.ndarray, start: int, memory: Memory) -> np.ndarray:
        """Logits [T, V]; writes the coda's K/V, over what an earlier readout of these positions left."""
        x = self._norm(state, "transformer.ln_f") if self.block == HUGINN else state
        x = self._blocks(x, "coda", start, memory)
        return self._norm(x, "transformer.ln_f") @ self.head.T

    def trajectory(self, tokens: Sequence[int], loops: int, *, initial_state: InitialState | None = None) -> Trajectory:
        """All positions together, every loop on its own plane (what all layouts do inside one chunk)."""
        memory = Memory(self, len(tokens), loops)
        embedded = self._embed(tokens)
        injected = self._blocks(embedded, "prelude", 0, memory)
        states, logits = [self._start(0, len(tokens), initial_state)], []
        for loop in range(loops):
            states.append(self._loop(states[-1], injected, 0, loop, memory))
            logits.append(self._readout(states[-1], 0, memory))
        return Trajectory(
            embedded=embedded, injected=injected, states=np.stack(states), logits=np.stack(logits), memory=memory
        )

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
        chunk: int | None = None,
        initial_state: InitialState | None = None,
    ) -> list[Step]:
        """Generate `outputs` tokens, or fewer when one of `stop` is chosen.

        With `tokens` and `depths` the run goes along them instead: step k is what the model says about output k given
        the history of the others, and its token and depth are the given ones.

        Args:
            prefill_loops: loops of every prompt position; the policy's max_loops if not given.
            chunk: how many prompt positions go through the loops together; all of them if not given.  Inside a chunk
                everybody sees everybody's current loop, so only a ring can tell the difference.  SHARED runs one
                position at a time whatever is asked.
            initial_state: the state of each position before loop 0; zeros if not given.
        """
        prefill_loops = prefill_loops or policy.max_loops
        chunk = 1 if self.layout == SHARED else chunk or len(prompt)
        memory = Memory(
            self, len(prompt) + outputs, max(prefill_loops, policy.max_loops, *policy.trace, *(depths or ()))
        )
        for start in range(0, len(prompt), chunk):
            ids = prompt[start : start + chunk]
            injected = self._blocks(self._embed(ids), "prelude", start, memory)
            state = self._start(start, len(ids), initial_state)
            for loop in range(prefill_loops):
                state = self._loop(state, injected, start, loop, memory)
            logits = self._readout(state, start, memory)[-1]
            memory.exit_depth[start : start + len(ids)] = prefill_loops
        steps: list[Step] = []
        for k in range(outputs):
            scores, readouts, depth = [], [], prefill_loops
            if k:
                position = len(prompt) + k - 1
                injected = self._blocks(self._embed([steps[-1].token]), "prelude", position, memory)
                states = [self._start(position, 1, initial_state)]
                leaves = False
                while not leaves:
                    states.append(self._loop(states[-1], injected, position, len(scores), memory))
                    if policy.name in ("kl", "argmax"):
                        readouts.append(self._readout(states[-1], position, memory)[0])
                    scores.append(exit_score(policy.name, states, readouts))
                    depth = len(scores)
                    leaves = (
                        depth == depths[k] if depths is not None else wants_exit(policy, k, depth, scores[-1], None)[0]
                    )
                logits = readouts[-1] if readouts else self._readout(states[-1], position, memory)[0]
                memory.exit_depth[position] = depth
            token = int(tokens[k] if tokens is not None else choose(k, logits))
            looked_at = np.stack(readouts) if readouts else None
            steps.append(Step(token=token, depth=depth, logits=logits, scores=tuple(scores), readouts=looked_at))
            if token in stop:
                break
        return steps


def scaled_frequencies(theta: float, head_dim: int, scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Radians per position [D/2].

    llama3 scaling leaves wavelengths up to original / high_freq_factor alone, stretches those from
    original / low_freq_factor on by the factor, and blends in between, linearly in original / wavelength.
    """
    frequency = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    if scaling is None:
        return frequency
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "llama3":
        raise ValueError(f"rope_scaling: {kind!r} is not llama3")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)  # over the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequency + (1 - kept) * frequency / scaling["factor"]


def exit_score(name: str, states: Sequence[np.ndarray], readouts: Sequence[np.ndarray]) -> float:
    """What the policy `name` looks at after a loop.

    Args:
        states: the state [..., E] before loop 0 and after every loop so far.
        readouts: logits [V] after every loop so far; only looked at by kl and argmax.

    latent: how much the last loop changed the state, relative to the new one; the first loop compares with the start.
    kl: KL(previous || current) of the next-token distributions; before the first loop the distribution is uniform.
    argmax: for how many readouts in a row the best token has been what it was; 0 after the first loop.
    """
    if name == "latent":
        return float(np.linalg.norm(states[-1] - states[-2]) / np.linalg.norm(states[-1]))
    if name == "kl":
        current = log_softmax(readouts[-1])
        previous = log_softmax(readouts[-2] if len(readouts) > 1 else np.zeros_like(current))
        return float(np.sum(np.exp(previous) * (previous - current)))
    if name == "argmax":
        return float(unchanged([int(np.argmax(logits)) for logits in readouts]))
    return 0.0


# stores the K/V [T, kv heads, D] of the rows being computed; gives what they see of earlier positions, [S, kv heads, D]
History = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Memory:
    """Every version of every key and value.  Prelude and coda have one per position, the core one per loop.

    `keys` and `values` are, by stage, [loops, layers, positions, kv heads, D], NaN where nothing was written.
    """

    def __init__(self, model: HuginnOracle, positions: int, loops: int) -> None:
        self.keys, self.values = {}, {}
        for stage, layers in model.layers.items():
            versions = loops if stage == "core_block" else 1
            shape = (versions, layers, positions, model.kv_heads, model.head_dim)
            self.keys[stage], self.values[stage] = (
                np.full(shape, np.nan, model.dtype),
                np.full(shape, np.nan, model.dtype),
            )
        self.exit_depth = np.zeros(positions, int)  # one-based; 0 until a position has left the loop
        self.layout, self.planes = model.layout, model.planes

    def exchange(
        self, stage: str, layer: int, loop: int, start: int, key: np.ndarray, value: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Store the rows of positions start .. start + T - 1; what they see of earlier positions, [S, kv heads, D]."""
        keys, values = self.keys[stage][:, layer], self.values[stage][:, layer]
        keys[loop, start : start + len(key)], values[loop, start : start + len(key)] = key, value
        if stage == "core_block":
            versions = [visible_loop(self.layout, loop, e, self.planes) for e in self.exit_depth[:start]]
        else:
            versions = [0] * start
        seen = [position for position, version in enumerate(versions) if version is not None]
        where = [version for version in versions if version is not None], seen
        assert not np.isnan(keys[where]).any(), "K/V that nobody wrote"
        return keys[where], values[where]
