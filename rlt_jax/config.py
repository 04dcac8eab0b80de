"""Every setting an operator may choose, validated once, with its default in one table.  No jax here."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from rlt_jax.errors import InvalidConfig


class KVLayoutKind(enum.Enum):
    """How a token's KV of several depths is kept; `kvcache.layout` has the rules."""

    LAST_EXITED = "last_exited"
    SHARED = "shared"
    DROP = "drop"
    RING = "ring"


DTYPES = ("bfloat16", "float32")
KERNEL_CHOICES = ("auto", "reference", "triton")
INITIAL_STATES = ("injected", "zeros", "random")  # that any model offers; each model says which are its own
MAX_RING_PLANES = 8  # see kvcache.layout: the first loops write all deeper planes through
MAX_LOOPS = 127  # given depths travel and are kept as int8
MAX_STOP_IDS = 16  # stop ids and EOS ids of one request together; a compiled width


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.  None means: chosen from the platform or the checkpoint, and reported.

    Attributes (units in the names; defaults for GPU / CPU where they differ):
        dtype: "bfloat16" or "float32" (float32 computes at full matmul precision).
        kv_layout: LAST_EXITED ("last_exited") keeps one KV plane per depth, SHARED ("shared") keeps one, always its
            last write: a different function of the prompt, which a model must have been trained for.  DROP ("drop")
            hides a token that left early from the deeper loops of later ones; RING ("ring") keeps kv_planes planes,
            loop d in plane d mod kv_planes, and takes prompts of one prefill chunk only.
        kv_planes: planes of the layout RING, 1 if not given; refused for the others, which have no choice.
        max_loops: deepest loop that a request may ask for, of a model that loops to any depth; it is the number of
            planes of LAST_EXITED and DROP.  None: the model's own.
        initial_state: what a request's states start from where it does not say, "zeros" or "random" if the model
            offers a choice.  None: the first that the model offers.
        boundary_batch: rows that wait for the layers before and after the loop until these run for all of them (sooner
            if no row is inside the loop); 1, with such layers a quarter of the slots.
        slots: live requests at once; 32 / 8.
        page_size: positions per KV page; 64 / 16.
        prefill_chunk: prompt positions per prefill program at most; 512 / 64.
        max_context: positions a request may use, prompt and output together; None: min(model, 4096 / 1024).
        kv_pages: pages in the pool; None: from free memory on a GPU, slots at full context on a CPU.
        memory_fraction: share of the device's memory that the engine may use.
        round_ticks: ticks per dispatched round at most; 4 from 32 slots up, else 8.
        kernels: implementation of the ops on the KV pool (paged_attention, kv_write); "auto" picks per op the best
            that fits and says why.
        max_waiting: requests that may wait at once; None is unlimited (offline), the server sets a limit.
        compilation_cache: keep compiled programs on disk between starts.
    """

    dtype: str = "bfloat16"
    kv_layout: KVLayoutKind = KVLayoutKind.LAST_EXITED
    kv_planes: int | None = None
    max_loops: int | None = None
    initial_state: str | None = None
    boundary_batch: int | None = None
    slots: int | None = None
    page_size: int | None = None
    prefill_chunk: int | None = None
    max_context: int | None = None
    kv_pages: int | None = None
    memory_fraction: float = 0.92
    round_ticks: int | None = None
    kernels: str = "auto"
    max_waiting: int | None = None
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}")
        known = [kind.value for kind in KVLayoutKind]
        if not isinstance(self.kv_layout, KVLayoutKind) and self.kv_layout not in known:
            raise InvalidConfig(f"kv_layout must be one of {', '.join(known)}, found {self.kv_layout!r}")
        object.__setattr__(self, "kv_layout", KVLayoutKind(self.kv_layout))  # its value as a string will do
        if self.kernels not in KERNEL_CHOICES:
            raise InvalidConfig(f"kernels must be one of {', '.join(KERNEL_CHOICES)}, found {self.kernels!r}")
        if self.initial_state is not None and self.initial_state not in INITIAL_STATES:
            raise InvalidConfig(
                f"initial_state must be one of {', '.join(INITIAL_STATES)}, found {self.initial_state!r}"
            )
        limits = {
            "kv_planes": (1, MAX_RING_PLANES),
            "max_loops": (1, MAX_LOOPS),
            "boundary_batch": (1, 4096),
            "slots": (1, 4096),
            "page_size": (1, 1024),
            "prefill_chunk": (1, 16384),
            "max_context": (2, 1 << 20),
            "kv_pages": (1, 1 << 24),
            "round_ticks": (1, 64),
            "max_waiting": (1, 1 << 20),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidConfig(f"{name} must be an integer in [{low}, {high}], found {value!r}")
        if self.kv_planes is not None and self.kv_layout is not KVLayoutKind.RING:
            raise InvalidConfig(
                f"kv_planes={self.kv_planes} is a setting of kv_layout=ring, found kv_layout={self.kv_layout.value}"
            )
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.05 <= fraction <= 0.98:
            raise InvalidConfig(f"memory_fraction must be in [0.05, 0.98], found {fraction!r}")

    def resolved(
        self,
        *,
        platform: str,
        max_positions: int,
        max_loops: int,
        initial_states: Sequence[str],
        whole_stack: bool,
    ) -> ResolvedEngineConfig:
        """Fill the defaults of the platform and the model in.

        Args:
            platform: jax's name: "gpu" or "cpu".
            max_positions, max_loops: of the model; max_loops is the cap that holds already.
            initial_states: those that the model offers, its default first.
            whole_stack: the model has no layers before or after the loop.

        Raises:
            InvalidConfig: a setting that the model does not allow.
        """
        defaults = PLATFORM_DEFAULTS["gpu" if platform == "gpu" else "cpu"]
        settings: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig)}
        for name, value in defaults.items():
            if settings[name] is None:
                settings[name] = min(max_positions, value) if name == "max_context" else value
        context = settings["max_context"]
        if context > max_positions:
            raise InvalidConfig(f"max_context={context} exceeds the model's max_position_embeddings={max_positions}")
        settings["prefill_chunk"] = min(settings["prefill_chunk"], context)
        if settings["initial_state"] is None:
            settings["initial_state"] = initial_states[0]
        if settings["initial_state"] not in initial_states:
            offered = ", ".join(initial_states)
            raise InvalidConfig(f"initial_state={self.initial_state!r}, but the model offers {offered}")
        settings["max_loops"] = max_loops
        if settings["kv_layout"] is KVLayoutKind.RING and settings["kv_planes"] is None:
            settings["kv_planes"] = 1
        if whole_stack and settings["boundary_batch"] not in (None, 1):
            raise InvalidConfig(
                f"boundary_batch must be 1 for a model without layers before or after its loop, "
                f"found {self.boundary_batch}"
            )
        if settings["boundary_batch"] is None:
            settings["boundary_batch"] = 1 if whole_stack else max(1, settings["slots"] // 4)
        if settings["round_ticks"] is None:
            settings["round_ticks"] = 4 if settings["slots"] >= 32 else 8
        return ResolvedEngineConfig(**settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedEngineConfig(EngineConfig):
    """An EngineConfig that leaves nothing to the platform: what one engine really runs with.

    kv_pages may still be None: the memory plan then says how many there are.  kv_planes is None but for a RING.
    """

    # field(): required, where a bare annotation would inherit the default None
    max_loops: int = dataclasses.field()
    initial_state: str = dataclasses.field()
    boundary_batch: int = dataclasses.field()
    slots: int = dataclasses.field()
    page_size: int = dataclasses.field()
    prefill_chunk: int = dataclasses.field()
    max_context: int = dataclasses.field()
    round_ticks: int = dataclasses.field()


PLATFORM_DEFAULTS: dict[str, dict[str, int]] = {
    "gpu": {"slots": 32, "page_size": 64, "prefill_chunk": 512, "max_context": 4096},
    "cpu": {"slots": 8, "page_size": 16, "prefill_chunk": 64, "max_context": 1024},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestDefaults:
    """What a request gets for the parameters it leaves out; from the checkpoint, shown by GetServerInfo."""

    exit_policy: str
    exit_threshold: float
    min_loops: int
    max_loops: int
    prefill_loops: int
    initial_state: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
