# SPDX-License-Identifier: Apache-2.0
"""The engine's chunk mask as an attention function that gradients pass through, for whole prompts packed into one row.

Everything stands at its true position. A chunk encoded after the preamble sees the preamble as if it directly followed
it, so its queries need the preamble's keys moved up to the chunk: such keys are appended as extra keys, turned by the
distance, and seen by that chunk alone. All else is a mask.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from lazyattention.errors import UnsupportedError
from lazyattention.ops.rotary import LayerRotary, turn, turn_table

TRAINING_ATTENTION_NAME = "lazyattention_training"
# Packed lengths on CUDA are multiples of this, the tile of FlexAttention's masks.
TILE = 128
# What transformers' models pass along and what changes nothing here.
_HARMLESS_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_hidden_states", "output_attentions", "return_dict"}
)


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """Where one prompt lies: its tokens among the packed tokens, its extra keys among the extra keys."""

    token_start: int
    token_end: int
    extra_start: int
    extra_end: int


@dataclass(slots=True, eq=False)
class ChunkVisibility:
    """Who sees whom in one packed row. Masks and tables are made once per batch, not once per layer.

    A key is seen by the tokens of its own span and by the text of its own prompt, as far as it stands before them.

    Attributes:
        positions: int64 `[num_tokens]`, true positions within each prompt.
        span_ids: int64 `[num_tokens]`, the span a token belongs to, unique over all prompts; -1 = padding.
        text_ids: int64 `[num_tokens]`, the prompt whose text a token is; -2 = it is none, and sees its own span only.
        key_positions: int64 `[num_tokens + num_extra]`, where each key stands.
        key_span_ids: int64 `[num_tokens + num_extra]`, the span whose tokens see it.
        key_text_ids: int64 `[num_tokens + num_extra]`, the prompt whose text sees it; -1 = none.
        extra_sources: int64 `[num_extra]`, the token whose key and value each extra key copies.
        extra_deltas: int64 `[num_extra]`, tokens by which its key is moved up.
        prompts: Where each prompt lies.
        rotaries: Per layer, how keys turn.
    """

    positions: torch.Tensor
    span_ids: torch.Tensor
    text_ids: torch.Tensor
    key_positions: torch.Tensor
    key_span_ids: torch.Tensor
    key_text_ids: torch.Tensor
    extra_sources: torch.Tensor
    extra_deltas: torch.Tensor
    prompts: tuple[PackedPrompt, ...]
    rotaries: tuple[LayerRotary, ...]
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)
    _block_masks: dict[int | None, BlockMask] = field(default_factory=dict)
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Packed tokens, padding included."""
        return len(self.positions)

    @property
    def num_extra(self) -> int:
        """Extra keys."""
        return len(self.extra_sources)

    def mask(self, index: int, window: int | None) -> torch.Tensor:
        """Mask of one prompt alone: bool `[its tokens, its tokens + its extra keys]`."""
        key = (window, index)
        if key not in self._masks:
            prompt = self.prompts[index]
            tokens = torch.arange(prompt.token_start, prompt.token_end, device=self.positions.device)
            extra = torch.arange(prompt.extra_start, prompt.extra_end, device=self.positions.device)
            seen = self._seen_function(window)
            self._masks[key] = seen(None, None, tokens[:, None], torch.cat((tokens, self.num_tokens + extra))[None])
        return self._masks[key]

    def block_mask(self, window: int | None) -> BlockMask:
        """FlexAttention's mask over the whole packed row."""
        if window not in self._block_masks:
            tiles = self.tiles_seen(window)
            self._block_masks[window] = BlockMask.from_kv_blocks(
                tiles.sum(dim=1, dtype=torch.int32)[None, None],
                tiles.int().argsort(dim=1, descending=True, stable=True).int()[None, None],
                BLOCK_SIZE=TILE,
                mask_mod=self._seen_function(window),
                seq_lengths=(self.num_tokens, len(self.key_positions)),
            )
        return self._block_masks[window]

    def tiles_seen(self, window: int | None) -> torch.Tensor:
        """Which tiles of keys hold something that a tile of queries may see: bool `[num_query_tiles, num_key_tiles]`.

        Judged by the ranges of what the tiles hold, which is never too few tiles and rarely too many, and by order: no
        token sees one that is packed behind it. Testing every pair of tokens takes longer than a layer.
        """
        queries, keys = self.span_ids >= 0, self.key_span_ids >= 0
        seen = _overlaps(_tile_ranges(self.span_ids, queries), _tile_ranges(self.key_span_ids, keys))
        texts = _tile_ranges(self.text_ids, self.text_ids >= 0)
        seen |= _overlaps(texts, _tile_ranges(self.key_text_ids, self.key_text_ids >= 0))
        first, last = _tile_ranges(self.positions, queries)
        first_key, last_key = _tile_ranges(self.key_positions, keys)
        seen &= last[:, None] >= first_key
        seen[:, : self.num_tokens // TILE] &= torch.ones_like(seen[:, : self.num_tokens // TILE]).tril()
        return seen if window is None else seen & (first[:, None] - last_key < window)

    def _seen_function(self, window: int | None) -> Callable[..., torch.Tensor]:
        """Return who sees whom in FlexAttention's form; tensors, not self, are captured, since it is compiled."""
        positions, span_ids, text_ids = self.positions.int(), self.span_ids.int(), self.text_ids.int()
        key_positions, key_span_ids = self.key_positions.int(), self.key_span_ids.int()
        key_text_ids = self.key_text_ids.int()

        def is_seen(_batch: object, _head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            distance = positions[query] - key_positions[key]
            seen = (span_ids[query] == key_span_ids[key]) | (text_ids[query] == key_text_ids[key])
            seen = seen & (distance >= 0)
            return seen if window is None else seen & (distance < window)

        return is_seen

    def extend(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the extra keys, turned, and their values: `[1, num_heads, num_tokens + num_extra, head_dim]`."""
        if not self.num_extra:
            return key, value
        extra_key = key[0, :, self.extra_sources].transpose(0, 1)
        rotary = self.rotaries[layer_idx]
        if rotary.inv_freq is not None:
            extra_key = turn(extra_key, *self._table(rotary.inv_freq, key), rotary)
        extra_value = value[0, :, self.extra_sources]
        return torch.cat((key, extra_key.transpose(0, 1)[None]), dim=2), torch.cat((value, extra_value[None]), dim=2)

    def _table(self, inv_freq: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Layers that turn alike share one tensor of frequencies.
        if id(inv_freq) not in self._tables:
            dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
            self._tables[id(inv_freq)] = turn_table(inv_freq.to(key.device), self.extra_deltas, dtype)
        return self._tables[id(inv_freq)]


def _tile_ranges(values: torch.Tensor, is_valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest valid value of each tile: int64 `[num_tiles]`; a tile without any overlaps nothing."""
    padding = -len(values) % TILE
    values = functional.pad(values, (0, padding)).view(-1, TILE)
    is_valid = functional.pad(is_valid, (0, padding)).view(-1, TILE)
    low = values.masked_fill(~is_valid, torch.iinfo(torch.int64).max).amin(dim=1)
    return low, values.masked_fill(~is_valid, -1).amax(dim=1)


def _overlaps(queries: tuple[torch.Tensor, torch.Tensor], keys: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Whether ranges (low, high) share a value: bool `[num_query_tiles, num_key_tiles]`."""
    return (queries[0][:, None] <= keys[1]) & (keys[0] <= queries[1][:, None])


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
        query: `[1, num_q_heads, num_tokens, head_dim]`, turned at true positions.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, turned likewise.
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
        `([1, num_tokens, num_q_heads, head_dim], None)`.

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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and softcap is None:  # torch 2.11 fails to compile a capped score with lengths that vary
        output = _flex_attention(query, key, value, chunk_visibility, scale, sliding_window, s_aux)
    else:
        output = _prompt_by_prompt(query, key, value, chunk_visibility, scale, sliding_window, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: ChunkVisibility,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Tiles that nobody sees cost nothing, so that packing is free; shapes as in `training_attention`."""
    attend: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
    output, lse = attend(
        query,
        key,
        value,
        block_mask=visibility.block_mask(window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=True,
    )
    if sinks is not None:
        # A sink is one more key without a value: it takes its share of the softmax.
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
        output = output * share[..., None].to(output.dtype)
    attended: torch.Tensor = output
    return attended


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # Lengths differ from batch to batch: one kernel must serve them all.
    return torch.compile(flex_attention, dynamic=True)


def _prompt_by_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: ChunkVisibility,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One dense mask per prompt; shapes as in `training_attention`. Padding stays 0."""
    num_tokens = visibility.num_tokens
    group_size = query.shape[1] // key.shape[1]
    parts = []
    for index, prompt in enumerate(visibility.prompts):
        tokens = slice(prompt.token_start, prompt.token_end)
        extra = slice(num_tokens + prompt.extra_start, num_tokens + prompt.extra_end)
        rows = query[:, :, tokens]
        keys, values = (
            torch.cat((x[:, :, tokens], x[:, :, extra]), dim=2).repeat_interleave(group_size, dim=1)
            for x in (key, value)
        )
        mask = visibility.mask(index, window)
        if softcap is None and sinks is None:
            parts.append(functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale))
        else:
            parts.append(_plain_attention(rows, keys, values, mask, scale, softcap, sinks))
    output = torch.cat(parts, dim=2)
    return functional.pad(output, (0, 0, 0, num_tokens - output.shape[2]))


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=3)
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(dim=3, dtype=dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


AttentionInterface.register(TRAINING_ATTENTION_NAME, training_attention)
