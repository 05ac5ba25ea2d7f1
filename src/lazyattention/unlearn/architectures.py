# SPDX-License-Identifier: Apache-2.0
"""Where a model keeps its layers, down-projections and attention projections, by `model_type`.

One line per architecture. An architecture that is not listed is refused: a wrong axis would mask other weights than
the ones scored. Mixtures of experts are refused by name, since a neuron there belongs to an expert, not to a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lazyattention.errors import UnsupportedError
from lazyattention.unlearn.config import NeuronAxis


@dataclass(frozen=True, slots=True)
class _Layout:
    """Module paths of one architecture, relative to the causal model (`layers`) or to a layer (the others)."""

    layers: str
    down: str
    attention: tuple[str, ...]


_LLAMA_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LLAMA = _Layout("model.layers", "mlp.down_proj", _LLAMA_ATTENTION)

LAYOUTS: dict[str, _Layout] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3"),
        _LLAMA,
    ),
    **dict.fromkeys(("smollm3", "granite", "cohere", "cohere2", "stablelm", "helium", "exaone4"), _LLAMA),
    # q, k and v in one matrix: trained whole, as the three of them are.
    "phi3": _Layout("model.layers", "mlp.down_proj", ("self_attn.qkv_proj", "self_attn.o_proj")),
    "phi": _Layout(
        "model.layers", "mlp.fc2", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense")
    ),
    "starcoder2": _Layout("model.layers", "mlp.c_proj", _LLAMA_ATTENTION),
    "gpt2": _Layout("transformer.h", "mlp.c_proj", ("attn.c_attn", "attn.c_proj")),
    "gpt_neox": _Layout("gpt_neox.layers", "mlp.dense_4h_to_h", ("attention.query_key_value", "attention.dense")),
    "opt": _Layout(
        "model.decoder.layers",
        "fc2",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    ),
}
_MIXTURES = ("moe", "mixtral", "gpt_oss", "deepseek", "dbrx", "jamba", "arctic", "llama4")


@dataclass(frozen=True, slots=True)
class DownProjection:
    """The down-projection of one layer.

    Attributes:
        layer_idx: Layer index from 0.
        name: Module path in the causal model.
        module: nn.Linear (weight `[out, in]`) or transformers' Conv1D (weight `[in, out]`).
        in_dim: The dimension of `weight` along which its input units lie: 1 for Linear, 0 for Conv1D.
    """

    layer_idx: int
    name: str
    module: nn.Module
    in_dim: int

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def neuron_dim(self, axis: NeuronAxis) -> int:
        """Return the dimension of `weight` along which the neurons of `axis` lie."""
        return self.in_dim if axis == "in" else 1 - self.in_dim

    def num_neurons(self, axis: NeuronAxis) -> int:
        return int(self.weight.shape[self.neuron_dim(axis)])


@dataclass(frozen=True, slots=True)
class Architecture:
    """Handles into one model.

    Attributes:
        model_type: `config.model_type`.
        layers: Decoder layers in order.
        layers_name: Path of the layer list in the causal model.
        down: One down-projection per layer.
        attention: Names and modules of all attention projections.
    """

    model_type: str
    layers: Sequence[nn.Module]
    layers_name: str
    down: tuple[DownProjection, ...]
    attention: tuple[tuple[str, nn.Module], ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def supported_model_types() -> list[str]:
    """Names of the architectures `architecture_of` accepts."""
    return sorted(LAYOUTS)


def architecture_of(model: nn.Module) -> Architecture:
    """Find layers, down-projections and attention projections of a causal transformers model or a PEFT model of one.

    Raises:
        UnsupportedError: An unlisted architecture, a mixture of experts, a projection of another class than Linear
            or Conv1D (quantised, for example), or a projection that shares its weight with another module.
    """
    base = base_model_of(model)
    model_type = str(getattr(base.config, "model_type", "unknown"))
    layout = LAYOUTS.get(model_type)
    if layout is None:
        if any(part in model_type for part in _MIXTURES):
            raise UnsupportedError(
                f"unlearning does not support {model_type!r}: in a mixture of experts a neuron belongs to an expert; "
                f"supported architectures are {', '.join(supported_model_types())}"
            )
        raise UnsupportedError(
            f"unlearning does not know where {model_type!r} keeps its down-projections; "
            f"supported architectures are {', '.join(supported_model_types())}"
        )
    layers = base.get_submodule(layout.layers)
    assert isinstance(layers, nn.ModuleList)
    down = tuple(_down_projection(layer, idx, layout) for idx, layer in enumerate(layers))
    attention = tuple(
        (f"{layout.layers}.{idx}.{path}", layer.get_submodule(path))
        for idx, layer in enumerate(layers)
        for path in layout.attention
    )
    _refuse_shared_weights(base, down, attention)
    return Architecture(model_type, list(layers), layout.layers, down, attention)


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the causal transformers model inside a PEFT or DDP wrapper, or the model itself."""
    inner = getattr(model, "module", model)
    get_base_model = getattr(inner, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else inner
    assert isinstance(base, nn.Module)
    return base


def _down_projection(layer: nn.Module, layer_idx: int, layout: _Layout) -> DownProjection:
    module = layer.get_submodule(layout.down)
    name = f"{layout.layers}.{layer_idx}.{layout.down}"
    module = getattr(module, "base_layer", module)
    if type(module) is nn.Linear:
        return DownProjection(layer_idx, name, module, in_dim=1)
    if isinstance(module, Conv1D):
        return DownProjection(layer_idx, name, module, in_dim=0)
    raise UnsupportedError(
        f"down-projection {name} is a {type(module).__name__}; its columns can be trained only as nn.Linear or Conv1D; "
        "load the model without quantisation of this module"
    )


def _refuse_shared_weights(
    model: nn.Module, down: Sequence[DownProjection], attention: Sequence[tuple[str, nn.Module]]
) -> None:
    """A projection tied to another module would change that module too."""
    users: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(param), []).append(name)
    trained = [projection.weight for projection in down]
    trained += [param for _, module in attention for param in module.parameters()]
    for param in trained:
        names = users.get(id(param), [])
        if len(names) > 1:
            raise UnsupportedError(f"weight {names[0]} is shared with {names[1]}; unlearning would change both")


def attention_parameters(architecture: Architecture) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters, biases included, of all attention projections. Fused q, k, v count as one matrix."""
    return [
        (f"{name}.{param_name}", param)
        for name, module in architecture.attention
        for param_name, param in module.named_parameters()
        if torch.is_floating_point(param)
    ]
