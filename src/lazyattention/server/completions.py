# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: plain prompts, one or many, with documents before them if asked."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from lazyattention.engine.outputs import CompletionOutput, RequestOutput
from lazyattention.errors import RequestError
from lazyattention.server.context import ServerContext, note_for_log, tenant_of, unique_id_of
from lazyattention.server.generation import Job
from lazyattention.server.inputs import DocumentResolver, to_sampling_params
from lazyattention.server.protocol import CompletionBody
from lazyattention.server.responses import completion_logprobs, document_report, usage

_MAX_PROMPTS = 256


async def prepare_completions(body: CompletionBody, request: Request, context: ServerContext) -> list[Job]:
    """One job per prompt; everything that can be refused is refused here.

    Raises:
        LazyAttentionError: The request is refused.
    """
    note_for_log(request, user=body.user)
    context.check_model(body.model)
    if len(body.prompts) > _MAX_PROMPTS:
        raise RequestError(
            f"'prompt' has {len(body.prompts)} entries, at most {_MAX_PROMPTS} are allowed; send several requests"
        )
    deadline_s = context.deadline_s(body.deadline_s)
    resolver = DocumentResolver(context.library, tenant_of(request))
    documents = [resolver.resolve(document) for document in body.documents or ()]
    jobs = []
    for number, prompt in enumerate(body.prompts):
        layout = resolver.with_scopes(await context.text_layout(prompt, documents, tenant_of(request), deadline_s))
        params = to_sampling_params(
            body,
            num_prompt_tokens=context.num_positions(layout, body.reuse or "auto"),
            max_model_len=context.model.max_model_len,
            vocab_size=context.model.vocab_size,
        )
        jobs.append(
            Job(
                request_id=f"cmpl-{unique_id_of(request)}-{number}",
                layout=layout,
                params=params,
                tenant=tenant_of(request),
                deadline_s=deadline_s,
                reuse=body.reuse or "auto",
                recompute=body.recompute,
                headers=dict(request.headers),
                check=lambda: context.library.check_kept(resolver.used),
            )
        )
    context.library.note_use(resolver.used)
    return jobs


async def run_all(jobs: Sequence[Job], context: ServerContext) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Run all jobs together; yield `(job number, output)`. The first error ends the others."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def pump(number: int, job: Job) -> None:
        async with aclosing(context.generator.run(job)) as outputs:
            async for output in outputs:
                queue.put_nowait((number, output))

    tasks = [asyncio.ensure_future(pump(number, job)) for number, job in enumerate(jobs)]
    done = asyncio.gather(*tasks)
    done.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (entry := await queue.get()) is not None:
            yield entry
        await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CompletionRenderer:
    """Turns outputs into completion objects or chunks; choice numbers run over prompts, then over `n`."""

    def __init__(self, body: CompletionBody, jobs: Sequence[Job], context: ServerContext) -> None:
        self._body = body
        self._jobs = jobs
        self._context = context
        self._created_s = int(time.time())
        self._last: dict[int, RequestOutput] = {}
        # Per choice: characters and log-probabilities sent so far.
        self._num_chars: dict[int, int] = {}
        self._num_logprobs: dict[int, int] = {}
        self._ended: set[int] = set()

    async def whole(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Wait for the end; the complete answer."""
        async for number, output in outputs:
            self._last[number] = output
        answer = self._base()
        answer["choices"] = [
            self._choice(number, one, self._echo(number) + one.text)
            for number, output in sorted(self._last.items())
            for one in output.outputs
        ]
        answer["usage"] = usage(self._last.values())
        if self._body.include_document_report:
            answer["documents"] = document_report(self._last[0].documents)
        return answer

    async def chunks(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk per new piece of text, as it comes."""
        options = self._body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        base = self._base() | ({"usage": None} if has_usage else {})
        is_reported = not self._body.include_document_report
        async for number, output in outputs:
            is_first = number not in self._last
            self._last[number] = output
            for one in output.outputs:
                place = self._place(number, one)
                if place in self._ended or not (one.delta_text or one.finish_reason or is_first):
                    continue
                if one.finish_reason is not None:
                    self._ended.add(place)
                text = (self._echo(number) if place not in self._num_chars else "") + one.delta_text
                chunk = base | {"choices": [self._choice(number, one, text)]}
                if not is_reported:
                    is_reported = True
                    chunk["documents"] = document_report(output.documents)
                yield chunk
        if has_usage:
            yield base | {"choices": [], "usage": usage(self._last.values())}

    def _choice(self, number: int, output: CompletionOutput, text: str) -> dict[str, Any]:
        place = self._place(number, output)
        logprobs = None
        offset = self._num_chars.get(place, 0)
        if output.logprobs is not None:
            new = output.logprobs[self._num_logprobs.get(place, 0) :]
            self._num_logprobs[place] = len(output.logprobs)
            logprobs = completion_logprobs(new, self._context.token_text, first_offset=offset)
        self._num_chars[place] = offset + len(text)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _place(self, number: int, output: CompletionOutput) -> int:
        return number * self._jobs[0].params.n + output.index

    def _echo(self, number: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompts[number]
        if isinstance(prompt, str):
            return prompt
        return str(self._context.tokenizer.decode(prompt, skip_special_tokens=False))

    def _base(self) -> dict[str, Any]:
        return {
            "id": self._jobs[0].request_id.rsplit("-", 1)[0],
            "object": "text_completion",
            "created": self._created_s,
            "model": self._context.model.name,
            "system_fingerprint": self._context.model.fingerprint,
        }
