"""Nanbeige4.2-3B: the whole stack loops a fixed number of times, plain pre-norm Llama blocks, no exit gate.

Facts: arXiv 2607.22083 and the official modelling file.  Positions do not change between loops; nothing is injected.
The final norm ends every loop, so that the next one starts from a normed state, or, with `skip_loop_final_norm`, it is
applied once, after the last loop.  Heads are grouped and wide: q is H D = 2 E in the released model.
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

# Parts of the official config class that the released model leaves off.  Each changes the equations, the parameters or
# the cache, so only the value that switches it off is accepted; JSON null means that value everywhere.
_DORMANT: dict[str, Any] = {
    # LoopSplit
    "enable_double_loop_split": False,
    "loop_middle_layers": None,
    "loop_share_kv": False,
    # hyper-connections
    "enable_hyper_connection": False,
    "enable_mhc": False,
    "enable_h_res_identity": False,
    "mhc_identity_nohresparam": False,
    "mhc_diff_for_loop": False,
    "mhc_double_stream_position_for_loop": None,
    # attention over the depths
    "enable_depth_attention": False,
    "depth_attention_stride": None,
    # n-gram embeddings
    "emb_neighbor_num": None,
    "emb_split_num": None,
    "ngram_vocab_size_ratio": None,
    "ngram_embedding_hidden_size": None,
    "ngram_layer_downproject_size": None,
    "ngram_compressed_tokenizer": False,
    "ngram_insert_all_layers": False,
    "ngram_mod_force_prime": False,
    "skip_ngram_for_input": False,
    "insert_ngram_layer_idx": [],
    "emb_tp_num": None,
    # norms of q and k
    "qk_layernorm": False,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NanbeigeLayer:
    """One transformer layer: a norm before each half, none after."""

    attn_norm: Any  # [E]
    qkv: Any  # [(H + 2K) D, E]  q, k, v rows joined
    attn_out: Any  # [E, H D]
    mlp_norm: Any  # [E]
    gate_up: Any  # [2F, E]
    down: Any  # [E, F]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NanbeigeParams:
    embed: Any  # [V, E]
    core: tuple[NanbeigeLayer, ...]
    final_norm: Any  # [E]
    head: Any  # [V, E]


@dataclasses.dataclass(frozen=True)
class Nanbeige(LoopedModel):
    spec: ModelSpec
    norm_every_loop: bool  # else the final norm belongs to the readout

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Nanbeige:
        read = ConfigReader(config, "nanbeige")
        hidden, heads = read.positive_int("hidden_size"), read.positive_int("num_attention_heads")
        loops = read.positive_int(
            "num_loops", default=1
        )  # the official class's default, which it leaves out when it saves
        weights = read.numbers("loop_loss_weights")
        if weights:  # one per loop before the last, from training; they decide the depth
            loops = len(weights) + 1
        spec = ModelSpec(
            model_type="nanbeige",
            vocab_size=read.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive_int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=read.positive_int("num_key_value_heads", default=heads),
            head_dim=read.positive_int("head_dim", default=hidden // heads),
            num_core_layers=read.layer_count("num_hidden_layers"),
            trained_loops=loops,
            max_loops=loops,
            max_positions=read.positive_int("max_position_embeddings"),
            norm_eps=read.positive_float("rms_norm_eps"),
            rope_theta=read.positive_float("rope_theta"),
            eos_token_ids=read.token_ids("eos_token_id"),
        )
        skip = read.only("skip_loop_final_norm", (False, True), default=False)
        read.divides("num_key_value_heads", spec.num_kv_heads, "num_attention_heads", heads)
        read.even("head_dim", spec.head_dim)
        read.only("kv_channels", (spec.head_dim, None), default=None)  # head_dim's other name, never another value
        read.only("hidden_act", ("silu",), default="silu")
        read.only("tie_word_embeddings", (False,), default=False)
        read.only("rope_scaling", (None,), default=None)
        read.only("attention_bias", (False,), default=False)
        read.only("mlp_bias", (False,), default=False)
        read.only("pretraining_tp", (1,), default=1)
        for field, off in _DORMANT.items():
            read.only(field, (off,), default=off)
        # training alone, and settings of parts that are off
        read.inert("attention_dropout", "initializer_range", "ngram_fused_mode", "num_residual_streams")
        read.inert("mhc_sinkhorn_iterations", "mhc_init_gating_factor")
        read.inert("depth_attention_recent_window", "depth_attention_static_anchor_once")
        read.finish()
        return cls(spec, norm_every_loop=not skip)

    def sources(self) -> NanbeigeParams:
        s = self.spec
        e = s.hidden_size

        def layer(i: int) -> NanbeigeLayer:
            at = f"model.layers.{i}."
            attn, mlp = at + "self_attn.", at + "mlp."
            return NanbeigeLayer(
                attn_norm=tensor(at + "input_layernorm.weight", e),
                qkv=qkv_source(s, attn),
                attn_out=tensor(attn + "o_proj.weight", e, s.num_heads * s.head_dim),
                mlp_norm=tensor(at + "post_attention_layernorm.weight", e),
                gate_up=gate_up_source(s, mlp),
                down=tensor(mlp + "down_proj.weight", e, s.intermediate_size),
            )

        return NanbeigeParams(
            embed=tensor("model.embed_tokens.weight", s.vocab_size, e),
            core=tuple(layer(i) for i in range(s.num_core_layers)),
            final_norm=tensor("model.norm.weight", e),
            head=tensor("lm_head.weight", s.vocab_size, e),
        )

    def embed(self, params: NanbeigeParams, tokens: jax.Array) -> jax.Array:
        return params.embed[tokens]

    def core(
        self,
        params: NanbeigeParams,
        state: jax.Array,
        injected: jax.Array | None,
        positions: jax.Array,
        kv: KV,
        attend: Attend,
    ) -> tuple[jax.Array, KV]:
        del injected
        s, x = self.spec, state
        for i, p in enumerate(params.core):  # unrolled: a scan over stacked weights copies them every tick
            normed = rms_norm(x, p.attn_norm, s.norm_eps)
            out, kv = self_attention(normed, p.qkv, p.attn_out, s, i, positions, kv, attend)
            x = x + out
            x = x + swiglu(rms_norm(x, p.mlp_norm, s.norm_eps), p.gate_up, p.down)
        return (rms_norm(x, params.final_norm, s.norm_eps) if self.norm_every_loop else x), kv

    def readout(
        self, params: NanbeigeParams, state: jax.Array, positions: jax.Array, kv: KV, attend: Attend
    ) -> tuple[jax.Array, KV]:
        del positions, attend
        return (state if self.norm_every_loop else rms_norm(state, params.final_norm, self.spec.norm_eps)), kv

    def head(self, params: NanbeigeParams, hidden: jax.Array) -> jax.Array:
        return linear(hidden, params.head, out_dtype=jnp.dtype(jnp.float32))
