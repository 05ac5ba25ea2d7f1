# SPDX-License-Identifier: Apache-2.0
"""Pick one token per sequence from a step's logits: vectorised over rows, one transfer to the host per step."""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lazyattention.engine.logits import apply_penalties, gumbel_noise, mask_unlikely
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import LazyAttentionError, RequestError
from lazyattention.ops.device_plan import send
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's raw logits (before penalties, temperature and processors).

    Attributes:
        token_id: The token picked.
        logprob: Its natural-log probability.
        top: The likeliest tokens and their log-probabilities, likeliest first; as many as `SamplingParams.logprobs`.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What was picked for one row.

    Attributes:
        token_id: -1 when `error` is set.
        logprobs: None unless asked for.
        error: Why this row, and it alone, has no token.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: LazyAttentionError | None = None


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence that needs its next token.

    Attributes:
        params: How to pick it.
        prompt_token_ids: For the repetition penalty.
        output_token_ids: Generated so far; their number is the counter of the random draw.
        seed_key: From `seed_key()`, the same for the sequence's whole life.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed_key: int


def seed_key(seed: int | None, completion_index: int = 0) -> int:
    """Derive what makes a sequence's draws its own.

    Args:
        seed: The request's seed; None draws a fresh one.
        completion_index: Which of the request's `n` completions.

    Returns:
        A whole number below 2**64.
    """
    if seed is None:
        return secrets.randbits(64)
    return _digest(seed % 2**64, completion_index)


def _digest(*numbers: int) -> int:
    raw = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class Sampler:
    """Picks tokens. Keeps nothing between calls: a draw depends on the row's logits, seed key and output length only.

    Order per row: logits processors, `logit_bias`, `min_tokens`, penalties; then greedy, or temperature, min-p, top-k, top-p
    and the draw. Logits that tie in a greedy pick go to whichever the device's argmax finds.
    """

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        """`eos_token_ids` are not picked before `min_tokens`, unless `ignore_eos`."""
        self._eos_token_ids = tuple(eos_token_ids)

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Pick the next token of each row. A row that cannot be sampled carries an error; the others are unharmed.

        Args:
            logits: `[num_rows, vocab_size]`, any float dtype and device; not changed.
            rows: One per row of `logits`.

        Returns:
            One per row, in order.

        Raises:
            ValueError: `logits` and `rows` differ in number.
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits has shape {tuple(logits.shape)}, expected [{len(rows)}, vocab_size]")
        if not rows:
            return []
        if all(_is_plain(row.params) for row in rows):
            largest, picked = logits.max(dim=1)
            fetched = torch.stack((picked.double(), largest.double()), dim=1).tolist()
            return [_sampled(int(token_id), value, value) for token_id, value in fetched]
        raw = logits.float()
        errors: dict[int, LazyAttentionError] = {}
        adjusted = self._adjust(raw, rows, errors)
        picked = adjusted.argmax(dim=1)
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if len(drawn) == len(rows):
            picked = _draw(adjusted, rows)
        elif drawn:
            index = send(np.array(drawn), adjusted.device)
            picked[index] = _draw(adjusted[index], [rows[i] for i in drawn])
        return _finish(raw, adjusted, picked, rows, errors)

    def _adjust(
        self, raw: torch.Tensor, rows: Sequence[SamplingRow], errors: dict[int, LazyAttentionError]
    ) -> torch.Tensor:
        """Apply what changes logits before the pick; `raw` itself when nothing does."""
        steps: list[Callable[[torch.Tensor, SamplingRow], None]] = [_run_processors, _add_bias, self._mask_stops]
        penalised = [i for i, row in enumerate(rows) if row.params.has_penalties]
        if not penalised and not any(_changes_row(row.params) for row in rows):
            return raw
        adjusted = raw.clone()
        for i, row in enumerate(rows):
            if not _changes_row(row.params):
                continue
            try:
                for step in steps:
                    step(adjusted[i], row)
            except RequestError as error:
                errors[i] = error
            except Exception as error:  # a caller's processor may raise anything; its own request alone ends
                logger.exception("a logits processor failed")
                errors[i] = RequestError(f"a logits processor failed: {type(error).__name__}: {error}")
        if penalised:
            chosen = [rows[i] for i in penalised]
            penalties = [
                [row.params.repetition_penalty, row.params.presence_penalty, row.params.frequency_penalty]
                for row in chosen
            ]
            part = adjusted[penalised]
            apply_penalties(
                part,
                [row.prompt_token_ids if row.params.repetition_penalty != 1.0 else () for row in chosen],
                [row.output_token_ids for row in chosen],
                torch.tensor(penalties, device=part.device),
            )
            adjusted[penalised] = part
        return adjusted

    def _mask_stops(self, logits: torch.Tensor, row: SamplingRow) -> None:
        params = row.params
        if len(row.output_token_ids) < params.min_tokens:
            stops = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]
            logits[[token_id for token_id in stops if token_id < len(logits)]] = float("-inf")


def _is_plain(params: SamplingParams) -> bool:
    """True if all that is asked of a row is its likeliest token."""
    return params.is_greedy and params.logprobs is None and not params.has_penalties and not _changes_row(params)


def _changes_row(params: SamplingParams) -> bool:
    return bool(params.logits_processors or params.logit_bias or params.min_tokens)


def _run_processors(logits: torch.Tensor, row: SamplingRow) -> None:
    for processor in row.params.logits_processors:
        processed = processor(row.output_token_ids, logits)
        if processed.shape != logits.shape:
            raise RequestError(f"a logits processor returned shape {tuple(processed.shape)}, not {tuple(logits.shape)}")
        if processed is not logits:
            logits.copy_(processed)


def _add_bias(logits: torch.Tensor, row: SamplingRow) -> None:
    bias = row.params.logit_bias
    if not bias:
        return
    if max(bias) >= len(logits):
        raise RequestError(f"logit_bias names token {max(bias)}, the vocabulary ends at {len(logits) - 1}")
    logits[list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw one token per row: int64 `[num_rows]`."""
    vocab_size = logits.shape[1]
    params = [row.params for row in rows]
    # One transfer; float64 carries all of these exactly.
    numbers = [
        (p.temperature, p.top_k if p.top_k > 0 else vocab_size, p.top_p, p.min_p, *_draw_key(row))
        for p, row in zip(params, rows, strict=True)
    ]
    sent = send(np.array(numbers, dtype=np.float64), logits.device)
    scaled = logits / sent[:, 0:1].float()
    if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        scaled = mask_unlikely(
            scaled, top_k=sent[:, 1].to(torch.int64), top_p=sent[:, 2].float(), min_p=sent[:, 3].float()
        )
    return (scaled + gumbel_noise(sent[:, 4:6].to(torch.int32), vocab_size)).argmax(dim=1)


def _draw_key(row: SamplingRow) -> tuple[int, int]:
    """Two int32 that depend on the sequence and on how many tokens it has."""
    key = _digest(row.seed_key, len(row.output_token_ids))
    return (key & 0xFFFFFFFF) - 2**31, (key >> 32) - 2**31


def _finish(
    raw: torch.Tensor,
    adjusted: torch.Tensor,
    picked: torch.Tensor,
    rows: Sequence[SamplingRow],
    errors: dict[int, LazyAttentionError],
) -> list[SampledToken]:
    """Fetch the picks (and log-probabilities where asked) in one transfer and look for rows that went wrong.

    float64 carries token ids and float32 values exactly, so that one tensor takes them all.
    """
    num_top = max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)
    index = picked.unsqueeze(1)
    # amax passes NaN on; the pick itself is -inf when no token was left.
    columns = [index.double(), raw.amax(dim=1, keepdim=True).double(), adjusted.gather(1, index).double()]
    if num_top is not None:
        lse = raw.logsumexp(dim=1, keepdim=True)
        top = raw.topk(min(num_top, raw.shape[1]), dim=1)
        columns += [(raw.gather(1, index) - lse).double(), top.indices.double(), (top.values - lse).double()]
    sampled = []
    for i, (row, fetched) in enumerate(zip(rows, torch.cat(columns, dim=1).tolist(), strict=True)):
        token_id, largest, chosen_logit = int(fetched[0]), fetched[1], fetched[2]
        if i in errors:
            sampled.append(SampledToken(-1, error=errors[i]))
            continue
        sampled.append(_sampled(token_id, largest, chosen_logit, _logprobs(token_id, fetched[3:], row.params.logprobs)))
    return sampled


def _sampled(token_id: int, largest: float, chosen_logit: float, logprobs: TokenLogprobs | None = None) -> SampledToken:
    error = _check_row(largest, chosen_logit)
    return SampledToken(token_id, logprobs) if error is None else SampledToken(-1, error=error)


def _logprobs(token_id: int, fetched: Sequence[float], num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    ids, values = fetched[1 : 1 + len(fetched) // 2], fetched[1 + len(fetched) // 2 :]
    return TokenLogprobs(token_id, fetched[0], tuple((int(i), v) for i, v in zip(ids, values, strict=True))[:num_top])


def _check_row(largest: float, chosen_logit: float) -> LazyAttentionError | None:
    if not abs(largest) < float("inf"):
        return LazyAttentionError(
            f"the model's logits contain {largest}: its weights or the dtype do not fit this prompt; try dtype='float32'"
        )
    if not abs(chosen_logit) < float("inf"):
        return RequestError("no token is left to pick: the logits processors, logit_bias and min_tokens exclude all")
    return None
