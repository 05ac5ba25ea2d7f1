# SPDX-License-Identifier: Apache-2.0
"""From prompt layouts and answers to padded batches: tokens, positions, and who sees whom under the engine's own plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazyattention.adapt.attention import ChunkVisibility
from lazyattention.ops.rotary import LayerRotary
from lazyattention.reuse import REUSE_METHODS, PromptLayout, SpanUse

# Lengths are padded to multiples of this: kernels that take a mask want aligned rows.
_ALIGNMENT = 8
_PADDED_SPAN = -1
_PADDED_EXTRA = -2


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One prompt with its answer.

    Attributes:
        layout: The prompt.
        answer: Token ids behind it.
        reuse_method: "full_recompute" = full attention; any chunk method = the chunk mask.
        encoding: What chunks see when encoded.
    """

    layout: PromptLayout
    answer: tuple[int, ...]
    reuse_method: str
    encoding: str

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.layout.num_tokens + len(self.answer)

    @property
    def num_question_tokens(self) -> int:
        """Length of the text behind the last document (all of it, if there are no documents)."""
        return len(self.layout.spans[-1].token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Rows padded on the left, so that answers end together.

    Attributes:
        input_ids: int64 `[batch, num_tokens]`.
        visibility: Positions and masks.
        num_kept: Last tokens whose logits are needed: the longest question with its answer.
        answer_mask: bool `[batch, num_kept]`, tokens that predict an answer token.
        question_mask: bool `[batch, num_kept]`, tokens that predict a question token.
        targets: int64 `[batch, num_kept]`, the token each one predicts; 0 behind the end.
    """

    input_ids: torch.Tensor
    visibility: ChunkVisibility
    num_kept: int
    answer_mask: torch.Tensor
    question_mask: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def make_batch(
    rows: Sequence[TrainingRow],
    rotaries: Sequence[LayerRotary],
    *,
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """Pad rows into one batch; masks follow `ReuseMethod.plan`, as in the engine."""
    num_tokens = _aligned(max(row.num_tokens for row in rows))
    placed = [_place(row) for row in rows]
    num_extra = _aligned(max(len(one.extra_sources) for one in placed))
    num_kept = max(row.num_question_tokens + len(row.answer) for row in rows)

    def padded(parts: Sequence[Sequence[int]], length: int, filler: int) -> torch.Tensor:
        return torch.tensor([[filler] * (length - len(part)) + list(part) for part in parts], device=device)

    input_ids = padded([[*row.layout.token_ids, *row.answer] for row in rows], num_tokens, pad_token_id)
    shifts = [num_tokens - row.num_tokens for row in rows]
    sources = [[shift + source for source in one.extra_sources] for one, shift in zip(placed, shifts, strict=True)]
    visibility = ChunkVisibility(
        positions=padded([range(row.num_tokens) for row in rows], num_tokens, 0),
        span_ids=padded([one.span_ids for one in placed], num_tokens, _PADDED_SPAN),
        is_text=padded([one.is_text for one in placed], num_tokens, 0).bool(),
        extra_sources=padded(sources, num_extra, 0).view(len(rows), num_extra).long(),
        extra_deltas=padded([one.extra_deltas for one in placed], num_extra, 0).view(len(rows), num_extra).long(),
        extra_spans=padded([one.extra_spans for one in placed], num_extra, _PADDED_EXTRA)
        .view(len(rows), num_extra)
        .long(),
        rotaries=tuple(rotaries),
    )
    place = torch.arange(num_kept, device=device)[None]
    answer_lens = torch.tensor([len(row.answer) for row in rows], device=device)[:, None]
    question_lens = torch.tensor([row.num_question_tokens for row in rows], device=device)[:, None]
    first_answer = num_kept - answer_lens - 1
    targets = torch.zeros(len(rows), num_kept, dtype=torch.long, device=device)
    targets[:, :-1] = input_ids[:, num_tokens - num_kept + 1 :]
    return TrainingBatch(
        input_ids=input_ids,
        visibility=visibility,
        num_kept=num_kept,
        answer_mask=(place >= first_answer) & (place < num_kept - 1),
        question_mask=(place >= num_kept - answer_lens - question_lens) & (place < first_answer),
        targets=targets,
    )


@dataclass(slots=True)
class _Placed:
    span_ids: list[int]
    is_text: list[bool]
    extra_sources: list[int]
    extra_deltas: list[int]
    extra_spans: list[int]


def _place(row: TrainingRow) -> _Placed:
    """Spell out one row's visibility."""
    plan = REUSE_METHODS[row.reuse_method].plan(row.layout, row.encoding)
    placed = _Placed([], [], [], [], [])
    num_preamble_tokens = 0 if plan.preamble_index is None else len(row.layout.spans[plan.preamble_index].token_ids)
    start = 0
    for index, (span, use) in enumerate(zip(row.layout.spans, plan.uses, strict=True)):
        num_tokens = len(span.token_ids)
        is_chunk = use is not SpanUse.TEXT and index != plan.preamble_index
        placed.span_ids += [index] * num_tokens
        placed.is_text += [not is_chunk] * num_tokens
        if is_chunk and num_tokens:
            placed.extra_sources += range(num_preamble_tokens)
            placed.extra_deltas += [start - num_preamble_tokens] * num_preamble_tokens
            placed.extra_spans += [index] * num_preamble_tokens
        start += num_tokens
    placed.span_ids += [len(row.layout.spans) - 1] * len(row.answer)
    placed.is_text += [True] * len(row.answer)
    return placed


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
