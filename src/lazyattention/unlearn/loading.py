# SPDX-License-Identifier: Apache-2.0
"""Load a model for training: dense weights, ordinary attention, on the device asked for."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.models.sources import resolve_source
from lazyattention.unlearn.adapters import load_adapter
from lazyattention.unlearn.architectures import LAYOUTS
from lazyattention.unlearn.config import TrainConfig


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model to be changed, its tokenizer, and where it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    folder: Path


def resolve_device(device: str) -> str:
    """Turn "auto" into "cuda" if there is one, else "cpu"."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_trainable(name_or_path: str | None, config: TrainConfig, *, adapter: Path | None = None) -> TrainableModel:
    """Load a model folder, a GGUF file (dequantised) or a hub name.

    Args:
        name_or_path: None = the default model.
        config: dtype, device, quantisation of the frozen base, and what to do with `adapter`.
        adapter: A LoRA adapter to merge, or to continue.

    Raises:
        ConfigError: There is no such model, or bitsandbytes is missing.
    """
    source = resolve_source(name_or_path)
    folder = str(source.folder)
    model_config = AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": _dtype(config, model_config)}
    device = resolve_device(config.device)
    if config.quantize != "none":
        options |= {"quantization_config": _quantization(config, model_config), "device_map": {"": device}}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    if config.quantize == "none":
        model = model.to(device)
    if adapter is not None:
        model = load_adapter(model, adapter, config.adapter_in)
    model.eval()
    return TrainableModel(model, AutoTokenizer.from_pretrained(folder), source.name, source.folder)


def _dtype(config: TrainConfig, model_config: Any) -> torch.dtype:  # noqa: ANN401
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    stored = getattr(model_config, "dtype", None) or torch.float32
    # float16 gradients overflow without loss scaling.
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float32


def _quantization(config: TrainConfig, model_config: Any) -> Any:  # noqa: ANN401
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"train.quantize = {config.quantize!r} needs the package bitsandbytes; install it or set 'none'"
        )
    layout = LAYOUTS.get(model_config.model_type)
    if layout is None:
        raise UnsupportedError(f"unlearning does not support {model_config.model_type!r}; see `lazyattention models`")
    # Columns of a packed weight cannot be trained: down-projections stay as they are.
    kept = [layout.down.rpartition(".")[2], "lm_head"]
    if config.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=_dtype(config, model_config),
        llm_int8_skip_modules=kept,
    )
