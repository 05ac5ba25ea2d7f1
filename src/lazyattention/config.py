# SPDX-License-Identifier: Apache-2.0
"""Frozen, checked options of the engine. Command-line flags and documentation are generated from these fields."""

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lazyattention.errors import ConfigError

ENCODINGS = ("after_preamble", "isolated")
POSITIONS = ("contiguous", "parallel")
DOCUMENT_PLACES = ("first_user", "last_user", "system")


def _doc(text: str, **more: object) -> dict[str, object]:
    """Help text of a field; the command line and docs/configuration.md read it."""
    return {"help": text, **more}


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise ConfigError(f"{name} must be a positive number, got {value!r}")


def _check_within(config: object, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {str(value):.20}")


def _check_choice(config: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How KV memory is cut up and how long documents stay.

    Attributes:
        block_size: Tokens per KV block. Power of two.
        kv_memory_bytes: Memory reserved for KV; None = a quarter of free memory, at most 4 GiB, on the CPU, and 85 % of
            free memory on a GPU.
        num_blocks: Number of KV blocks; overrides kv_memory_bytes.
        kv_dtype: "auto" (the model's dtype) or the name of a torch float dtype.
        max_chunk_len: Longer documents are split into chunks of at most this many tokens.
        chunk_ttl_s: Seconds after its last use at which a stored chunk expires; None = never.
    """

    block_size: int = field(default=16, metadata=_doc("Tokens per KV block, a power of two."))
    kv_memory_bytes: int | None = field(
        default=None, metadata=_doc("Memory for stored KV in bytes; default: by device.")
    )
    num_blocks: int | None = field(default=None, metadata=_doc("Number of KV blocks; overrides the memory size."))
    kv_dtype: str = field(default="auto", metadata=_doc('Dtype of stored KV; "auto" follows the model.'))
    max_chunk_len: int = field(
        default=1024, metadata=_doc("Longer documents are split into chunks of this many tokens.")
    )
    chunk_ttl_s: float | None = field(default=None, metadata=_doc("Seconds without use after which a chunk expires."))

    def __post_init__(self) -> None:
        _check_positive(self, "block_size", "kv_memory_bytes", "num_blocks", "max_chunk_len", "chunk_ttl_s")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much runs together.

    Attributes:
        max_num_batched_tokens: Tokens computed in one step at most; longer prompts are prefilled in slices.
        max_num_seqs: Requests that run at the same time at most.
        max_model_len: Longest prompt plus output in tokens; None = what the model supports.
        max_skipped: After this many younger requests overtook a waiting one, nobody overtakes it any more.
    """

    max_num_batched_tokens: int = field(default=2048, metadata=_doc("Tokens computed in one step at most."))
    max_num_seqs: int = field(default=64, metadata=_doc("Requests that run at the same time at most."))
    max_model_len: int | None = field(default=None, metadata=_doc("Longest prompt plus output; default: the model's."))
    max_skipped: int = field(default=64, metadata=_doc("How many younger requests may overtake a waiting one."))

    def __post_init__(self) -> None:
        _check_positive(self, "max_num_batched_tokens", "max_num_seqs", "max_model_len", "max_skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """How documents are encoded, placed and looked at when they are reused. All of it is exact: the same for every chunk method.

    Full attention knows no chunks: none of these options reaches it.

    Attributes:
        encoding: What a chunk sees when it is encoded: "after_preamble" (the text before the first document) or
            "isolated" (nothing else).
        positions: Where documents stand: "contiguous" (one behind the other) or "parallel" (neighbours all start at the
            same position; the text after them goes on behind the longest).
        num_hidden: First tokens of each chunk that only the chunk itself sees; at least one token stays visible.
        sink: Tokens encoded in front of each chunk, which only the chunk itself sees and which are no part of the
            prompt: "bos", a text, or "" for none.
        chunk_temperature: What text's attention scores on chunks are divided by, before any cap of the model's; 0.001 to 1000.
        chunk_bias: What is added to these scores afterwards; -1000 to 1000.
        calibrated: Take both from `lazyattention quality --calibrate`, for this model and the other options.
    """

    encoding: str = field(default="after_preamble", metadata=_doc("What a chunk sees when encoded.", choices=ENCODINGS))
    positions: str = field(default="contiguous", metadata=_doc("Where documents stand.", choices=POSITIONS))
    num_hidden: int = field(default=0, metadata=_doc("First tokens of each chunk that only the chunk itself sees."))
    sink: str = field(
        default="", metadata=_doc('What only the chunk behind it sees, outside the prompt: "bos" or a text.')
    )
    chunk_temperature: float = field(
        default=1.0, metadata=_doc("What text's attention scores on chunks are divided by.")
    )
    chunk_bias: float = field(default=0.0, metadata=_doc("What is added to text's attention scores on chunks."))
    calibrated: bool = field(
        default=False, metadata=_doc("Take both from `lazyattention quality --calibrate`, made for this model.")
    )

    def __post_init__(self) -> None:
        _check_choice(self, "encoding", ENCODINGS)
        _check_choice(self, "positions", POSITIONS)
        if not isinstance(self.sink, str) or any("\ud800" <= char <= "\udfff" for char in self.sink):
            raise ConfigError(f"sink must be a text, got {self.sink!r:.80}")
        if isinstance(self.num_hidden, bool) or not isinstance(self.num_hidden, int) or self.num_hidden < 0:
            raise ConfigError(f"num_hidden must be a whole number of at least 0, got {self.num_hidden!r}")
        # Beyond these, scores leave float32's range.
        _check_within(self, "chunk_temperature", 1e-3, 1e3)
        _check_within(self, "chunk_bias", -1e3, 1e3)
        if not isinstance(self.calibrated, bool):
            raise ConfigError(f"calibrated must be True or False, got {self.calibrated!r:.80}")
        if self.calibrated and self.scales_scores:
            raise ConfigError("calibrated brings its own chunk_temperature and chunk_bias; leave them out")

    @property
    def scales_scores(self) -> bool:
        """True if text's attention scores on chunks are other than the model's."""
        return self.chunk_temperature != 1 or self.chunk_bias != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs besides the model.

    Attributes:
        cache: KV memory.
        scheduler: Batch limits.
        chunk: How documents are encoded, placed and looked at; requests may bring their own.
        reuse_method: Name of a reuse method: rotate_query, rotate_key, copy_rotate, chunk_recompute, prefix,
            full_recompute.
        recompute: Which blocks of stored documents each request computes anew, unless it says otherwise: "first:TOKENS",
            "deviation:SHARE", "attention:SHARE"; None = none.
        max_loss: Reuse only if it was measured to make answers at most this much less likely, in nats per answer token;
            otherwise recompute with full attention. None = always reuse.
        documents_place: Where documents given beside the messages go: before the first user message's text, before the
            last one's, or at the end of the system message.
        chat_template: None = the tokenizer's own; "plain" = a plain one for models without; else a Jinja template.
        seed: Seed of requests that bring none; None = drawn anew for each.
        compile: Compile the model's layers, which takes some seconds at start-up; None = on CUDA devices.
        cuda_graphs: Replay small steps (decodes and short prompts over stored documents) as CUDA graphs; None = on CUDA
            devices.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    chunk: ChunkOptions = field(default_factory=ChunkOptions)
    reuse_method: str = field(default="rotate_query", metadata=_doc("How stored KV is used at a new position."))
    recompute: str | None = field(
        default=None,
        metadata=_doc(
            "Parts of stored documents that each request computes anew: first:TOKENS, deviation:SHARE or attention:SHARE."
        ),
    )
    max_loss: float | None = field(
        default=None, metadata=_doc("Reuse only if its measured loss is at most this, in nats per answer token.")
    )
    documents_place: str = field(
        default="first_user", metadata=_doc("Where documents given beside the messages go.", choices=DOCUMENT_PLACES)
    )
    chat_template: str | None = field(default=None, metadata=_doc('Chat template; "plain" for models without one.'))
    seed: int | None = field(default=None, metadata=_doc("Seed of requests that bring none."))
    compile: bool | None = field(
        default=None, metadata=_doc("Compile the model's layers at start-up; default: on a GPU.")
    )
    cuda_graphs: bool | None = field(default=None, metadata=_doc("Run small steps as CUDA graphs; default: on a GPU."))

    def __post_init__(self) -> None:
        _check_choice(self, "documents_place", DOCUMENT_PLACES)
        _check_positive(self, "max_loss")
        if self.chat_template is not None and self.chat_template != "plain" and "{" not in self.chat_template:
            raise ConfigError(f"chat_template must be 'plain' or a Jinja template, got {self.chat_template!r:.80}")

    @classmethod
    def of(cls, base: "EngineConfig | None" = None, **options: object) -> "EngineConfig":
        """Build a config from flat options, whichever part they belong to.

        Args:
            base: Start from these values; None = defaults.
            **options: Field names of CacheConfig, SchedulerConfig, ChunkOptions or EngineConfig.

        Raises:
            ConfigError: An option is unknown (the nearest name is suggested) or a value is not allowed.
        """
        config = base or cls()
        nested = {"cache": CacheConfig, "scheduler": SchedulerConfig, "chunk": ChunkOptions}
        owners = {f.name: part for part, kind in nested.items() for f in fields(kind)}
        owners |= {f.name: "" for f in fields(cls)}
        parts: dict[str, dict[str, Any]] = {part: {} for part in ("", *nested)}
        for name, value in options.items():
            if name not in owners:
                raise ConfigError(_unknown_option(name, sorted(owners)))
            parts[owners[name]][name] = value
        config = replace(config, **parts.pop(""))
        return replace(config, **{part: replace(getattr(config, part), **given) for part, given in parts.items()})


def _unknown_option(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown option {name!r}.{hint} Known options: {', '.join(known)}"
