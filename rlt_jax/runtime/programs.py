"""The device programs: pure functions over (params, kv, slots, round), compiled once at start, with donated state.

    begin     free the slots of cancelled requests, set the round's plan, clear its events
    bind      put one request into its slot
    prefill   the round's next chunk of one prompt through all its loops (one program per chunk bucket)
    decode    up to N ticks; N is a traced scalar
    report    pack the round's events for the host

A tick:   core pass over all slots, each at its own (position, depth), writing and reading its own KV plane
          -> exit test -> coda, head and sampling for the rows that left -> their next token enters at depth 0.
Layers before or after the loop run over all slots however few need them, so with such layers the rows at the boundary
of the loop (in READOUT or ENTER) wait for each other: until boundary_batch of them do, or nobody is inside the loop.
Nothing is read by the host inside a round.  Decode rows and chunk rows never share a matmul: the row count of a product
may change its rounding, and a request's bits must not depend on its neighbours.

`prefill` and `decode` take and return donated state alone, so that what they touch keeps its address from one round to
the next and their CUDA graphs need little updating (XLA's scratch still moves; docs/architecture.md).  That is why the
plan, chunks included, goes in and the events come out through two tiny programs of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.exits import (
    READOUT_SCORES,
    ExitPolicy,
    ExitScores,
    ExitState,
    ReadoutState,
    exit_test,
    latent_score,
    observe,
    restarted,
)
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.kvcache.pool import KVPool, empty_pool, mark_exits, write_rows
from rlt_jax.models.spec import Attend, LoopedModel, Params
from rlt_jax.ops.paged_attention.api import paged_attention
from rlt_jax.runtime.plan import MAX_CHUNKS, NO_TOKEN, Finish
from rlt_jax.runtime.slots import Phase, SlotState, apply_bind, empty_slots
from rlt_jax.sampling import sample, state_noise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Events:
    """What a round did, for the host.  `pack` makes one int32 array of it: one transfer per round."""

    ticks: Any  # [] i32, ticks run
    idle_row_ticks: Any  # [] i32, rows x ticks that had nothing to run in the core pass
    token: Any  # [N, S] i32, NO_TOKEN where nothing was sampled
    depth: Any  # [N, S] i32, exit depth of the token, one-based
    logprob: Any  # [N, S] f32
    finish: Any  # [N, S] i32, Finish

    @staticmethod
    def empty(max_ticks: int, slots: int) -> Events:
        def zeros() -> jax.Array:  # an array of its own each: state is donated leaf by leaf
            return jnp.zeros((max_ticks, slots), jnp.int32)

        return Events(
            ticks=jnp.int32(0),
            idle_row_ticks=jnp.int32(0),
            token=jnp.full((max_ticks, slots), NO_TOKEN, jnp.int32),
            depth=zeros(),
            logprob=jnp.zeros((max_ticks, slots), jnp.float32),
            finish=zeros(),
        )

    def pack(self, slots: SlotState) -> jax.Array:
        """[4 N + 5, S] i32: token, depth, logprob bits and finish of each tick, then five rows of totals."""
        bits = lax.bitcast_convert_type(self.logprob, jnp.int32)
        counters = [jnp.full((slots.slots,), n, jnp.int32) for n in (self.ticks, self.idle_row_ticks)]
        tail = jnp.stack([*counters, slots.phase, slots.position, slots.depth])
        return jnp.concatenate([self.token, self.depth, bits, self.finish, tail])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundState:
    """What one round is told and what it answers.  Donated through every program."""

    ticks: Any  # [] i32, ticks to run at most, <= max_ticks
    end_early: Any  # [] i32, 1: end as soon as a slot finishes, because requests wait
    boundary_batch: Any  # [] i32, rows at the boundary of the loop that the layers outside it wait for
    chunks: Any  # [MAX_CHUNKS, 4] i32: slot, start, count, last (0 or 1) of each chunk, in the order they run
    next_chunk: Any  # [] i32, chunks that have run
    events: Events


BEGIN_HEADER = ("ticks", "end_early", "boundary_batch")


def begin_words(slots: int) -> int:
    """Length of the packed plan that `Programs.begin` takes: BEGIN_HEADER, a flag per slot to free, the chunks."""
    return len(BEGIN_HEADER) + slots + 4 * MAX_CHUNKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The pure functions of one server configuration; everything static is a field here."""

    model: LoopedModel
    layout: KVLayout
    dtype: Any
    slots: int
    max_context: int
    pages_per_slot: int
    pages: int
    max_ticks: int
    attention: str  # implementation of paged_attention
    kv_write: str  # implementation of kv_write

    def make_state(self) -> tuple[KVPool, SlotState, RoundState]:
        """Fresh pool, slots and round; used at start and after a device failure."""
        kv = empty_pool(self.layout, self.pages, self.dtype)
        slots = empty_slots(self.slots, self.max_context, self.pages_per_slot, self.model.spec, self.dtype)
        events = Events.empty(self.max_ticks, self.slots)
        round_ = RoundState(
            ticks=jnp.int32(0),
            end_early=jnp.int32(0),
            boundary_batch=jnp.int32(0),
            chunks=jnp.zeros((MAX_CHUNKS, 4), jnp.int32),
            next_chunk=jnp.int32(0),
            events=events,
        )
        return kv, slots, round_

    def begin(self, slots: SlotState, round_: RoundState, words: jax.Array) -> tuple[SlotState, RoundState]:
        """Start a round.  DONATES slots and round_.

        `words` is [begin_words(S)] i32: BEGIN_HEADER, 1 for each slot to free (those compute nothing from here on), and
        the chunks, row by row.
        """
        header, at = {name: words[i] for i, name in enumerate(BEGIN_HEADER)}, len(BEGIN_HEADER)
        freed = words[at : at + self.slots] != 0
        slots = dataclasses.replace(slots, phase=jnp.where(freed, Phase.FREE, slots.phase).astype(jnp.int32))
        return slots, RoundState(
            **header,
            chunks=words[at + self.slots :].reshape(MAX_CHUNKS, 4),
            next_chunk=jnp.int32(0),
            events=Events.empty(self.max_ticks, self.slots),
        )

    def bind(self, slots: SlotState, words: jax.Array) -> SlotState:
        """DONATES slots."""
        return apply_bind(slots, words)

    def report(self, slots: SlotState, round_: RoundState) -> jax.Array:
        """The round's packed Events.  Donates nothing."""
        return round_.events.pack(slots)

    def prefill(
        self, params: Params, kv: KVPool, slots: SlotState, round_: RoundState, *, bucket: int
    ) -> tuple[KVPool, SlotState, RoundState]:
        """Run the round's next chunk, count <= bucket positions of one slot's prompt, through all its prefill loops.

        DONATES kv, slots and round_.  After a prompt's last chunk the slot is in READOUT at its last position.

        A coda runs over the chunk for its KV alone: what follows attends to it.  READOUT computes the last position
        once more, in decode rows, as for every other output.
        """
        slot, start, count, last = lax.dynamic_index_in_dim(round_.chunks, round_.next_chunk, keepdims=False)
        index = jnp.arange(bucket, dtype=jnp.int32)
        valid = index < count
        position = start + index
        tokens = slots.given_tokens[slot, jnp.minimum(position, self.max_context - 1)]
        table = slots.table[slot]
        address = self._address(jnp.broadcast_to(table, (bucket, table.shape[0])), position, valid)
        loops = slots.prefill_loops[slot]

        def attend_at(depth: jax.Array) -> Attend:
            plane = self.layout.plane(depth)
            # only the last loop's entry is final: it fills the deeper planes as well
            deeper = _both(self.layout.writes_deeper(depth), depth + 1 >= loops)
            planes = jnp.full((bucket,), plane)
            in_core = planes, self._planes_to(planes, deeper)

            def attend(kv: KVPool, layer: int, q: Any, k: Any, v: Any) -> tuple[KVPool, jax.Array]:
                core = self.layout.is_core(layer)
                kv = self._write(kv, layer, k, v, address, in_core if core else _one_plane(bucket))
                where = jnp.where(valid, position, -1)[None]
                out = self._attend(kv, layer, q[None], table[None], where, (plane if core else plane * 0)[None])
                return kv, out[0]

            return attend

        x = self.model.embed(params, tokens)
        injected, kv = self.model.prelude(params, x, position, kv, attend_at(jnp.int32(0)))
        state = self.model.initial_state(params, injected, self._noise(slots, slot, position))
        kv = mark_exits(kv, self.layout.planes, page=address[0], offset=address[1])

        def loop(depth: jax.Array, carry: tuple[jax.Array, KVPool]) -> tuple[jax.Array, KVPool]:
            state, kv = carry
            return self.model.core(params, state, injected, position, kv, attend_at(depth))

        state, kv = lax.fori_loop(0, loops, loop, (state, kv))
        kv = mark_exits(kv, loops, page=address[0], offset=address[1])
        if self.layout.coda_layers:
            _, kv = self.model.readout(params, state, position, kv, attend_at(jnp.int32(0)))
        final = lax.dynamic_index_in_dim(state, count - 1, axis=0, keepdims=False)

        def put(rows: jax.Array, value: Any) -> jax.Array:
            return rows.at[slot].set(jnp.asarray(value, rows.dtype))

        slots = dataclasses.replace(
            slots,
            phase=put(slots.phase, jnp.where(last != 0, Phase.READOUT, Phase.FREE)),
            position=put(slots.position, start + count - 1),
            depth=put(slots.depth, loops),
            hidden=put(slots.hidden, final),
        )
        return kv, slots, dataclasses.replace(round_, next_chunk=round_.next_chunk + 1)

    def decode(
        self, params: Params, kv: KVPool, slots: SlotState, round_: RoundState
    ) -> tuple[KVPool, SlotState, RoundState]:
        """Run up to round_.ticks ticks.  DONATES kv, slots and round_.

        The round also ends when no slot can run, and, if end_early is set, as soon as a slot finishes.
        """

        def more(carry: tuple[Events, KVPool, SlotState]) -> jax.Array:
            events, _, slots = carry
            runnable = (slots.phase == Phase.CORE) | (slots.phase == Phase.READOUT) | self._can_enter(slots)
            ended = (round_.end_early != 0) & (events.finish != Finish.NONE).any()
            return (events.ticks < round_.ticks) & runnable.any() & ~ended

        def tick(carry: tuple[Events, KVPool, SlotState]) -> tuple[Events, KVPool, SlotState]:
            events, kv, slots = carry
            idle = jnp.sum(slots.phase != Phase.CORE, dtype=jnp.int32)
            kv, slots = self._core_stage(params, kv, slots)
            reads = (slots.phase == Phase.READOUT).any()
            if self._outer_layers:  # decided once: rows that are read out now go on to enter in the same tick
                boundary = self._boundary_is_open(slots, round_)
                reads &= boundary
            events, kv, slots = lax.cond(
                reads,
                lambda args: self._readout_stage(params, *args),
                lambda args: args,
                (events, kv, slots),
            )
            if self._outer_layers:
                kv, slots = lax.cond(
                    boundary & self._can_enter(slots).any(),
                    lambda args: self._enter_stage(params, *args),
                    lambda args: args,
                    (kv, slots),
                )
            else:
                kv, slots = self._enter_stage(params, kv, slots)
            events = dataclasses.replace(events, ticks=events.ticks + 1, idle_row_ticks=events.idle_row_ticks + idle)
            return events, kv, slots

        events, kv, slots = lax.while_loop(more, tick, (round_.events, kv, slots))
        return kv, slots, dataclasses.replace(round_, events=events)

    def _core_stage(self, params: Params, kv: KVPool, slots: SlotState) -> tuple[KVPool, SlotState]:
        """One loop for every row in CORE, then the exit test.  Leaving rows go to READOUT, or on to a forced token."""
        active = slots.phase == Phase.CORE
        depth = jnp.where(active, slots.depth, 0)
        attend = self._slot_attend(slots, active, depth)
        state, kv = self.model.core(params, slots.hidden, slots.injected, slots.position, kv, attend)
        done = slots.depth + active.astype(jnp.int32)
        forced = slots.position < slots.forced_end
        row = jnp.arange(self.slots, dtype=jnp.int32)
        trace = slots.given_depths[row, slots.position].astype(jnp.int32)
        given = jnp.where(forced, slots.prefill_loops, trace)
        exit_state, kv, kl = self._read_out_for_exits(params, kv, slots, state, done, active & (given == 0))
        scores = ExitScores(
            gate=self.model.exit_score(params, state),
            latent=latent_score(slots.hidden, state) if "latent" in self.model.spec.exit_scores else None,
            kl=kl,
        )
        tested, leaves = exit_test(exit_state, slots.exit_params, done, scores, given)
        leaves &= active
        kv = self._mark_rows(kv, slots, leaves, done)
        if self.layout.coda_layers:  # its KV is part of the history: forced rows pass through READOUT like the others
            stays_forced = jnp.zeros_like(leaves)
        else:
            stays_forced = leaves & (slots.position + 1 < slots.forced_end)
        position = slots.position + stays_forced.astype(jnp.int32)
        following = slots.given_tokens[row, jnp.minimum(position, self.max_context - 1)]
        phase = jnp.where(leaves, jnp.where(stays_forced, Phase.ENTER, Phase.READOUT), slots.phase)
        return kv, dataclasses.replace(
            slots,
            phase=phase.astype(jnp.int32),
            position=position,
            depth=done,
            token=jnp.where(stays_forced, following, slots.token),
            hidden=jnp.where(active[:, None], state, slots.hidden),
            exit_state=dataclasses.replace(
                exit_state,
                survival=jnp.where(active, tested.survival, exit_state.survival),
                pending=jnp.where(active, tested.pending, exit_state.pending),
            ),
        )

    def _read_out_for_exits(
        self, params: Params, kv: KVPool, slots: SlotState, state: jax.Array, done: jax.Array, tested: jax.Array
    ) -> tuple[ExitState, KVPool, jax.Array | None]:
        """What the policies about next-token distributions see after a loop: the exit state, the pool, KL [S].

        A readout costs a coda and a head, so it runs only while a row of `tested` has such a policy.  Such a row's own
        coda KV is overwritten each time; other rows neither write nor change.
        """
        scores = [score for score in READOUT_SCORES if score in self.model.spec.exit_scores]
        if not scores:
            return slots.exit_state, kv, None
        policies = [ExitPolicy[score.upper()] for score in scores]
        wants = tested & (slots.exit_params.policy[:, None] == jnp.asarray(policies, jnp.int32)).any(-1)

        def read_out(args: tuple[KVPool, ReadoutState]) -> tuple[KVPool, ReadoutState, jax.Array]:
            kv, before = args
            attend = self._slot_attend(slots, wants, jnp.zeros_like(slots.depth))
            hidden, kv = self.model.readout(params, state, slots.position, kv, attend)
            after, kl = observe(before, self.model.head(params, hidden), done, wants)
            return kv, after, jnp.zeros(done.shape, jnp.float32) if kl is None else kl

        def skip(args: tuple[KVPool, ReadoutState]) -> tuple[KVPool, ReadoutState, jax.Array]:
            return *args, jnp.zeros(done.shape, jnp.float32)

        kv, readout, kl = lax.cond(wants.any(), read_out, skip, (kv, slots.exit_state.readout))
        return dataclasses.replace(slots.exit_state, readout=readout), kv, kl if "kl" in scores else None

    def _readout_stage(
        self, params: Params, events: Events, kv: KVPool, slots: SlotState
    ) -> tuple[Events, KVPool, SlotState]:
        """Coda, head and sampling for the rows in READOUT; the head runs on all slots, so shapes never vary.

        A forced row is here for its coda's KV alone: nothing is sampled, and its next prompt token enters.
        """
        live = slots.phase == Phase.READOUT
        attend = self._slot_attend(slots, live, jnp.zeros_like(slots.depth))
        hidden, kv = self.model.readout(params, slots.hidden, slots.position, kv, attend)
        forced = jnp.zeros_like(live)
        if self.layout.coda_layers:
            forced = live & (slots.position + 1 < slots.forced_end)
            live &= ~forced
        one = live.astype(jnp.int32)
        logits = self.model.head(params, hidden)
        token, logprob = sample(logits, slots.sampler, slots.output_index, live)
        stopped = (slots.stop_ids == token[:, None]).any(-1)
        finish = jnp.where(stopped, Finish.STOP, jnp.where(slots.remaining <= 1, Finish.LENGTH, Finish.NONE))
        phase = jnp.where(finish == Finish.NONE, Phase.ENTER, Phase.FREE)

        def record(log: jax.Array, value: jax.Array, empty: Any) -> jax.Array:
            return log.at[events.ticks].set(jnp.where(live, value, empty).astype(log.dtype))

        events = dataclasses.replace(
            events,
            token=record(events.token, token, NO_TOKEN),
            depth=record(events.depth, slots.depth, 0),
            logprob=record(events.logprob, logprob, 0.0),
            finish=record(events.finish, finish, Finish.NONE),
        )
        after = slots.phase
        if self.layout.coda_layers:
            row = jnp.arange(self.slots, dtype=jnp.int32)
            following = slots.given_tokens[row, jnp.minimum(slots.position + 1, self.max_context - 1)]
            after = jnp.where(forced, Phase.ENTER, after)
            slots = dataclasses.replace(
                slots,
                token=jnp.where(forced, following, slots.token),
                position=slots.position + forced.astype(jnp.int32),
            )
        slots = dataclasses.replace(
            slots,
            phase=jnp.where(live, phase, after).astype(jnp.int32),
            token=jnp.where(live, token, slots.token),
            position=slots.position + one,
            remaining=slots.remaining - one,
            output_index=slots.output_index + one,
        )
        return events, kv, slots

    def _enter_stage(self, params: Params, kv: KVPool, slots: SlotState) -> tuple[KVPool, SlotState]:
        """Prelude for the rows in ENTER that own their page: they stand at depth 0 for the next tick."""
        enters = self._can_enter(slots)
        attend = self._slot_attend(slots, enters, jnp.zeros_like(slots.depth))
        injected, kv = self.model.prelude(params, self.model.embed(params, slots.token), slots.position, kv, attend)
        row = jnp.arange(self.slots, dtype=jnp.int32)
        state = self.model.initial_state(params, injected, self._noise(slots, row, slots.position))
        kv = self._mark_rows(kv, slots, enters, self.layout.planes)
        if slots.injected is not None:
            slots = dataclasses.replace(slots, injected=jnp.where(enters[:, None], injected, slots.injected))
        return kv, dataclasses.replace(
            slots,
            phase=jnp.where(enters, Phase.CORE, slots.phase).astype(jnp.int32),
            depth=jnp.where(enters, 0, slots.depth),
            hidden=jnp.where(enters[:, None], state, slots.hidden),
            exit_state=restarted(slots.exit_state, enters),
        )

    @property
    def _outer_layers(self) -> bool:
        """Whether there is more than an embedding before the loop, or more than a head after it."""
        return self.layout.prelude_layers + self.layout.coda_layers > 0

    def _boundary_is_open(self, slots: SlotState, round_: RoundState) -> jax.Array:
        """Whether the layers outside the loop run now.  Nobody inside the loop: yes, so nobody waits for ever."""
        waiting = jnp.sum((slots.phase == Phase.READOUT) | self._can_enter(slots), dtype=jnp.int32)
        return (waiting >= round_.boundary_batch) | ~(slots.phase == Phase.CORE).any()

    def _noise(self, slots: SlotState, slot: jax.Array, position: jax.Array) -> jax.Array | None:
        """`noise` of initial_state for rows of `slot` (one or [B]) at position [B]; None for models without it."""
        start = slots.start
        if start is None:
            return None
        key = jnp.broadcast_to(start.key[slot], (*position.shape, 2))
        noise = state_noise(key, position, self.model.spec.hidden_size)
        return jnp.where(jnp.broadcast_to(start.random[slot], position.shape)[:, None], noise, 0.0)

    def _can_enter(self, slots: SlotState) -> jax.Array:
        stalled = slots.position // self.layout.page_size >= slots.pages_owned
        return (slots.phase == Phase.ENTER) & ~stalled

    def _slot_attend(self, slots: SlotState, active: jax.Array, depth: jax.Array) -> Attend:
        """`attend` for one query per slot, at `depth` [S] in the core; inactive rows write nothing and see nothing."""
        address = self._address(slots.table, slots.position, active)
        where = jnp.where(active, slots.position, -1)[:, None]
        plane = self.layout.plane(depth)
        planes_to = self._planes_to(plane, self.layout.writes_deeper(depth))

        def attend(kv: KVPool, layer: int, q: Any, k: Any, v: Any) -> tuple[KVPool, jax.Array]:
            core = self.layout.is_core(layer)
            kv = self._write(kv, layer, k, v, address, (plane, planes_to) if core else _one_plane(self.slots))
            at = plane if core else jnp.zeros_like(plane)
            return kv, self._attend(kv, layer, q[:, None], slots.table, where, at)[:, 0]

        return attend

    def _planes_to(self, plane: jax.Array, deeper: jax.Array | bool) -> jax.Array | None:
        """First plane [B] after those that an entry of `plane` [B] is written to; None where that is always one."""
        if deeper is False:
            return None
        return jnp.where(deeper, self.layout.planes, plane + 1)

    def _address(self, table: jax.Array, position: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(page, offset) per row; an inactive row's page is out of range, so that its write is dropped."""
        slot_page = jnp.minimum(position // self.layout.page_size, table.shape[1] - 1)
        page = jnp.take_along_axis(table, slot_page[:, None], axis=1)[:, 0]
        return jnp.where(active, page, self.pages), position % self.layout.page_size

    def _write(self, kv: KVPool, layer: int, k: Any, v: Any, address: Any, planes: Any) -> KVPool:
        page, offset = address
        return write_rows(
            kv,
            layer,
            k,
            v,
            page=page,
            offset=offset,
            planes_from=planes[0],
            planes_to=planes[1],
            implementation=self.kv_write,
        )

    def _attend(self, kv: KVPool, layer: int, q: Any, table: Any, positions: Any, planes: Any) -> jax.Array:
        core = self.layout.is_core(layer)
        return paged_attention(
            q,
            kv.k[layer],
            kv.v[layer],
            table,
            positions,
            planes,
            exit_depth=kv.exit_depth if core else None,
            history=self.layout.history if core else None,
            implementation=self.attention,
        )

    def _mark_rows(self, kv: KVPool, slots: SlotState, rows: jax.Array, exit_depth: Any) -> KVPool:
        """Note the exit depth of the positions of `rows` [S] bool, where the layout keeps it."""
        if self.layout.history is None:
            return kv
        page, offset = self._address(slots.table, slots.position, rows)
        return mark_exits(kv, exit_depth, page=page, offset=offset)


def _one_plane(rows: int) -> tuple[jax.Array, None]:
    """Planes that layers outside the loop write: their only one."""
    return jnp.zeros((rows,), jnp.int32), None


def _both(always: Any, sometimes: jax.Array) -> Any:
    """`and` of a condition that may be a plain bool with an array; a plain False stays one."""
    if isinstance(always, bool):
        return sometimes if always else False
    return always & sometimes
