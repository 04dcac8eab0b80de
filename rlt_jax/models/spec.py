"""What a looped language model is, as static facts and as an interface of pure functions.

    embed -> prelude layers -> injected e        state s_0 = initial_state(e, noise), or one that the caller gives
    repeat depth d = 0, 1, ...:   s = core(s, e)        exit_score(s) may end the loop
    hidden = readout(s)  (coda layers)           logits = head(hidden)

Whole-stack models (Ouro, Nanbeige) have no prelude, no injection and no coda: `LoopedModel`'s defaults are exactly
that case.  Models with a prelude or a coda (Huginn) override the steps.  Nothing here knows about requests, pages or
slots: every function takes arrays with any leading axes, and reaches the KV cache only through `attend`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import jax

from rlt_jax.errors import InvalidConfig, shown

Params = Any  # a pytree of arrays, one entry per layer, never stacked (stacked weights are copied every tick)
KV = Any  # whatever the caller threads through `attend`; models never look inside

# attend(kv, layer, q [..., H, D], k [..., K, D], v [..., K, D]) -> (kv, out [..., H, D])
# `layer` counts prelude, core and coda layers in order.  q and k are already rotated.  The callee stores k and v for
# the rows' positions before it attends, so a row always sees its own entry of the loop being run.
Attend = Callable[[KV, int, jax.Array, jax.Array, jax.Array], tuple[KV, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Static facts of one checkpoint.  Hashable: it is part of every compiled program's key."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_prelude_layers: int = 0
    num_core_layers: int
    num_coda_layers: int = 0
    trained_loops: int  # the depth the model was trained at; prompts run at it unless the request says otherwise
    max_loops: int  # the deepest loop a request may ask for (= KV planes of LAST_EXITED and DROP)
    open_ended: bool = False  # any depth makes sense; max_loops is then a cap that `with_max_loops` moves
    max_positions: int
    norm_eps: float
    rope_theta: float
    injects: bool = False  # core reads the prelude's output in every loop, so the runtime keeps it per row
    initial_states: tuple[str, ...] = ("injected",)  # "injected", or "zeros" and "random"; the first is the default
    initial_state_std: float = 0.0  # of a random one, before it is cut at 3 sigma; any embedding scale included
    exit_scores: tuple[str, ...] = ()  # after a loop: "gate" (`exit_score`), "latent" (of two states), "kl" and
    # "argmax" (of two readouts: coda and head after every loop)
    exit_threshold: float = 1.0  # the checkpoint's early_exit_threshold; >= 1 means full depth
    eos_token_ids: tuple[int, ...] = ()  # from config.json; the loader adds generation_config's and the tokenizer's
    eos_tokens: tuple[str, ...] = ()  # special tokens that end a text too, where the tokenizer has them

    @property
    def num_layers(self) -> int:
        """Physical layers, prelude and coda included."""
        return self.num_prelude_layers + self.num_core_layers + self.num_coda_layers


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Where one parameter comes from: checkpoint tensors concatenated along axis 0.

    Attributes:
        names: tensor names in the checkpoint, in order.
        shapes: their shapes, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter: the parts joined along axis 0."""
        return (sum(s[0] for s in self.shapes), *self.shapes[0][1:])


@dataclasses.dataclass(frozen=True)
class LoopedModel(abc.ABC):
    """Pure functions of one model family.  Instances are frozen and hashable; all arrays are arguments.

    Shapes: leading axes `...` are free (slots in decode, chunk rows in prefill, [batch, T] in training).
    """

    spec: ModelSpec

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> LoopedModel:
        """Read a Hugging Face config.json.  Raises CheckpointError naming an unknown, missing or bad field."""

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any], tensor_names: Collection[str]) -> LoopedModel:
        """Like `from_config`, for families whose config.json leaves open what the names of the tensors tell."""
        del tensor_names
        return cls.from_config(config)

    def with_max_loops(self, max_loops: int) -> Self:
        """The same model with another cap on the depth; its trained depth stays, and may be above the cap.

        Raises:
            InvalidConfig: max_loops is below 1, or not the model's own where that is fixed.
        """
        spec = self.spec
        if max_loops < 1 or not (spec.open_ended or max_loops == spec.max_loops):
            allowed = ">= 1" if spec.open_ended else f"{spec.max_loops}, the only cap of model_type '{spec.model_type}'"
            raise InvalidConfig(f"max_loops must be {allowed}, found {shown(max_loops)}")
        return dataclasses.replace(self, spec=dataclasses.replace(spec, max_loops=max_loops))

    @abc.abstractmethod
    def sources(self) -> Params:
        """The parameter pytree with a TensorSource at each leaf: names and shapes in the checkpoint."""

    def unused_tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a checkpoint may hold and that are not read (copies, tables), with their shapes."""
        return {}

    @abc.abstractmethod
    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """tokens [...] int32 -> [..., E]."""

    def prelude(
        self, params: Params, x: jax.Array, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        """Layers before the loop: embedded [..., E] -> injected [..., E]."""
        del params, positions, attend
        return x, kv

    def initial_state(self, params: Params, injected: jax.Array, noise: jax.Array | None) -> jax.Array:
        """State before loop 0: [..., E] -> [..., E].

        Args:
            injected: the prelude's output.
            noise: [..., E] float32, standard normal cut at 3 sigma for rows that start at random, zeros for rows that
                start from zeros; None where the spec's only initial state is "injected".
        """
        del params, noise
        return injected

    @abc.abstractmethod
    def core(
        self, params: Params, state: jax.Array, injected: jax.Array | None, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        """One loop: state [..., E] -> state [..., E], end-of-loop norm included."""

    def exit_score(self, params: Params, state: jax.Array) -> jax.Array | None:
        """Gate logit after a loop, [...] float32, or None for models without the score "gate"."""
        del params, state
        return None

    def readout(
        self, params: Params, state: jax.Array, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        """From the last loop's state to the head's input (coda layers): [..., E] -> [..., E]."""
        del params, positions, attend
        return state, kv

    @abc.abstractmethod
    def head(self, params: Params, hidden: jax.Array) -> jax.Array:
        """[..., E] -> logits [..., V] float32."""
