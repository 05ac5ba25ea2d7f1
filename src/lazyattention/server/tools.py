# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` within the text."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazyattention.errors import UnsupportedError
from lazyattention.server.protocol import NamedToolChoice, ToolBody
from lazyattention.server.structured import GrammarCompiler

BEGIN, END = "<tool_call>", "</tool_call>"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asked for. `arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str
    id: str


def check_tool_template(template: str | None) -> None:
    """Refuse tools for a model whose chat template does not speak this form.

    Raises:
        UnsupportedError: The template takes no tools, or writes calls in another form.
    """
    if not template or "tools" not in template:
        raise UnsupportedError(
            "'tools' are not supported: the model's chat template does not take any; choose another model"
        )
    if BEGIN not in template:
        raise UnsupportedError(f"'tools' are not supported: the model's chat template does not write calls as {BEGIN}")


def tool_grammar(
    tools: Sequence[ToolBody],
    choice: NamedToolChoice | str,
    *,
    parallel: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """A Lark grammar of one or (`parallel`) several calls of the chosen tools.

    Args:
        tools: Arguments follow their schemas; those of a tool that is not strict only where `choice` forces a call.
        choice: A named function, "required", or "auto": then text may stand before, between and after calls.
        parallel: Allow several calls; never of a named function.
        answer: With "auto": the JSON schema of an answer without calls, instead of text.
    """
    is_free = choice == "auto"
    if isinstance(choice, NamedToolChoice):
        tools, parallel = [tool for tool in tools if tool.function.name == choice.function.name], False
    rules = []
    for number, tool in enumerate(tools):
        is_strict = bool(tool.function.strict) or not is_free
        schema = (tool.function.parameters if is_strict else None) or _ANY_OBJECT
        if "$ref" not in schema:
            schema = _ANY_OBJECT | schema
        head = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        # A rule of its own, so that "$ref" finds the schema's own "$defs".
        rules += [
            f'call_{number}: {head} arguments_{number} "}}"',
            f"arguments_{number}: {GrammarCompiler.json_rule(schema)}",
        ]
    body = f'"\\n" ({" | ".join(f"call_{number}" for number in range(len(tools)))}) "\\n{END}"'
    if is_free and answer is not None:
        start = 'start: call ("\\n" call)* | answer' if parallel else "start: call | answer"
        calls = [f'call: "{BEGIN}" {body}', f"answer: {GrammarCompiler.json_rule(answer)}"]
    elif is_free:
        start = "start: call* text" if parallel else "start: call | text"
        # Lazy: the tag ends the text before it as soon as it is there.
        calls = [f"call: lead {body}", f'lead[lazy]: TEXT "{BEGIN}"', "text: TEXT", r"TEXT: /(.|\n)*/"]
    else:
        start = 'start: call ("\\n" call)*' if parallel else "start: call"
        calls = [f'call: "{BEGIN}" {body}']
    return "\n".join([start, *calls, *rules])


class ToolCallParser:
    """Takes calls out of text that arrives in pieces. What is not a well-formed call stays text."""

    def __init__(self) -> None:
        self._pending = ""
        # White space before a call is not shown, unless the call turns out to be none.
        self._gap = ""
        self._is_in_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take in `text`; return what is certainly plain text, and the calls completed."""
        self._pending += text
        plain, calls = "", []
        while True:
            before, tag, after = self._pending.partition(END if self._is_in_call else BEGIN)
            if not tag:
                break
            if not self._is_in_call:
                plain += before.rstrip()
                self._gap = before[len(before.rstrip()) :]
            elif (call := self._take_call(before)) is not None:
                calls.append(call)
            else:
                plain += f"{self._gap}{BEGIN}{before}{END}"
            self._is_in_call = not self._is_in_call
            self._pending = after
        if not self._is_in_call:
            uncertain = _overlap(self._pending, BEGIN)
            certain = self._pending[: len(self._pending) - uncertain].rstrip()
            plain, self._pending = plain + certain, self._pending[len(certain) :]
        return plain, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The text is over (or was stopped at the end tag): what was held back."""
        rest, self._pending = self._pending, ""
        if not self._is_in_call:
            return ("" if self.num_calls and not rest.strip() else rest), []
        self._is_in_call = False
        call = self._take_call(rest)
        return ("", [call]) if call is not None else (self._gap + BEGIN + rest, [])

    def _take_call(self, text: str) -> ToolCall | None:
        call = _parse_call(text)
        self.num_calls += call is not None
        return call


def _parse_call(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False), "call_" + uuid.uuid4().hex[:24])


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
