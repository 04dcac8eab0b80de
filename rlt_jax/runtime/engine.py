"""Life of a request, from text to text: the object that servers, notebooks and benchmarks drive.

    prepare (checks, tokenises; any thread) -> add -> step, step, ... -> RequestOutputs

One thread calls everything but `prepare` and the info methods.  `step` keeps up to two rounds on the device: it plans
and dispatches, then waits for the oldest round and turns its events into outputs.  It forbids tracing and implicit
transfers to itself, so a compile while serving is an error, not a pause.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import platform as host_platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rlt_jax
from rlt_jax.config import MAX_LOOPS, EngineConfig, KVLayoutKind, RequestDefaults, ResolvedEngineConfig
from rlt_jax.errors import CorruptState, DeviceFault, EngineDead, InvalidConfig, InvalidRequest
from rlt_jax.exits import POLICY_NAMES, POLICY_NEEDS_SCORE
from rlt_jax.kvcache.layout import KVLayout
from rlt_jax.kvcache.pages import PageAllocator
from rlt_jax.models.checkpoint import LoadedCheckpoint, load_checkpoint
from rlt_jax.platform import claim_device, enable_compilation_cache, set_memory_share
from rlt_jax.request import FinishReason, Request, RequestOutput, SamplingParams
from rlt_jax.runtime.outputs import Outputs
from rlt_jax.runtime.plan import Delivery
from rlt_jax.runtime.runner import MAX_IN_FLIGHT, Runner
from rlt_jax.runtime.scheduler import Scheduler, SchedulerLimits
from rlt_jax.validation import check_prompt, resolve_params

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_RESETS = 3  # device failures without one good round in between: the device is taken for broken


class LLMEngine:
    """A loaded model and the machinery to serve it.

    Args:
        model: a directory in Hugging Face layout, a repo id, an already loaded checkpoint, or None (bundled model).
        config: settings; None fields are chosen from the platform and the checkpoint.
        revision: branch, tag or commit of a repo id; None is the pinned one where this version knows the model.
        progress: show loading progress on stderr.

    Raises:
        CheckpointError, InvalidConfig, NotImplementedError: with the field, the value and the limit.
    """

    def __init__(
        self,
        model: str | Path | LoadedCheckpoint | None = None,
        config: EngineConfig | None = None,
        *,
        revision: str | None = None,
        progress: bool = False,
    ) -> None:
        config = config or EngineConfig()
        set_memory_share(config.memory_fraction)
        if config.compilation_cache:
            enable_compilation_cache()
        device = claim_device()
        if isinstance(model, LoadedCheckpoint):
            if revision is not None:
                raise InvalidConfig(f"revision={revision!r} applies to a repository id, found a loaded checkpoint")
            self.loaded = model
        else:
            self.loaded = load_checkpoint(
                model, dtype=config.dtype, revision=revision, device=device, progress=progress
            )
        if self.loaded.dtype != config.dtype:
            raise InvalidConfig(f"dtype={config.dtype}, but the checkpoint given was loaded as {self.loaded.dtype}")
        if config.max_loops is not None:
            capped = self.loaded.model.with_max_loops(config.max_loops)
            self.loaded = dataclasses.replace(self.loaded, model=capped)
        spec = self.loaded.model.spec
        if spec.max_loops > MAX_LOOPS:
            remedy = ": set max_loops" if spec.open_ended else ""
            raise InvalidConfig(f"max_loops={spec.max_loops} of the model exceeds {MAX_LOOPS}{remedy}")
        self.config = config.resolved(
            platform=device.platform,
            max_positions=spec.max_positions,
            max_loops=spec.max_loops,
            initial_states=spec.initial_states,
            whole_stack=spec.num_prelude_layers + spec.num_coda_layers == 0,
        )
        self.defaults = _request_defaults(self.loaded, self.config)
        _warn_of_layout(self.config)
        self._device = device
        self._layout = KVLayout.create(
            self.config.kv_layout,
            max_loops=spec.max_loops,
            page_size=self.config.page_size,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_layers=spec.num_layers,
            prelude_layers=spec.num_prelude_layers,
            coda_layers=spec.num_coda_layers,
            dtype_bytes=jnp.dtype(self.config.dtype).itemsize,
            ring_planes=self.config.kv_planes,
        )
        self._runner = Runner(
            self.loaded.model,
            self.loaded.params,
            self.config,
            self._layout,
            eos_token_ids=self.loaded.eos_token_ids,
            device=device,
            parameter_bytes=self.loaded.parameter_bytes,
        )
        self._pages = PageAllocator(self._runner.memory_plan.pages)
        self._scheduler = Scheduler(
            SchedulerLimits(
                slots=self.config.slots,
                prefill_chunk=self.config.prefill_chunk,
                round_ticks=self.config.round_ticks,
                max_waiting=self.config.max_waiting,
            ),
            self._layout,
            self._pages,
        )
        self._outputs = Outputs()
        self._ended: list[RequestOutput] = []  # outputs of requests that ended outside a round
        self._resets_in_a_row = 0
        self._dead: str | None = None
        self._counters = dict.fromkeys(("rounds", "ticks", "idle_row_ticks", "generated_tokens", "resets"), 0)
        self._started = time.monotonic()
        for choice in self._runner.implementations:
            log.info("%s: %s (%s)", choice.op, choice.chosen, choice.reason)
        log.info("memory plan: %s", self._runner.memory_plan.as_dict())
        log.info("%d programs compiled in %.1f s", self._runner.compiled_programs, self._runner.compile_seconds)

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Request:
        """Check and tokenise a request without queueing it.  Changes nothing; any thread may call it.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequest("request_id", f"must be a non-empty string, found {request_id!r}")
        tokenizer = self.loaded.tokenizer
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("prompt", "is empty; at least 1 token is needed")
            if tokenizer is None:
                raise InvalidRequest("prompt", "is text, but the model has no tokenizer; give token ids")
            least, limit = tokenizer.least_tokens(prompt), self.config.max_context
            if least > limit:
                raise InvalidRequest(
                    "prompt", f"has {len(prompt)} characters, at least {least} tokens; the limit is max_context={limit}"
                )
            prompt = tokenizer.encode(prompt)
        spec, context = self.loaded.model.spec, self.config.max_context
        one_chunk = self.config.prefill_chunk if self._layout.prompt_is_one_chunk else None
        tokens = check_prompt(prompt, vocab_size=spec.vocab_size, max_context=context, prefill_chunk=one_chunk)
        resolved = resolve_params(
            params or SamplingParams(),
            prompt_tokens=len(tokens),
            spec=spec,
            defaults=self.defaults,
            eos_token_ids=self.loaded.eos_token_ids,
            max_context=context,
            max_capacity=self._pages.total_pages * self._layout.page_size,
            has_tokenizer=tokenizer is not None,
        )
        return Request(request_id, tokens, resolved)

    def add(self, request: Request) -> None:
        """Queue a prepared request.

        Raises:
            InvalidRequest: its id is in use by a live request.
            QueueFull: max_waiting requests wait already.
            EngineDead: the device failed for good.
        """
        if self._dead:
            raise EngineDead(self._dead)
        self._scheduler.submit(request)
        self._outputs.open(request, self.loaded.tokenizer)

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Request:
        """`prepare` and `add` in one."""
        request = self.prepare(request_id, prompt, params)
        self.add(request)
        return request

    def abort(self, request_id: str) -> bool:
        """End a live request.  Its slot and pages are free at once; its last output comes from the next `step`."""
        request = self._scheduler.find(request_id)
        if request is None or not self._scheduler.end(request):
            return False
        self._ended.append(self._outputs.close(request, FinishReason.ABORT))
        return True

    def has_work(self) -> bool:
        """Whether `step` has something to do, to deliver, or to raise: a dead engine must not pass for an idle one."""
        return bool(self._dead or self._scheduler.has_plannable_work() or self._runner.in_flight or self._ended)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plan and dispatch what can run, wait for the oldest round, and return what is new.

        Raises:
            EngineDead: the device stays broken; every live request has received its error from the step before.
            CorruptState: a bug of ours; nothing that this engine says can be trusted any more.
        """
        if self._dead:
            if self._ended:
                ended, self._ended = self._ended, []
                return ended
            raise EngineDead(self._dead)
        earlier, self._ended = self._ended, []  # before this round's: an id may have a new owner by now
        with jax.no_tracing(), jax.transfer_guard("disallow"):
            outputs = self._step()
        ended, self._ended = self._ended, []
        return [*earlier, *outputs, *ended]

    def _step(self) -> list[RequestOutput]:
        try:
            while self._runner.in_flight < MAX_IN_FLIGHT and self._scheduler.has_plannable_work():
                self._dispatch()
            if not self._runner.in_flight:
                self._scheduler.check()
                return []
            plan, events = self._runner.collect()
        except CorruptState:  # the host's own books are wrong: a fresh pool would not help
            raise
        except Exception as error:  # whatever broke, the pool's contents can no longer be trusted
            self._recover(error)
            return []
        self._resets_in_a_row = 0
        self._counters["rounds"] += 1
        self._counters["ticks"] += events.ticks
        self._counters["idle_row_ticks"] += events.idle_row_ticks
        outputs = [self._deliver(delivery) for delivery in self._scheduler.apply(plan, events)]
        if not self._scheduler.has_live() and not self._runner.in_flight:
            self._scheduler.check()
        return outputs

    def _dispatch(self) -> None:
        """One plan to the device.  A host fault rolls the plan back and is retried once; nobody notices."""
        try:
            self._plan_and_dispatch()
        except (CorruptState, DeviceFault):
            raise
        except Exception:
            log.warning("a host fault before dispatch, trying once more", exc_info=True)
            self._plan_and_dispatch()

    def _plan_and_dispatch(self) -> None:
        """As `_dispatch`, once.  After a host fault the scheduler is as if no plan had been made."""
        plan = self._scheduler.plan()
        try:
            self._runner.dispatch(plan)
        except DeviceFault:  # the plan has begun: its requests are on the device
            raise
        except Exception:
            self._scheduler.rollback(plan)
            raise

    def _recover(self, error: Exception) -> None:
        """The device state is lost: requests in a slot fail, the others go on with a fresh pool."""
        log.error("device failure, starting over with a fresh pool", exc_info=error)
        what = str(error) if isinstance(error, DeviceFault) else f"{type(error).__name__}: {error}"
        reason = f"the device failed while this request was running: {what}"
        for request in self._scheduler.fail_running():
            self._ended.append(self._outputs.close(request, None, error=reason))
        self._counters["resets"] += 1
        self._resets_in_a_row += 1
        try:
            if self._resets_in_a_row >= MAX_CONSECUTIVE_RESETS:
                raise EngineDead(f"{self._resets_in_a_row} device failures in a row")
            self._runner.reset()
        except Exception as second:
            self._dead = f"the device did not recover: {type(second).__name__}: {second} (first: {error})"
            log.critical(self._dead)
            self._runner.close()
            for request in self._scheduler.fail_waiting():
                self._ended.append(self._outputs.close(request, None, error=self._dead))

    def _deliver(self, delivery: Delivery) -> RequestOutput:
        output = self._outputs.deliver(delivery)
        self._counters["generated_tokens"] += len(output.token_ids)
        if output.error is not None:
            log.error("request %s failed: %s", output.request_id, output.error)
        if output.finished and delivery.finish is None:  # by the host, which found a stop string or a NaN: its slot and
            self._scheduler.end(delivery.request)  # pages are still held
        return output

    # -- information --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters and gauges of now.  pages and slots in use are zero when nothing is live."""
        return {
            "waiting": self._scheduler.waiting,
            "running": self._scheduler.running,
            "free_slots": self._scheduler.free_slots,
            "pages_total": self._pages.total_pages,
            "pages_free": self._pages.free_pages,
            **self._counters,
        }

    def model_info(self) -> dict[str, Any]:
        """Facts about the model, JSON-able."""
        spec = self.loaded.model.spec
        policies = [n for n in POLICY_NAMES if POLICY_NEEDS_SCORE.get(n, "") in ("", *spec.exit_scores)]
        return {
            "name": self.loaded.name,
            "model_type": spec.model_type,
            "vocab_size": spec.vocab_size,
            "max_context": self.config.max_context,
            "trained_loops": spec.trained_loops,
            "max_loops": spec.max_loops,
            "open_ended": spec.open_ended,
            "initial_states": list(spec.initial_states),
            "kv_layout": self.config.kv_layout.value,
            "kv_planes": self._layout.planes,
            "kv_bytes_per_token": self._layout.bytes_per_position,
            "exit_scores": list(spec.exit_scores),
            "exit_policies": policies,
            "eos_token_ids": list(self.loaded.eos_token_ids),
            "has_tokenizer": self.loaded.tokenizer is not None,
            "parameters": self.loaded.parameter_count,
            "dtype": self.config.dtype,
        }

    def server_info(self) -> dict[str, Any]:
        """How this engine runs, JSON-able: versions, choices and why, memory, buckets, defaults."""
        c = self.config
        return {
            "versions": {
                "rlt_jax": rlt_jax.__version__,
                "jax": jax.__version__,
                "jaxlib": importlib.metadata.version("jaxlib"),
                "python": host_platform.python_version(),
            },
            "platform": self._device.platform,
            "device_kind": self._device.device_kind,
            "devices": jax.device_count(),
            "kv_layout": c.kv_layout.value,
            "slots": c.slots,
            "page_size": c.page_size,
            "prefill_chunk": c.prefill_chunk,
            "prefill_buckets": list(self._runner.prefill_buckets),
            "round_ticks": c.round_ticks,
            "boundary_batch": c.boundary_batch,
            "max_waiting": c.max_waiting,
            "implementations": [dataclasses.asdict(choice) for choice in self._runner.implementations],
            "memory_plan": self._runner.memory_plan.as_dict(),
            "defaults": self.defaults.as_dict(),
            "compiled_programs": self._runner.compiled_programs,
            "compile_seconds": self._runner.compile_seconds,
            "uptime_seconds": time.monotonic() - self._started,
        }

    def close(self) -> None:
        """Give the device memory back, unless others hold the checkpoint too.  The engine is dead afterwards."""
        self._dead = "the engine was closed"
        self._runner.close()
        self.loaded = dataclasses.replace(self.loaded, params=None)

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _warn_of_layout(config: ResolvedEngineConfig) -> None:
    """A layout with fewer planes than loops computes something else; most models answer nonsense under it."""
    kind, planes = config.kv_layout, config.kv_planes or 1
    if kind is KVLayoutKind.SHARED or (kind is KVLayoutKind.RING and planes < config.max_loops):
        log.warning(
            "kv_layout=%s keeps %d of %d loops: other results than last_exited at every depth, of use only for a model "
            "that was trained for it or is known to bear it",
            kind.value, planes, config.max_loops,
        )  # fmt: skip


def _request_defaults(loaded: LoadedCheckpoint, config: ResolvedEngineConfig) -> RequestDefaults:
    """What a request gets for what it leaves out: from the checkpoint, and from the server's settings."""
    spec, generation = loaded.model.spec, loaded.generation
    return RequestDefaults(
        exit_policy="gate" if "gate" in spec.exit_scores else "fixed",
        exit_threshold=spec.exit_threshold,
        min_loops=min(2, spec.max_loops),
        max_loops=spec.max_loops,
        prefill_loops=spec.max_loops if spec.open_ended else spec.trained_loops,
        initial_state=config.initial_state,
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        min_p=generation.min_p,
    )
