# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights by content: equal exactly when the numbers that KV depends on are equal.

Files are hashed whole (BLAKE2b, about 1 GB/s). The digest of a file is remembered beside its path, size, inode and
change times, so that a large model is read once and not at every start.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lazyattention import envs
from lazyattention.utils.hashing import digest_fields
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_READ_BYTES = 1 << 22
# What a config.json says about where and how a model was saved, not about what it computes.
_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


def weights_id_of(weights_digest: str, config: Any, adapter_digest: str = "") -> str:  # noqa: ANN401
    """Combine the digests of weights and adapter with the configuration (RoPE settings included) into one name.

    The dtype the weights are loaded in does not enter: the KV's dtype is a part of a chunk's key of its own.
    """
    return digest_fields((weights_digest, _config_text(config), adapter_digest)).hex()


def folder_digest(folder: Path) -> str:
    """Hash every weight file of a model or adapter folder; names enter too. Empty string when there is none."""
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    with ThreadPoolExecutor(max_workers=min(4, len(files) or 1)) as pool:
        digests = list(pool.map(file_digest, files))
    fields = [part for path, digest in zip(files, digests, strict=True) for part in (path.name, digest)]
    return digest_fields(fields).hex() if fields else ""


def file_digest(path: Path) -> str:
    """Hash one file's content, or return the remembered digest when the file has not changed since."""
    stat = path.stat()
    seen = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    memo = envs.CACHE_DIR / "digests" / f"{digest_fields([str(path.resolve())]).hex()}.json"
    try:
        remembered = json.loads(memo.read_text())
        if remembered["file"] == seen:
            return str(remembered["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing remembered, or not readable: hash again
    digest = _hash_content(path)
    _remember(memo, {"file": seen, "digest": digest})
    return digest


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash named tensors in memory. Floating-point values are hashed as float32 (float64 as itself)."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        for part_name, part in _plain_parts(name, tensors[name]):
            header = f"{part_name}|{tuple(part.shape)}|{part.dtype}"
            h.update(len(header).to_bytes(4, "little") + header.encode())
            h.update(part.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield plain CPU tensors; a tensor subclass (packed weights) yields the tensors it is made of."""
    tensor = tensor.detach()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and type(tensor) is not torch.Tensor:
        inner_names, context = flatten()
        yield f"{name}|{type(tensor).__name__}|{context}", torch.empty(0, dtype=torch.uint8)
        for inner in inner_names:
            yield from _plain_parts(f"{name}.{inner}", getattr(tensor, inner))
        return
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        tensor = tensor.to(torch.float32)
    yield name, tensor.to("cpu").contiguous()


def _config_text(config: Any) -> str:  # noqa: ANN401
    known = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE_CONFIG_KEYS}
    return json.dumps(known, sort_keys=True, default=str)


def _hash_content(path: Path) -> str:
    if path.stat().st_size > 1 << 30:
        logger.info("hashing %s once to name its weights", path)
    h = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            h.update(piece)
    return h.hexdigest()


def _remember(memo: Path, entry: dict[str, Any]) -> None:
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        new = memo.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(entry))
        new.replace(memo)
    except OSError as error:
        logger.warning(
            "cannot remember a weight file's digest in %s (%s): it is hashed again at every start; set "
            "LAZYATTENTION_CACHE_DIR to a folder that can be written",
            memo.parent,
            error,
        )
