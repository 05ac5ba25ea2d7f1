# SPDX-License-Identifier: Apache-2.0
"""How likely the engine finds given answers: requests whose tokens are forced, their distributions recorded.

Nothing is emulated: scored requests take the way of every other request through scheduler, batch, model and sampler, so
they share stored chunks with them and read what a user's request would read.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lazyattention.config import ChunkOptions
from lazyattention.engine.engine import Engine
from lazyattention.engine.outputs import RequestOutput
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import RequestError
from lazyattention.reuse import PromptLayout

_ids = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class ScoredAnswer:
    """One answer and what the model thought at each of its tokens.

    Attributes:
        token_ids: The answer, an end-of-sequence token included if it was given or generated.
        logprobs: float32 `[num_tokens, vocab_size]` on the model's device: natural-log probabilities of every token at
            each position, the tokens before it being the answer's.
        output: The request's output: reuse report, timings, text.
    """

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    output: RequestOutput

    @property
    def token_logprobs(self) -> torch.Tensor:
        """Log-probability of each answer token, float32 `[num_tokens]`."""
        index = torch.tensor(self.token_ids, device=self.logprobs.device)
        return self.logprobs.gather(1, index[:, None])[:, 0]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood per token, nats."""
        return -float(self.token_logprobs.mean())

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have given exactly this answer."""
        return self.logprobs.argmax(dim=1).tolist() == list(self.token_ids)


class _Recorder:
    """A logits processor that keeps each position's logits, and forces the next token if there is one to force.

    Asked again about a position (a preempted request resumes), it overwrites what it kept with the same.
    """

    def __init__(self, answer: Sequence[int] | None) -> None:
        self._answer = answer
        self.rows: dict[int, torch.Tensor] = {}

    def __call__(self, output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        position = len(output_token_ids)
        self.rows[position] = logits.clone()
        if self._answer is None:
            return logits
        forced = torch.full_like(logits, float("-inf"))
        forced[self._answer[position]] = 0.0
        return forced

    def logprobs(self) -> torch.Tensor:
        return torch.stack([self.rows[position] for position in sorted(self.rows)]).log_softmax(dim=1)


def score(
    engine: Engine,
    layouts: Sequence[PromptLayout],
    answers: Sequence[Sequence[int] | None],
    *,
    max_tokens: int = 16,
    reuse_method: str | None = None,
    chunk_options: ChunkOptions | None = None,
    recompute: str | None = None,
    scope: str = "default",
    on_done: Callable[[], None] | None = None,
) -> list[ScoredAnswer]:
    """Score one given answer per prompt, or let the model answer. Exact: log-probabilities are those of generating it.

    Memory grows with the number of answer tokens times the vocabulary: score in groups.

    Args:
        engine: Runs them beside whatever else it runs; must not be stepped by somebody else meanwhile.
        layouts: Prompts, from `engine.prompts`.
        answers: Token ids, at least one each; None = generate greedily.
        max_tokens: Longest generated answer.
        reuse_method: Another method than the engine's.
        chunk_options: Other chunk options than the engine's.
        recompute: Which blocks of stored documents to compute anew; None = as the engine's option says.
        scope: The tenant.
        on_done: Called as each answer is done.

    Returns:
        One per prompt, in order.

    Raises:
        RequestError: The numbers differ, an answer is empty or holds an unknown token, or a prompt cannot be served.
        LazyAttentionError: A request failed.
    """
    if len(layouts) != len(answers):
        raise RequestError(f"got {len(answers)} answers for {len(layouts)} prompts; give one answer each")
    vocab_size = engine.loaded.vocab_size
    for index, answer in enumerate(answers):
        if answer is not None and (not answer or not all(0 <= token_id < vocab_size for token_id in answer)):
            raise RequestError(
                f"answers[{index}] must be token ids in [0, {vocab_size}), at least one; got {answer!r:.80}"
            )
    recorders = [_Recorder(None if answer is None else tuple(answer)) for answer in answers]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens if answer is None else len(answer),
            ignore_eos=answer is not None,
            logits_processors=(recorder,),
        )
        for answer, recorder in zip(answers, recorders, strict=True)
    ]
    outputs = run_requests(
        engine,
        layouts,
        params,
        reuse_method=reuse_method,
        chunk_options=chunk_options,
        recompute=recompute,
        scope=scope,
        on_done=on_done,
    )
    return [
        ScoredAnswer(tuple(output.outputs[0].token_ids), recorder.logprobs(), output)
        for output, recorder in zip(outputs, recorders, strict=True)
    ]


def generate(
    engine: Engine,
    layouts: Sequence[PromptLayout],
    *,
    max_tokens: int,
    reuse_method: str | None = None,
    chunk_options: ChunkOptions | None = None,
    recompute: str | None = None,
    scope: str = "default",
    on_done: Callable[[], None] | None = None,
) -> list[ScoredAnswer]:
    """Answer each prompt greedily and keep the distributions; arguments, results and errors as for `score`."""
    return score(
        engine,
        layouts,
        [None] * len(layouts),
        max_tokens=max_tokens,
        reuse_method=reuse_method,
        chunk_options=chunk_options,
        recompute=recompute,
        scope=scope,
        on_done=on_done,
    )


def run_requests(
    engine: Engine,
    layouts: Sequence[PromptLayout],
    params: Sequence[SamplingParams],
    *,
    reuse_method: str | None = None,
    chunk_options: ChunkOptions | None = None,
    recompute: str | None = None,
    scope: str = "default",
    on_done: Callable[[], None] | None = None,
) -> list[RequestOutput]:
    """Run requests to their ends and return their last outputs, in order.

    Raises:
        LazyAttentionError: A request was refused or failed; the others are aborted.
    """
    ids = [f"scored-{next(_ids)}" for _ in layouts]
    outputs: dict[str, RequestOutput] = {}
    try:
        for request_id, layout, one in zip(ids, layouts, params, strict=True):
            engine.add_request(
                request_id,
                layout,
                one,
                scope=scope,
                reuse_method=reuse_method,
                chunk_options=chunk_options,
                recompute=recompute,
            )
        waiting = set(ids)
        while waiting:
            for output in engine.step():
                if not output.finished or output.request_id not in waiting:
                    continue
                if output.error is not None:
                    raise output.error
                waiting.discard(output.request_id)
                outputs[output.request_id] = output
                if on_done is not None:
                    on_done()
    finally:
        for request_id in ids:
            engine.abort(request_id)
    return [outputs[request_id] for request_id in ids]
