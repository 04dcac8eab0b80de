"""Typed gRPC clients.  Importing this needs grpc, not jax.

from rlt_jax.client import GenerationClient
"""

from rlt_jax.client.client import AsyncGenerationClient, AsyncGenerationStream, GenerationClient, GenerationStream
from rlt_jax.client.errors import DeadlineExceeded, ServerBusy, ServerError
from rlt_jax.client.info import EngineSettings, EngineStats, ModelInfo, OpImplementation, ServerInfo

__all__ = [
    "AsyncGenerationClient",
    "AsyncGenerationStream",
    "DeadlineExceeded",
    "EngineSettings",
    "EngineStats",
    "GenerationClient",
    "GenerationStream",
    "ModelInfo",
    "OpImplementation",
    "ServerBusy",
    "ServerError",
    "ServerInfo",
]
