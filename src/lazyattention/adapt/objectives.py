# SPDX-License-Identifier: Apache-2.0
"""What the adapter learns, by name. An objective is one function of student logits, teacher logits and a batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from lazyattention.adapt.rows import TrainingBatch
from lazyattention.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss.

    Attributes:
        loss: `(student_logits, teacher_logits, batch, question_weight) -> float32 [batch]`, one loss per row. Logits
            are `[num_kept, vocab_size]`, of the batch's kept tokens.
        needs_teacher: Whether teacher logits (adapter off, full attention) are needed; None is passed otherwise.
        needs_answers: Whether gold answers are needed; otherwise the model answers for itself.
    """

    loss: Callable[[torch.Tensor, torch.Tensor | None, TrainingBatch, float], torch.Tensor]
    needs_teacher: bool
    needs_answers: bool


def distill_loss(
    student: torch.Tensor, teacher: torch.Tensor | None, batch: TrainingBatch, question_weight: float
) -> torch.Tensor:
    """KL(teacher || student), averaged over the answer's tokens, plus the question's with a weight.

    Source: block masks and position re-encoding as in Ma et al. 2025, arXiv:2409.15355. Differences: no labels; the
    targets are the same model's distributions under full attention (self-distillation), over the documents that the
    question is about where they are known, and a chunk sees the preamble.
    """
    assert teacher is not None
    answer = _row_means(_kl(student, teacher, batch.answer_mask), batch.answer_mask, batch)
    if not question_weight:
        return answer
    return answer + question_weight * _row_means(_kl(student, teacher, batch.question_mask), batch.question_mask, batch)


def labels_loss(
    student: torch.Tensor, teacher: torch.Tensor | None, batch: TrainingBatch, question_weight: float
) -> torch.Tensor:
    """Cross-entropy of gold answers under the chunk mask: block fine-tuning.

    Source: Ma et al. 2025, arXiv:2409.15355 (Block-Attention).
    """
    mask = batch.answer_mask
    return _row_means(
        functional.cross_entropy(student[mask].float(), batch.targets[mask], reduction="none"), mask, batch
    )


def _kl(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL at the masked tokens: float32 `[num_masked]`. Only their logits become float32."""
    target = teacher[mask].float().log_softmax(dim=-1)
    return functional.kl_div(student[mask].float().log_softmax(dim=-1), target, reduction="none", log_target=True).sum(
        dim=-1
    )


def _row_means(values: torch.Tensor, mask: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Mean of each row's masked values, 0 for rows without any: `[num_rows]`."""
    rows = batch.kept_rows[mask]
    zeros = torch.zeros(batch.num_rows, dtype=values.dtype, device=values.device)
    counts = zeros.index_add(0, rows, torch.ones_like(values))
    return zeros.index_add(0, rows, values) / counts.clamp(min=1)


OBJECTIVES: Registry[Objective] = Registry("objective")
OBJECTIVES.register("distill", Objective(distill_loss, needs_teacher=True, needs_answers=False))
OBJECTIVES.register("labels", Objective(labels_loss, needs_teacher=False, needs_answers=True))
