# SPDX-License-Identifier: Apache-2.0
"""How much a prompt's last text looks at each of its tokens, while it runs as if nothing were recomputed.

Attention itself keeps no probabilities; they are formed here once more, in plain PyTorch, for the sequences that need
them.
"""

import numpy as np
import torch

from lazyattention.engine.batch import scaling_of, slots_of, spans_seen_from
from lazyattention.engine.request import Sequence
from lazyattention.engine.scheduler import Piece, Step
from lazyattention.ops import AttentionMetadata, LayerCall, Observer
from lazyattention.ops.rotary import turn, turn_table
from lazyattention.reuse.recompute import Evidence

# Of a long last text only its end asks: bounds the work, as the second one bounds memory.
MAX_QUESTION_TOKENS = 256
_TILE_ROWS = 32


class QuestionAttention:
    """Collects one sequence's attention over all layers, steps and heads.

    Attributes:
        mass: float32 (float64 in models of float64) `[num_prompt_tokens]`: summed probabilities of each token.
    """

    def __init__(self, num_prompt_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        """Nothing was seen yet."""
        self.mass = torch.zeros(num_prompt_tokens, dtype=dtype, device=device)


def watch_questions(step: Step, block_size: int, device: torch.device, dtype: torch.dtype) -> Observer | None:
    """Return what must observe this step's forward pass, or None if no question in it is watched.

    Args:
        step: Laid out piece after piece.
        block_size: Tokens per block.
        device: Of the KV pool.
        dtype: Of the model.
    """
    watched: list[_Piece] = []
    row = 0
    for piece in step.pieces:
        sequence = piece.sequence
        if (
            sequence is not None
            and sequence.group.missing_evidence is Evidence.QUESTION_ATTENTION
            and piece.span_index == len(sequence.spans) - 1
        ):
            if sequence.question_attention is None:
                sequence.question_attention = QuestionAttention(
                    len(sequence.group.prompt_token_ids), device, _accumulate_dtype(dtype)
                )
            if piece.offset + piece.num_tokens > len(sequence.spans[-1].token_ids) - MAX_QUESTION_TOKENS:
                watched.append(_Piece(piece, sequence, row, block_size, device))
        row += piece.num_tokens
    if not watched:
        return None

    def observe(call: LayerCall, metadata: AttentionMetadata) -> None:
        for one in watched:
            one.observe(call, metadata)

    return observe


class _Piece:
    """Some rows of the batch that belong to a watched question, and where the keys lie that they look at."""

    def __init__(self, piece: Piece, sequence: Sequence, row: int, block_size: int, device: torch.device) -> None:
        assert sequence.question_attention is not None
        self._sum = sequence.question_attention.mass
        last = sequence.spans[-1]
        num_before = max(piece.offset, len(last.token_ids) - MAX_QUESTION_TOKENS)
        end = piece.offset + piece.num_tokens
        self._rows = slice(row + num_before - piece.offset, row + piece.num_tokens)
        slots, turns, positions, scaling = [], [], [], []
        for index, delta in [*spans_seen_from(sequence, piece.span_index), (piece.span_index, 0)]:
            span = sequence.spans[index]
            inside = np.arange(end if span is last else len(span.token_ids))
            if not len(inside):
                continue
            blocks = span.block_ids if span.chunk is None else span.chunk_blocks(block_size)
            slots.append(slots_of(blocks, inside, block_size))
            positions.append(span.start + inside)
            scaling.append(np.full((len(inside), 2), scaling_of(sequence, piece.span_index, index)))
            is_turned = span.chunk is None or span.chunk.keys_turned
            turns.append(np.full(len(inside), delta) if is_turned else positions[-1])
        self._slots, self._turns, self._key_positions = (
            torch.from_numpy(np.concatenate(arrays)).to(device) for arrays in (slots, turns, positions)
        )
        temperatures, biases = torch.from_numpy(np.concatenate(scaling)).to(device, self._sum.dtype).T
        self._temperatures, self._biases = temperatures, biases
        self._query_positions = torch.arange(last.start + num_before, last.start + end, device=device)

    def observe(self, call: LayerCall, metadata: AttentionMetadata) -> None:
        rotary = metadata.rotaries[call.layer_idx]
        k_cache = metadata.kv_caches[call.layer_idx][0]
        dtype = self._sum.dtype
        k = k_cache.flatten(0, 1)[self._slots].to(dtype)  # [num_keys, num_kv_heads, head_dim]
        if rotary.inv_freq is not None:
            k = turn(k, *turn_table(rotary.inv_freq, self._turns, dtype), rotary)
        q = call.q[self._rows].to(dtype)
        num_kv_heads = k.shape[1]
        group = q.shape[1] // num_kv_heads
        for start in range(0, len(q), _TILE_ROWS):
            rows = slice(start, start + _TILE_ROWS)
            tile = q[rows].reshape(-1, num_kv_heads, group, q.shape[2])
            scores = torch.einsum("rhgd,nhd->rhgn", tile, k) * call.options.softmax_scale
            scores /= self._temperatures
            if call.options.logit_softcap is not None:
                scores = call.options.logit_softcap * torch.tanh(scores / call.options.logit_softcap)
            scores += self._biases
            distance = self._query_positions[rows, None] - self._key_positions
            hidden = distance < 0
            if call.options.sliding_window is not None:
                hidden = hidden | (distance >= call.options.sliding_window)
            scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
            if call.sinks is not None:
                sinks = call.sinks.to(dtype).view(1, num_kv_heads, group, 1).expand(len(tile), -1, -1, -1)
                scores = torch.cat((scores, sinks), dim=-1)
            probabilities = scores.softmax(dim=-1).sum(dim=(0, 1, 2))
            self._sum.index_add_(0, self._key_positions, probabilities[: len(self._key_positions)])


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
