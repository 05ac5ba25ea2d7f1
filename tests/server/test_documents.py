# SPDX-License-Identifier: Apache-2.0
"""The life of documents over HTTP."""

import json

import pytest
from tests.server.conftest import chat_body, client_of

from lazyattention.errors import CapacityError
from lazyattention.server.config import ScopeConfig

pytestmark = pytest.mark.anyio
DOCUMENTS = "/v1/documents"
CHAT = "/v1/chat/completions"


async def upload(client, *documents, **more):
    response = await client.post(DOCUMENTS, json={"documents": list(documents), **more})
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def listed(client):
    return {entry["id"]: entry for entry in (await client.get(DOCUMENTS)).json()["data"]}


async def test_what_was_warmed_is_hit_by_the_first_request(client):
    (report,) = await upload(client, {"text": "the lamp", "id": "lamp", "title": "Lamp", "metadata": {"page": 3}})
    assert (report["status"], report["num_done"], report["num_documents"]) == ("warmed", 1, 1)
    assert report["num_tokens"] > 0
    body = chat_body(documents=[{"id": "lamp"}], include_document_report=True)
    (hit,) = (await client.post(CHAT, json=body)).json()["documents"]
    assert (hit["status"], hit["title"]) == ("hit", "Lamp")
    by_text = chat_body(documents=[{"text": "the lamp", "id": "lamp", "title": "Lamp"}], include_document_report=True)
    assert (await client.post(CHAT, json=by_text)).json()["documents"][0]["status"] == "hit"
    assert (await upload(client, {"text": "the lamp", "id": "lamp", "title": "Lamp"}))[0]["status"] == "already warm"


async def test_lists_say_what_is_stored_and_used(client):
    await upload(client, {"text": "the lamp", "id": "lamp", "title": "Lamp", "metadata": {"page": 3}})
    await upload(client, {"text": "the cape", "id": "cape"}, warm=False)
    await client.post(CHAT, json=chat_body(documents=[{"id": "lamp"}]))
    entries = await listed(client)
    lamp, cape = entries["lamp"], entries["cape"]
    assert (lamp["is_stored"], lamp["num_hits"], lamp["num_uses"], lamp["metadata"]) == (True, 1, 1, {"page": 3})
    assert lamp["num_bytes"] > 0
    assert lamp["idle_s"] is not None
    assert (cape["is_stored"], cape["num_bytes"], cape["num_tokens"], cape["idle_s"]) == (False, 0, None, None)


async def test_long_lists_come_in_pages(client):
    await upload(client, *({"text": f"text {n}", "id": f"d{n}"} for n in range(7)), warm=False)
    seen, after = [], None
    while True:
        query = {"limit": 3} | ({"after": after} if after else {})
        page = (await client.get(DOCUMENTS, params=query)).json()
        assert page["num_documents"] == 7
        seen += [entry["id"] for entry in page["data"]]
        if not page["has_more"]:
            break
        after = seen[-1]
    assert seen == [f"d{n}" for n in range(7)]
    assert (await client.get(DOCUMENTS, params={"after": "none"})).status_code == 404
    assert (await client.get(DOCUMENTS, params={"limit": 0})).status_code == 400


async def test_one_document_is_shown_with_its_text(client):
    await upload(client, {"text": "the lamp", "id": "folder/lamp.md"}, warm=False)
    assert (await client.get(f"{DOCUMENTS}/folder/lamp.md")).json()["text"] == "the lamp"


async def test_pins_are_set_shown_and_taken_back(client):
    await upload(client, {"text": "the lamp", "id": "lamp"})
    pinned = (await client.post(f"{DOCUMENTS}/lamp/pin", json={"ttl_s": 60})).json()
    assert (pinned["is_pinned"], pinned["pin_ttl_s"]) == (True, 60)
    assert (await listed(client))["lamp"]["is_pinned"]
    assert (await client.post(f"{DOCUMENTS}/lamp/unpin")).json()["is_pinned"] is False
    assert not (await listed(client))["lamp"]["is_pinned"]
    assert (await client.post(f"{DOCUMENTS}/lamp/pin", json={"ttl_s": 0})).status_code == 400
    assert (await client.post(f"{DOCUMENTS}/none/pin", json={})).status_code == 404
    await upload(client, {"text": "the cape", "id": "cape"}, pin=True, pin_ttl_s=9)
    assert (await listed(client))["cape"]["is_pinned"]


async def test_what_was_never_computed_cannot_be_pinned(client):
    await upload(client, {"text": "the lamp", "id": "lamp"}, warm=False)
    response = await client.post(f"{DOCUMENTS}/lamp/pin", json={})
    assert response.status_code == 404


async def test_deleting_forgets_text_and_kv_and_says_what_was_freed(client, engine):
    await upload(client, {"text": "the lamp", "id": "lamp"})
    num_bytes = (await listed(client))["lamp"]["num_bytes"]
    answer = (await client.delete(f"{DOCUMENTS}/lamp")).json()
    assert (answer["deleted"], answer["num_freed_bytes"], answer["held_by"]) == (True, num_bytes, [])
    assert await listed(client) == {}
    assert engine._stored == {}
    assert (await client.delete(f"{DOCUMENTS}/lamp")).status_code == 404
    assert (await client.post(CHAT, json=chat_body(documents=[{"id": "lamp"}]))).status_code == 404
    body = chat_body(documents=[{"text": "the lamp", "id": "lamp"}], include_document_report=True)
    assert (await client.post(CHAT, json=body)).json()["documents"][0]["status"] == "miss"


async def test_deleting_a_text_that_was_never_computed(client):
    await upload(client, {"text": "the lamp", "id": "lamp"}, warm=False)
    assert (await client.delete(f"{DOCUMENTS}/lamp")).json()["num_freed_bytes"] == 0


async def test_a_new_text_under_an_old_id_replaces_it_everywhere(client, engine):
    await upload(client, {"text": "the lamp", "id": "x"})
    await upload(client, {"text": "the cape", "id": "x"}, warm=False)
    assert engine._stored == {}  # what was computed of the old text is gone
    assert (await client.get(f"{DOCUMENTS}/x")).json()["text"] == "the cape"


async def test_uploads_are_all_or_nothing(engine):
    scopes = {"default": ScopeConfig(max_stored_bytes=100, max_documents=3)}
    async with client_of(engine, scopes=scopes) as client:
        too_much = {"documents": ["x" * 60, "y" * 60], "warm": False}
        response = await client.post(DOCUMENTS, json=too_much)
        assert response.status_code == 503
        assert "100" in response.json()["error"]["message"]
        assert await listed(client) == {}
        assert (await client.post(DOCUMENTS, json={"documents": ["a"] * 4})).status_code == 400
        await upload(client, {"text": "x" * 60, "id": "x"}, warm=False)
        await upload(client, {"text": "y" * 90, "id": "x"}, warm=False)  # replacing counts the difference
        await client.delete(f"{DOCUMENTS}/x")
        await upload(client, {"text": "z" * 100, "id": "z"}, warm=False)


async def test_the_same_id_twice_in_one_upload_is_refused(client):
    for documents in ([{"text": "a", "id": "x"}, {"text": "b", "id": "x"}], ["same", "same"]):
        response = await client.post(DOCUMENTS, json={"documents": documents})
        assert response.status_code == 400
        assert "more than once" in response.json()["error"]["message"]


async def test_one_document_that_fails_does_not_stop_the_others(client, engine):
    engine.fail_with = CapacityError("no room")
    (report,) = await upload(client, "the lamp")
    assert (report["status"], report["error"]["message"]) == ("failed", "no room")
    assert (await listed(client))[report["id"]]["is_stored"] in (True, False)


async def test_progress_comes_as_events(client):
    response = await client.post(DOCUMENTS, json={"documents": ["a", "b", "c"], "stream": True})
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    reports = [json.loads(line[6:]) for line in lines[:-1]]
    assert [(r["num_done"], r["num_documents"], r["status"]) for r in reports] == [(n, 3, "warmed") for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "body",
    [
        {"documents": []},
        {"documents": [{"id": "x"}]},
        {"documents": ["x"], "pin_ttl_s": 3},
        {"documents": ["x"], "pin": True, "warm": False},
        {"documents": ["x"], "ttl": 3},
        {"documents": [{"text": "x", "id": ""}]},
        {"documents": ["x"], "messages": []},
    ],
)
async def test_wrong_uploads_are_400(client, body):
    assert (await client.post(DOCUMENTS, json=body)).status_code == 400


async def test_empty_documents_are_kept(client):
    (report,) = await upload(client, "")
    assert report["status"] == "warmed"


async def test_methods_of_a_path_are_all_named(client):
    response = await client.put(DOCUMENTS)
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")


async def test_warming_for_a_system_message_uses_its_prompt(client, engine):
    prompts = []
    real = engine.generate

    def generate(prompt, *args, **options):
        prompts.append(engine.tokenizer.decode(prompt.token_ids))
        return real(prompt, *args, **options)

    engine.generate = generate
    await upload(client, "the lamp", messages=[{"role": "system", "content": "Answer in verse."}])
    assert prompts[0].index("Answer in verse.") < prompts[0].index("the lamp")
