# SPDX-License-Identifier: Apache-2.0
"""Token batches and the likelihoods read off them: which positions predict an answer token, and how well."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Padded examples.

    Attributes:
        input_ids: int64 `[batch, seq_len]`.
        attention_mask: int64 `[batch, seq_len]`, 0 = padding.
        labels: int64 `[batch, seq_len]`; -100 everywhere but on answer tokens. Unshifted: `labels[:, i]` is the
            token at i, predicted from i - 1.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device | str) -> "TokenBatch":
        return TokenBatch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device))

    @property
    def num_answer_tokens(self) -> int:
        return int((self.labels[:, 1:] != IGNORED_LABEL).sum())

    def positions(self, which: str) -> torch.Tensor:
        """Positions whose activations count: bool `[batch, seq_len]`.

        Args:
            which: "answer" = those that predict an answer token; "all" = every real token.
        """
        if which == "all":
            return self.attention_mask.bool()
        predicts = torch.zeros_like(self.labels, dtype=torch.bool)
        predicts[:, :-1] = self.labels[:, 1:] != IGNORED_LABEL
        return predicts


def pad_right(rows: list[tuple[list[int], list[int]]], pad_id: int) -> TokenBatch:
    """Stack `(input_ids, labels)` rows of unequal length, padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED_LABEL, dtype=torch.long)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (ids, row_labels) in enumerate(rows):
        input_ids[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        labels[i, : len(ids)] = torch.tensor(row_labels, dtype=torch.long)
        attention_mask[i, : len(ids)] = 1
    return TokenBatch(input_ids, attention_mask, labels)


def logits_of(model: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Run `model` on a batch: `[batch, seq_len, vocab_size]`, in the model's dtype."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label under the logits one position before it.

    Args:
        logits: `[batch, seq_len, vocab_size]`.
        labels: int64 `[batch, seq_len]`, -100 = not counted.

    Returns:
        float32 `[batch, seq_len - 1]`, 0 where not counted, and the bool table of counted positions.
    """
    targets = labels[:, 1:]
    counted = targets != IGNORED_LABEL
    nll = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return -nll.view_as(targets), counted


def mean_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood over all answer tokens of the batch, nats, a scalar; 0 without any."""
    log_probs, counted = token_log_probs(logits, labels)
    return -log_probs.sum() / counted.sum().clamp(min=1)


def sequence_log_probs(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    """Log-probability of each answer, float32 `[batch]`: the "sum" over its tokens or their "mean"."""
    log_probs, counted = token_log_probs(logits, labels)
    total = log_probs.sum(dim=1)
    return total if reduction == "sum" else total / counted.sum(dim=1).clamp(min=1)
