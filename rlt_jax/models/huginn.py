"""Huginn-0125 and the models retrofitted after it: a prelude, a core that loops to any depth, and a coda.

    e = prelude(embedding)      s_0 = 0 or random      s <- core(adapter [s, e])      coda, final norm, head

Facts: arXiv 2502.05171 (Huginn) and 2511.07384 (retrofits of Llama, TinyLlama and OLMo-2), and their modelling files.
All share model_type and tensor names, but the equations of a block differ, and only the tensor names say which hold:

    Huginn  norms before each half and after each residual sum, biases of q and k, adjacent rotary pairs; the final norm
            stands before the coda too
    Llama   a norm before each half
    OLMo-2  a norm after each half, norms of q and k over their whole width

Prompt and output may run at any depth: the state converges, and what it says can be read after every loop.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.errors import CheckpointError
from rlt_jax.models.config_reader import ConfigReader
from rlt_jax.models.layers import Llama3Scaling, linear, rms_norm, rope_half, rope_pairs, self_attention, swiglu, tensor
from rlt_jax.models.spec import KV, Attend, LoopedModel, ModelSpec

# Names of the parts as the training code knew them.  The one value of each is what is built here.
_PARTS: dict[str, str] = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "injection_type": "linear",
    "state_init": "like-init",
    "initial_state_mode": "random",  # the other modes start from the prelude's output, or skip the first adapter
}
_NORM_3, _Q_NORM = ".norm_3.weight", ".attn.q_norm.weight"  # the tensors that tell the blocks apart


class Block(enum.Enum):
    """Equations of a layer, and with them of the rotary pairs and of the readout."""

    HUGINN = "huginn"
    LLAMA = "llama"
    OLMO = "olmo"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuginnLayer:
    """One transformer layer of any block; what a block lacks is None."""

    norm_1: Any  # [E]
    qkv: Any  # [(H + 2K) D, E]  q, k, v rows joined, as in the file
    attn_out: Any  # [E, H D]
    norm_2: Any  # [E]
    gate_up: Any  # [2F, E]  as in the file
    down: Any  # [E, F]
    norm_3: Any = None  # [E]  Huginn
    norm_4: Any = None  # [E]  Huginn
    qk_bias: Any = None  # [2, 1, H, D]  Huginn: of q, of k
    q_norm: Any = None  # [H D]  OLMo-2
    k_norm: Any = None  # [K D]  OLMo-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuginnParams:
    embed: Any  # [V, E]
    prelude: tuple[HuginnLayer, ...]
    adapter: Any  # [E, 2E]  columns of the state, then of the prelude's output
    core: tuple[HuginnLayer, ...]
    coda: tuple[HuginnLayer, ...]
    final_norm: Any  # [E]
    head: Any = None  # [V, E]; None: tied, the embedding is the head


@dataclasses.dataclass(frozen=True)
class Huginn(LoopedModel):
    spec: ModelSpec
    block: Block
    embed_scale: float
    tied: bool
    rope_scaling: Llama3Scaling | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Huginn:
        """The original block.  Raises CheckpointError for a retrofit: its block is known by its tensors alone."""
        if config.get("qk_bias") is False:
            raise CheckpointError(
                "config.json: field 'qk_bias' is false, so this is a retrofitted model, and only the names of its "
                "tensors tell which block it has"
            )
        return cls._read(config, Block.HUGINN)

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any], tensor_names: Collection[str]) -> Huginn:
        if any(name.endswith(_NORM_3) for name in tensor_names):
            return cls._read(config, Block.HUGINN)
        return cls._read(config, Block.OLMO if any(name.endswith(_Q_NORM) for name in tensor_names) else Block.LLAMA)

    @classmethod
    def _read(cls, config: Mapping[str, Any], block: Block) -> Huginn:
        read = ConfigReader(config, "huginn_raven")
        original = block is Block.HUGINN
        hidden, heads = read.positive_int("n_embd"), read.positive_int("n_heads")
        kv_heads = read.positive_int("num_key_value_heads", default=heads)
        prelude, core, coda = (
            read.layer_count(f"n_layers_in_{part}") for part in ("prelude", "recurrent_block", "coda")
        )
        loops = read.positive_int("mean_recurrence")
        positions = read.positive_int("block_size")
        init = read.section("init_values")
        embed_scale = init.positive_float("embed_scale", default=math.sqrt(hidden))
        std = init.positive_float("std", default=math.sqrt(2 / (5 * hidden)))
        init.inert("embedding", "out_proj")
        init.finish()
        spec = ModelSpec(
            model_type="huginn_raven",
            vocab_size=read.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive_int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=read.positive_int("head_dim", default=hidden // heads),
            num_prelude_layers=prelude,
            num_core_layers=core,
            num_coda_layers=coda,
            trained_loops=loops,
            max_loops=loops,
            open_ended=True,
            # a retrofit keeps the base model's positions beside the field that it inherits and does not use
            max_positions=positions if original else read.positive_int("max_position_embeddings", default=positions),
            norm_eps=read.positive_float("norm_eps"),
            rope_theta=read.positive_float("rope_base" if original else "rope_theta"),
            injects=True,
            initial_states=("zeros", "random"),
            initial_state_std=std * embed_scale,
            exit_scores=("latent", "kl", "argmax"),
            eos_token_ids=read.token_ids("eos_token_id"),
            # where its own generation loop stops; config.json names one of them at most
            eos_tokens=("<|begin_text|>", "<|end_text|>", "<|end_turn|>") if original else (),
        )
        read.even("head_dim", spec.head_dim)
        if original:  # one bias per query head and as many for the keys
            read.only("num_key_value_heads", (heads,), default=heads)
            read.only("rope_theta", (None,), default=None)
            read.only("rope_scaling", (None,), default=None)
            read.inert("max_position_embeddings")
        else:
            read.divides("num_key_value_heads", kv_heads, "n_heads", heads)
            read.inert("rope_base")
        read.only("qk_bias", (original,), default=True)
        tied = read.only("tie_embeddings", (True, False), default=True)
        read.inert("tie_word_embeddings")  # the official class overwrites it with the field above
        read.only("bias", (False,), default=False)
        read.only("padded_vocab_size", (spec.vocab_size,), default=spec.vocab_size)
        read.only("n_layers", (spec.num_layers,), default=spec.num_layers)
        read.only("test_time_noise", (0, 0.0), default=0)
        for field, part in _PARTS.items():
            read.only(field, (part,), default=part)
        # training alone, kernels, arithmetic on other fields, and a hint that the tensor names overrule
        read.inert("init_orthogonal", "init_strategy", "mean_backprop_depth", "sampling_scheme", "padding_multiple")
        read.inert("activation_checkpoint_impl", "effective_expected_depth", "test_time_noise_type", "block_variant")
        scaling = None if original else _llama3_scaling(read)
        read.finish()
        return cls(spec, block, embed_scale, tied, scaling)

    def sources(self) -> HuginnParams:
        s = self.spec
        e, q, kv = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        original, olmo = self.block is Block.HUGINN, self.block is Block.OLMO

        def layer(at: str) -> HuginnLayer:
            return HuginnLayer(
                norm_1=tensor(at + "norm_1.weight", e),
                qkv=tensor(at + "attn.Wqkv.weight", q + 2 * kv, e),
                attn_out=tensor(at + "attn.proj.weight", e, q),
                norm_2=tensor(at + "norm_2.weight", e),
                gate_up=tensor(at + "mlp.fc.weight", 2 * s.intermediate_size, e),
                down=tensor(at + "mlp.proj.weight", e, s.intermediate_size),
                norm_3=tensor(at + "norm_3.weight", e) if original else None,
                norm_4=tensor(at + "norm_4.weight", e) if original else None,
                qk_bias=tensor(at + "attn.qk_bias", 2, 1, s.num_heads, s.head_dim) if original else None,
                q_norm=tensor(at + "attn.q_norm.weight", q) if olmo else None,
                k_norm=tensor(at + "attn.k_norm.weight", kv) if olmo else None,
            )

        def layers(part: str, count: int) -> tuple[HuginnLayer, ...]:
            return tuple(layer(f"transformer.{part}.{i}.") for i in range(count))

        return HuginnParams(
            embed=tensor("transformer.wte.weight", s.vocab_size, e),
            prelude=layers("prelude", s.num_prelude_layers),
            adapter=tensor("transformer.adapter.weight", e, 2 * e),
            core=layers("core_block", s.num_core_layers),
            coda=layers("coda", s.num_coda_layers),
            final_norm=tensor("transformer.ln_f.weight", e),
            head=None if self.tied else tensor("lm_head.weight", s.vocab_size, e),
        )

    def unused_tensors(self) -> dict[str, tuple[int, ...]]:
        """The embedding's second copy, and the rotary table (cos, sin), which is computed instead."""
        s = self.spec
        unused: dict[str, tuple[int, ...]] = {}
        if self.tied:
            unused["lm_head.weight"] = (s.vocab_size, s.hidden_size)
        if self.block is Block.HUGINN:
            unused["freqs_cis"] = (1, s.max_positions, 1, s.head_dim // 2, 2)
        return unused

    def embed(self, params: HuginnParams, tokens: jax.Array) -> jax.Array:
        x = params.embed[tokens]
        # in float32: as a bfloat16 number the scale itself would be rounded
        return (x.astype(jnp.float32) * self.embed_scale).astype(x.dtype)

    def prelude(
        self, params: HuginnParams, x: jax.Array, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        return self._layers(params.prelude, 0, x, positions, kv, attend)

    def initial_state(self, params: HuginnParams, injected: jax.Array, noise: jax.Array | None) -> jax.Array:
        del params
        assert noise is not None, "this model starts from noise, or from zeros given as noise"
        return (noise * self.spec.initial_state_std).astype(injected.dtype)

    def core(
        self,
        params: HuginnParams,
        state: jax.Array,
        injected: jax.Array | None,
        positions: jax.Array,
        kv: KV,
        attend: Attend,
    ) -> tuple[jax.Array, KV]:
        assert injected is not None, "this model needs the prelude's output in every loop"
        x = linear(jnp.concatenate([state, injected], axis=-1), params.adapter)
        return self._layers(params.core, len(params.prelude), x, positions, kv, attend)

    def readout(
        self, params: HuginnParams, state: jax.Array, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        eps = self.spec.norm_eps
        x = rms_norm(state, params.final_norm, eps) if self.block is Block.HUGINN else state
        x, kv = self._layers(params.coda, len(params.prelude) + len(params.core), x, positions, kv, attend)
        return rms_norm(x, params.final_norm, eps), kv

    def head(self, params: HuginnParams, hidden: jax.Array) -> jax.Array:
        weight = params.embed if self.tied else params.head
        return linear(hidden, weight, out_dtype=jnp.dtype(jnp.float32))

    def _layers(
        self,
        layers: tuple[HuginnLayer, ...],
        first: int,
        x: jax.Array,
        positions: jax.Array,
        kv: KV,
        attend: Attend,
    ) -> tuple[jax.Array, KV]:
        for i, p in enumerate(layers, start=first):  # unrolled: a scan over stacked weights copies them every tick
            x, kv = self._layer(p, i, x, positions, kv, attend)
        return x, kv

    def _layer(
        self, p: HuginnLayer, number: int, x: jax.Array, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        s, eps = self.spec, self.spec.norm_eps
        half = functools.partial(rope_half, theta=s.rope_theta, scaling=self.rope_scaling)
        attention = functools.partial(
            self_attention, qkv=p.qkv, out=p.attn_out, spec=s, layer=number, positions=positions, kv=kv, attend=attend
        )
        match self.block:
            case Block.HUGINN:
                bias = p.qk_bias.reshape(2, -1)
                out, kv = attention(
                    rms_norm(x, p.norm_1, eps),
                    adjust=lambda q, k: (q + bias[0], k + bias[1]),
                    rotate=functools.partial(rope_pairs, theta=s.rope_theta),
                )
                x = rms_norm(out + x, p.norm_2, eps)
                x = rms_norm(swiglu(rms_norm(x, p.norm_3, eps), p.gate_up, p.down) + x, p.norm_4, eps)
            case Block.LLAMA:
                out, kv = attention(rms_norm(x, p.norm_1, eps), rotate=half)
                x = x + out
                x = x + swiglu(rms_norm(x, p.norm_2, eps), p.gate_up, p.down)
            case Block.OLMO:
                out, kv = attention(
                    x, adjust=lambda q, k: (rms_norm(q, p.q_norm, eps), rms_norm(k, p.k_norm, eps)), rotate=half
                )
                x = x + rms_norm(out, p.norm_1, eps)
                x = x + rms_norm(swiglu(x, p.gate_up, p.down), p.norm_2, eps)
        return x, kv


def _llama3_scaling(read: ConfigReader) -> Llama3Scaling | None:
    if not read.has("rope_scaling"):
        return None
    section = read.section("rope_scaling")
    section.only("rope_type", ("llama3",), default=None)
    scaling = Llama3Scaling(
        factor=section.positive_float("factor"),
        low_freq_factor=section.positive_float("low_freq_factor"),
        high_freq_factor=section.positive_float("high_freq_factor"),
        original_max_positions=section.positive_int("original_max_position_embeddings"),
    )
    section.above("high_freq_factor", scaling.high_freq_factor, "low_freq_factor", scaling.low_freq_factor)
    section.finish()
    return scaling
