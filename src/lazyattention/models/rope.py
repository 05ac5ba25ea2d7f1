# SPDX-License-Identifier: Apache-2.0
"""Decides, per layer, how a transformers model's heads are turned by position; refuses what cannot be turned exactly.

Turning is exact when the angle is position times a fixed frequency. The claim made here is checked on the model itself
by `models/probe.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lazyattention.errors import UnsupportedError
from lazyattention.models.matrix import (
    EXACT_FAMILIES,
    EXACT_ROPE_TYPES,
    REFUSED_FAMILIES,
    REFUSED_ROPE_TYPES,
    LayersWithoutRope,
)
from lazyattention.ops.rotary import LayerRotary

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_WHAT_TO_DO = "`lazyattention models` lists the families that are served"


def layer_rotaries(model: PreTrainedModel) -> list[LayerRotary]:
    """Return how each attention layer's heads are turned, by `layer_idx`.

    Frequencies are the model's own `inv_freq` buffers in float32, on the model's device; layers that use the same
    frequencies share one tensor. YaRN's attention factor is left out: it is in q and k already.

    Args:
        model: A transformers causal language model.

    Raises:
        UnsupportedError: The family, its RoPE type or an option of it cannot be turned exactly, or was never tested.
    """
    refuse_unsupported(model.config)
    config = model.config.get_text_config()
    family = EXACT_FAMILIES[config.model_type]
    rotary_emb = _rotary_embedding(model)
    # A table that two layers share stays one tensor, so that its cos and sin are computed once per step.
    tables: dict[str, torch.Tensor] = {}
    rotaries = []
    for layer_idx, module in enumerate(attention_modules(model)):
        if not _has_rope(module, config, family.layers_without_rope, layer_idx):
            rotaries.append(LayerRotary(inv_freq=None, rotary_dim=0))
            continue
        name = _table_name(rotary_emb, module, config, layer_idx)
        if name not in tables:
            tables[name] = getattr(rotary_emb, name).detach().to(torch.float32)
        inv_freq = tables[name]
        rotaries.append(
            LayerRotary(
                inv_freq=inv_freq,
                rotary_dim=2 * inv_freq.shape[0],
                is_interleaved=family.pairs == "interleaved",
            )
        )
    return rotaries


def refuse_unsupported(config: Any) -> None:  # noqa: ANN401 - every family has its own config class
    """Refuse, from its configuration alone, a model that cannot be turned exactly or was never tested.

    Raises:
        UnsupportedError: With the reason.
    """
    text_config = config.get_text_config()
    for model_type in dict.fromkeys((config.model_type, text_config.model_type)):
        if model_type in REFUSED_FAMILIES:
            raise UnsupportedError(
                f"models of type {model_type!r} cannot be served: {REFUSED_FAMILIES[model_type]}; {_WHAT_TO_DO}"
            )
        if model_type not in EXACT_FAMILIES:
            raise UnsupportedError(
                f"models of type {model_type!r} have not been tested, and an untested position encoding could give "
                f"wrong answers in silence; {_WHAT_TO_DO}"
            )
    _refuse_options(text_config)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for table in per_layer_type or [parameters]:
        _refuse_rope_type(table.get("rope_type", "default"))
    if "mrope_section" in parameters:
        raise UnsupportedError(f"mrope_section is set: {REFUSED_FAMILIES['qwen2_vl']}; {_WHAT_TO_DO}")


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's attention modules, index = `layer_idx`.

    Raises:
        UnsupportedError: A decoder layer has no attention module of its own (state-space and hybrid models).
    """
    decoder = _decoder(model)
    modules = []
    for layer_idx, layer in enumerate(decoder.layers):
        own = list(_attention_in(layer, layer_idx))
        if len(own) != 1:
            raise UnsupportedError(
                f"layer {layer_idx} of this model has {len(own)} attention modules; only decoders with exactly one per "
                f"layer are served; {_WHAT_TO_DO}"
            )
        modules.append(own[0])
    return modules


def _attention_in(layer: nn.Module, layer_idx: int) -> Iterator[nn.Module]:
    for module in layer.modules():
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) == layer_idx:
            yield module


def _decoder(model: PreTrainedModel) -> Any:  # noqa: ANN401 - transformers' decoders share no type that names `layers`
    candidates = [model.get_decoder() if hasattr(model, "get_decoder") else None, getattr(model, "model", None)]
    decoder = next((candidate for candidate in candidates if hasattr(candidate, "layers")), None)
    if decoder is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no decoder with layers; only decoder-only language models are served; "
            f"{_WHAT_TO_DO}"
        )
    return decoder


def _refuse_options(config: Any) -> None:  # noqa: ANN401
    """Refuse what one family's configuration can switch on and what changes the mathematics."""
    if config.model_type == "llama4_text" and getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedError(
            "attn_temperature_tuning scales queries by their absolute position, so a chunk encoded alone differs; only "
            "models with attn_temperature_tuning=False are exact; choose another model"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedError(
            f"num_kv_shared_layers={config.num_kv_shared_layers}: layers that read another layer's KV are not "
            f"modelled by the KV pool; only 0 is served; {_WHAT_TO_DO}"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(
            f"use_bidirectional_attention={config.use_bidirectional_attention!r}: only causal attention is served; "
            f"{_WHAT_TO_DO}"
        )
    _refuse_untested_window(config)
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    # Llama 4 calls its layers chunked; up to attention_chunk_size tokens they are full attention.
    if config.model_type == "llama4_text":
        unknown -= {"chunked_attention"}
    if unknown:
        raise UnsupportedError(
            f"layer_types contains {sorted(unknown)}; only {sorted(_KNOWN_LAYER_TYPES)} are served; {_WHAT_TO_DO}"
        )


def _refuse_untested_window(config: Any) -> None:  # noqa: ANN401
    """Refuse a sliding window in families that were not tested with one: their mask and their keyword may differ."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    is_used = window and getattr(config, "use_sliding_window", True)
    if layer_types is not None:
        is_used = is_used and "sliding_attention" in layer_types
    reaches_all = window and window >= config.max_position_embeddings
    if is_used and not reaches_all and "sliding window" not in EXACT_FAMILIES[config.model_type].features:
        raise UnsupportedError(
            f"sliding_window={window} is set in a model of type {config.model_type!r}, whose window does not reach the "
            f"attention function; only None or at least {config.max_position_embeddings} is served; {_WHAT_TO_DO}"
        )


def _rotary_embedding(model: PreTrainedModel) -> nn.Module:
    decoder = _decoder(model)
    rotary_emb: nn.Module | None = getattr(decoder, "rotary_emb", None)
    if rotary_emb is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no rotary embedding (learned positions, ALiBi or none); only RoPE can be "
            f"turned; {_WHAT_TO_DO}"
        )
    rope_types = getattr(rotary_emb, "rope_type", "default")
    for rope_type in rope_types.values() if isinstance(rope_types, dict) else [rope_types]:
        _refuse_rope_type(rope_type)
    return rotary_emb


def _refuse_rope_type(rope_type: str) -> None:
    if rope_type not in EXACT_ROPE_TYPES:
        reason = REFUSED_ROPE_TYPES.get(rope_type, "it has not been tested")
        raise UnsupportedError(
            f"RoPE type {rope_type!r} cannot be turned exactly: {reason}; exact are {', '.join(EXACT_ROPE_TYPES)}; "
            "choose a model with one of these, or remove the RoPE scaling from config.json if prompts stay within the "
            "original length"
        )


def _table_name(rotary_emb: nn.Module, module: nn.Module, config: Any, layer_idx: int) -> str:  # noqa: ANN401
    """Name the buffer of `rotary_emb` with this layer's frequencies."""
    if hasattr(rotary_emb, "inv_freq"):
        return "inv_freq"
    layer_type = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    name = f"{layer_type or config.layer_types[layer_idx]}_inv_freq"
    if not hasattr(rotary_emb, name):
        raise UnsupportedError(
            f"{type(rotary_emb).__name__} has no frequencies named {name!r} for layer {layer_idx}; expected one table, "
            f"or one per layer type; {_WHAT_TO_DO}"
        )
    return name


def _has_rope(module: nn.Module, config: Any, rule: LayersWithoutRope, layer_idx: int) -> bool:  # noqa: ANN401
    if rule == "none":
        return True
    if rule == "use_rope":
        return bool(module.use_rope)
    if rule == "not_sliding":
        return module.sliding_window is not None
    return module.sliding_window is None or bool(config.layer_types[layer_idx] == "sliding_attention")
