# SPDX-License-Identifier: Apache-2.0
"""One forward pass per batch gives all that the likelihood metrics need; the metrics are arithmetic on its result."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from lazyattention.unlearn.data.encode import IGNORE_INDEX, EncodedExample, collate
from lazyattention.unlearn.metrics.batches import run_in_batches

# Logits are turned to float32 in slices of at most this many numbers (256 MiB).
_MAX_SLICE_NUMEL = 1 << 26


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """What the model thinks of one answer, teacher-forced. Every array is `[num_tokens]`.

    Attributes:
        token_ids: int64. The labelled tokens: the answer, then its end token if there is one.
        logprobs: float32, nats. log p(token | everything before it).
        is_greedy: bool. The token is the model's first choice.
        vocab_mean: float32, nats. Mean of log p over the model's own distribution (minus the entropy).
        vocab_std: float32, nats. Standard deviation of log p over the same.
        num_end_tokens: How many of the last tokens are end tokens, 0 or 1.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    is_greedy: NDArray[np.bool_]
    vocab_mean: NDArray[np.float32]
    vocab_std: NDArray[np.float32]
    num_end_tokens: int = 0

    @property
    def nll(self) -> float:
        """Summed over all tokens, in nats."""
        return -float(self.logprobs.sum(dtype=np.float64))

    @property
    def mean_nll(self) -> float:
        """Per token, in nats."""
        return self.nll / len(self.logprobs)

    @property
    def answer_is_greedy(self) -> NDArray[np.bool_]:
        """`is_greedy` without the end token: knowing when to stop is not knowing the answer."""
        return self.is_greedy[: len(self.is_greedy) - self.num_end_tokens]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; afterwards every sub-module is in the mode it was in.

    Not `inference_mode`: a tensor a module keeps from such a pass (rotary tables) cannot take part in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def score_answers(
    model: PreTrainedModel,
    encoded: Sequence[EncodedExample],
    *,
    pad_id: int,
    batch_size: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[AnswerScores]:
    """Score the labelled tokens of each example.

    Batches are made of examples of similar length, padded on the right and masked, so the batch size does not
    change the result but for rounding (1e-5 in float32; in bfloat16 kernels may differ by 1e-2). Logits are
    computed at the positions that predict a labelled token of some example in the batch, where the model can.

    Args:
        model: Runs on the device it is on; its mode (training or not) is restored.
        encoded: In any order.
        pad_id: Any token id; padding is masked.
        batch_size: Examples per forward pass; see `run_in_batches`.
        on_batch: Called after each batch with the number of examples in it.

    Returns:
        In the order of `encoded`.
    """
    takes_logits_to_keep = accepts_logits_to_keep(model)
    order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index].input_ids))
    results: dict[int, AnswerScores] = {}
    with evaluating(model):
        for indices, scores in run_in_batches(
            model,
            order,
            batch_size,
            lambda places: _score_batch(model, [encoded[place] for place in places], pad_id, takes_logits_to_keep),
        ):
            results.update(zip(indices, scores, strict=True))
            if on_batch is not None:
                on_batch(len(indices))
    return [results[index] for index in range(len(encoded))]


def accepts_logits_to_keep(model: nn.Module) -> bool:
    """Tell whether the model's forward can compute logits at chosen positions only; looks below a PEFT wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def _score_batch(
    model: PreTrainedModel, batch: list[EncodedExample], pad_id: int, takes_logits_to_keep: bool
) -> list[AnswerScores]:
    device = next(model.parameters()).device
    tensors = collate(batch, pad_id)
    # Position p predicts the label at p + 1.
    targets = tensors["labels"][:, 1:]  # [batch, seq_len - 1]
    # On the CPU: an index there fits a tensor on any device, and a model may be spread over several.
    positions = (targets != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)  # [num_positions]
    kwargs = {"logits_to_keep": positions} if takes_logits_to_keep else {}
    logits = model(
        input_ids=tensors["input_ids"].to(device),
        attention_mask=tensors["attention_mask"].to(device),
        use_cache=False,
        **kwargs,
    ).logits
    if not takes_logits_to_keep:
        logits = logits[:, positions]
    targets = targets[:, positions].to(logits.device)  # [batch, num_positions]
    is_target = targets != IGNORE_INDEX
    parts = _token_statistics(logits[is_target], targets[is_target])
    counts = is_target.sum(dim=1).tolist()
    token_ids = torch.split(targets[is_target].cpu(), counts)
    split_parts = [torch.split(part.cpu(), counts) for part in parts]
    return [
        AnswerScores(
            token_ids[row].numpy(),
            split_parts[0][row].numpy(),
            split_parts[1][row].numpy(),
            split_parts[2][row].numpy(),
            split_parts[3][row].numpy(),
            example.num_end_tokens,
        )
        for row, example in enumerate(batch)
    ]


def _token_statistics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return log p(target), is-first-choice, mean and standard deviation of log p. Each `[num_tokens]`."""
    num_rows = max(1, _MAX_SLICE_NUMEL // logits.shape[-1])
    columns: list[tuple[torch.Tensor, ...]] = []
    for part, target in zip(torch.split(logits, num_rows), torch.split(targets, num_rows), strict=True):
        logprobs = part.float().log_softmax(dim=-1)  # [rows, vocab_size]
        probs = logprobs.exp()
        # A token ruled out by -inf has probability 0 and contributes nothing; 0 * -inf would be nan.
        mean = (probs * logprobs).nan_to_num(0.0).sum(dim=-1)
        variance = (probs * (logprobs - mean.unsqueeze(-1)).square()).nan_to_num(0.0).sum(dim=-1)
        columns.append(
            (
                logprobs.gather(-1, target.unsqueeze(-1)).squeeze(-1),
                logprobs.argmax(dim=-1) == target,
                mean,
                variance.sqrt(),
            )
        )
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))
