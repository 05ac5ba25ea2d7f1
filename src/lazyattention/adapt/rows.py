# SPDX-License-Identifier: Apache-2.0
"""From prompt layouts and answers to packed batches: tokens, positions, and who sees whom under the engine's own plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lazyattention.adapt.attention import TILE, ChunkVisibility, PackedPrompt
from lazyattention.ops.rotary import LayerRotary
from lazyattention.reuse import REUSE_METHODS, Chunking, PromptLayout, ReusePlan, SpanUse

_PADDED_SPAN = -1
_NO_TEXT, _NO_KEY_TEXT = -2, -1


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One prompt with its answer.

    Attributes:
        layout: The prompt.
        teacher_layout: What the teacher reads in its place; the question is the same.
        answer: Token ids behind it.
        plan: Who sees whom, and where everything stands.
    """

    layout: PromptLayout
    teacher_layout: PromptLayout
    answer: tuple[int, ...]
    plan: ReusePlan

    @classmethod
    def of(
        cls,
        layout: PromptLayout,
        answer: tuple[int, ...],
        reuse_method: str,
        chunking: Chunking | None = None,
        *,
        teacher_layout: PromptLayout | None = None,
    ) -> "TrainingRow":
        """Plan a row: "full_recompute" = full attention; any chunk method = the chunk mask."""
        taught = layout if teacher_layout is None else teacher_layout
        assert taught.spans[-1].token_ids == layout.spans[-1].token_ids
        return cls(layout, taught, answer, REUSE_METHODS[reuse_method].plan(layout, chunking or Chunking()))

    @property
    def num_tokens(self) -> int:
        """Prompt and answer, sinks included."""
        return sum(len(planned.span.token_ids) for planned in self.plan.spans) + len(self.answer)

    @property
    def num_question_tokens(self) -> int:
        """Length of the text behind the last document (all of it, if there are no documents)."""
        return len(self.layout.spans[-1].token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Rows one behind the other in a single sequence; only what predicts a question or an answer has logits.

    Attributes:
        input_ids: int64 `[1, num_tokens]`.
        visibility: Positions and masks.
        kept: int64 `[num_kept]`, tokens whose logits are needed, row after row.
        kept_rows: int64 `[num_kept]`, the row of each.
        answer_mask: bool `[num_kept]`, those that predict an answer token.
        question_mask: bool `[num_kept]`, those that predict a question token.
        targets: int64 `[num_kept]`, the token each one predicts.
        num_rows: Rows.
    """

    input_ids: torch.Tensor
    visibility: ChunkVisibility
    kept: torch.Tensor
    kept_rows: torch.Tensor
    answer_mask: torch.Tensor
    question_mask: torch.Tensor
    targets: torch.Tensor
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows


@dataclass(slots=True)
class _Packed:
    """Lists that rows append to; names as in ChunkVisibility and TrainingBatch."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    span_ids: list[int] = field(default_factory=list)
    text_ids: list[int] = field(default_factory=list)
    key_text_ids: list[int] = field(default_factory=list)
    extra_sources: list[int] = field(default_factory=list)
    extra_deltas: list[int] = field(default_factory=list)
    extra_positions: list[int] = field(default_factory=list)
    extra_spans: list[int] = field(default_factory=list)
    prompts: list[PackedPrompt] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    kept_rows: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    num_spans: int = 0

    def add(self, row: TrainingRow) -> None:
        """Append one row, spelling out its visibility."""
        number, first, first_extra = len(self.prompts), len(self.token_ids), len(self.extra_sources)
        places: list[range] = []  # of each planned span's tokens
        for planned in row.plan.spans:
            is_chunk = planned.is_hidden or planned.use is not SpanUse.TEXT and planned.span.is_document
            place = range(len(self.token_ids), len(self.token_ids) + len(planned.span.token_ids))
            self._add_tokens(
                planned.span.token_ids,
                planned.start,
                _NO_TEXT if is_chunk else number,
                _NO_KEY_TEXT if planned.is_hidden else number,
            )
            # What a chunk sees ends where the chunk begins.
            stands = planned.start - sum(len(places[index]) for index in planned.context)
            for index in planned.context:
                self.extra_sources += places[index]
                self.extra_deltas += [stands - row.plan.spans[index].start] * len(places[index])
                self.extra_positions += range(stands, stands + len(places[index]))
                self.extra_spans += [self.num_spans] * len(places[index])
                stands += len(places[index])
            places.append(place)
            self.num_spans += 1
        last = row.plan.spans[-1]
        self._add_tokens(row.answer, last.start + len(last.span.token_ids), number, number)
        self.num_spans += 1
        end = len(self.token_ids)
        self.prompts.append(PackedPrompt(first, end, first_extra, len(self.extra_sources)))
        # Each token of question and answer predicts the next; what stands before the question is not text.
        num_asked = row.num_question_tokens + len(row.answer) - 1
        self.kept += range(end - 1 - num_asked, end - 1)
        self.kept_rows += [number] * num_asked
        self.is_answer += [False] * (num_asked - len(row.answer)) + [True] * len(row.answer)

    def _add_tokens(self, token_ids: Sequence[int], start: int, text_id: int, key_text_id: int) -> None:
        self.token_ids += token_ids
        self.positions += range(start, start + len(token_ids))
        self.span_ids += [self.num_spans] * len(token_ids)
        self.text_ids += [text_id] * len(token_ids)
        self.key_text_ids += [key_text_id] * len(token_ids)


def make_batch(
    rows: Sequence[TrainingRow],
    rotaries: Sequence[LayerRotary],
    *,
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """Pack rows into one sequence; masks follow `ReuseMethod.plan`, as in the engine.

    Args:
        rows: At least one.
        rotaries: Per layer, how keys turn.
        pad_token_id: What fills the last tile.
        device: Where the tensors go.
    """
    packed = _Packed()
    for row in rows:
        packed.add(row)
    tile = TILE if torch.device(device).type == "cuda" else 1

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (-len(values) % tile)

    positions, span_ids = padded(packed.positions, 0), padded(packed.span_ids, _PADDED_SPAN)
    extra_spans = padded(packed.extra_spans, _PADDED_SPAN - 1)
    visibility = ChunkVisibility(
        positions=tensor(positions),
        span_ids=tensor(span_ids),
        text_ids=tensor(padded(packed.text_ids, _NO_TEXT)),
        key_positions=tensor(positions + padded(packed.extra_positions, 0)),
        key_span_ids=tensor(span_ids + extra_spans),
        key_text_ids=tensor(padded(packed.key_text_ids, _NO_KEY_TEXT) + [_NO_KEY_TEXT] * len(extra_spans)),
        extra_sources=tensor(padded(packed.extra_sources, 0)),
        extra_deltas=tensor(padded(packed.extra_deltas, 0)),
        prompts=tuple(packed.prompts),
        rotaries=tuple(rotaries),
    )
    is_answer = torch.tensor(packed.is_answer, dtype=torch.bool, device=device)
    return TrainingBatch(
        input_ids=tensor(padded(packed.token_ids, pad_token_id))[None],
        visibility=visibility,
        kept=tensor(packed.kept),
        kept_rows=tensor(packed.kept_rows),
        answer_mask=is_answer,
        question_mask=~is_answer,
        targets=tensor([packed.token_ids[place + 1] for place in packed.kept]),
        num_rows=len(rows),
    )
