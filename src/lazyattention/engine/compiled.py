# SPDX-License-Identifier: Apache-2.0
"""Compiles a transformers model layer by layer: one graph for all layers of a kind, whatever the number of tokens.

A whole-model graph would take minutes to compile and break at every change of shape; a layer takes seconds, once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from lazyattention.errors import UnsupportedError
from lazyattention.models.attention import TicketBook
from lazyattention.ops import AttentionMetadata

# What compiling may raise, now or when a later batch needs another graph; the model itself is sound then.
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
# Dimensions of size 1 get a graph of their own, so a single token is not worth compiling for.
MIN_TOKENS = 2


class _LayerForward:
    """Stands in for a layer's `forward`: compiled when it is handed tickets, the layer's own otherwise."""

    def __init__(self, layer: nn.Module, layer_idx: int, compiled: Callable[..., Any]) -> None:
        self._layer = layer
        self._layer_idx = layer_idx
        self._compiled = compiled
        self._original = layer.forward

    def __call__(self, *args: Any, attention_metadata: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401 - transformers' own
        if isinstance(attention_metadata, TicketBook):
            ticket = attention_metadata.tickets[self._layer_idx]
            return self._compiled(self._layer, *args, attention_metadata=ticket, **kwargs)
        return self._original(*args, attention_metadata=attention_metadata, **kwargs)


class CompiledLayers:
    """Takes the place of each decoder layer's `forward` until `close`.

    Protocol: run the model with `attention_metadata` from `metadata`; with anything else the layers run as they are. The
    first run compiles. Any run may raise one of COMPILE_ERRORS, and can be repeated without compiled layers.
    """

    def __init__(self, model: nn.Module, num_layers: int, *, backend: str = "inductor") -> None:
        """Wrap the layers; nothing is compiled yet.

        Args:
            model: A transformers model behind our attention function.
            num_layers: Attention layers it has.
            backend: Of torch.compile; others than the default are for tests.

        Raises:
            UnsupportedError: The layers cannot be told apart, or carry somebody else's hooks.
        """
        self._layers = _decoder_layers(model, num_layers)
        self._book = TicketBook(set(self._layers))
        compiled = {
            kind: torch.compile(kind.forward, backend=backend, dynamic=True, fullgraph=True)
            for kind in {type(layer) for layer in self._layers.values()}
        }
        for layer_idx, layer in self._layers.items():
            layer.forward = _LayerForward(layer, layer_idx, compiled[type(layer)])

    @contextmanager
    def metadata(self, metadata: AttentionMetadata) -> Iterator[TicketBook]:
        """Give what to pass as `attention_metadata` inside the block."""
        with self._book.open(metadata) as book:
            yield book

    def close(self) -> None:
        """Give the layers their own `forward` back."""
        for layer in self._layers.values():
            layer.__dict__.pop("forward", None)


def _decoder_layers(model: nn.Module, num_layers: int) -> dict[int, nn.Module]:
    """Return layer index -> decoder layer."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        indices = [_layer_indices(layer) for layer in module]
        if all(len(found) == 1 for found in indices):
            layers = {found.pop(): layer for found, layer in zip(indices, module, strict=True)}
            if any(isinstance(layer.__dict__.get("forward"), _LayerForward) for layer in layers.values()):
                raise UnsupportedError("another engine has compiled this model's layers; close it first")
            if any("forward" in layer.__dict__ for layer in layers.values()):
                raise UnsupportedError("the model's layers carry hooks, for example of accelerate")
            return layers
    raise UnsupportedError(f"no list of {num_layers} decoder layers with one attention each was found in the model")


def _layer_indices(layer: nn.Module) -> set[int]:
    found = (getattr(module, "layer_idx", None) for module in layer.modules())
    return {layer_idx for layer_idx in found if isinstance(layer_idx, int)}
