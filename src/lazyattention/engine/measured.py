# SPDX-License-Identifier: Apache-2.0
"""What was measured of a model with its options, kept as small JSON files in LAZYATTENTION_CACHE_DIR/quality."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from lazyattention import envs
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.errors import ConfigError
from lazyattention.reuse.recompute import Recompute
from lazyattention.utils.hashing import digest_fields

_Kind = TypeVar("_Kind")


def prompt_options(config: EngineConfig) -> dict[str, Any]:
    """All that shapes what a model is shown, and how; scaled scores left out, which can be changed afterwards."""
    chunk = replace(config.chunk, calibrated=False, chunk_temperature=1.0, chunk_bias=0.0)
    own = {name: getattr(config, name) for name in ("documents_place", "chat_template")}
    return {**asdict(chunk), **own, "max_chunk_len": config.cache.max_chunk_len}


def path_of(kind: str, weights_id: str, config: EngineConfig, chunk: ChunkOptions) -> Path:
    """Where one kind of measurement is kept: for these weights (adapter included) and all that shapes prompts and answers."""
    fields: tuple[str, ...] = (
        kind,
        weights_id,
        json.dumps(asdict(chunk), sort_keys=True),
        config.documents_place,
        config.chat_template or "",
        str(config.cache.max_chunk_len),
    )
    recompute = Recompute.of(config.recompute)
    if recompute is not None:
        fields += (str(recompute),)
    return envs.CACHE_DIR / "quality" / f"{digest_fields(fields).hex()}.json"


def keep(path: Path, what: str, values: Mapping[str, Any]) -> None:
    """Write a measurement; the newest one counts.

    Raises:
        ConfigError: It cannot be written.
    """
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the {what} cannot be kept in {path.parent}: {error}; set LAZYATTENTION_CACHE_DIR to a folder that can be "
            "written"
        ) from error


def find(path: Path, what: str, kind: type[_Kind]) -> _Kind | None:
    """Read a measurement as a `kind` (a dataclass), or return None if there is none.

    Raises:
        ConfigError: The file is broken.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _broken(path, what, error) from error
    if not isinstance(values, dict):
        raise _broken(path, what, "it holds no object")
    try:
        return kind(**values)
    except TypeError as error:
        raise _broken(path, what, error) from error


def _broken(path: Path, what: str, reason: object) -> ConfigError:
    return ConfigError(f"the {what} in {path} cannot be read: {reason}; delete it and measure again")
