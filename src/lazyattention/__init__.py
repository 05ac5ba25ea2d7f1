# SPDX-License-Identifier: Apache-2.0
"""Answer questions over documents without computing the same document twice."""

import importlib
from typing import TYPE_CHECKING, Any

from lazyattention.config import CacheConfig, ChunkOptions, EngineConfig, SchedulerConfig
from lazyattention.documents.document import Document
from lazyattention.errors import (
    CapacityError,
    ConfigError,
    LazyAttentionError,
    NotFoundError,
    RequestError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from lazyattention.engine.llm import LLM
    from lazyattention.engine.outputs import RequestOutput
    from lazyattention.engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CacheConfig",
    "CapacityError",
    "ChunkOptions",
    "ConfigError",
    "Document",
    "EngineConfig",
    "LazyAttentionError",
    "NotFoundError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "UnsupportedError",
]

# These import torch and transformers; they are loaded on first use so that `lazyattention --help` is instant.
_LAZY = {
    "LLM": "lazyattention.engine.llm",
    "RequestOutput": "lazyattention.engine.outputs",
    "SamplingParams": "lazyattention.engine.sampling_params",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
