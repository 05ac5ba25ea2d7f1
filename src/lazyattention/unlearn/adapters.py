# SPDX-License-Identifier: Apache-2.0
"""LoRA in and out: adapters on attention, and the exact adapter of a change to selected neurons.

A change to the columns K of a weight is dW[:, K] times the one-hot rows of K: a LoRA of rank |K| without approximation.
Rows are symmetric. Attention trained in full has full-rank changes and is shipped as a delta file instead.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.unlearn.architectures import Architecture, DownProjection
from lazyattention.unlearn.config import TrainConfig
from lazyattention.unlearn.masked_step import take
from lazyattention.unlearn.neuron_mask import NeuronMask, Selection
from lazyattention.utils.packages import require_package

_ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def _peft() -> Any:  # noqa: ANN401 - a module
    return require_package("peft", "LoRA", "unlearn")


def add_attention_lora(model: PreTrainedModel, architecture: Architecture, config: TrainConfig) -> PreTrainedModel:
    """Wrap `model` with adapters on all attention projections; an adapter already there is continued."""
    peft = _peft()
    if hasattr(model, "peft_config"):
        return model
    is_conv1d = architecture.down[0].in_dim == 0
    lora = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=[name for name, _ in architecture.attention],
        fan_in_fan_out=is_conv1d,
        bias="none",
        task_type="CAUSAL_LM",
    )
    wrapped: PreTrainedModel = peft.get_peft_model(model, lora)
    return wrapped


def load_adapter(model: PreTrainedModel, folder: Path, mode: str) -> PreTrainedModel:
    """Put a LoRA adapter on a model before unlearning.

    Args:
        model: The base model; changed.
        folder: A PEFT adapter.
        mode: "merge" into the weights, or "continue" training it.
    """
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"adapter folder {folder} has no adapter_config.json; give a folder saved by PEFT")
    wrapped = _peft().PeftModel.from_pretrained(model, str(folder), is_trainable=mode == "continue")
    merged: PreTrainedModel = wrapped if mode == "continue" else wrapped.merge_and_unload()
    return merged


def export_adapter(
    folder: Path,
    model: Any,  # noqa: ANN401 - a PeftModel, whose type needs the package
    architecture: Architecture,
    mask: NeuronMask,
    original: Mapping[str, torch.Tensor],
    *,
    attention: str,
    base_model_name: str,
) -> Path:
    """Write one PEFT adapter that turns the original model into the unlearned one.

    Exact: the neurons' part is kept in float32 and reproduces every change; the attention part is the LoRA trained.

    Args:
        folder: Created if missing.
        model: The unlearned model, its attention adapters not merged.
        architecture: Of the model.
        mask: Neurons that were trained.
        original: Captured entries of the original down-projections, by weight name.
        attention: "lora" or "frozen".
        base_model_name: Written into the adapter's configuration.

    Raises:
        UnsupportedError: Attention was trained in full.
    """
    if attention == "full":
        raise UnsupportedError(
            "attention trained in full has no exact LoRA of low rank; use train.attention = 'lora' or 'frozen', or "
            "take the delta file"
        )
    tensors, ranks = neuron_adapter(architecture, mask, original)
    config = _peft().LoraConfig(
        r=8, lora_alpha=8, bias="none", task_type="CAUSAL_LM", base_model_name_or_path=base_model_name
    )
    if attention == "lora":
        trained = model.peft_config["default"]
        config.r, config.lora_alpha, config.fan_in_fan_out = trained.r, trained.lora_alpha, trained.fan_in_fan_out
        for name, param in model.named_parameters():
            if "lora_" in name:
                tensors[name.replace(".default.", ".")] = param.detach().cpu().contiguous()
    config.fan_in_fan_out = architecture.down[0].in_dim == 0
    config.rank_pattern = dict(ranks)
    config.alpha_pattern = {name: float(rank) for name, rank in ranks.items()}
    attention_names = sorted(
        {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors if ".lora_A." in name} - set(ranks)
    )
    config.target_modules = [*attention_names, *ranks]
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _ADAPTER_FILE, metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    return folder


def neuron_adapter(
    architecture: Architecture, mask: NeuronMask, original: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """LoRA factors of the down-projections' changes, and their ranks by module name."""
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for projection, layer in zip(architecture.down, mask.layers, strict=True):
        if not layer.any():
            continue
        selection = Selection(projection.neuron_dim(mask.axis), layer.nonzero().flatten())
        new = take(projection.weight.detach().cpu(), selection).float()
        factor_a, factor_b = _factors(projection, mask, selection, new - original[f"{projection.name}.weight"].float())
        tensors[f"{_PREFIX}{projection.name}.lora_A.weight"] = factor_a.contiguous()
        tensors[f"{_PREFIX}{projection.name}.lora_B.weight"] = factor_b.contiguous()
        ranks[projection.name] = selection.index.numel()
    return tensors, ranks


def _factors(
    projection: DownProjection, mask: NeuronMask, selection: Selection, change: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `[rank, in]` and B `[out, rank]` with B @ A equal to the change of the weight written as `[out, in]`."""
    rank = selection.index.numel()
    one_hot = torch.zeros(rank, projection.num_neurons(mask.axis))
    one_hot[torch.arange(rank), selection.index] = 1.0
    if projection.in_dim == 0:
        change = change.T  # Conv1D stores [in, out]
    if mask.axis == "in":
        return one_hot, change  # change: [out, rank]
    return change, one_hot.T  # change: [rank, in]
