"""The two training stages as jitted programs over chunks of data, and the loops that drive them.

One dispatch runs all optimizer steps of a chunk (`lax.scan`, state donated); data for the next chunks is made on
threads meanwhile, and metrics are read one dispatch late, so the device does not wait for Python but where the
curriculum asks what the model knows (every PROBE_EVERY chunks).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlt_jax.models.ouro import Ouro, OuroParams
from rlt_jax.train.data import AHEAD, ANSWER_WEIGHT, Chunk, Curriculum, DataSpec, stream
from rlt_jax.train.losses import (
    gate_loss,
    improvement_target,
    look_ahead_target,
    stage1_loss,
    token_cross_entropy,
)
from rlt_jax.train.model import cast, count_parameters, forward_states, init_params
from rlt_jax.train.tasks import MAX_HOPS, VALIDATION_CLASS, Difficulty, Symbols, held_out
from rlt_jax.train.tokenizer import build_tokenizer

Batch = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # the arrays of a Chunk, one step: [B, T] each
GATE_RULES = ("improvement", "look_ahead")
PROBE_SAMPLES, PROBE_SEED = 48, 30_000_001  # chains per number of hops
PROBE_EVERY = AHEAD  # chunks: data of the last raise has arrived by then
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run.

    Attributes:
        seed: of the weights and the data.
        learning_rate: peak; linear warm-up, held, then cosine to zero at the last step.
        warmup: steps of warm-up.
        hold: share of the run up to which the peak is held.  Long chains are learned late and suddenly: under a rate
            that falls from the start they may never be.
        weight_decay: on matrices other than the embedding.
        beta: entropy weight in the first and the second half of stage I.
        compute_dtype: of activations and of the weights in matmuls; the master weights are float32.
        gate_steps: steps of stage II.
        gate_learning_rate: peak of stage II.
    """

    seed: int = 0
    learning_rate: float = 2e-3
    warmup: int = 200
    hold: float = 0.6
    weight_decay: float = 0.1
    beta: tuple[float, float] = (0.1, 0.05)
    compute_dtype: str = "bfloat16"
    gate_steps: int = 320
    gate_learning_rate: float = 1e-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Donated through every dispatch."""

    params: OuroParams  # float32 master weights
    optimizer: Any
    step: jax.Array  # [] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """One exit gate: the only thing that stage II trains."""

    weight: jax.Array  # [E] float32
    bias: jax.Array  # [] float32


def _optimizer(config: TrainConfig, params: OuroParams) -> optax.GradientTransformation:
    matrices = jax.tree.map(lambda a: a.ndim == 2 and min(a.shape) > 1, params)
    decayed = dataclasses.replace(matrices, embed=False)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def learning_rate(config: TrainConfig, step: jax.Array, total: jax.Array) -> jax.Array:
    """Warm-up, hold, cosine to zero at `total` (traced: one compiled program for runs of any length)."""
    at, end = step.astype(jnp.float32), total.astype(jnp.float32)
    warm = (at + 1) / config.warmup
    begin = jnp.maximum(config.hold * end, config.warmup)
    progress = jnp.clip((at - begin) / jnp.maximum(end - begin, 1.0), 0.0, 1.0)
    return config.learning_rate * jnp.minimum(warm, 0.5 * (1 + jnp.cos(jnp.pi * progress)))


def _per_loop(model: Ouro, params: OuroParams, batch: Batch, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropy, correctness and gate logit of every loop: three [U, B, T]."""
    tokens, position, segment, _, exit_depth = (a.astype(jnp.int32) for a in batch)
    targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)  # the wrapped column has weight 0
    states = forward_states(model, params, tokens, position, segment, exit_depth, dtype=dtype)
    results = [token_cross_entropy(model.head(cast(params, dtype), h), targets) for h in states]
    gates = [model.exit_score(params, h) for h in states]
    return jnp.stack([r[0] for r in results]), jnp.stack([r[1] for r in results]), jnp.stack(gates)


def _stage1_step(
    model: Ouro, config: TrainConfig, total: jax.Array, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    weight = batch[3].astype(jnp.float32) / ANSWER_WEIGHT
    exit_depth = batch[4].astype(jnp.int32)
    beta = jnp.where(state.step < total // 2, config.beta[0], config.beta[1])

    def objective(params: OuroParams) -> tuple[jax.Array, dict[str, jax.Array]]:
        cross_entropy, right, gate = _per_loop(model, params, batch, config.compute_dtype)
        loss, p = stage1_loss(cross_entropy, gate, exit_depth, beta)
        loss = jnp.sum(loss * weight) / jnp.sum(weight)
        full = exit_depth == model.spec.trained_loops
        answers = ((batch[3] == ANSWER_WEIGHT) & full).astype(jnp.float32)

        def mean(x: jax.Array, over: jax.Array) -> jax.Array:
            return jnp.sum(x * over, axis=(-2, -1)) / jnp.maximum(jnp.sum(over), 1.0)

        loop = jnp.arange(1, model.spec.trained_loops + 1, dtype=jnp.float32)[:, None, None]
        return loss, {
            "loss": loss,
            "answer_ce": mean(cross_entropy, answers),
            "answer_right": mean(right.astype(jnp.float32), answers),
            "mean_loop": mean(jnp.sum(p * loop, axis=0), answers),
        }

    gradient, metrics = jax.grad(objective, has_aux=True)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer step count
        updates, optimizer = _optimizer(config, state.params).update(gradient, state.optimizer, state.params)
    rate = learning_rate(config, state.step, total)
    # a step whose gradient is not finite must not poison the weights; it is counted in the log instead
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    good = jnp.isfinite(norm)
    params = jax.tree.map(lambda p, u: jnp.where(good, p - rate * u, p), state.params, updates)
    optimizer = jax.tree.map(lambda new, old: jnp.where(good, new, old), optimizer, state.optimizer)
    metrics |= {"gradient_norm": norm, "skipped": (~good).astype(jnp.int32)}
    return TrainState(params, optimizer, state.step + 1), metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def stage1_chunk(
    model: Ouro, config: TrainConfig, total: jax.Array, state: TrainState, chunk: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """All steps of a chunk; metrics are the last step's, `skipped` is summed."""
    state, metrics = jax.lax.scan(functools.partial(_stage1_step, model, config, total), state, chunk)
    last = jax.tree.map(lambda m: m[-1], metrics)
    return state, last | {"skipped": jnp.sum(metrics["skipped"])}


def _gate_logits(states: jax.Array, gate: Gate) -> jax.Array:
    return jnp.sum(states.astype(jnp.float32) * gate.weight, axis=-1) + gate.bias


def stage2_objective(
    gates: dict[str, Gate], states: jax.Array, cross_entropy: jax.Array, weight: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of the two gates' losses (they share nothing, so each trains as if alone); states [U, B, T, E]."""

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(x * weight) / jnp.sum(weight)

    losses = {
        "improvement": mean(
            gate_loss(_gate_logits(states[1:], gates["improvement"]), improvement_target(cross_entropy))
        ),
        "look_ahead": mean(gate_loss(_gate_logits(states[:-1], gates["look_ahead"]), look_ahead_target(cross_entropy))),
    }
    return losses["improvement"] + losses["look_ahead"], losses


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def stage2_chunk(
    model: Ouro,
    config: TrainConfig,
    params: OuroParams,
    carry: tuple[dict[str, Gate], Any, jax.Array],
    chunk: Batch,
) -> tuple[tuple[dict[str, Gate], Any, jax.Array], dict[str, jax.Array]]:
    """Stage II over a chunk.  `params` are the frozen, already cast weights: an input, never an output."""
    optimizer = optax.adam(1.0)

    def step(
        carry: tuple[dict[str, Gate], Any, jax.Array], batch: Batch
    ) -> tuple[tuple[dict[str, Gate], Any, jax.Array], dict[str, jax.Array]]:
        gates, moments, at = carry
        tokens, position, segment, _, _ = (a.astype(jnp.int32) for a in batch)
        targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
        # every loop of every token is needed, so all tokens run at full depth here
        depth = jnp.full(tokens.shape, model.spec.trained_loops)
        states = forward_states(model, params, tokens, position, segment, depth, dtype=config.compute_dtype)
        cross_entropy = jnp.stack([token_cross_entropy(model.head(params, h), targets)[0] for h in states])
        weight = batch[3].astype(jnp.float32) / ANSWER_WEIGHT
        gradient, losses = jax.grad(stage2_objective, has_aux=True)(gates, jnp.stack(states), cross_entropy, weight)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer step count
            updates, moments = optimizer.update(gradient, moments)
        rate = config.gate_learning_rate * jnp.maximum(0.0, 1.0 - at.astype(jnp.float32) / config.gate_steps)
        gates = optax.apply_updates(gates, jax.tree.map(lambda u: rate * u, updates))
        return (gates, moments, at + 1), losses

    carry, losses = jax.lax.scan(step, carry, chunk)
    return carry, jax.tree.map(lambda m: m[-1], losses)


def _on_device(chunk: Chunk) -> Batch:
    return jax.device_put(chunk.arrays())


class HopProbe:
    """How many hops a model can follow: held-out chains of the validation class, teacher-forced, at full depth."""

    def __init__(self, model: Ouro, dtype: str) -> None:
        symbols = Symbols.of(build_tokenizer())
        parts = [
            held_out(
                symbols,
                "chain",
                PROBE_SAMPLES,
                split_class=VALIDATION_CLASS,
                seed=PROBE_SEED,
                difficulty=Difficulty(most_hops=hops, frontier=1.0, frontier_queries=1.0),
            )
            for hops in range(1, MAX_HOPS + 1)
        ]
        width = max(int(part.length.max()) for part in parts)
        tokens = np.zeros((len(parts), PROBE_SAMPLES, width), np.int32)
        asked = np.zeros(tokens.shape, bool)  # where the token that `hops` hops lead to is predicted
        for row, part in enumerate(parts):
            for i, (n, end) in enumerate(zip(part.prompt, part.length, strict=True)):
                tokens[row, i, :end] = part.tokens[i, :end]
                asked[row, i, n : end - 1 : 2] = True
        self._asked = jnp.asarray(asked)
        flat = tokens.reshape(-1, width)
        columns = np.broadcast_to(np.arange(width, dtype=np.int32), flat.shape)
        ones = np.ones_like(flat)
        self._batch = jax.device_put((flat, columns, ones, ones, ones * model.spec.trained_loops))
        self._run = functools.partial(_hops_right, model, dtype)

    def __call__(self, params: OuroParams) -> list[float]:
        """Share of right answers that need 1, 2, ... MAX_HOPS hops."""
        return [float(v) for v in jax.device_get(self._run(params, self._batch, self._asked))]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hops_right(model: Ouro, dtype: str, params: OuroParams, batch: Batch, asked: jax.Array) -> jax.Array:
    _, right, _ = _per_loop(model, params, batch, dtype)
    right = right[-1].reshape(asked.shape)
    return jnp.sum(right & asked, axis=(1, 2)) / jnp.sum(asked, axis=(1, 2))


def _row(values: jax.Array) -> str:
    return "/".join(f"{float(v):.3f}" for v in values)


def train_stage1(
    model: Ouro, config: TrainConfig, curriculum: Curriculum, *, threads: int = 2, log: Log = print
) -> OuroParams:
    """Stage I from scratch, on all chunks of the curriculum's run; returns the float32 parameters.

    A curriculum that is not fixed is raised whenever the model answers the hops it asks for.
    """
    data, params = curriculum.spec, init_params(model, config.seed)
    log(f"stage I: {count_parameters(params):,} parameters, {model.spec.trained_loops} loops, {data=}")
    state = TrainState(params, _optimizer(config, params).init(params), jnp.zeros((), jnp.int32))
    probe = None if curriculum.fixed or "chain" not in data.tasks else HopProbe(model, config.compute_dtype)
    chunks = stream(data, config.seed, threads=threads, curriculum=curriculum)
    total = data.chunks * data.chunk_steps
    begin = time.perf_counter()
    state, metrics = stage1_chunk(model, config, jnp.int32(total), state, _on_device(next(chunks)))
    jax.block_until_ready(state)
    if probe is not None:
        probe(state.params)  # compiled here, not in the steps that are timed
    log(f"first {data.chunk_steps} steps with compilation: {time.perf_counter() - begin:.1f} s")

    begin = last_log = time.perf_counter()
    skipped, pending, hops = 0, metrics, ""
    for index in range(1, data.chunks):
        state, metrics = stage1_chunk(model, config, jnp.int32(total), state, _on_device(next(chunks)))
        done = (index + 1) * data.chunk_steps
        if probe is not None and index % PROBE_EVERY == 0:
            right = probe(state.params)
            hops = ", hops right " + "/".join(f"{share:.2f}" for share in right)
            if curriculum.follow(index, right):
                log(f"step {done}: {curriculum.most_hops(index)} hops learned{hops}")
        skipped += int(pending["skipped"])  # waits for the dispatch before the last: two stay in flight at most
        now = time.perf_counter()
        speed = (done - 2 * data.chunk_steps) / max(now - begin, 1e-9)  # steps known to be complete since `begin`
        if now - last_log > 10 or done == total:
            last_log = now
            shown = jax.device_get(pending)
            log(
                f"step {done}: loss {float(shown['loss']):.3f}, answers ce {_row(shown['answer_ce'])} "
                f"right {_row(shown['answer_right'])}{hops}, mean loop {float(shown['mean_loop']):.2f}, "
                f"gradient {float(shown['gradient_norm']):.2f}, skipped {skipped}, "
                f"{speed * data.rows * data.seq_len / 1e3:.0f}k tokens/s, eta {(total - done) / max(speed, 1e-9):.0f} s"
            )
        pending = metrics
    chunks.close()
    shown = jax.device_get(metrics)
    log(
        f"stage I done: {total} steps in {time.perf_counter() - begin:.0f} s; answers ce {_row(shown['answer_ce'])} "
        f"right {_row(shown['answer_right'])}"
    )
    return state.params


def train_stage2(
    model: Ouro, config: TrainConfig, data: DataSpec, params: OuroParams, *, threads: int = 2, log: Log = print
) -> dict[str, Gate]:
    """Stage II on the frozen weights as they ship (`params`, already cast): one gate per rule of GATE_RULES."""
    # own arrays for each rule: they are donated
    gates = {
        rule: Gate(jnp.array(params.exit_gate_weight[0], jnp.float32), jnp.array(params.exit_gate_bias[0], jnp.float32))
        for rule in GATE_RULES
    }
    carry = (gates, optax.adam(1.0).init(gates), jnp.zeros((), jnp.int32))
    # data of its own, as hard as what the model is judged by
    chunks = stream(data, config.seed + 1_000_003, threads=threads)
    begin = last_log = time.perf_counter()
    for done in range(data.chunk_steps, config.gate_steps + data.chunk_steps, data.chunk_steps):
        carry, losses = stage2_chunk(model, config, params, carry, _on_device(next(chunks)))
        if time.perf_counter() - last_log > 5 or done >= config.gate_steps:
            last_log = time.perf_counter()
            log(f"gate step {done}: " + ", ".join(f"{k} {float(v):.4f}" for k, v in losses.items()))
    chunks.close()
    jax.block_until_ready(carry)
    log(f"stage II done in {time.perf_counter() - begin:.0f} s")
    return carry[0]


def with_gate(params: OuroParams, gate: Gate) -> OuroParams:
    """The parameters with this gate; everything else untouched."""
    return dataclasses.replace(
        params,
        exit_gate_weight=gate.weight[None].astype(params.exit_gate_weight.dtype),
        exit_gate_bias=gate.bias[None].astype(params.exit_gate_bias.dtype),
    )
