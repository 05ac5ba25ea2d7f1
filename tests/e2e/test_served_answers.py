# SPDX-License-Identifier: Apache-2.0
"""HTTP in, text out, on a real model: the same text as without a server, whoever else is served."""

import asyncio
import random
import statistics
import time

import httpx
import openai
import pytest
from tests.server.conftest import bearer, two_scopes

from fixtures.live_server import live_server, running_engine
from lazyattention.config import CacheConfig, EngineConfig
from lazyattention.engine.llm import LLM
from lazyattention.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio
WORDS = [
    "the",
    "lamp",
    "the",
    "cape",
    "a",
    "keeper",
    "writes",
    "wind",
    "weather",
    "spring",
    "northern",
    "document",
    "order",
    "question",
    "answer",
]
DOCUMENTS = [" ".join(random.Random(n).choices(WORDS, k=40)) for n in range(8)]


def conversation(number):
    generator = random.Random(number)
    question = " ".join(generator.choices(WORDS, k=8)) + f" {number}?"
    return [{"role": "user", "content": question}], generator.sample(DOCUMENTS, 3)


def test_answers_over_http_equal_the_offline_engine(loaded, server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with LLM(loaded, config=EngineConfig(cache=CacheConfig(num_blocks=500))) as llm:
        for number in range(4):
            messages, documents = conversation(number)
            (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), documents=documents)
            answer = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=12, extra_body={"documents": documents}
            )
            assert answer.choices[0].message.content == expected.text
            assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
            assert answer.usage.prompt_tokens == expected.num_prompt_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "parallel", "num_hidden": 3, "sink": "bos", "chunk_temperature": 0.8, "chunk_bias": -0.5},
        {"encoding": "isolated", "sink": "the log\n", "recompute": "attention:0.3"},
        {"max_loss": 0.1, "num_hidden": 2, "recompute": "first:4"},
    ],
)
def test_chunk_options_of_a_server_are_those_of_the_offline_engine(loaded, options):
    """Answers, reports and usage agree with the engine and with each other; cold, warm, and by every kind of reuse."""
    config = EngineConfig.of(num_blocks=500, **options)
    messages, documents = conversation(5)
    documents = [*documents, "", "x", documents[0]]
    params = SamplingParams(temperature=0, max_tokens=6)
    body = {"model": "tiny", "messages": messages, "documents": documents, "temperature": 0, "max_tokens": 6}
    with LLM(loaded, config=config) as llm, running_engine(loaded, config) as engine, live_server(engine) as server:
        for reuse in ("auto", "auto", "always", "never"):
            (expected,) = llm.chat(messages, params, documents=documents, reuse=reuse)
            more = {"reuse": reuse, "include_document_report": True}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=60).json()
            assert answer["choices"][0]["message"]["content"] == expected.text
            usage, entries = answer["usage"], answer["documents"]
            assert usage["prompt_tokens"] == expected.num_prompt_tokens
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected.num_reused_tokens
            for name in ("num_tokens", "num_reused_tokens", "num_recomputed_tokens"):
                assert sum(entry[name] for entry in entries) == sum(getattr(one, name) for one in expected.documents)
        metrics = httpx.get(f"{server.url}/metrics").text
        stats = llm.stats()
        for metric, stat in {
            "recomputed_tokens": "num_recomputed_tokens",
            "recompute_selections": "num_selections",
        }.items():
            assert f"lazyattention_{metric}_total {float(stats[stat])}" in metrics


async def test_recomputed_blocks_over_http_equal_the_offline_engine(loaded, server):
    messages, documents = conversation(77)
    with LLM(loaded, config=EngineConfig(cache=CacheConfig(num_blocks=500))) as llm, httpx.Client() as client:
        body = {"model": "tiny", "messages": messages, "documents": documents, "temperature": 0, "max_tokens": 12}
        for recompute in ("first:16", "deviation:0.3", "attention:0.3"):
            params = SamplingParams(temperature=0, max_tokens=12)
            (expected,) = llm.chat(messages, params, documents=documents, recompute=recompute)
            more = {"recompute": recompute, "include_document_report": True}
            answer = client.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=60).json()
            assert answer["choices"][0]["message"]["content"] == expected.text
            counts = [entry["num_recomputed_tokens"] for entry in answer["documents"]]
            assert sum(counts) == expected.num_recomputed_tokens > 0
        refused = client.post(
            f"{server.url}/v1/chat/completions", json=body | {"recompute": "first:16", "reuse": "never"}, timeout=60
        )
        assert refused.status_code == 400
        assert "full_recompute" in refused.json()["error"]["message"]
        metrics = client.get(f"{server.url}/metrics").text
        assert "lazyattention_recompute_selections_total 2.0" in metrics


async def test_every_concurrent_stream_equals_its_solo_run(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(number):
        messages, documents = conversation(number)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            seed=number,
            temperature=0.7 * (number % 2),
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"documents": documents},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, chunks[-1].usage.completion_tokens

    together = await asyncio.gather(*(ask(number) for number in range(48)))
    alone = [await ask(number) for number in range(48)]
    assert together == alone
    assert len({text for text, _ in alone}) > 40  # mixing them up would show


async def test_reuse_over_http_is_what_was_not_computed(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"model": "tiny", "max_tokens": 1, "temperature": 0, "include_document_report": True}
        upload = {"documents": [{"text": text, "id": f"d{n}"} for n, text in enumerate(DOCUMENTS)]}
        reports = (await client.post("/v1/documents", json=upload)).json()["data"]
        assert {report["status"] for report in reports} == {"warmed"}
        before = (await client.get("/metrics")).text
        body |= {
            "messages": [{"role": "user", "content": "why?"}],
            "documents": [{"id": "d5"}, {"id": "d1"}, "new text"],
        }
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        after = (await client.get("/metrics")).text
        assert [d["status"] for d in answer["documents"]] == ["hit", "hit", "miss"]
        computed = _metric(after, "engine_computed_tokens_total") - _metric(before, "engine_computed_tokens_total")
        usage = answer["usage"]
        assert computed == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        deleted = (await client.delete("/v1/documents/d5")).json()
        assert deleted["num_freed_bytes"] > 0
        answer = (await client.post("/v1/chat/completions", json=body | {"documents": [DOCUMENTS[5]]})).json()
        assert answer["documents"][0]["status"] == "miss"


async def test_deleting_while_a_request_reads_says_who_holds_it(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        await client.post("/v1/documents", json={"documents": [{"text": DOCUMENTS[0], "id": "d"}]})
        body = {"model": "tiny", "max_tokens": 400, "stream": True, "ignore_eos": True, "documents": [{"id": "d"}]}
        body["messages"] = [{"role": "user", "content": "why?"}]
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            deleted = (await client.delete("/v1/documents/d")).json()
            assert deleted["held_by"] == ["chatcmpl-" + response.headers["x-request-id"]]
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"  # the request goes on undisturbed


async def test_shared_documents_are_computed_once_for_all_who_read_them(loaded):
    with running_engine(loaded) as engine, live_server(engine, scopes=two_scopes()) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            upload = {"documents": [{"text": DOCUMENTS[0], "id": "handbook"}], "warm": False}
            await client.post("/v1/documents", json=upload, headers=bearer("key-shared"))

            async def ask(key, *documents):
                body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "include_document_report": True}
                body |= {"messages": [{"role": "user", "content": "why?"}], "documents": list(documents)}
                answer = (await client.post("/v1/chat/completions", json=body, headers=bearer(key))).json()
                statuses = [document["status"] for document in answer["documents"]]
                return answer["choices"][0]["message"]["content"], statuses

            shared, private = {"id": "handbook"}, {"text": DOCUMENTS[1], "id": "mine"}
            first, cold = await ask("key-a", shared, private)
            second, warm = await ask("key-b", shared, private)
            assert (cold, warm) == (["miss", "miss"], ["hit", "miss"])
            assert first == second
            # A text of one's own under the shared id stays private.
            assert (await ask("key-b", {"text": DOCUMENTS[0], "id": "handbook"}))[1] == ["miss"]
            assert (await ask("key-a", {"text": DOCUMENTS[0], "id": "handbook"}))[1] == ["miss"]
            # Use by others is not shown; deleting frees it for everybody.
            (entry,) = (await client.get("/v1/documents", headers=bearer("key-b"))).json()["data"]
            assert (entry["is_stored"], entry["num_hits"], entry["num_uses"]) == (True, None, None)
            deleted = (await client.delete("/v1/documents/handbook", headers=bearer("key-shared"))).json()
            assert deleted["num_freed_bytes"] > 0
            await client.post("/v1/documents", json=upload, headers=bearer("key-shared"))
            assert (await ask("key-a", shared))[1] == ["miss"]


def _metric(text, name):
    lines = [line for line in text.splitlines() if line.startswith(f"lazyattention_{name} ")]
    return float(lines[0].split()[1])


async def test_another_tenants_documents_cost_the_same_time_as_new_ones(loaded):
    """Statistical: what tenant "a" has stored cannot be told from what nobody has, by tenant "b" measuring time."""
    rounds, generator = 24, random.Random(1)
    texts = [" ".join(generator.choices(WORDS, k=400)) for _ in range(2 * rounds + 2)]
    theirs, nobodys = texts[: rounds + 1], texts[rounds + 1 :]
    config = EngineConfig(cache=CacheConfig(num_blocks=16000))
    with running_engine(loaded, config) as engine, live_server(engine, scopes=two_scopes()) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            upload = {"documents": theirs}
            assert (await client.post("/v1/documents", json=upload, headers=bearer("key-a"))).status_code == 200
            await _time_of(client, theirs[-1], "key-b")  # warm up
            await _time_of(client, nobodys[-1], "key-b")
            pairs = []
            for number in range(rounds):
                order = [theirs[number], nobodys[number]]
                times = {text: await _time_of(client, text, "key-b") for text in order[:: 1 if number % 2 else -1]}
                pairs.append((times[theirs[number]], times[nobodys[number]]))
            hits = [await _time_of(client, text, "key-a") for text in theirs[:rounds]]
    faster = sum(stored < new for stored, new in pairs)
    # Two-sided sign test: of 24 fair coins, fewer than 5 or more than 19 show heads with probability 0.2 %.
    assert 5 <= faster <= 19, f"{faster} of {rounds} were faster"
    # The same measurement does see a hit when there is one.
    own, new = statistics.median(hits), statistics.median(new for _, new in pairs)
    assert own < 0.8 * new, f"own hits took {own:.4f} s, new texts {new:.4f} s"


async def _time_of(client, text, key):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "documents": [text]}
    start = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body, headers=bearer(key))
    assert response.status_code == 200
    return time.perf_counter() - start
