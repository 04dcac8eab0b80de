"""Device state of the live requests, one row per slot, and how a request is put into its row.

Life of a slot:

    FREE --bind--> FREE (its prompt runs in chunks) --last chunk--> READOUT        all layouts but SHARED
    FREE --bind--> ENTER (its prompt runs position by position, forced)            SHARED
    READOUT --sample--> ENTER --prelude--> CORE --loops--> READOUT -> ...          until a stop: FREE

Two conditions are derived, never stored: a row is *forced* while position < forced_end (a SHARED prompt: exactly
prefill_loops loops, neither sampled nor delivered), and *stalled* while it is in ENTER and does not own the page of its
position.

What only some models need is None for the others, whose programs then do not know it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax.config import MAX_STOP_IDS
from rlt_jax.exits import POLICY_NAMES, ExitParams, ExitState, fresh_exit_state
from rlt_jax.models.spec import ModelSpec
from rlt_jax.request import Request
from rlt_jax.runtime.plan import NO_TOKEN
from rlt_jax.sampling import SamplerParams, request_key, state_key


class Phase(enum.IntEnum):
    FREE = 0  # no request, or its prompt still runs in chunks
    ENTER = 1  # token and position known, waits for the prelude
    CORE = 2  # inside the loop
    READOUT = 3  # left the loop, waits for coda and sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StartParams:
    """What a request's states start from, for models that offer the choice."""

    random: Any  # [S] bool: from noise, else from zeros
    key: Any  # [S, 2] u32, key data of the stream of initial states


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotState:
    """All per-request arrays that a tick reads and writes.  S slots, C = max_context, MP pages per slot.

    Donated through every program: after a call the old object is dead.
    """

    phase: Any  # [S] i32, Phase
    table: Any  # [S, MP] i32 page ids; entries past pages_owned are 0, a valid id that is never read
    pages_owned: Any  # [S] i32
    position: Any  # [S] i32, of the token being computed
    depth: Any  # [S] i32, loops done for that token = zero-based index of the next loop
    token: Any  # [S] i32
    hidden: Any  # [S, E] state that goes round the loop; after the last loop, the readout's input
    forced_end: Any  # [S] i32, positions below it are forced (SHARED prompts); 0 otherwise
    prefill_loops: Any  # [S] i32, depth of prompt positions
    remaining: Any  # [S] i32, tokens the request may still produce
    output_index: Any  # [S] i32, index of the next output; picks its random key
    stop_ids: Any  # [S, MAX_STOP_IDS] i32, stop and EOS ids, NO_TOKEN where unused
    exit_state: ExitState
    exit_params: ExitParams
    sampler: SamplerParams
    given_tokens: Any  # [S, C] i32, the prompt
    given_depths: Any  # [S, C] i8, exit depth to obey at a position (trace), 0 = none
    injected: Any = None  # [S, E] the prelude's output, which every loop reads; None: the model does not inject
    start: Any = None  # StartParams; None: the model's states do not start from noise

    @property
    def slots(self) -> int:
        return self.phase.shape[0]


def empty_slots(slots: int, max_context: int, pages_per_slot: int, spec: ModelSpec, dtype: jnp.dtype) -> SlotState:
    """Every slot FREE."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((slots, *shape), dtype)

    return SlotState(
        phase=zeros(),
        table=zeros(pages_per_slot),
        pages_owned=zeros(),
        position=zeros(),
        depth=zeros(),
        token=zeros(),
        hidden=zeros(spec.hidden_size, dtype=dtype),
        forced_end=zeros(),
        prefill_loops=zeros(),
        remaining=zeros(),
        output_index=zeros(),
        stop_ids=jnp.full((slots, MAX_STOP_IDS), NO_TOKEN, jnp.int32),
        exit_state=fresh_exit_state(slots, spec.vocab_size, spec.exit_scores),
        exit_params=ExitParams(
            policy=zeros(), threshold=zeros(dtype=jnp.float32), min_loops=zeros(), max_loops=zeros()
        ),
        sampler=SamplerParams(
            temperature=zeros(dtype=jnp.float32),
            top_k=zeros(),
            top_p=zeros(dtype=jnp.float32),
            min_p=zeros(dtype=jnp.float32),
            processed=zeros(dtype=jnp.bool_),
            key=zeros(2, dtype=jnp.uint32),
        ),
        given_tokens=zeros(max_context),
        given_depths=zeros(max_context, dtype=jnp.int8),
        injected=zeros(spec.hidden_size, dtype=dtype) if spec.injects else None,
        start=StartParams(random=zeros(dtype=jnp.bool_), key=zeros(2, dtype=jnp.uint32))
        if "random" in spec.initial_states
        else None,
    )


# A bind travels as one int32 vector: [header | stop ids | page table | prompt tokens | given depths, four a word].
_HEADER = (
    "slot",
    "phase",
    "pages_owned",
    "token",
    "forced_end",
    "prefill_loops",
    "max_tokens",
    "policy",
    "threshold",
    "min_loops",
    "max_loops",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "processed",
    "seed_high",
    "seed_low",
    "sample_index",
    "random_start",
)
_FLOATS = frozenset({"threshold", "temperature", "top_p", "min_p"})


def bind_words(max_context: int, pages_per_slot: int) -> int:
    """Length of a packed bind."""
    return len(_HEADER) + MAX_STOP_IDS + pages_per_slot + max_context + -(-max_context // 4)


def pack_bind(
    request: Request,
    *,
    slot: int,
    pages: tuple[int, ...],
    stop_ids: tuple[int, ...],
    sequential_prompt: bool,
    max_context: int,
    pages_per_slot: int,
) -> np.ndarray:
    """The packed row that `apply_bind` reads: everything the device needs to know about a request."""
    p, prompt = request.params, request.prompt_token_ids
    header = {
        "slot": slot,
        "phase": Phase.ENTER if sequential_prompt else Phase.FREE,
        "pages_owned": len(pages),
        "token": prompt[0],
        "forced_end": len(prompt) if sequential_prompt else 0,
        "prefill_loops": p.prefill_loops,
        "max_tokens": p.max_tokens,
        "policy": POLICY_NAMES[p.exit_policy],
        "threshold": p.exit_threshold,
        "min_loops": p.min_loops,
        "max_loops": p.max_loops,
        "temperature": p.temperature,
        "top_k": p.top_k,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "processed": p.logprobs == "processed",
        "seed_high": p.seed >> 32,
        "seed_low": p.seed & 0xFFFFFFFF,
        "sample_index": p.sample_index,
        "random_start": p.initial_state == "random",
    }
    words = np.zeros(bind_words(max_context, pages_per_slot), np.int32)
    for i, name in enumerate(_HEADER):
        words[i] = np.array(header[name], np.float32 if name in _FLOATS else np.uint32).view(np.int32)
    at = len(_HEADER)
    words[at : at + MAX_STOP_IDS] = NO_TOKEN
    words[at : at + len(stop_ids)] = stop_ids
    at += MAX_STOP_IDS
    words[at : at + len(pages)] = pages
    at += pages_per_slot
    words[at : at + len(prompt)] = prompt
    at += max_context
    if p.exit_trace is not None:
        depths = np.zeros(-(-max_context // 4) * 4, np.int8)
        # entry i >= 1 is the depth spent on the input of output i, which sits at position P + i - 1
        given = p.exit_trace[1 : p.max_tokens]
        depths[len(prompt) : len(prompt) + len(given)] = given
        words[at:] = depths.view(np.int32)
    return words


def apply_bind(slots: SlotState, words: jax.Array) -> SlotState:
    """Put a packed request into its slot.  DONATES slots; the whole row is new, so nothing of the last owner stays."""
    context, width = slots.given_tokens.shape[1], slots.table.shape[1]

    def nothing(rows: jax.Array) -> jax.Array:
        return jnp.zeros(rows.shape[1:], rows.dtype)

    field: dict[str, jax.Array] = {}
    for i, name in enumerate(_HEADER):
        field[name] = jax.lax.bitcast_convert_type(words[i], jnp.float32) if name in _FLOATS else words[i]
    at = len(_HEADER)
    stop_ids = words[at : at + MAX_STOP_IDS]
    at += MAX_STOP_IDS
    table = words[at : at + width]
    at += width
    tokens = words[at : at + context]
    depths = jax.lax.bitcast_convert_type(words[at + context :], jnp.int8).reshape(-1)[:context]
    seed = [jax.lax.bitcast_convert_type(field[w], jnp.uint32) for w in ("seed_high", "seed_low", "sample_index")]
    start = None
    if slots.start is not None:
        start = StartParams(random=field["random_start"] != 0, key=state_key(*seed[:2]))
    zero = jnp.int32(0)
    row = SlotState(
        phase=field["phase"],
        table=table,
        pages_owned=field["pages_owned"],
        position=zero,
        depth=zero,
        token=field["token"],
        hidden=nothing(slots.hidden),
        forced_end=field["forced_end"],
        prefill_loops=field["prefill_loops"],
        remaining=field["max_tokens"],
        output_index=zero,
        stop_ids=stop_ids,
        exit_state=ExitState(
            survival=jnp.float32(1), pending=zero, readout=jax.tree.map(nothing, slots.exit_state.readout)
        ),
        exit_params=ExitParams(**{n: field[n] for n in ("policy", "threshold", "min_loops", "max_loops")}),
        sampler=SamplerParams(
            **{n: field[n] for n in ("temperature", "top_k", "top_p", "min_p")},
            processed=field["processed"] != 0,
            key=request_key(*seed),
        ),
        given_tokens=tokens,
        given_depths=depths,
        injected=jax.tree.map(nothing, slots.injected),
        start=start,
    )
    return jax.tree.map(lambda all_rows, one: all_rows.at[field["slot"]].set(one), slots, row)
