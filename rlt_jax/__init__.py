"""rlt_jax: a JAX engine for looped language models.

from rlt_jax import LLM, SamplingParams
llm = LLM()                                   # the bundled model; or a directory, or a Hugging Face repo id
print(llm.generate(["copy: q d k a w z m e ="], SamplingParams(exit_threshold=0.5))[0])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlt_jax.config import EngineConfig, KVLayoutKind
from rlt_jax.errors import CheckpointError, EngineDead, InvalidConfig, InvalidRequest, QueueFull, RltError
from rlt_jax.request import Completion, FinishReason, RequestOutput, ResolvedParams, SamplingParams, Usage

if TYPE_CHECKING:
    from rlt_jax.llm import LLM
    from rlt_jax.runtime.engine import LLMEngine

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "EngineConfig",
    "EngineDead",
    "FinishReason",
    "InvalidConfig",
    "InvalidRequest",
    "KVLayoutKind",
    "LLMEngine",
    "QueueFull",
    "RequestOutput",
    "ResolvedParams",
    "RltError",
    "SamplingParams",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Import the engine on first use: reading a config or an error class needs no jax."""
    if name == "LLM":
        from rlt_jax.llm import LLM

        return LLM
    if name == "LLMEngine":
        from rlt_jax.runtime.engine import LLMEngine

        return LLMEngine
    raise AttributeError(f"module 'rlt_jax' has no attribute {name!r}")
