# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF file into a folder of safetensors once, so that later starts are fast and nothing stays packed.

The folder is named after the file's content. It appears by one rename, so it is complete or absent: two processes may
convert the same file at once, and the first to finish wins. A folder that was damaged later is set aside and rebuilt.
"""

import io
import json
import os
import shutil
import tempfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import GgufConfig

from lazyattention import envs
from lazyattention.errors import ConfigError
from lazyattention.models.reading import READ_ERRORS, refuse_incomplete, short
from lazyattention.models.weights_id import file_digest
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

_MANIFEST = "lazyattention.json"
# Raised whenever the converted folder's content changes.
_FORMAT = 1
_MAGIC = b"GGUF"
# Above this, bfloat16 halves the disk space; below, float32 keeps every bit of the dequantised weights.
_FLOAT32_UP_TO_BYTES = 4 << 30


def prepare_gguf(path: Path) -> Path:
    """Return a folder with `path`'s weights (dequantised), configuration and tokenizer; make it if needed.

    Weights are kept in float32 when that takes at most 4 GiB, else in bfloat16.

    Raises:
        ConfigError: The file is no GGUF file, is cut short, or holds a model that transformers cannot read.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConfigError(
                f"{path} is not a GGUF file (its first bytes are not 'GGUF'); give a .gguf file or a model folder; if "
                "it was downloaded, download it again"
            )
    folder = envs.CACHE_DIR / "models" / f"{path.stem}-{file_digest(path)[:16]}-v{_FORMAT}"
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        logger.info("converting %s into %s (once)", path, folder)
        _convert(path, work)
        _write_manifest(work)
        _publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def is_complete(folder: Path) -> bool:
    """Return whether every file is there with the size (for weights: content) it had when it was written."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, (size, digest) in files.items():
            if (folder / name).stat().st_size != size:
                return False
            if digest is not None and file_digest(folder / name) != digest:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _convert(path: Path, work: Path) -> None:
    # transformers draws one bar with tqdm itself, which its own switch for progress bars does not reach.
    is_quiet = not transformers_logging.is_progress_bar_enabled()
    try:
        with redirect_stderr(io.StringIO()) if is_quiet else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except READ_ERRORS as error:
        raise ConfigError(
            f"{path} cannot be read as a GGUF model: {short(error)}; it may be cut short, or of an architecture that "
            "transformers does not read; download it again or use the model's safetensors"
        ) from error
    model: PreTrainedModel
    model, found = loaded
    refuse_incomplete(found, str(path))
    _save(model, work)
    eos_token_id = model.config.eos_token_id
    # transformers 5.17 takes the first special token of some files for the end of text.
    if isinstance(eos_token_id, int) and tokenizer.eos_token_id != eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token_id)
    tokenizer.save_pretrained(work)


def _save(model: PreTrainedModel, work: Path) -> None:
    """Save dense weights. `save_pretrained` refuses models read from GGUF in some versions, so this does it plainly."""
    num_bytes = 4 * sum(param.numel() for param in model.parameters())
    dtype = torch.float32 if num_bytes <= _FLOAT32_UP_TO_BYTES else torch.bfloat16
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    tensors = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (is_tied and name in tied)
    }
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    for unwanted in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, unwanted):
            delattr(model.config, unwanted)
    model.config.dtype = dtype
    model.config.save_pretrained(work)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(work)


def _write_manifest(work: Path) -> None:
    files = {
        path.name: (path.stat().st_size, file_digest(path) if path.suffix == ".safetensors" else None)
        for path in sorted(work.iterdir())
    }
    (work / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))


def _publish(work: Path, folder: Path) -> None:
    """Rename `work` to `folder`; keep a complete folder that another process published first."""
    if folder.exists() and not is_complete(folder):
        broken = Path(tempfile.mkdtemp(prefix=f".{folder.name}-broken-", dir=folder.parent))
        logger.warning("%s is damaged; it is rebuilt from the GGUF file", folder)
        os.replace(folder, broken / "folder")
        shutil.rmtree(broken, ignore_errors=True)
    try:
        os.replace(work, folder)
    except OSError:
        if not is_complete(folder):
            raise
