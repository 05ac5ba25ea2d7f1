# SPDX-License-Identifier: Apache-2.0
"""What an objective receives and returns, and the two retain terms they share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from lazyattention.errors import ConfigError
from lazyattention.unlearn.batch import IGNORED_LABEL, mean_nll
from lazyattention.unlearn.config import ObjectiveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """One step's logits and labels.

    Attributes:
        forget_logits: `[batch, seq_len, vocab_size]` of the model being trained, on forget questions and answers;
            for objectives that need "idk", on forget questions and "I don't know" answers.
        forget_labels: int64 `[batch, seq_len]`, -100 off the answer.
        retain_logits: The same on retain examples.
        retain_labels: The same on retain examples.
        ref_forget_logits: Of the original model, without graph; given when the objective needs "ref_forget".
        ref_retain_logits: Of the original model; given when the retain loss is "kl".
    """

    forget_logits: torch.Tensor
    forget_labels: torch.Tensor
    retain_logits: torch.Tensor | None = None
    retain_labels: torch.Tensor | None = None
    ref_forget_logits: torch.Tensor | None = None
    ref_retain_logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """The loss and its unweighted parts, scalars."""

    loss: torch.Tensor
    forget_loss: torch.Tensor
    retain_loss: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One objective.

    Attributes:
        name: Its name in OBJECTIVES.
        forget_loss: What is minimised for the forget set.
        uses_retain: Whether there is a retain term.
        retain_loss: Forces the retain term; None = `ObjectiveConfig.retain_loss`.
        needs_ref_forget: Whether the original model's forget logits are needed.
        needs_idk: Whether forget answers are replaced by "I don't know".
        source: Where it comes from, and how this one differs.
    """

    name: str
    forget_loss: Callable[[ObjectiveInputs, ObjectiveConfig], torch.Tensor]
    uses_retain: bool = True
    retain_loss: str | None = None
    needs_ref_forget: bool = False
    needs_idk: bool = False
    source: str

    def retain_kind(self, config: ObjectiveConfig) -> str:
        """The retain term in force: "nll", "kl", or "none"."""
        if not self.uses_retain or config.retain_weight == 0:
            return "none"
        return self.retain_loss or config.retain_loss


def compute_terms(objective: Objective, inputs: ObjectiveInputs, config: ObjectiveConfig) -> ObjectiveTerms:
    """Return forget_weight * forget_loss + retain_weight * retain_loss and both terms."""
    forget = objective.forget_loss(inputs, config)
    kind = objective.retain_kind(config)
    if kind == "none":
        return ObjectiveTerms(config.forget_weight * forget, forget, None)
    if inputs.retain_logits is None or inputs.retain_labels is None:
        raise ConfigError(f"objective {objective.name!r} needs a retain set; give one, or set retain_weight to 0")
    if kind == "nll":
        retain = mean_nll(inputs.retain_logits, inputs.retain_labels)
    else:
        assert inputs.ref_retain_logits is not None, "the trainer gives reference logits whenever the kind is kl"
        retain = kl_to_reference(inputs.retain_logits, inputs.ref_retain_logits, inputs.retain_labels)
    return ObjectiveTerms(config.forget_weight * forget + config.retain_weight * retain, forget, retain)


def kl_to_reference(logits: torch.Tensor, ref_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL(original || trained) in nats, the mean over positions that predict an answer token."""
    counted = labels[:, 1:] != IGNORED_LABEL
    log_probs = functional.log_softmax(logits[:, :-1][counted].float(), dim=-1)
    ref_log_probs = functional.log_softmax(ref_logits[:, :-1][counted].float(), dim=-1)
    return functional.kl_div(log_probs, ref_log_probs, log_target=True, reduction="sum") / counted.sum().clamp(min=1)
