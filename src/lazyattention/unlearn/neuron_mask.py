# SPDX-License-Identifier: Apache-2.0
"""From attribution scores to the neurons that may change, and from those to the entries of each weight."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.architectures import Architecture, attention_parameters
from lazyattention.unlearn.config import NeuronAxis, NeuronConfig

# Large enough for any layer count; only spaces the seeds of layers apart.
_SEED_STRIDE = 10_007


@dataclass(frozen=True, slots=True)
class Selection:
    """Which slices of one weight may change.

    Attributes:
        dim: Dimension of the weight along which its neurons lie.
        index: int64 `[num_selected]`, ascending.
    """

    dim: int
    index: torch.Tensor

    def update_mask(self, param: torch.Tensor) -> torch.Tensor:
        """Broadcast to a bool tensor shaped like `param`, True = may change."""
        along = torch.zeros(param.shape[self.dim], dtype=torch.bool, device=param.device)
        along[self.index.to(param.device)] = True
        shape = [1] * param.dim()
        shape[self.dim] = -1
        return along.view(shape).expand_as(param)


@dataclass(frozen=True, slots=True)
class NeuronMask:
    """The neurons that may change.

    Attributes:
        axis: Which side of the down-projections the neurons lie on.
        layers: One bool tensor `[num_neurons]` per layer, on the CPU.
    """

    axis: NeuronAxis
    layers: tuple[torch.Tensor, ...]

    @property
    def counts(self) -> list[int]:
        """Selected neurons per layer."""
        return [int(layer.sum()) for layer in self.layers]

    @property
    def share(self) -> float:
        """Selected neurons over all neurons."""
        return sum(self.counts) / max(sum(layer.numel() for layer in self.layers), 1)

    @property
    def empty_layers(self) -> list[int]:
        return [idx for idx, count in enumerate(self.counts) if count == 0]

    def digest(self) -> str:
        """Fingerprint of axis and neurons, the same on every machine."""
        h = hashlib.blake2b(self.axis.encode(), digest_size=16)
        for layer in self.layers:
            h.update(layer.numel().to_bytes(8, "little") + layer.to(torch.uint8).numpy().tobytes())
        return h.hexdigest()

    def save(self, path: Path) -> None:
        """Write as safetensors, one uint8 tensor per layer."""
        tensors = {f"layer.{idx}": layer.to(torch.uint8) for idx, layer in enumerate(self.layers)}
        save_file(tensors, path, metadata={"axis": self.axis, "digest": self.digest()})

    @classmethod
    def load(cls, path: Path) -> "NeuronMask":
        """Read what `save` wrote; RequestError when the content does not match its own fingerprint."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            layers = tuple(file.get_tensor(f"layer.{idx}").bool() for idx in range(len(list(file.keys()))))
        axis: NeuronAxis = "out" if metadata.get("axis") == "out" else "in"
        mask = cls(axis, layers)
        if metadata.get("digest") != mask.digest():
            raise RequestError(f"neuron mask {path} does not match its fingerprint; run attribution again")
        return mask


def select_neurons(
    scores: Sequence[torch.Tensor],
    config: NeuronConfig,
    *,
    axis: NeuronAxis,
    retain_scores: Sequence[torch.Tensor] | None = None,
) -> NeuronMask:
    """Apply the rule, the dual policy and the control of `config`.

    Args:
        scores: Signed `attribution_score` of the forget set, one float32 `[num_neurons]` per layer; under the
            controls that need no scores only their sizes are read.
        config: Rule, dual policy, control.
        axis: Recorded in the mask.
        retain_scores: The same of the retain set; needed by dual = "drop" and "only".

    Raises:
        ConfigError: A dual policy without `retain_scores`, or nothing is selected at all.
    """
    if config.control == "none":
        return NeuronMask(axis, tuple(torch.zeros(s.numel(), dtype=torch.bool) for s in scores))
    if config.control == "all":
        return NeuronMask(axis, tuple(torch.ones(s.numel(), dtype=torch.bool) for s in scores))
    layers = _apply_rule(scores, config)
    if config.dual != "keep":
        if retain_scores is None:
            raise ConfigError(f"neurons.dual = {config.dual!r} needs scores of the retain set; give a retain set")
        critical_for_retain = _apply_rule(retain_scores, config)
        keep_dual = config.dual == "only"
        layers = [f & (r if keep_dual else ~r) for f, r in zip(layers, critical_for_retain, strict=True)]
    mask = NeuronMask(axis, tuple(layers))
    if config.control == "random":
        mask = random_mask(mask, config.seed)
    if sum(mask.counts) == 0:
        raise ConfigError("no neuron is selected; lower neurons.threshold, raise min_per_layer, or change neurons.dual")
    return mask


def random_mask(like: NeuronMask, seed: int) -> NeuronMask:
    """Draw as many neurons per layer as `like` has, uniformly and reproducibly."""
    layers = []
    for idx, layer in enumerate(like.layers):
        generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + idx)
        chosen = torch.randperm(layer.numel(), generator=generator)[: int(layer.sum())]
        drawn = torch.zeros_like(layer)
        drawn[chosen] = True
        layers.append(drawn)
    return NeuronMask(like.axis, tuple(layers))


def dual_share(forget: NeuronMask, retain: NeuronMask) -> float:
    """Share of the neurons critical for the forget set that are critical for the retain set too."""
    both = sum(int((f & r).sum()) for f, r in zip(forget.layers, retain.layers, strict=True))
    return both / max(sum(forget.counts), 1)


def _apply_rule(scores: Sequence[torch.Tensor], config: NeuronConfig) -> list[torch.Tensor]:
    cpu_scores = [score.detach().float().cpu() for score in scores]
    if config.select == "threshold":
        # A maximum of 0 or less means that no neuron has the wanted sign: then nothing passes.
        layers = [(s > config.threshold * s.max()) & (s > 0) for s in cpu_scores]
    elif config.scope == "layer":
        layers = [_pick(s, config) for s in cpu_scores]
    else:
        flat = _pick(torch.cat(cpu_scores), config)
        layers = list(torch.split(flat, [s.numel() for s in cpu_scores]))
    for s, layer in zip(cpu_scores, layers, strict=True):
        missing = config.min_per_layer - int(layer.sum())
        if missing > 0:
            layer[s.topk(min(config.min_per_layer, s.numel())).indices] = True
    return layers


def _pick(scores: torch.Tensor, config: NeuronConfig) -> torch.Tensor:
    """Select by `top_p` or `budget` among one list of scores."""
    order = scores.argsort(descending=True, stable=True)
    if config.select == "budget":
        count = max(round(config.budget * scores.numel()), 1)
    else:
        positive = scores[order].clamp(min=0)
        # The fewest neurons whose score reaches the share: those before it, and the one that reaches it.
        reached = positive.double().cumsum(0) >= config.top_p * positive.double().sum() * (1 - 1e-12)
        count = int((~reached).sum()) + 1 if float(positive.sum()) > 0 else 0
    chosen = torch.zeros(scores.numel(), dtype=torch.bool)
    chosen[order[:count]] = True
    return chosen


def neuron_selections(architecture: Architecture, mask: NeuronMask) -> dict[nn.Parameter, Selection]:
    """Map each down-projection weight with at least one selected neuron to its slices, on the weight's device."""
    if len(mask.layers) != architecture.num_layers:
        raise ConfigError(
            f"the neuron mask has {len(mask.layers)} layers, the model {architecture.num_layers}; "
            "run attribution for this model"
        )
    selections = {}
    for projection, layer in zip(architecture.down, mask.layers, strict=True):
        if layer.numel() != projection.num_neurons(mask.axis):
            raise ConfigError(
                f"the neuron mask has {layer.numel()} neurons in layer {projection.layer_idx}, "
                f"the model {projection.num_neurons(mask.axis)}; run attribution for this model"
            )
        if layer.any():
            index = layer.nonzero().flatten().to(projection.weight.device)
            selections[projection.weight] = Selection(projection.neuron_dim(mask.axis), index)
    return selections


def freeze_all_but(model: nn.Module, trainable: Iterable[nn.Parameter]) -> None:
    """Set `requires_grad` of exactly these parameters and clear all gradients."""
    chosen = {id(param) for param in trainable}
    for param in model.parameters():
        param.grad = None
        # Quantised weights are integers and can only stay frozen.
        if param.is_floating_point():
            param.requires_grad_(id(param) in chosen)


def trainable_parameters(
    model: nn.Module, architecture: Architecture, mask: NeuronMask, attention: str, *, everything: bool = False
) -> tuple[dict[str, nn.Parameter], dict[nn.Parameter, Selection]]:
    """Say which parameters an update touches and, for the down-projections, which slices.

    Args:
        model: The whole model, with adapters if `attention` is "lora".
        architecture: Of `model`.
        mask: Selected neurons.
        attention: "full", "lora" or "frozen".
        everything: Every parameter is trainable; mask and attention say nothing.

    Returns:
        Trainable parameters by their name in `model`, and the slices of those that are trained in part.
    """
    if everything:
        return dict(model.named_parameters()), {}
    selections = neuron_selections(architecture, mask)
    chosen = {id(param) for param in selections}
    if attention == "full":
        chosen |= {id(param) for _, param in attention_parameters(architecture)}
    named = {
        name: param
        for name, param in model.named_parameters()
        if id(param) in chosen or (attention == "lora" and "lora_" in name)
    }
    return named, selections
