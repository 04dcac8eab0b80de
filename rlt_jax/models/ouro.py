"""ByteDance Ouro (1.4B, 2.6B, Thinking): the whole stack loops, sandwich norms, a learned exit gate.

Facts: arXiv 2510.25741 and the official modelling file.  The normed state after each loop is at once the gate's input,
the head's input and the next loop's input; positions do not change between loops; nothing is injected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.models.config_reader import ConfigReader
from rlt_jax.models.layers import gate_up_source, linear, qkv_source, rms_norm, self_attention, swiglu, tensor
from rlt_jax.models.spec import KV, Attend, LoopedModel, ModelSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OuroLayer:
    """One transformer layer.  Norm names follow the data: before and after each half."""

    attn_in_norm: Any  # [E]
    qkv: Any  # [(H + 2K) D, E]  q, k, v rows joined: one matmul instead of three
    attn_out: Any  # [E, H D]
    attn_out_norm: Any  # [E]
    mlp_in_norm: Any  # [E]
    gate_up: Any  # [2F, E]
    down: Any  # [E, F]
    mlp_out_norm: Any  # [E]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OuroParams:
    embed: Any  # [V, E]
    core: tuple[OuroLayer, ...]
    loop_norm: Any  # [E]  applied at the end of every loop
    exit_gate_weight: Any  # [1, E]
    exit_gate_bias: Any  # [1]
    head: Any  # [V, E]


@dataclasses.dataclass(frozen=True)
class Ouro(LoopedModel):
    spec: ModelSpec

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Ouro:
        read = ConfigReader(config, "ouro")
        hidden, heads = read.positive_int("hidden_size"), read.positive_int("num_attention_heads")
        loops = read.positive_int("total_ut_steps")
        layers = read.layer_count("num_hidden_layers")
        spec = ModelSpec(
            model_type="ouro",
            vocab_size=read.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive_int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=read.positive_int("num_key_value_heads", default=heads),
            head_dim=read.positive_int("head_dim", default=hidden // heads),
            num_core_layers=layers,
            trained_loops=loops,
            max_loops=loops,
            max_positions=read.positive_int("max_position_embeddings"),
            norm_eps=read.positive_float("rms_norm_eps"),
            rope_theta=read.positive_float("rope_theta"),
            exit_scores=("gate",),
            exit_threshold=read.unit_float("early_exit_threshold", default=1.0),
            eos_token_ids=read.token_ids("eos_token_id"),
        )
        read.divides("num_key_value_heads", spec.num_kv_heads, "num_attention_heads", heads)
        read.even("head_dim", spec.head_dim)
        read.only("hidden_act", ("silu",), default="silu")
        read.only("tie_word_embeddings", (False,), default=False)
        read.only("rope_scaling", (None,), default=None)
        read.only("use_sliding_window", (False,), default=False)
        read.only("sliding_window", (None,), default=None)
        read.only("attention_bias", (False,), default=False)
        read.only("early_exit_step", (None,), default=None)
        read.only("layer_types", (["full_attention"] * layers, None), default=None)
        read.inert("attention_dropout", "initializer_range", "max_window_layers", "chunk_size", "use_weighted_exit")
        read.finish()
        return cls(spec)

    def sources(self) -> OuroParams:
        s = self.spec
        e = s.hidden_size

        def layer(i: int) -> OuroLayer:
            at = f"model.layers.{i}."
            attn, mlp = at + "self_attn.", at + "mlp."
            return OuroLayer(
                attn_in_norm=tensor(at + "input_layernorm.weight", e),
                qkv=qkv_source(s, attn),
                attn_out=tensor(attn + "o_proj.weight", e, s.num_heads * s.head_dim),
                attn_out_norm=tensor(at + "input_layernorm_2.weight", e),
                mlp_in_norm=tensor(at + "post_attention_layernorm.weight", e),
                gate_up=gate_up_source(s, mlp),
                down=tensor(mlp + "down_proj.weight", e, s.intermediate_size),
                mlp_out_norm=tensor(at + "post_attention_layernorm_2.weight", e),
            )

        return OuroParams(
            embed=tensor("model.embed_tokens.weight", s.vocab_size, e),
            core=tuple(layer(i) for i in range(s.num_core_layers)),
            loop_norm=tensor("model.norm.weight", e),
            exit_gate_weight=tensor("model.early_exit_gate.weight", 1, e),
            exit_gate_bias=tensor("model.early_exit_gate.bias", 1),
            head=tensor("lm_head.weight", s.vocab_size, e),
        )

    def embed(self, params: OuroParams, tokens: jax.Array) -> jax.Array:
        return params.embed[tokens]

    def core(
        self,
        params: OuroParams,
        state: jax.Array,
        injected: jax.Array | None,
        positions: jax.Array,
        kv: KV,
        attend: Attend,
    ) -> tuple[jax.Array, KV]:
        del injected
        s, x = self.spec, state
        for i, p in enumerate(params.core):  # unrolled: a scan over stacked weights copies them every tick
            normed = rms_norm(x, p.attn_in_norm, s.norm_eps)
            out, kv = self_attention(normed, p.qkv, p.attn_out, s, i, positions, kv, attend)
            x = x + rms_norm(out, p.attn_out_norm, s.norm_eps)
            out = swiglu(rms_norm(x, p.mlp_in_norm, s.norm_eps), p.gate_up, p.down)
            x = x + rms_norm(out, p.mlp_out_norm, s.norm_eps)
        return rms_norm(x, params.loop_norm, s.norm_eps), kv

    def exit_score(self, params: OuroParams, state: jax.Array) -> jax.Array:
        weight = params.exit_gate_weight[0].astype(jnp.float32)
        bias = params.exit_gate_bias[0].astype(jnp.float32)
        return jnp.sum(state.astype(jnp.float32) * weight, axis=-1) + bias

    def head(self, params: OuroParams, hidden: jax.Array) -> jax.Array:
        return linear(hidden, params.head, out_dtype=jnp.dtype(jnp.float32))
