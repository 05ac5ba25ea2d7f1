# SPDX-License-Identifier: Apache-2.0
"""The engine's chunk mask as an attention function that gradients pass through, for padded batches of whole prompts.

Everything stands at its true position. A chunk encoded after the preamble sees the preamble as if it directly followed
it, so its queries need the preamble's keys moved up to the chunk: such keys are appended as extra keys, turned by the
distance, and seen by that chunk alone. All else is a mask.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from lazyattention.errors import UnsupportedError
from lazyattention.ops.rotary import LayerRotary, turn, turn_table

TRAINING_ATTENTION_NAME = "lazyattention_training"
# What transformers' models pass along and what changes nothing here.
_HARMLESS_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_hidden_states", "output_attentions", "return_dict"}
)


@dataclass(slots=True, eq=False)
class ChunkVisibility:
    """Who sees whom in one batch. Masks and tables are made once per batch, not once per layer.

    Attributes:
        positions: int64 `[batch, num_tokens]`, true positions.
        span_ids: int64 `[batch, num_tokens]`, the span a token belongs to; -1 = padding.
        is_text: bool `[batch, num_tokens]`: sees all earlier spans; other tokens see their own span only.
        extra_sources: int64 `[batch, num_extra]`, index of the token whose key and value each extra key copies.
        extra_deltas: int64 `[batch, num_extra]`, tokens by which its key is moved up.
        extra_spans: int64 `[batch, num_extra]`, the only span that sees it; -2 = padding.
        rotaries: Per layer, how keys turn.
    """

    positions: torch.Tensor
    span_ids: torch.Tensor
    is_text: torch.Tensor
    extra_sources: torch.Tensor
    extra_deltas: torch.Tensor
    extra_spans: torch.Tensor
    rotaries: tuple[LayerRotary, ...]
    _biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def num_extra(self) -> int:
        """Extra keys per row of the batch."""
        return self.extra_sources.shape[1]

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[batch, 1, num_tokens, num_tokens + num_extra]`: 0 = seen, a large negative number = not.

        A finite number, so that a padding row's softmax is no NaN. A token always sees itself.
        """
        key = (window, dtype)
        if key not in self._biases:
            seen = self._seen(window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._biases[key] = bias.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
        return self._biases[key]

    def _seen(self, window: int | None) -> torch.Tensor:
        positions, span_ids = self.positions, self.span_ids
        distances = positions[:, :, None] - positions[:, None, :]
        same_span = span_ids[:, :, None] == span_ids[:, None, :]
        seen = (distances >= 0) & (same_span | self.is_text[:, :, None]) & (span_ids >= 0)[:, None, :]
        moved = positions.gather(1, self.extra_sources) + self.extra_deltas
        extra_seen = span_ids[:, :, None] == self.extra_spans[:, None, :]
        if window is not None:
            seen &= distances < window
            extra_seen &= positions[:, :, None] - moved[:, None, :] < window
        num_tokens = positions.shape[1]
        seen |= torch.eye(num_tokens, dtype=torch.bool, device=seen.device)
        return torch.cat((seen, extra_seen), dim=2)

    def extend(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the extra keys, turned, and their values: `[batch, num_heads, num_tokens + num_extra, head_dim]`."""
        if not self.num_extra:
            return key, value
        extra_key = _take(key, self.extra_sources)
        rotary = self.rotaries[layer_idx]
        if rotary.inv_freq is not None:
            cos, sin = self._table(rotary.inv_freq, key)
            # [batch, num_heads, num_extra, head_dim] -> rows of heads, which is what turns.
            rows = extra_key.transpose(1, 2).flatten(0, 1)
            extra_key = turn(rows, cos, sin, rotary).view(extra_key.transpose(1, 2).shape).transpose(1, 2)
        return torch.cat((key, extra_key), dim=2), torch.cat((value, _take(value, self.extra_sources)), dim=2)

    def _table(self, inv_freq: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Layers that turn alike share one tensor of frequencies.
        if id(inv_freq) not in self._tables:
            dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
            self._tables[id(inv_freq)] = turn_table(inv_freq.to(key.device), self.extra_deltas.flatten(), dtype)
        return self._tables[id(inv_freq)]


def training_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    chunk_visibility: ChunkVisibility,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unknown: Any,  # noqa: ANN401 - inspected below; anything unexpected raises
) -> tuple[torch.Tensor, None]:
    """Attend as the engine would, with gradients. Argument names are transformers'.

    Exact: equals the engine's logits up to rounding, which tests hold in float64.

    Args:
        module: Its `layer_idx` says how keys turn.
        query: `[batch, num_q_heads, num_tokens, head_dim]`, turned at true positions.
        key: `[batch, num_kv_heads, num_tokens, head_dim]`, turned likewise.
        value: As key, not turned.
        attention_mask: Must be None.
        chunk_visibility: Who sees whom.
        scaling: softmax_scale; None = `head_dim ** -0.5`.
        dropout: Must be 0.
        sliding_window: Keys at this distance or farther are not seen.
        softcap: Scores are capped softly at this value.
        s_aux: Attention sinks, `[num_q_heads]`.
        unknown: Refused unless known to change nothing.

    Returns:
        `([batch, num_tokens, num_q_heads, head_dim], None)`.

    Raises:
        UnsupportedError: Something was given that would change the mathematics.
    """
    names = sorted(
        name
        for name, given in unknown.items()
        if given is not None and given is not False and name not in _HARMLESS_KEYWORDS
    )
    if attention_mask is not None or dropout or names:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(names) or 'a mask or dropout'} to its attention function, which "
            "adapting does not support; this model cannot be adapted"
        )
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int), "transformers numbers its attention modules"
    key, value = chunk_visibility.extend(key, value, layer_idx)
    bias = chunk_visibility.bias(sliding_window, query.dtype)
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1:
        # Memory-efficient kernels with a mask know no grouped heads.
        key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:
        output = _plain_attention(query, key, value, bias, scale, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=3)
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(dim=3, dtype=dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


def _take(x: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Gather tokens: `[batch, num_heads, num_tokens, head_dim]` by `[batch, num_extra]`."""
    index = sources[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


AttentionInterface.register(TRAINING_ATTENTION_NAME, training_attention)
