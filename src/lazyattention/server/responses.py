# SPDX-License-Identifier: Apache-2.0
"""Answer bodies in OpenAI's shape, with documents' reuse beside the usage."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from lazyattention.engine.outputs import DocumentReuse, RequestOutput
from lazyattention.engine.sampler import TokenLogprobs
from lazyattention.server.token_text import TokenText

# JSON has no -inf; the value OpenAI and vLLM use for it.
_LOWEST_LOGPROB = -9999.0


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Token counts over all prompts of a request; `cached_tokens` were not computed."""
    last = list(outputs)
    num_prompt = sum(output.num_prompt_tokens for output in last)
    num_output = sum(len(one.token_ids) for output in last for one in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_reused_tokens for output in last)},
    }


def document_report(entries: Sequence[DocumentReuse]) -> list[dict[str, Any]]:
    """Per document in prompt order: what was reused, what not and why, tokens and bytes."""
    report = []
    for document_id, group in itertools.groupby(_with_places(entries), key=lambda pair: pair[0]):
        chunks = [entry for _, entry in group]
        statuses = list(dict.fromkeys(entry.status for entry in chunks))
        reasons = list(dict.fromkeys(entry.reason for entry in chunks))
        report.append(
            {
                "id": document_id[1],
                "title": chunks[0].title,
                "status": statuses[0] if len(statuses) == 1 else "partial",
                "reason": "; ".join(reasons),
                "num_tokens": sum(entry.num_tokens for entry in chunks),
                "num_reused_tokens": sum(entry.num_reused_tokens for entry in chunks),
                "num_recomputed_tokens": sum(entry.num_recomputed_tokens for entry in chunks),
                "num_bytes": sum(entry.num_bytes for entry in chunks),
                "num_chunks": len(chunks),
            }
        )
    return report


def _with_places(entries: Sequence[DocumentReuse]) -> list[tuple[tuple[int, str], DocumentReuse]]:
    """Number the documents: the same one may stand twice in a row, and its chunk 0 begins each."""
    place, pairs = 0, []
    for entry in entries:
        place += entry.chunk_index == 0
        pairs.append(((place, entry.document_id), entry))
    return pairs


def chat_logprobs(entries: Sequence[TokenLogprobs], token_text: TokenText) -> dict[str, Any]:
    """Chat's form: one object per token, with its bytes."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_text.bytes_of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(raw)}

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs], token_text: TokenText, *, first_offset: int
) -> dict[str, Any]:
    """The completions route's form: parallel lists. Offsets count characters from the text's start."""
    tokens = [token_text.text_of(entry.token_id) for entry in entries]
    offsets = list(itertools.accumulate(map(len, tokens), initial=first_offset))[:-1]
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, _LOWEST_LOGPROB) for entry in entries],
        "top_logprobs": [
            {token_text.text_of(token_id): max(logprob, _LOWEST_LOGPROB) for token_id, logprob in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }
