# SPDX-License-Identifier: Apache-2.0
"""Input meant to hurt: it is refused quickly, readably, and hurts nobody else."""

import asyncio
import json
import logging
import time

import pytest
from tests.server.conftest import bearer, chat_body, client_of, two_scopes

from fixtures.fake_engine import FakeEngine
from lazyattention.server.logs import JsonFormatter, TextFormatter

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DOCUMENTS = "/v1/documents"
MANY = 300_000


async def error_of(response, status=400):
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert len(error["message"]) < 2500
    return error


@pytest.mark.parametrize(
    "field",
    [
        {f"k{number}": 1 for number in range(MANY)},
        {"documents": [1] * MANY},
        {"messages": [1] * MANY},
        {"messages": [{"role": "user", "content": [1] * MANY}]},
        {"stop": [1] * MANY},
        {"stop_token_ids": ["x"] * MANY},
        {"logit_bias": {str(number): "x" for number in range(MANY)}},
        {"metadata": {str(number): 1 for number in range(MANY)}},
        {"documents": [{f"k{number}": 1 for number in range(MANY)}]},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_a_million_mistakes_are_found_as_fast_as_one(client, field):
    body = json.dumps(chat_body(**field))
    begin = time.perf_counter()
    error = await error_of(await client.post(CHAT, content=body, headers={"content-type": "application/json"}))
    # Each mistake reported would take 30 µs of the event loop: 9 s.
    assert time.perf_counter() - begin < 3
    assert error["message"]


async def test_mixed_prompts_are_refused_at_their_first_wrong_entry(client):
    prompts = ["x"] * MANY + [1]
    begin = time.perf_counter()
    await error_of(await client.post(COMPLETIONS, json={"model": "fake", "prompt": prompts}))
    assert time.perf_counter() - begin < 3


async def test_many_unknown_fields_are_named_up_to_a_limit(client):
    error = await error_of(await client.post(CHAT, json=chat_body(**{f"k{number}": 1 for number in range(50)})))
    assert "k0, k1" in error["message"]
    assert "and 40 more" in error["message"]


@pytest.mark.parametrize("name", ["str", "int", "Model", "body", "list[str]"])
async def test_unknown_fields_with_the_names_of_types_are_named(client, name):
    assert (await error_of(await client.post(CHAT, json=chat_body(**{name: 1}))))["param"] == name


async def test_places_hold_field_names_only(client):
    error = await error_of(await client.post(CHAT, json=chat_body(documents=[{"text": "x", "score": 1}])))
    assert error["param"] == "documents.0.score"
    error = await error_of(await client.post(CHAT, json=chat_body(stop=1)))
    assert error["param"] == "stop"
    error = await error_of(await client.post(CHAT, json=chat_body(top_logprobs=2)))
    assert error["message"] == "body: 'top_logprobs' needs 'logprobs': true"


async def test_broken_json_says_where(client):
    headers = {"content-type": "application/json"}
    error = await error_of(await client.post(CHAT, content=b'{"model": ', headers=headers))
    assert error["param"] is None
    assert "not valid JSON" in error["message"]
    assert "character 10" in error["message"]
    for content in (b'{"model": "\xff"}', '{"model": "x"}'.encode("utf-16"), b'{"a": "\xed\xa0\x80"}'):
        assert "UTF-8" in (await error_of(await client.post(CHAT, content=content, headers=headers)))["message"]
    deep = b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert "nested" in (await error_of(await client.post(CHAT, content=deep, headers=headers)))["message"]


async def test_a_body_without_its_content_type_says_so(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = await client.post(CHAT, content=json.dumps(chat_body()), headers={"content-type": kind})
        assert "Content-Type: application/json" in (await error_of(response))["message"]
    assert "JSON object" in (await error_of(await client.post(CHAT, json=[1])))["message"]


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, 10**400], ids=["2**31", "2**63", "1e30", "1e400"])
async def test_numbers_beyond_any_vocabulary_are_refused(client, value):
    assert (await error_of(await client.post(CHAT, json=chat_body(top_k=value))))["param"] == "top_k"


async def test_numbers_that_are_none_are_refused(client):
    await client.post(DOCUMENTS, json={"documents": [{"id": "a", "text": "the lamp"}]})
    headers = {"content-type": "application/json"}
    for number in ("NaN", "1e999", "-Infinity"):
        response = await client.post(f"{DOCUMENTS}/a/pin", content=f'{{"ttl_s": {number}}}', headers=headers)
        assert (await error_of(response))["param"] == "ttl_s"


async def test_stop_strings_are_of_sensible_length(client):
    assert (await error_of(await client.post(CHAT, json=chat_body(stop="x" * 1025))))["param"] == "stop"
    assert (await client.post(CHAT, json=chat_body(stop=["x" * 1024]))).status_code == 200


async def test_logit_bias_keys_have_one_spelling(client):
    assert "'05'" in (await error_of(await client.post(CHAT, json=chat_body(logit_bias={"05": 1}))))["message"]


@pytest.mark.parametrize("document_id", ["a\nb", "a\r", "\0", "a\u2028b", "\x1b[2J", "\u202eabc", ".", ".."])
async def test_ids_that_cannot_be_printed_are_refused(client, document_id):
    document = {"id": document_id, "text": "the lamp"}
    await error_of(await client.post(DOCUMENTS, json={"documents": [document]}))
    await error_of(await client.post(CHAT, json=chat_body(documents=[document])))


@pytest.mark.parametrize("document_id", ["...", "../x", "a/pin", "pin", "a b", "%2e", "?q#f", "é/😀", "//", "\\", "'"])
async def test_any_other_id_has_a_life(client, document_id):
    from urllib.parse import quote

    path = f"{DOCUMENTS}/{quote(document_id, safe='').replace('.', '%2E')}"
    await client.post(DOCUMENTS, json={"documents": [{"id": document_id, "text": "the lamp"}]})
    assert (await client.get(path)).json()["id"] == document_id
    assert (await client.post(f"{path}/pin", json={})).json()["is_pinned"]
    assert (await client.delete(path)).json()["deleted"]


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_nothing_a_client_sends_begins_a_log_line(formatter):
    for evil in ("/a\n12:00:00 INFO forged", "\r\n", "\x1b[2Jx", "\u2028x", "\u202ex"):
        record = logging.LogRecord("x", logging.INFO, "", 1, "GET %s", (evil,), None)
        record.user, record.metadata = evil, {"a": evil}
        assert formatter.format(record).isprintable()


def test_a_traceback_has_its_own_lines():
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 1, "failed", (), (type(error), error, error.__traceback__))
    assert TextFormatter().format(record).splitlines()[1].startswith("Traceback")


# Long texts


@pytest.mark.parametrize(
    "field",
    [
        {"documents": ["a" * 3_000_000]},
        {"documents": [f"{number} {'a' * 3000}" for number in range(1000)]},
        {"messages": [{"role": "user", "content": "a" * 3_000_000}]},
    ],
    ids=["one document", "many documents", "a message"],
)
async def test_what_cannot_fit_is_not_tokenised_to_its_end(client, field):
    context = client._transport.app.state.context
    num_chars = []
    tokenizers = []
    for _ in range(2):
        tokenizer, builders = context._prompts._slots.get()

        def counting(text, *, original=tokenizer, **options):
            num_chars.append(len(text))
            return original(text, **options)

        counting.apply_chat_template, counting.chat_template = tokenizer.apply_chat_template, tokenizer.chat_template
        tokenizers.append((counting, builders))
    for slot in tokenizers:
        context._prompts._slots.put(slot)
    error = await error_of(await client.post(CHAT, json=chat_body(**field)))
    assert "more than" in error["message"]
    assert 0 < sum(num_chars) < 1_000_000


async def test_a_flood_of_prompts_to_tokenise_does_not_delay_another_scope(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        context = client._transport.app.state.context
        use = context._prompts.use

        def slow_use(scope, work):
            time.sleep(0.05)
            return use(scope, work)

        context._prompts.use = slow_use
        body = chat_body(max_tokens=1)
        flood = [asyncio.ensure_future(client.post(CHAT, json=body, headers=bearer("key-a"))) for _ in range(60)]
        await asyncio.sleep(0.1)
        begin = time.perf_counter()
        assert (await client.post(CHAT, json=body, headers=bearer("key-b"))).status_code == 200
        waited_s = time.perf_counter() - begin
        assert sum(one.done() for one in flood) < 40
        assert waited_s < 0.8  # the flood takes 1.5 s
        await asyncio.gather(*flood)


async def test_the_deadline_counts_while_a_prompt_is_tokenised(engine):
    async with client_of(engine) as client:
        context = client._transport.app.state.context
        context._prompts.use = lambda scope, work: time.sleep(0.5)
        begin = time.perf_counter()
        await error_of(await client.post(CHAT, json=chat_body(deadline_s=0.1)), 504)
        assert time.perf_counter() - begin < 0.4


# Lists and deletions


async def test_pages_end_although_a_shared_scope_has_the_same_ids(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        for key, names in (("key-shared", "abc"), ("key-a", "ad")):
            documents = [{"id": name, "text": f"{name} of {key}"} for name in names]
            await client.post(DOCUMENTS, json={"documents": documents, "warm": False}, headers=bearer(key))
        seen, query = [], ""
        for _ in range(10):
            page = (await client.get(f"{DOCUMENTS}?limit=1{query}", headers=bearer("key-a"))).json()
            seen += [(entry["id"], entry["is_read_only"]) for entry in page["data"]]
            if not page["has_more"]:
                break
            query = f"&after={seen[-1][0]}"
        assert seen == [("a", False), ("d", False), ("b", True), ("c", True)]


async def test_unknown_query_parameters_are_named(client):
    assert "order" in (await error_of(await client.get(f"{DOCUMENTS}?order=asc")))["message"]


async def test_a_document_deleted_while_its_request_waits_is_not_computed(engine):
    engine.step_s = 0.02
    async with client_of(engine, max_running=1) as client:
        await client.post(DOCUMENTS, json={"documents": [{"id": "a", "text": "the lamp"}]})
        first = asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=20, ignore_eos=True)))
        await asyncio.sleep(0.05)
        waiting = asyncio.ensure_future(client.post(CHAT, json=chat_body(documents=[{"id": "a"}])))
        await asyncio.sleep(0.05)
        assert (await client.delete(f"{DOCUMENTS}/a")).json()["deleted"]
        assert "deleted" in (await error_of(await waiting, 404))["message"]
        assert (await first).status_code == 200
        assert (await client.get(DOCUMENTS)).json()["num_stored_bytes"] == 0


async def test_documents_that_came_with_a_request_can_be_deleted(client):
    body = chat_body(documents=["the lamp"], include_document_report=True)
    answer = (await client.post(CHAT, json=body)).json()
    deleted = (await client.delete(f"{DOCUMENTS}/{answer['documents'][0]['id']}")).json()
    assert deleted["deleted"]
    assert deleted["num_freed_bytes"] > 0
    assert (await client.get(DOCUMENTS)).json()["num_stored_bytes"] == 0
    assert (await client.post(CHAT, json=body)).json()["documents"][0]["status"] == "miss"


async def test_any_header_of_a_named_origin_passes(engine):
    headers = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang,traceparent",
    }
    async with client_of(FakeEngine(), cors_origins=("https://app.example",)) as client:
        assert (await client.options(CHAT, headers=headers)).status_code == 200
        assert (await client.options(CHAT, headers=headers | {"origin": "https://evil.example"})).status_code == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, DOCUMENTS])
async def test_nobody_is_redirected(client, path):
    response = await client.post(f"{path}/", json=chat_body(), headers={"host": "evil.example"})
    assert response.status_code in (404, 405)
    assert "location" not in response.headers


async def test_no_tokenizer_remembers_a_deleted_document(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        upload = {"documents": [{"id": "x", "text": "the shared lamp"}]}
        await client.post(DOCUMENTS, json=upload, headers=bearer("key-shared"))
        for key in ("key-a", "key-b", "key-shared"):
            body = chat_body(documents=[{"id": "x"}, f"a text of {key}"])
            assert (await client.post(CHAT, json=body, headers=bearer(key))).status_code == 200
        builders = client._transport.app.state.context._prompts._builders
        assert sum(len(builder.memo) for scopes in builders for builder in scopes.values()) > 0
        await client.delete(f"{DOCUMENTS}/x", headers=bearer("key-shared"))
        assert sum(len(builder.memo) for scopes in builders for builder in scopes.values()) == 0


async def test_compressed_bodies_are_refused_by_name(client):
    response = await client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert "gzip" in (await error_of(response, 415))["message"]
    plain = await client.post(CHAT, json=chat_body(), headers={"content-encoding": "identity"})
    assert plain.status_code == 200
