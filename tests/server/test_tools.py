# SPDX-License-Identifier: Apache-2.0
"""Tool calls and answers that must follow a schema."""

import json

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.server.conftest import chat_body

from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.errors import RequestError
from lazyattention.server.protocol import ToolBody
from lazyattention.server.structured import GrammarCompiler
from lazyattention.server.tools import ToolCallParser, tool_grammar

MESSAGES = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
async def api(client):
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=client, max_retries=0)


async def chat(api, **options):
    options = {"model": "fake", "messages": MESSAGES, "max_tokens": 400, **options}
    return (await api.chat.completions.create(**options)).choices[0]


# The parser


def parse(pieces):
    parser, text, calls = ToolCallParser(), "", []
    for piece in pieces:
        new_text, new_calls = parser.push(piece)
        text, calls = text + new_text, calls + new_calls
    rest, last = parser.finish()
    return text + rest, [(call.name, json.loads(call.arguments)) for call in calls + last]


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ("Hello", "Hello", []),
        (CALL, "", [("weather", {"city": "Oslo"})]),
        (f"Let me look.\n{CALL}", "Let me look.", [("weather", {"city": "Oslo"})]),
        (f"{CALL}\n{CALL}\n", "", [("weather", {"city": "Oslo"})] * 2),
        (CALL.removesuffix("</tool_call>"), "", [("weather", {"city": "Oslo"})]),
        ('<tool_call>{"name": "time"}</tool_call>', "", [("time", {})]),
        ("<tool_call>not json</tool_call> so", "<tool_call>not json</tool_call> so", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        ("a < b <tool", "a < b <tool", []),
        ("   ", "   ", []),
        (" x \n<tool_call>[]</tool_call>\n", " x \n<tool_call>[]</tool_call>\n", []),
    ],
)
def test_calls_are_taken_out_and_everything_else_stays(text, plain, calls):
    assert parse([text]) == (plain, calls)
    assert parse(list(text)) == (plain, calls)


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name":"f"}', "<", "x ", "\n", "</tool"]), max_size=8),
    st.data(),
)
def test_pieces_do_not_change_what_is_parsed(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces) == parse([text])


# Over HTTP


@pytest.mark.anyio
async def test_a_call_the_model_makes_by_itself_is_reported(api, engine):
    engine.script = CALL
    choice = await chat(api, tools=[WEATHER, TIME])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Oslo"},
    )
    assert call.id.startswith("call_")


@pytest.mark.anyio
async def test_streamed_calls_come_with_their_number_and_no_markup_leaks(api, engine):
    engine.script = f"Wait. {CALL}\n{CALL}"
    stream = await api.chat.completions.create(
        model="fake", messages=MESSAGES, tools=[WEATHER], stream=True, max_tokens=400
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Wait."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "weather")]
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.anyio
async def test_text_without_a_call_is_an_ordinary_answer(api, engine):
    engine.script = "It is sunny."
    choice = await chat(api, tools=[WEATHER])
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "It is sunny.", None)


@pytest.mark.anyio
async def test_choice_none_offers_no_tools(api, engine):
    engine.script = CALL
    choice = await chat(api, tools=[WEATHER], tool_choice="none")
    assert choice.message.content == CALL


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


FULL_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


@pytest.mark.anyio
@pytest.mark.parametrize(
    "text", ["It is sunny.", "a < b", "<tool", f"Wait. {FULL_CALL} And so.", f"{FULL_CALL}\n{FULL_CALL}"]
)
async def test_strict_tools_leave_right_calls_and_other_text_alone(api, engine, text):
    engine.script = text
    free, held = [await chat(api, tools=[tool], temperature=0) for tool in (WEATHER, strict(WEATHER))]
    assert held.message.content == free.message.content
    assert [c.function for c in held.message.tool_calls or []] == [c.function for c in free.message.tool_calls or []]


def allows(tools, text, **options):
    """Whether the grammar lets `text` pass, to its very end."""
    tokenizer = tiny_tokenizer()
    grammar = tool_grammar([ToolBody.model_validate(tool) for tool in tools], "auto", **options)
    processor = GrammarCompiler(tokenizer, vocab_size=384, eos_token_ids=[3]).lark(grammar)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), 3]
    return all(processor(token_ids[:n], torch.zeros(384))[token_id] == 0 for n, token_id in enumerate(token_ids))


def test_strict_tools_hold_calls_to_names_and_schemas():
    tools = [strict(WEATHER), TIME]
    assert allows(tools, f"So: {FULL_CALL}, {FULL_CALL}", parallel=True)
    assert allows(tools, '<tool_call>\n{"name": "time", "arguments": {"any": 1}}\n</tool_call>', parallel=True)
    assert not allows(tools, CALL, parallel=True)  # a required argument is missing
    assert not allows(tools, FULL_CALL.replace("Oslo", "Paris"), parallel=True)
    assert not allows(tools, FULL_CALL.replace('"weather"', '"other"'), parallel=True)
    assert not allows(tools, f"So: {FULL_CALL.removesuffix('</tool_call>')}", parallel=True)
    assert allows(tools, f"So: {FULL_CALL}", parallel=False)
    assert not allows(tools, f"{FULL_CALL} {FULL_CALL}", parallel=False)
    assert allows([WEATHER], CALL, parallel=True)  # not strict: any object


@pytest.mark.anyio
async def test_with_a_response_format_the_answer_is_a_call_or_follows_the_schema(api, client, engine):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    engine.script = FULL_CALL
    assert (await chat(api, tools=[WEATHER], response_format=schema, temperature=0)).finish_reason == "tool_calls"
    engine.script = '{"name": "Ann", "age": 3}'
    answer = await chat(api, tools=[WEATHER], response_format=schema, temperature=0)
    assert json.loads(answer.message.content) == {"name": "Ann", "age": 3}
    engine.script = None
    for seed in range(3):
        choice = await chat(api, tools=[WEATHER], response_format=schema, seed=seed)
        assert choice.message.tool_calls or set(json.loads(choice.message.content)) == {"name", "age"}
    body = chat_body(tools=[WEATHER], tool_choice="required", response_format=schema)
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.anyio
async def test_one_call_at_most_if_not_parallel(api, engine):
    engine.script = f"{CALL}\n{CALL}"
    choice = await chat(api, tools=[WEATHER], parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(4))
async def test_a_named_function_is_called_with_arguments_that_follow_its_schema(api, seed):
    named = {"type": "function", "function": {"name": "weather"}}
    choice = await chat(api, tools=[TIME, WEATHER], tool_choice=named, seed=seed, temperature=1.5)
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Oslo", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert choice.finish_reason == "tool_calls"


@pytest.mark.anyio
async def test_required_calls_at_least_one_of_the_tools(api):
    names = set()
    for seed in range(3):
        choice = await chat(api, tools=[WEATHER], tool_choice="required", seed=seed, max_tokens=100)
        names |= {call.function.name for call in choice.message.tool_calls}
    assert names == {"weather"}


@pytest.mark.anyio
async def test_calls_and_results_go_back_into_the_prompt(api, engine):
    engine.script = CALL
    answer = await chat(api, tools=[WEATHER])
    result = {"role": "tool", "content": "Rain.", "tool_call_id": answer.message.tool_calls[0].id}
    engine.script = "It rains."
    final = await chat(api, tools=[WEATHER], messages=[*MESSAGES, answer.message.model_dump(), result])
    assert final.message.content == "It rains."


@pytest.mark.anyio
async def test_arguments_that_are_no_object_are_refused(client):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    response = await client.post("/v1/chat/completions", json=chat_body(messages=messages, tools=[WEATHER]))
    assert response.status_code == 400
    assert "arguments" in response.json()["error"]["message"]


@pytest.mark.anyio
async def test_a_tool_choice_must_name_a_tool(client):
    body = chat_body(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "other"}})
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "'other'" in response.json()["error"]["message"]


# Schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{"seed": 1}, {"seed": 2}, {"temperature": 0}, {"seed": 3, "n": 3}])
async def test_answers_follow_the_schema(api, options):
    schema_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = await api.chat.completions.create(
        model="fake", messages=MESSAGES, response_format=schema_format, max_tokens=400, **options
    )
    for choice in answer.choices:
        person = json.loads(choice.message.content)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 150
        assert choice.finish_reason == "stop"


class Person(BaseModel):
    is_tall: bool
    age: int


@pytest.mark.anyio
async def test_the_clients_own_parsing_helpers_work(api, engine):
    options = {"model": "fake", "messages": MESSAGES, "max_tokens": 200, "seed": 4}
    parsed = await api.chat.completions.parse(response_format=Person, **options)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    async with api.chat.completions.stream(response_format=Person, **options) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    engine.script = '<tool_call>\n{"name": "weather", "arguments": {"is_tall": true, "age": 7}}\n</tool_call>'
    tool = openai.pydantic_function_tool(Person, name="weather")
    called = await api.chat.completions.parse(tools=[tool], tool_choice="auto", **options)
    assert called.choices[0].finish_reason == "tool_calls"
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


@pytest.mark.anyio
async def test_json_objects_are_begun_as_such(api):
    choice = await chat(api, response_format={"type": "json_object"}, seed=1, max_tokens=60)
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "schema", [{"type": "colour"}, {"type": "string", "pattern": "((("}, {"$ref": "#/nowhere"}, {"x-guidance": {}}]
)
async def test_schemas_that_cannot_be_enforced_are_refused(client, schema):
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = await client.post("/v1/chat/completions", json=chat_body(response_format=response_format))
    assert response.status_code == 400
    assert "schema" in response.json()["error"]["message"]


def test_the_processor_depends_on_its_arguments_only():
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, vocab_size=384, eos_token_ids=[3])
    token_ids = tokenizer.encode('{"name": "Ann", "age": 3}', add_special_tokens=False)
    logits = torch.zeros(384)
    in_order = compiler.json_schema(PERSON)
    masks = [in_order(token_ids[:n], logits) for n in range(len(token_ids) + 1)]
    anyhow = compiler.json_schema(PERSON)
    for n in [5, 2, len(token_ids), 0, 7, 7, 3]:
        assert torch.equal(anyhow(token_ids[:n], logits), masks[n])
    assert (masks[-1] > float("-inf")).nonzero().flatten().tolist() == [3]  # nothing but the end


def test_a_token_outside_the_grammar_is_an_error_and_not_free_text():
    tokenizer = tiny_tokenizer()
    processor = GrammarCompiler(tokenizer, vocab_size=384, eos_token_ids=[3]).json_schema(PERSON)
    with pytest.raises(RequestError, match="grammar"):
        processor(tokenizer.encode("hello", add_special_tokens=False), torch.zeros(384))


@pytest.mark.anyio
async def test_errors_of_grammars_are_one_line(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    response = await client.post("/v1/chat/completions", json=chat_body(response_format=schema))
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]["message"]


def tool(parameters, name="tree", **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"enum": ["a", "b"]}, "below": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


def call_of(arguments):
    return f'<tool_call>\n{{"name": "tree", "arguments": {arguments}}}\n</tool_call>'


def test_schemas_with_definitions_of_their_own_are_followed():
    tools = [tool(TREE, strict=True), WEATHER]
    assert allows(tools, call_of('{"name": "a", "below": [{"name": "b", "below": []}]}'), parallel=True)
    assert not allows(tools, call_of('{"name": "a", "below": [{"name": "c"}]}'), parallel=True)
    assert not allows(tools, call_of('{"name": "a", "more": 1}'), parallel=True)


def test_nested_models_of_pydantic_are_followed():
    class Place(BaseModel):
        city: str

    class Trip(BaseModel):
        start: Place
        end: Place

    tools = [openai.pydantic_function_tool(Trip, name="tree")]
    assert allows(tools, call_of('{"start": {"city": "Oslo"}, "end": {"city": "Rome"}}'), parallel=True)
    assert not allows(tools, call_of('{"start": {"city": "Oslo"}, "end": {"town": "Rome"}}'), parallel=True)


def test_arguments_are_an_object_whatever_their_schema_leaves_open():
    for parameters in ({"properties": {"a": {"type": "integer"}}}, {}, {"description": "anything"}):
        assert allows([tool(parameters, strict=True)], call_of('{"a": 1}'), parallel=True)
        assert not allows([tool(parameters, strict=True)], call_of('"a"'), parallel=True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([tool({"type": "string"})], "type object"),
        ([tool({"type": "object"}), tool({"type": "object"})], "more than once"),
        ([tool({"x-guidance": {"lenient": True}}, strict=True)], "x-guidance"),
    ],
    ids=["no object", "twice", "x-guidance"],
)
async def test_tools_that_cannot_be_meant_are_refused(client, tools, said):
    response = await client.post("/v1/chat/completions", json=chat_body(tools=tools))
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
