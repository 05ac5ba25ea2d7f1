# SPDX-License-Identifier: Apache-2.0
"""Answers that must follow a JSON schema or a grammar: masks for the sampler, computed by llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lazyattention.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Fixed separators: a model that may emit any amount of white space sometimes never stops doing so.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Matchers kept per request: more than one only while its completions differ.
_MAX_MATCHERS = 160


class GrammarCompiler:
    """Turns schemas and grammars into logits processors for one tokenizer."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:  # noqa: ANN401  # any transformers tokenizer
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._wrapped: LLTokenizer | None = None

    def json_schema(self, schema: Mapping[str, Any] | bool) -> "GrammarProcessor":
        """Text that is JSON following `schema`.

        Raises:
            RequestError: The schema is not valid or uses a keyword that cannot be enforced.
            UnsupportedError: llguidance is not installed, or the tokenizer is not a fast one.
        """
        return self.lark(f"start: {self.json_rule(schema)}")

    @staticmethod
    def json_rule(schema: Mapping[str, Any] | bool) -> str:
        """A rule for use in `lark`: JSON following `schema`."""
        if isinstance(schema, Mapping) and "x-guidance" in schema:
            raise RequestError("the JSON schema has 'x-guidance', which may not be set by a request; remove it")
        styled = {"x-guidance": _JSON_STYLE, **schema} if isinstance(schema, Mapping) else schema
        return f"%json {json.dumps(styled)}"

    def lark(self, grammar: str) -> "GrammarProcessor":
        """Text that follows a grammar in llguidance's Lark dialect; the same errors as `json_schema`."""
        llguidance = _import_llguidance()
        tokenizer = self._llguidance_tokenizer()
        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the JSON schema cannot be enforced: {_reason(matcher)}; simplify it")
        return GrammarProcessor(matcher, self._eos_token_ids)

    def _llguidance_tokenizer(self) -> "LLTokenizer":
        if self._wrapped is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise UnsupportedError("structured output needs a fast tokenizer; this model's is a slow one")
            self._wrapped = _import_llguidance().LLTokenizer(
                backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        return self._wrapped


class GrammarProcessor:
    """Forbids every token that would leave the grammar. Depends on its arguments only, as the sampler asks.

    Matchers are a memo: each has consumed the tokens beside it, and the longest one that the output continues is advanced.
    """

    def __init__(self, matcher: "LLMatcher", eos_token_ids: Sequence[int]) -> None:
        """`matcher` has consumed nothing and is not changed."""
        self._fresh = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._matchers: list[tuple[list[int], LLMatcher]] = []

    def __call__(self, output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Mask `logits`, float32 [vocab_size]; see `LogitsProcessor`."""
        matcher = self._matcher_after(list(output_token_ids))
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        if matcher.is_stopped() and not matcher.is_error():
            allowed[self._eos_token_ids] = True
        else:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            num_known = min(len(bits), len(logits))
            allowed[:num_known] = torch.from_numpy(bits[:num_known].astype(bool))
        if matcher.is_error():
            raise RequestError(f"the JSON schema or tool cannot be followed on: {_reason(matcher)}; simplify it")
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def _matcher_after(self, token_ids: list[int]) -> "LLMatcher":
        consumed: list[int] = []
        matcher = None
        for entry in reversed(self._matchers):
            if len(entry[0]) >= len(consumed) and token_ids[: len(entry[0])] == entry[0]:
                consumed, matcher = entry
                if len(consumed) == len(token_ids):
                    return matcher
        if matcher is None:
            consumed, matcher = [], self._fresh.deep_copy()
            self._matchers.append((consumed, matcher))
            del self._matchers[:-_MAX_MATCHERS]
        for token_id in token_ids[len(consumed) :]:
            if not matcher.is_stopped():
                matcher.consume_token(token_id)
            consumed.append(token_id)
        return matcher


def _reason(matcher: "LLMatcher") -> str:
    """Why it stopped, without the dump of its state."""
    return matcher.get_error().strip().split("\n")[0]


def _import_llguidance() -> Any:  # noqa: ANN401  # a module
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            "structured output and forced tool calls need the package llguidance; install lazyattention[structured]"
        ) from None
    return llguidance
