# SPDX-License-Identifier: Apache-2.0
"""Every field of /v1/chat/completions and /v1/completions, asked for through the official client."""

import asyncio
import json

import openai
import pytest
from tests.server.conftest import chat_body, client_of

from fixtures.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "What does the keeper write?"}]


@pytest.fixture
async def api(client):
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=client, max_retries=0)


async def chat(api, **options):
    return await api.chat.completions.create(**{"model": "fake", "messages": MESSAGES, "max_tokens": 12, **options})


async def collect(stream):
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return chunks, text


async def test_a_stream_holds_what_the_whole_answer_holds(api):
    options = {"seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 1.2}
    whole = await chat(api, **options)
    chunks, _ = await collect(await chat(api, stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    for choice in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
        tokens = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert tokens == choice.logprobs.content


async def test_n_choices_differ_and_usage_counts_the_prompt_once(api):
    one = await chat(api, seed=1)
    four = await chat(api, seed=1, n=4)
    assert four.usage.prompt_tokens == one.usage.prompt_tokens
    assert len({choice.message.content for choice in four.choices}) > 1
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]


async def test_seed_makes_answers_repeatable(api):
    answers = [(await chat(api, seed=seed)).choices[0].message.content for seed in (1, 1, 2, 3)]
    assert answers[0] == answers[1]
    assert len(set(answers)) > 1


async def test_logprobs_carry_tokens_and_bytes(api):
    choice = (await chat(api, logprobs=True, top_logprobs=3, temperature=0)).choices[0]
    raw = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert raw.decode("utf-8", "replace").removesuffix("<|im_end|>") == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the likeliest


async def test_stop_ends_before_the_stop_string(api, engine):
    engine.script = "one two three"
    choice = (await chat(api, stop=[" two"])).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("one", "stop")
    kept = await chat(api, stop=" two", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == "one two"


async def test_length_is_reported(api, engine):
    engine.script = "one two three four"
    choice = (await chat(api, max_completion_tokens=2, max_tokens=openai.NOT_GIVEN)).choices[0]
    assert choice.finish_reason == "length"


async def test_every_sampling_field_reaches_the_sampler(client, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    body = chat_body(stop=["x"], logit_bias={"7": -3}, **fields)
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    params = engine.params[-1]
    assert {name: getattr(params, name) for name in fields} == {**fields, "stop_token_ids": (5,)}
    assert params.stop_strings == ("x",)
    assert params.logit_bias == {7: -3}


async def test_chat_without_a_limit_may_fill_the_context(client, engine):
    body = chat_body()
    del body["max_tokens"]
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert engine.params[-1].max_tokens == engine.max_model_len - answer["usage"]["prompt_tokens"]


async def test_an_answer_can_be_sent_back(api):
    answer = await chat(api)
    history = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
    assert (await chat(api, messages=history)).choices[0].message.role == "assistant"


async def test_system_developer_and_parts_are_messages(api):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "ann"},
    ]
    assert (await chat(api, messages=messages)).choices


# Documents


async def test_documents_are_reported_with_hit_miss_and_reason(client):
    body = chat_body(documents=["the lamp", {"text": "the cape", "id": "cape", "title": "Cape"}])
    body["include_document_report"] = True
    cold = (await client.post("/v1/chat/completions", json=body)).json()
    warm = (await client.post("/v1/chat/completions", json=body)).json()
    assert [(d["status"], d["reason"], d["num_reused_tokens"]) for d in cold["documents"]] == [("miss", "new", 0)] * 2
    assert [(d["status"], d["reason"]) for d in warm["documents"]] == [("hit", "reused")] * 2
    assert [d["id"] for d in warm["documents"]][1] == "cape"
    assert all(d["num_reused_tokens"] == d["num_tokens"] and d["num_bytes"] > 0 for d in warm["documents"])
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == sum(d["num_tokens"] for d in warm["documents"]) > 0


async def test_the_report_is_in_the_first_chunk_of_a_stream(client):
    body = chat_body(documents=["the lamp"], include_document_report=True, stream=True)
    lines = (await client.post("/v1/chat/completions", json=body)).text.split("\n\n")
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["documents"][0]["status"] == "miss"
    assert all("documents" not in json.loads(line[6:]) for line in lines[1:-2])


async def test_no_report_unless_asked_for(client):
    answer = await client.post("/v1/chat/completions", json=chat_body(documents=["the lamp"]))
    assert "documents" not in answer.json()


async def test_documents_may_stand_anywhere_in_the_messages(client):
    part = {"type": "document", "text": "the log", "id": "log"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Read:"}, part]},
        {"role": "user", "content": [part, {"type": "text", "text": "Why?"}, part]},
    ]
    body = chat_body(messages=messages, include_document_report=True)
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert [d["id"] for d in answer["documents"]] == ["log"] * 3


async def test_reuse_never_computes_everything(client):
    body = chat_body(documents=["the lamp"], include_document_report=True, reuse="never")
    await client.post("/v1/chat/completions", json=body)
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["documents"][0]["status"] == "computed"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_recompute_reaches_the_engine(client, engine, path):
    body = {"model": "fake", "documents": ["the lamp"]}
    body |= {"prompt": "Why?"} if path == "completions" else {"messages": [{"role": "user", "content": "Why?"}]}
    for given in ("first:16", "none", None):
        answer = await client.post(f"/v1/{path}", json=body if given is None else body | {"recompute": given})
        assert answer.status_code == 200
        assert engine.recomputes[-1] == given
    for wrong, message in [("frist:1", "did you mean 'first'"), ("first:0", "whole number"), ("deviation:2", "share")]:
        answer = await client.post(f"/v1/{path}", json=body | {"recompute": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "recompute"
        assert message in answer.json()["error"]["message"]


async def test_completions_take_documents_too(client):
    body = {"model": "fake", "prompt": "Why?", "documents": ["the lamp"], "include_document_report": True}
    assert (await client.post("/v1/completions", json=body)).json()["documents"][0]["status"] == "miss"


# Completions


async def complete(api, **options):
    return await api.completions.create(**{"model": "fake", "prompt": "the lamp", "max_tokens": 6, **options})


async def test_prompts_and_choices_are_numbered_in_order(api):
    answer = await complete(api, prompt=["the lamp", "the cape"], n=2, seed=3)
    alone = await complete(api, prompt="the cape", n=2, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]


async def test_token_id_prompts_equal_text_prompts(api, engine):
    token_ids = engine.tokenizer("the lamp")["input_ids"]
    by_text, by_ids = await complete(api, temperature=0), await complete(api, prompt=token_ids, temperature=0)
    assert by_text.choices[0].text == by_ids.choices[0].text
    both = await complete(api, prompt=[token_ids, token_ids], temperature=0)
    assert [choice.text for choice in both.choices] == [by_text.choices[0].text] * 2


async def test_completion_streams_hold_what_the_answer_holds(api):
    options = {"prompt": ["the lamp", "the cape"], "n": 2, "seed": 3, "logprobs": 2, "max_tokens": 12}
    whole = await complete(api, **options)
    chunks = [c async for c in await complete(api, stream=True, stream_options={"include_usage": True}, **options)]
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert sum((piece.logprobs.tokens for piece in pieces), []) == choice.logprobs.tokens
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]


async def test_echo_puts_the_prompt_first(api):
    plain, echoed = await complete(api, temperature=0), await complete(api, temperature=0, echo=True)
    assert echoed.choices[0].text == "the lamp" + plain.choices[0].text
    chunks = [chunk async for chunk in await complete(api, temperature=0, echo=True, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


async def test_completions_generate_sixteen_tokens_by_default(api, engine):
    engine.script = "a b c d e f g h i j k l m n o p q r s t u v"
    answer = await complete(api, max_tokens=None)
    assert answer.usage.completion_tokens == 16


async def test_best_of_is_n_or_refused(api):
    assert len((await complete(api, n=2, best_of=2)).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of"):
        await complete(api, n=1, best_of=3)


# Models


async def test_models_are_listed_and_retrieved(api):
    models = (await api.models.list()).data
    assert [model.id for model in models] == ["fake"]
    assert (await api.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError, match="not served"):
        await api.models.retrieve("gpt-4")


async def test_the_served_name_can_be_chosen():
    async with client_of(FakeEngine(), model_name="org/name") as client:
        assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"
        answer = await client.post("/v1/chat/completions", json=chat_body(model="org/name"))
        assert answer.json()["model"] == "org/name"
        assert (await client.post("/v1/chat/completions", json=chat_body())).status_code == 404


async def test_line_separators_of_unicode_do_not_break_events(client, engine):
    engine.script = "one\u2028two\u0085three"
    response = await client.post("/v1/chat/completions", json=chat_body(stream=True, max_tokens=60))
    assert response.content.isascii()
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == engine.script


async def test_a_request_that_ended_leaves_no_timer_behind(client, engine):
    assert (await client.post("/v1/chat/completions", json=chat_body(deadline_s=0.3))).status_code == 200
    await asyncio.sleep(0.5)
    assert engine.aborted == []


async def test_the_same_request_id_may_be_used_by_two_at_once(client, engine):
    engine.step_s = 0.02
    headers = {"X-Request-Id": "same"}
    answers = await asyncio.gather(
        *(client.post("/v1/chat/completions", json=chat_body(), headers=headers) for _ in range(3))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 3
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
