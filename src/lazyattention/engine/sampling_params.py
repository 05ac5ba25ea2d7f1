# SPDX-License-Identifier: Apache-2.0
"""How one request picks its tokens and when it stops. Checked on construction; names as in vLLM and OpenAI."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyattention.errors import RequestError

if TYPE_CHECKING:
    import torch

# Takes the sequence's output token ids and its logits, float32 [vocab_size]; returns the logits to use.
LogitsProcessor = Callable[[Sequence[int], "torch.Tensor"], "torch.Tensor"]

MAX_LOGPROBS = 20
MAX_N = 128
# Below this a temperature means greedy: dividing by it would overflow float32.
GREEDY_TEMPERATURE = 1e-5
_SEED_BOUND = 2**63
# Beyond any vocabulary, and exact in the float64 that carries it to the device.
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are picked and when a sequence ends.

    Attributes:
        temperature: Divides the logits; 0 picks the likeliest token (greedy). In [0, 100].
        top_p: Keep the likeliest tokens that together hold this probability. In (0, 1]; 1 = off.
        top_k: Keep this many of the likeliest tokens; 0 or -1 = off. Below 2**31.
        min_p: Drop tokens less likely than `min_p` times the likeliest. In [0, 1]; 0 = off.
        seed: The same seed gives the same tokens whatever shares the batch. None: another one each time.
        max_tokens: Most tokens to generate, at least 1.
        min_tokens: End-of-sequence and stop tokens are not picked, and stop strings not looked for, before this many.
        stop: Strings that end the text; a single string is allowed. Not part of the text unless asked for.
        stop_token_ids: Token ids that end the sequence, beside the model's own end-of-sequence ids.
        include_stop_str_in_output: Keep the stop string in the text.
        ignore_eos: Go on after the model's end-of-sequence token.
        repetition_penalty: Above 1 makes tokens of the prompt and the output less likely. In (0, 100]; 1 = off.
        presence_penalty: Subtracted once from the logit of a token that is in the output. In [-2, 2].
        frequency_penalty: Subtracted as often as the token is in the output. In [-2, 2].
        logprobs: Report the log-probability of each token and of this many likeliest ones; None = no report.
        n: How many independent completions to generate.
        logit_bias: Added to the logits of these token ids. Values in [-100, 100].
        logits_processors: Called in order for each token, before everything else; see `LogitsProcessor`. Must depend on
            their arguments only: a preempted sequence may be asked again.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        self._check_numbers()
        self._check_counts()
        self._check_lists()

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is picked; no randomness."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """The prompt or the output so far changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_numbers(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_is_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_counts(self) -> None:
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("n", self.n, 1, MAX_N)
        if self.seed is not None:
            _check_int("seed", self.seed, -_SEED_BOUND, _SEED_BOUND - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, must be at most max_tokens ({self.max_tokens})")

    def _check_lists(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop contains {text!r}, must be a non-empty string or a list of such; leave it out"
                )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, None)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias: token id", token_id, 0, None)
            _check_float(f"logit_bias of token {token_id}", bias, -100.0, 100.0)
        for processor in self.logits_processors:
            if not callable(processor):
                raise RequestError(f"logits_processors contains {processor!r}, must be callables (output_ids, logits)")


def _check_float(name: str, value: float, low: float, high: float, *, low_is_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (low_is_open and value == low):
        raise RequestError(f"{name} is {value!r}, must be a number in {'(' if low_is_open else '['}{low:g}, {high:g}]")


def _check_int(name: str, value: int, low: int, high: int | None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} is {value!r}, must be a whole number {allowed}")
