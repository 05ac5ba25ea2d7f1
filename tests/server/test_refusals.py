# SPDX-License-Identifier: Apache-2.0
"""What is refused, and that the answer says so in OpenAI's shape."""

import json

import pytest
from tests.server.conftest import chat_body, client_of

from fixtures.fake_engine import FakeEngine
from fixtures.tiny_tokenizer import CHATML
from lazyattention.config import EngineConfig
from lazyattention.errors import CapacityError, LazyAttentionError, UnsupportedError

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def refused(client, status, body, path=CHAT):
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "field",
    [
        {"colour": "red"},
        {"audio": {}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"prediction": {"type": "content", "content": "x"}},
        {"reasoning_effort": "low"},
        {"service_tier": "flex"},
        {"web_search_options": {}},
        {"best_of": 1},
        {"prompt": "x"},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_unknown_and_unsupported_fields_are_named(client, field):
    error = await refused(client, 400, chat_body(**field))
    assert error["param"] == next(iter(field))
    assert error["code"] == "unknown_field"
    assert next(iter(field)) in error["message"]


async def test_null_stands_for_a_field_left_out(client):
    names = "audio functions function_call reasoning_effort service_tier seed stop n tools response_format logit_bias"
    assert (await client.post(CHAT, json=chat_body(**dict.fromkeys(names.split())))).status_code == 200


async def test_nested_unknown_fields_are_named_with_their_place(client):
    messages = [{"role": "user", "content": "x", "mood": "good"}]
    assert "mood" in (await refused(client, 400, chat_body(messages=messages)))["param"]
    error = await refused(client, 400, chat_body(documents=[{"text": "x", "score": 1}]))
    assert "documents.0" in error["message"]
    assert "score" in error["message"]
    error = await refused(client, 400, chat_body(stream=True, stream_options={"chunk": 1}))
    assert error["param"] == "stream_options.chunk"


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n: "),
        ({"n": 129}, "n: "),
        ({"n": 1.5}, "n: "),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3}, "not both"),
        ({"top_logprobs": 3}, "'logprobs': true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "token id below 384"),
        ({"logit_bias": {"384": 1}}, "token id below 384"),
        ({"logit_bias": {"3": 101}}, "[-100, 100]"),
        ({"stop": ""}, "non-empty"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"stream_options": {}}, "'stream': true"),
        ({"min_tokens": 9}, "min_tokens is 9"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"documents": [{"title": "x"}]}, "needs 'text'"),
        ({"documents": [{"id": "x", "title": "y"}]}, "go with 'text'"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tool_choice": "required"}, "needs 'tools'"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"documents": ["\udc00"]}, "surrogate"),
        ({"documents": [{"text": "x", "metadata": {"\ud800\ud800": 1}}]}, "surrogate"),
        ({"user": "\ud83d \ude00"}, "surrogate"),
    ],
)
async def test_wrong_values_are_named(client, field, said):
    # json.dumps writes a lone surrogate as an escape, which is valid JSON.
    response = await client.post(
        CHAT, content=json.dumps(chat_body(**field)), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "token id"),
        ({"prompt": [384]}, "token id"),
        ({"prompt": [[1], "x"]}, "prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": ["x"] * 257}, "256"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_wrong_completion_fields_are_named(client, field, said):
    error = await refused(client, 400, {"model": "fake", "prompt": "x", **field}, COMPLETIONS)
    assert said in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b'{"model": "\xff"}', b"[]", b"null", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut off", "not UTF-8", "bad string", "array", "null", "deep", "huge number"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/documents"])
async def test_malformed_bodies_are_400(client, raw, path):
    response = await client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [r"\ud83d\ude00", r"\\ud800", r"\\\ud83d\ude00 \u0041", "\U0001f600"])
async def test_whole_pairs_and_escaped_backslashes_are_text(client, raw):
    body = json.dumps(chat_body("TEXT")).replace("TEXT", raw)
    response = await client.post(CHAT, content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 200


async def test_a_body_that_is_not_declared_json_is_400(client):
    response = await client.post(CHAT, content=b"model=fake", headers={"content-type": "text/plain"})
    assert response.status_code == 400


async def test_unknown_paths_and_methods_have_the_same_shape(client):
    for response in (await client.get("/v2"), await client.get(CHAT), await client.delete("/v1/models")):
        assert response.status_code in (404, 405)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_another_model_is_404(client):
    error = await refused(client, 404, chat_body(model="gpt-4"))
    assert error["code"] == "model_not_found"
    assert "'fake'" in error["message"]


async def test_too_long_prompts_name_the_numbers():
    async with client_of(FakeEngine(max_model_len=40)) as client:
        error = await refused(client, 400, chat_body("x" * 100))
        assert "limit is 40" in error["message"]
        error = await refused(client, 400, chat_body("x", max_tokens=39))
        assert "leaves room for" in error["message"]


async def test_documents_at_the_same_positions_count_once():
    engine = FakeEngine(max_model_len=200)
    documents = ["the lighthouse stands on the northern cape " * 2] * 8
    async with client_of(engine) as client:
        await refused(client, 400, chat_body(documents=documents))
    engine.engine.config = EngineConfig.of(positions="parallel")
    async with client_of(engine) as client:
        response = await client.post(CHAT, json=chat_body(documents=documents))
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] > 200
        await refused(client, 400, chat_body(documents=documents, reuse="never"))


async def test_too_many_documents_are_refused(client):
    error = await refused(client, 400, chat_body(documents=["x"] * 10_000))
    assert "more than 2000 documents" in error["message"]


async def test_unknown_document_ids_are_404(client):
    error = await refused(client, 404, chat_body(documents=[{"id": "nowhere"}]))
    assert "'nowhere'" in error["message"]


async def test_tools_are_refused_without_a_template_for_them():
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with client_of(FakeEngine(template=CHATML)) as client:
        assert "template does not take any" in (await refused(client, 501, chat_body(tools=tools)))["message"]
    async with client_of(FakeEngine(template="{{ tools }}" + CHATML)) as client:
        assert "<tool_call>" in (await refused(client, 501, chat_body(tools=tools)))["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("no room"), 503), (UnsupportedError("no way"), 501), (LazyAttentionError("broken"), 500)],
)
async def test_engine_errors_keep_their_status_and_streams_that_began_end_with_them(engine, client, error, status):
    engine.fail_with = error
    answer = await refused(client, status, chat_body())
    assert answer["message"] == str(error)
    streamed = await client.post(CHAT, json=chat_body(stream=True))
    assert streamed.status_code == status  # nothing was sent yet: a status is clearer than an event


async def test_an_error_in_the_middle_of_a_stream_is_an_event(engine, client):
    real = engine._append

    def fail_later(one, detokenizer, key, output, params):
        real(one, detokenizer, key, output, params)
        if len(one.token_ids) == 2:
            engine.fail_with = CapacityError("no room left")

    engine._append, engine.script = fail_later, "one two three four"
    response = await client.post(CHAT, json=chat_body(stream=True))
    events = response.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["error"]["message"] == "no room left"


async def test_a_bug_is_500_without_details_and_the_server_goes_on(engine, client):
    real, engine.generate = engine.generate, None
    response = await client.post(CHAT, json=chat_body())
    assert response.status_code == 500
    assert "NoneType" not in response.text
    engine.generate = real
    assert (await client.post(CHAT, json=chat_body())).status_code == 200
