# SPDX-License-Identifier: Apache-2.0
"""Workloads: which documents each request brings, how long everything is, and when requests arrive. No model here.

Documents are token ids drawn from a seed; each request gets some of them, without replacement, by a popularity that all
requests share (Zipf), or as a trace of a real service says.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lazyattention.reuse import PromptLayout, Span


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: all equal, uniform, or log-normal.

    Attributes:
        text: "512"; "128-1024"; or "512~0.6", median and sigma of the logarithm.
    """

    text: str

    def __post_init__(self) -> None:
        self.draw(np.random.default_rng(0), 1)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw `count` lengths, each at least 1."""
        if "-" in self.text:
            low, high = (int(part) for part in self.text.split("-"))
            drawn = rng.integers(low, high + 1, count)
        elif "~" in self.text:
            median, sigma = (float(part) for part in self.text.split("~"))
            drawn = np.rint(rng.lognormal(math.log(median), sigma, count)).astype(np.int64)
        else:
            drawn = np.full(count, int(self.text))
        return [max(1, int(length)) for length in drawn]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One question.

    Attributes:
        documents: Indices of its documents, in prompt order.
        question_id: Of its question; no two requests ask the same.
        question_len: Tokens of its question.
        output_len: Tokens to generate.
        arrival_s: Seconds after the start; None in a closed loop.
    """

    documents: tuple[int, ...]
    question_id: int
    question_len: int
    output_len: int
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests over one collection of documents.

    Attributes:
        document_lens: Tokens of each document.
        preamble_len: Tokens of the instructions that stand before the documents of every request.
        requests: In order of arrival.
        seed: All token ids come from it.
    """

    document_lens: tuple[int, ...]
    preamble_len: int
    requests: tuple[WorkloadRequest, ...]
    seed: int

    @property
    def working_set_tokens(self) -> int:
        """Tokens of all documents that some request brings, each counted once."""
        used = {index for request in self.requests for index in request.documents}
        return sum(self.document_lens[index] for index in used)

    def halves(self) -> "tuple[Workload, Workload]":
        """Return the first half of the requests and the second, over the same collection of documents."""
        middle = len(self.requests) // 2
        return replace(self, requests=self.requests[:middle]), replace(self, requests=self.requests[middle:])

    def layouts(self, vocab_size: int) -> Iterator[PromptLayout]:
        """Make the prompts."""
        memo: dict[int, Span] = {}
        preamble = Span(_token_ids(self.seed, 0, 0, self.preamble_len, vocab_size), is_preamble=True)
        for request in self.requests:
            spans = [preamble] if self.preamble_len else []
            for index in request.documents:
                if index not in memo:
                    token_ids = _token_ids(self.seed, 1, index, self.document_lens[index], vocab_size)
                    memo[index] = Span(token_ids, document_id=f"document-{index}")
                spans.append(memo[index])
            spans.append(Span(_token_ids(self.seed, 2, request.question_id, request.question_len, vocab_size)))
            yield PromptLayout(tuple(spans))


def zipf_workload(
    *,
    num_documents: int,
    documents_per_request: int,
    num_requests: int,
    alpha: float,
    document_len: str = "512",
    question_len: str = "64",
    output_len: str = "32",
    preamble_len: int = 32,
    popular_first: bool = False,
    seed: int = 0,
) -> Workload:
    """Draw requests whose documents follow one popularity.

    Args:
        num_documents: Size of the collection.
        documents_per_request: Documents of each request, all different.
        num_requests: Requests.
        alpha: Popularity of the i-th most popular document is `i ** -alpha`; 0 = uniform.
        document_len: As `Lengths`, as the next two.
        question_len: Of each question.
        output_len: Of each answer.
        preamble_len: Tokens before the documents.
        popular_first: Order each request's documents by popularity, which helps identical prefixes most; else by chance,
            as relevance to a question has nothing to do with popularity.
        seed: Of everything.

    Raises:
        ValueError: More documents per request than there are.
    """
    if documents_per_request > num_documents:
        raise ValueError(f"documents_per_request is {documents_per_request}, but there are {num_documents} documents")
    rng = np.random.default_rng(seed)
    document_lens = Lengths(document_len).draw(rng, num_documents)
    # The i-th most popular document is any of them, so that popularity says nothing about length.
    by_rank = rng.permutation(num_documents)
    weights = -alpha * np.log(np.arange(1, num_documents + 1))
    questions = Lengths(question_len).draw(rng, num_requests)
    outputs = Lengths(output_len).draw(rng, num_requests)
    requests = []
    for number, (question, output) in enumerate(zip(questions, outputs, strict=True)):
        # The largest of weights plus Gumbel noise are drawn like one after the other without replacement.
        ranks = np.argsort(-(weights + rng.gumbel(size=num_documents)), kind="stable")[:documents_per_request]
        ranks = np.sort(ranks) if popular_first else rng.permutation(ranks)
        requests.append(WorkloadRequest(tuple(int(i) for i in by_rank[ranks]), number, question, output))
    return Workload(tuple(document_lens), preamble_len, tuple(requests), seed)


def trace_workload(
    folder: Path, *, num_requests: int, first: int = 0, max_output_len: int = 64, seed: int = 0
) -> Workload:
    """Read requests of the RAGPulse trace (hashed passages and token lengths of a real service, no text).

    Instructions become the preamble, of the length most requests have; history and question become the question.

    Args:
        folder: Holds `ragpulse_0_trace.jsonl` and the tables of lengths beside it.
        num_requests: Requests to take.
        first: Requests to leave out before.
        max_output_len: Longer answers are cut.
        seed: Of token ids.

    Raises:
        FileNotFoundError: The folder lacks a file of the trace.
    """
    tables = {
        "sys_prompt": _length_table(folder / "ragpulse_1_sys_prompt.jsonl"),
        "passages_ids": _length_table(folder / "ragpulse_2_passages.jsonl"),
        "history": _length_table(folder / "ragpulse_3_history.jsonl"),
        "user_input": _length_table(folder / "ragpulse_4_user_input.jsonl"),
    }
    with (folder / "ragpulse_0_trace.jsonl").open() as lines:
        records = [json.loads(line) for index, line in zip(range(first + num_requests), lines, strict=False)][first:]
    passages = sorted({index for record in records for index in record["hash_ids"]["passages_ids"]})
    place = {passage: index for index, passage in enumerate(passages)}
    start_s = float(records[0]["timestamp"])
    preambles = []
    requests = []
    for number, record in enumerate(records):
        ids = record["hash_ids"]
        preambles.append(sum(tables["sys_prompt"][i] for i in ids["sys_prompt"]))
        question = sum(tables[part][i] for part in ("history", "user_input") for i in ids[part])
        documents = tuple(dict.fromkeys(place[i] for i in ids["passages_ids"]))
        output_len = max(1, min(int(record["output_length"]), max_output_len))
        arrival_s = float(record["timestamp"]) - start_s
        requests.append(WorkloadRequest(documents, number, max(1, question), output_len, arrival_s))
    lens = tuple(max(1, tables["passages_ids"][i]) for i in passages)
    return Workload(lens, max(set(preambles), key=preambles.count), tuple(requests), seed)


def at_rate(workload: Workload, requests_per_s: float | None, *, seed: int = 0) -> Workload:
    """Return the workload with Poisson arrivals at this rate; None = a closed loop."""
    if requests_per_s is None:
        return replace(workload, requests=tuple(replace(r, arrival_s=None) for r in workload.requests))
    gaps = np.random.default_rng(seed).exponential(1.0 / requests_per_s, len(workload.requests))
    arrivals = np.cumsum(gaps) - gaps[0]
    timed = tuple(replace(r, arrival_s=float(t)) for r, t in zip(workload.requests, arrivals, strict=True))
    return replace(workload, requests=timed)


def _length_table(path: Path) -> dict[int, int]:
    table = {}
    for line in path.read_text().splitlines():
        if not line.strip():
            continue
        record = json.loads(line)
        (id_name,) = (name for name in record if name.endswith("_id"))
        table[int(record[id_name])] = int(record["token_length"])
    return table


def _token_ids(seed: int, kind: int, index: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Draw tokens, special ones (the first two) left out."""
    rng = np.random.default_rng((seed, kind, index))
    return tuple(rng.integers(2, vocab_size, length).tolist())


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of all values lies; nan of none."""
    return float(np.quantile(values, share)) if len(values) else math.nan
