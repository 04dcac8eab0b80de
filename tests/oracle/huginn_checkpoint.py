"""Random tiny checkpoints of the Huginn family: any sizes, all three block variants, tensors by their published names.

`HuginnShape` says the sizes (hashable, so that an engine can be kept per shape), `huginn_checkpoint(shape, seed)` gives
the config and the float32 tensors, `shapes()` draws shapes for hypothesis.  The weights are scaled so that every part
matters and nothing explodes: norms about 1, linears about 1 / sqrt(fan-in), an adapter that shrinks the state enough
for most loops to converge (at half a linear's scale many never do), so that convergence tests leave at mixed depths.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.oracle.huginn import HUGINN, LLAMA, OLMO2, HuginnOracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuginnShape:
    """Sizes of a checkpoint.  A Huginn block has no grouped heads (q and k bias are one tensor), no scaled rotary."""

    block: str = HUGINN
    prelude: int = 1
    core: int = 2
    coda: int = 1
    width: int = 32
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    intermediate: int = 48
    vocab: int = 96
    loops: int = 6  # mean_recurrence
    context: int = 128
    tied: bool = True
    scaled_rotary: bool = False  # llama3 frequency scaling

    def __post_init__(self) -> None:
        if self.block not in (HUGINN, LLAMA, OLMO2):
            raise ValueError(f"block: {self.block!r} is not one of {HUGINN}, {LLAMA}, {OLMO2}")
        if self.block == HUGINN and (self.kv_heads != self.heads or self.scaled_rotary):
            raise ValueError(f"a Huginn block has kv_heads == heads and no scaled_rotary: {self}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"heads must be a multiple of kv_heads and head_dim even: {self}")


@st.composite
def shapes(draw: st.DrawFn, *, blocks: tuple[str, ...] = (HUGINN, LLAMA, OLMO2)) -> HuginnShape:
    """Every block, layer counts from one up, grouped heads, q widths that are not the model's, odd vocabularies."""
    block = draw(st.sampled_from(blocks))
    kv_heads = draw(st.integers(2, 3) if block == HUGINN else st.integers(1, 3))
    heads = kv_heads * (1 if block == HUGINN else draw(st.sampled_from([1, 2, 3])))
    head_dim = draw(st.sampled_from([8, 16]))
    return HuginnShape(
        block=block,
        prelude=draw(st.integers(1, 3)),
        core=draw(st.integers(1, 4)),
        coda=draw(st.integers(1, 3)),
        width=heads * head_dim if block == HUGINN else draw(st.sampled_from([16, 24, heads * head_dim])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=draw(st.sampled_from([24, 40])),
        vocab=draw(st.sampled_from([61, 96])),
        loops=draw(st.integers(2, 8)),
        tied=draw(st.booleans()),
        scaled_rotary=block != HUGINN and draw(st.booleans()),
    )


def huginn_checkpoint(shape: HuginnShape, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(fields of config.json, tensors in float32); the same for the same arguments.

    Where the draw is chaotic (float32 loses its digits over the loops) or most inputs lead to one token, the next one
    is taken: such weights would test luck, or nothing.
    """
    rng = np.random.default_rng(seed)
    while True:
        config, tensors = _draw(shape, rng)
        tokens, loops = rng.integers(0, shape.vocab, 24), max(8, shape.loops)
        exact, rounded = (
            HuginnOracle(None, config=config, tensors=tensors, dtype=dtype).trajectory(tokens, loops).logits
            for dtype in (np.float64, np.float32)
        )
        commonest = np.bincount(exact[-1].argmax(axis=1)).max()
        if np.abs(exact - rounded).max() < 5e-5 and commonest <= len(tokens) // 2:
            return config, tensors


def _draw(shape: HuginnShape, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    width, q_width, kv_width = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, np.ndarray] = {}

    def normal(name: str, *size: int, scale: float, mean: float = 0.0) -> None:
        tensors[name] = (mean + scale * rng.standard_normal(size)).astype(np.float32)

    def linear(name: str, rows: int, columns: int) -> None:
        normal(f"{name}.weight", rows, columns, scale=rng.uniform(0.8, 1.2) / columns**0.5)

    def norm(name: str, size: int = width) -> None:
        normal(f"{name}.weight", size, scale=0.2, mean=1.0)

    normal("transformer.wte.weight", shape.vocab, width, scale=width**-0.5 if shape.tied else 1.0)
    for stage, layers in (("prelude", shape.prelude), ("core_block", shape.core), ("coda", shape.coda)):
        for i in range(layers):
            at = f"transformer.{stage}.{i}"
            for n in range(1, 5 if shape.block == HUGINN else 3):
                norm(f"{at}.norm_{n}")
            linear(f"{at}.attn.Wqkv", q_width + 2 * kv_width, width)
            linear(f"{at}.attn.proj", width, q_width)
            if shape.block == HUGINN:
                normal(f"{at}.attn.qk_bias", 2, 1, shape.heads, shape.head_dim, scale=0.3)
            if shape.block == OLMO2:
                norm(f"{at}.attn.q_norm", q_width)
                norm(f"{at}.attn.k_norm", kv_width)
            linear(f"{at}.mlp.fc", 2 * shape.intermediate, width)
            linear(f"{at}.mlp.proj", width, shape.intermediate)
    normal("transformer.adapter.weight", width, 2 * width, scale=width**-0.5)
    state_scale = np.float32(0.35 if shape.block == HUGINN else 0.25)
    tensors["transformer.adapter.weight"][:, :width] *= state_scale
    norm("transformer.ln_f")
    if shape.tied:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()  # files hold both
    else:
        normal("lm_head.weight", shape.vocab, width, scale=2 * width**-0.5)

    embed_scale = width**0.5 if shape.tied else 1.0  # embedded tokens are of size one
    config: dict[str, Any] = {
        "architecture_class_name": "RecurrentGPT",
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "bias": False,
        "block_class_name": "SandwichBlock",
        "block_size": shape.context,
        "max_position_embeddings": shape.context,
        "n_embd": width,
        "n_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "padded_vocab_size": shape.vocab,
        "n_layers": shape.prelude + shape.core + shape.coda,
        "n_layers_in_prelude": shape.prelude,
        "n_layers_in_recurrent_block": shape.core,
        "n_layers_in_coda": shape.coda,
        "mean_recurrence": shape.loops,
        "norm_eps": 1e-5 if shape.block == LLAMA else 1e-6,
        "norm_class_name": "RMSNorm_llama",
        "nonlin_name": "SiLU",
        "mlp_class_name": "GatedMLP",
        "injection_type": "linear",
        "state_init": "like-init",
        "init_values": {"std": (0.4 / width) ** 0.5, "embedding": (0.4 / width) ** 0.5, "embed_scale": embed_scale},
        "qk_bias": shape.block == HUGINN,
        "tie_embeddings": shape.tied,
        "tie_word_embeddings": shape.tied,
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        "rope_base": 50000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": "float32",
    }
    if shape.block == HUGINN:
        angle = np.outer(np.arange(shape.context), 50000.0 ** (-2.0 * np.arange(shape.head_dim // 2) / shape.head_dim))
        table = np.stack([np.cos(angle), np.sin(angle)], axis=-1)[None, :, None]  # [1, context, 1, D/2, 2]
        tensors["freqs_cis"] = table.astype(np.float32)
    else:
        config |= {"rope_theta": 10000.0, "rope_base": 10000.0, "initial_state_mode": "random"}
    if shape.scaled_rotary:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    return config, tensors
