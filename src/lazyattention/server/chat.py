# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions: messages in, an answer or a stream of its pieces out."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from lazyattention.engine.outputs import CompletionOutput, RequestOutput
from lazyattention.errors import RequestError
from lazyattention.server import tools
from lazyattention.server.context import ServerContext, note_for_log, tenant_of, unique_id_of
from lazyattention.server.generation import Job
from lazyattention.server.inputs import DocumentResolver, to_messages, to_sampling_params
from lazyattention.server.protocol import ChatBody, JsonObjectFormat, JsonSchemaFormat
from lazyattention.server.responses import chat_logprobs, document_report, usage
from lazyattention.server.structured import GrammarProcessor


async def prepare_chat(body: ChatBody, request: Request, context: ServerContext) -> Job:
    """Everything that can be refused before the engine is asked.

    Raises:
        LazyAttentionError: The request is refused.
    """
    note_for_log(request, user=body.user, safety_identifier=body.safety_identifier, metadata=body.metadata)
    context.check_model(body.model)
    deadline_s = context.deadline_s(body.deadline_s)
    resolver = DocumentResolver(context.library, tenant_of(request))
    documents = [resolver.resolve(document) for document in body.documents or ()]
    messages = to_messages(body.messages, resolver)
    if body.tools and body.tool_choice != "none":
        tools.check_tool_template(context.model.chat_template)
    offered = [] if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    if _is_forced(body) and _schema(body) is not None:
        raise RequestError("'response_format' and a forced 'tool_choice' exclude each other; leave one out")
    layout = await context.chat_layout(messages, documents, offered or None, tenant_of(request), deadline_s)
    layout = resolver.with_scopes(layout)
    processor = await context.in_worker(lambda: _grammar(body, context))
    is_single_call = bool(offered) and not _has_tool_grammar(body) and body.parallel_tool_calls is False
    params = to_sampling_params(
        body,
        num_prompt_tokens=context.num_positions(layout, body.reuse or "auto"),
        max_model_len=context.model.max_model_len,
        vocab_size=context.model.vocab_size,
        processors=[processor] if processor else [],
        # The text up to here holds the one call; the parser needs no end tag at the end.
        stop=[tools.END] if is_single_call else [],
    )
    context.library.note_use(resolver.used)
    return Job(
        request_id="chatcmpl-" + unique_id_of(request),
        layout=layout,
        params=params,
        tenant=tenant_of(request),
        deadline_s=deadline_s,
        reuse=body.reuse or "auto",
        recompute=body.recompute,
        headers=dict(request.headers),
        check=lambda: context.library.check_kept(resolver.used),
    )


def _grammar(body: ChatBody, context: ServerContext) -> GrammarProcessor | None:
    """What the answer must follow, if anything."""
    schema = _schema(body)
    if _has_tool_grammar(body):
        choice = body.tool_choice or "auto"
        is_parallel = body.parallel_tool_calls is not False
        grammar = tools.tool_grammar(body.tools or (), choice, parallel=is_parallel, answer=schema)
        return context.grammars.lark(grammar)
    return None if schema is None else context.grammars.json_schema(schema)


def _schema(body: ChatBody) -> dict[str, Any] | None:
    """The JSON schema of the answer's text, if it must be JSON."""
    if isinstance(body.response_format, JsonObjectFormat):
        return {"type": "object"}
    if isinstance(body.response_format, JsonSchemaFormat):
        return body.response_format.json_schema.schema_
    return None


def _has_tool_grammar(body: ChatBody) -> bool:
    """Whether calls must be held to a form: forced ones, strict ones, and those that stand in for a JSON answer."""
    if not body.tools or body.tool_choice == "none":
        return False
    is_strict = any(tool.function.strict for tool in body.tools)
    return _is_forced(body) or is_strict or _schema(body) is not None


def _is_forced(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "none", "auto")


@dataclass(slots=True)
class _Choice:
    """One completion on its way to the client."""

    parser: tools.ToolCallParser | None
    is_begun: bool = False
    num_logprobs: int = 0
    text: list[str] = field(default_factory=list)
    calls: list[tools.ToolCall] = field(default_factory=list)

    def take(self, output: CompletionOutput) -> tuple[str, list[tools.ToolCall]]:
        """New text and new calls."""
        text, calls = output.delta_text, list[tools.ToolCall]()
        if self.parser is not None:
            text, calls = self.parser.push(text)
            if output.finish_reason is not None:
                rest, last_calls = self.parser.finish()
                text, calls = text + rest, calls + last_calls
        self.text.append(text)
        self.calls += calls
        return text, calls

    def finish_reason(self, output: CompletionOutput) -> str | None:
        return "tool_calls" if self.calls and output.finish_reason == "stop" else output.finish_reason


class ChatRenderer:
    """Turns outputs into chat completion objects or chunks."""

    def __init__(self, body: ChatBody, job: Job, context: ServerContext) -> None:
        self._body = body
        self._job = job
        self._context = context
        self._created_s = int(time.time())
        has_tools = bool(body.tools) and body.tool_choice != "none"
        self._choices = [_Choice(tools.ToolCallParser() if has_tools else None) for _ in range(job.params.n)]

    async def whole(self, outputs: AsyncIterator[RequestOutput]) -> dict[str, Any]:
        """Wait for the end; the complete answer."""
        last: RequestOutput | None = None
        async for last in outputs:
            for output, choice in zip(last.outputs, self._choices, strict=True):
                choice.take(output)
        assert last is not None  # the generator raises or ends with a finished output
        choices = [
            {
                "index": output.index,
                "message": _message("".join(choice.text), choice.calls),
                "logprobs": self._logprobs(output, choice),
                "finish_reason": choice.finish_reason(output),
            }
            for output, choice in zip(last.outputs, self._choices, strict=True)
        ]
        answer = self._base("chat.completion") | {"choices": choices, "usage": usage([last])}
        if self._body.include_document_report:
            answer["documents"] = document_report(last.documents)
        return answer

    async def chunks(self, outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk per new piece of text, as it comes."""
        last: RequestOutput | None = None
        options = self._body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        base = self._base("chat.completion.chunk") | ({"usage": None} if has_usage else {})
        is_reported = not self._body.include_document_report
        async for last in outputs:
            for output, choice in zip(last.outputs, self._choices, strict=True):
                if not output.delta_token_ids and output.finish_reason is None:
                    continue
                for piece in self._pieces(output, choice):
                    if not is_reported:
                        is_reported = True
                        yield base | {"choices": [piece], "documents": document_report(last.documents)}
                    else:
                        yield base | {"choices": [piece]}
        if has_usage and last is not None:
            yield base | {"choices": [], "usage": usage([last])}

    def _pieces(self, output: CompletionOutput, choice: _Choice) -> list[dict[str, Any]]:
        """What one output adds to a stream: its role, its text, its calls, its end."""
        if (
            output.finish_reason is not None
            and choice.is_begun
            and not output.delta_token_ids
            and not output.delta_text
        ):
            return []  # ended before; a sibling goes on
        pieces = []
        if not choice.is_begun:
            choice.is_begun = True
            pieces.append(_piece(output, {"role": "assistant", "content": ""}))
        num_calls = len(choice.calls)
        text, calls = choice.take(output)
        if text:
            pieces.append(_piece(output, {"content": text}, self._logprobs(output, choice)))
        for number, call in enumerate(calls, num_calls):
            pieces.append(_piece(output, {"tool_calls": [{"index": number, **_call(call)}]}))
        if output.finish_reason is not None:
            end = _piece(output, {}, self._logprobs(output, choice))
            pieces.append(end | {"finish_reason": choice.finish_reason(output)})
        return pieces

    def _logprobs(self, output: CompletionOutput, choice: _Choice) -> dict[str, Any] | None:
        """Those not reported yet; None if none were asked for, or none are new."""
        if output.logprobs is None:
            return None
        new = output.logprobs[choice.num_logprobs :]
        choice.num_logprobs = len(output.logprobs)
        return chat_logprobs(new, self._context.token_text) if new else None

    def _base(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._job.request_id,
            "object": kind,
            "created": self._created_s,
            "model": self._context.model.name,
            "system_fingerprint": self._context.model.fingerprint,
        }


def _piece(output: CompletionOutput, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _message(text: str, calls: list[tools.ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: tools.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
