"""What a server says about its model and itself, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from rlt.v1 import generation_service_pb2 as pb
from rlt_jax.client import wire
from rlt_jax.request import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model behind a server; fields as in GetModelInfoResponse."""

    name: str
    model_type: str
    vocab_size: int
    max_context: int  # positions one request may use, prompt and output together
    trained_loops: int
    max_loops: int  # the most that a request may ask for
    open_ended: bool  # any depth makes sense: max_loops is what the server was started with
    initial_states: tuple[str, ...]
    kv_planes: int  # copies of a position's KV in a layer inside the loop
    kv_bytes_per_token: int  # over all layers
    exit_scores: tuple[str, ...]
    exit_policies: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    parameter_count: int
    dtype: str

    @classmethod
    def from_message(cls, message: pb.GetModelInfoResponse) -> ModelInfo:
        return cls(
            name=message.name,
            model_type=message.model_type,
            vocab_size=message.vocab_size,
            max_context=message.max_context,
            trained_loops=message.trained_loops,
            max_loops=message.max_loops,
            open_ended=message.open_ended,
            initial_states=tuple(message.initial_states),
            kv_planes=message.kv_planes,
            kv_bytes_per_token=message.kv_bytes_per_token,
            exit_scores=tuple(message.exit_scores),
            exit_policies=tuple(message.exit_policies),
            eos_token_ids=tuple(message.eos_token_ids),
            has_tokenizer=message.has_tokenizer,
            parameter_count=message.parameter_count,
            dtype=message.dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine's settings as resolved for its platform and model."""

    kv_layout: str
    slots: int
    page_size: int
    prefill_chunk: int
    prefill_buckets: tuple[int, ...]
    round_ticks: int
    max_waiting: int
    boundary_batch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot between two rounds; counters run since the start."""

    running: int
    waiting: int
    free_slots: int
    pages_total: int
    pages_free: int
    rounds: int
    ticks: int
    idle_row_ticks: int
    generated_tokens: int
    resets: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpImplementation:
    """Which implementation runs a numerical op, and why."""

    op: str
    chosen: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """A server; fields as in GetServerInfoResponse."""

    versions: Mapping[str, str]
    platform: str
    device_kind: str
    device_count: int
    settings: EngineSettings
    implementations: tuple[OpImplementation, ...]
    memory_plan: Mapping[str, Any]
    defaults: SamplingParams  # what a request gets for the fields it leaves out
    compiled_programs: int
    uptime_seconds: float
    stats: EngineStats

    @classmethod
    def from_message(cls, message: pb.GetServerInfoResponse) -> ServerInfo:
        settings, stats = message.settings, message.stats
        return cls(
            versions=dict(message.versions),
            platform=message.platform,
            device_kind=message.device_kind,
            device_count=message.device_count,
            settings=EngineSettings(
                kv_layout=settings.kv_layout,
                slots=settings.slots,
                page_size=settings.page_size,
                prefill_chunk=settings.prefill_chunk,
                prefill_buckets=tuple(settings.prefill_buckets),
                round_ticks=settings.round_ticks,
                max_waiting=settings.max_waiting,
                boundary_batch=settings.boundary_batch,
            ),
            implementations=tuple(
                OpImplementation(op=item.op, chosen=item.chosen, reason=item.reason) for item in message.implementations
            ),
            memory_plan=_plain(json_format.MessageToDict(message.memory_plan)),
            defaults=wire.read_params(message.defaults),
            compiled_programs=message.compiled_programs,
            uptime_seconds=message.uptime_seconds,
            stats=EngineStats(**{field.name: getattr(stats, field.name) for field in dataclasses.fields(EngineStats)}),
        )


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A protobuf Struct knows one kind of number; whole ones become ints again."""
    return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in fields.items()}
