# SPDX-License-Identifier: Apache-2.0
"""API keys, scopes, limits and rates."""

import asyncio
import time

import pytest
from tests.server.conftest import bearer, chat_body, client_of, two_scopes

from fixtures.fake_engine import FakeEngine
from lazyattention.documents.document import Document
from lazyattention.errors import CapacityError, ConfigError
from lazyattention.reuse import PromptLayout, Span
from lazyattention.server.auth import Authenticator
from lazyattention.server.config import ScopeConfig, ServerConfig, key_digest, scopes_from_file, scopes_from_text
from lazyattention.server.errors import AuthenticationError, DeadlineError, OverloadedError, ShuttingDownError
from lazyattention.server.inputs import DocumentResolver
from lazyattention.server.library import DocumentLibrary
from lazyattention.server.limits import AdmissionQueue, RateLimiter
from lazyattention.server.protocol import DocumentBody

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"

# Keys


async def test_requests_without_a_known_key_are_401(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        for headers in ({}, bearer("wrong"), {"Authorization": "Basic key-a"}, {"Authorization": "key-a"}, bearer(" ")):
            response = await client.post(CHAT, json=chat_body(), headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.post(CHAT, json=chat_body(), headers=bearer("key-a"))).status_code == 200


async def test_the_body_of_a_stranger_is_not_read(engine):
    async with client_of(engine, scopes=two_scopes()) as client:

        async def endless():
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0.01)

        async with asyncio.timeout(5):
            assert (await client.post(CHAT, content=endless())).status_code == 401


async def test_public_paths_need_no_key_and_metrics_need_an_operator(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        for path in ("/", "/health", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer("key-a"))).status_code == 403
        assert (await client.get("/metrics", headers=bearer("key-operator"))).status_code == 200


def test_key_comparison_takes_as_long_for_any_key():
    """Statistical: a key that shares a long beginning with a real one is not recognisable by time."""
    real = "sk-" + "a" * 60
    scopes = {"a": ScopeConfig(name="a", key_digests=(key_digest(real),))}
    authenticator = Authenticator(scopes)
    times = {"near": [], "far": []}
    candidates = {"near": "Bearer " + real[:-1] + "b", "far": "Bearer " + "z" * len(real)}
    for turn in range(4000):
        for kind in ("near", "far") if turn % 2 else ("far", "near"):
            start = time.perf_counter_ns()
            with pytest.raises(AuthenticationError):
                authenticator.scope_of(candidates[kind])
            times[kind].append(time.perf_counter_ns() - start)
    near, far = (sorted(values)[len(values) // 2] for values in times.values())
    assert abs(near - far) < 0.1 * far


async def test_every_key_is_compared_whether_found_or_not(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "lazyattention.server.auth.hmac.compare_digest", lambda a, b: compared.append(a) or bytes(a) == bytes(b)
    )
    authenticator = Authenticator(two_scopes())
    assert authenticator.scope_of("Bearer key-a").name == "a"
    assert len(compared) == 4


def test_key_files_are_read(tmp_path):
    path = tmp_path / "keys.toml"
    digest = key_digest("sk-2").hex()
    path.write_text(
        f'[scopes.a]\nkeys = ["sk-1"]\nkey_sha256 = ["{digest}"]\nreads = ["b"]\nmax_documents = 3\n'
        '[scopes.b]\nkeys = ["sk-3"]\nis_operator = true\n'
    )
    scopes = scopes_from_file(path)
    authenticator = Authenticator(scopes)
    assert [authenticator.scope_of(f"Bearer sk-{n}").name for n in (1, 2, 3)] == ["a", "a", "b"]
    assert (scopes["a"].max_documents, scopes["a"].reads, scopes["b"].is_operator) == (3, ("b",), True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "[scopes.NAME]"),
        ("[scopes.a]\n", "needs keys"),
        ("[scopes.a]\nkeys = 'x'", "list of non-empty strings"),
        ("[scopes.a]\nkeys = ['x']\ncolour = 1", "colour"),
        ("[scopes.a]\nkeys = ['x']\nmax_documents = 0", "max_documents"),
        ("[scopes.a]\nkey_sha256 = ['xyz']", "hexadecimal"),
        ("[scopes.a]\nkey_sha256 = ['ab']", "64 hexadecimal"),
        ("[other]\n", "[scopes.NAME]"),
        ("not toml", "cannot be read"),
    ],
)
def test_wrong_key_files_are_refused(tmp_path, text, said):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        scopes_from_file(path)
    assert said in str(caught.value)


def test_keys_from_the_environment():
    scopes = scopes_from_text("a:k1, b:k2,a:k3")
    assert {name: len(scope.key_digests) for name, scope in scopes.items()} == {"a": 2, "b": 1}
    with pytest.raises(ConfigError) as caught:
        scopes_from_text("a:k1,secret-without-scope")
    assert "entry 2" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_unsafe_configurations_do_not_start():
    with pytest.raises(ConfigError, match="allow-anonymous"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", allow_anonymous=True).host == "0.0.0.0"
    assert ServerConfig(host="0.0.0.0", scopes=two_scopes()).has_keys
    with pytest.raises(ConfigError, match="same API key"):
        ServerConfig(scopes={n: ScopeConfig(name=n, key_digests=(key_digest("k"),)) for n in "ab"})
    with pytest.raises(ConfigError, match="reads 'nobody'"):
        ServerConfig(scopes={"a": ScopeConfig(name="a", reads=("nobody",))})
    with pytest.raises(ConfigError, match="go together"):
        ServerConfig(tls_cert_file="x")


# Isolation


async def test_scopes_share_no_hits_no_lists_and_no_errors(engine):
    body = chat_body(documents=["the lamp"], include_document_report=True)
    async with client_of(engine, scopes=two_scopes()) as client:

        async def status(key):
            answer = await client.post(CHAT, json=body, headers=bearer(key))
            return answer.json()["documents"][0]["status"]

        assert [await status(key) for key in ("key-a", "key-b", "key-a")] == ["miss", "miss", "hit"]
        upload = {"documents": [{"text": "secret", "id": "plan"}]}
        await client.post("/v1/documents", json=upload, headers=bearer("key-a"))
        assert (await client.get("/v1/documents", headers=bearer("key-b"))).json()["data"] == []
        theirs = await client.get("/v1/documents/plan", headers=bearer("key-b"))
        nobodys = await client.get("/v1/documents/none", headers=bearer("key-b"))
        assert theirs.status_code == 404
        assert theirs.text.replace("plan", "none") == nobodys.text
        assert (await client.delete("/v1/documents/plan", headers=bearer("key-b"))).status_code == 404
        by_id = chat_body(documents=[{"id": "plan"}])
        assert (await client.post(CHAT, json=by_id, headers=bearer("key-b"))).status_code == 404
        assert (await client.post(CHAT, json=by_id, headers=bearer("key-a"))).status_code == 200


async def test_a_shared_scope_can_be_read_but_not_changed(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        upload = {"documents": [{"text": "for all", "id": "handbook"}]}
        await client.post("/v1/documents", json=upload, headers=bearer("key-shared"))
        listed = (await client.get("/v1/documents", headers=bearer("key-a"))).json()["data"]
        assert [(entry["id"], entry["is_read_only"]) for entry in listed] == [("handbook", True)]
        body = chat_body(documents=[{"id": "handbook"}])
        assert (await client.post(CHAT, json=body, headers=bearer("key-a"))).status_code == 200
        for method, path in (("DELETE", ""), ("POST", "/unpin")):
            response = await client.request(method, f"/v1/documents/handbook{path}", headers=bearer("key-a"))
            assert response.status_code == 404
        assert (await client.get("/v1/documents/handbook", headers=bearer("key-b"))).json()["text"] == "for all"


def test_only_documents_named_by_id_belong_to_the_shared_scope():
    scopes, library = two_scopes(), DocumentLibrary()
    library.add(scopes["shared"], [Document("for all", id="handbook"), Document("for all too", id="rules")])
    library.add(scopes["a"], [Document("mine", id="plan")])
    resolver = DocumentResolver(library, scopes["a"])
    texts = [{"id": "handbook"}, {"id": "rules"}, {"id": "plan"}, {"text": "my own rules", "id": "rules"}]
    documents = [resolver.resolve(DocumentBody(**text)) for text in texts]
    spans = [Span((1,), document.document_id) for document in documents]
    marked = resolver.with_scopes(PromptLayout((*spans, Span((2,)))))
    # "rules" is also the id of a text of the request's own: neither of the two may be shared.
    assert [span.scope for span in marked.spans] == ["shared", None, None, None, None]


async def test_the_scope_is_never_taken_from_the_request(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        for more in ({"scope": "b"}, {"metadata": {"scope": "b"}, "user": "b"}):
            await client.post(
                CHAT, json=chat_body(documents=["x"], **more), headers={**bearer("key-a"), "X-Scope": "b"}
            )
    assert {scope for scope, _ in engine._stored} == {"a"}


# Limits


async def test_bodies_beyond_the_scopes_limit_are_413(engine):
    scopes = two_scopes(max_body_bytes=2000)
    async with client_of(engine, scopes=scopes) as client:
        response = await client.post(CHAT, json=chat_body("x" * 3000), headers=bearer("key-a"))
        assert response.status_code == 413
        assert "2000" in response.json()["error"]["message"]

        async def chunked():
            for _ in range(10):
                yield b"x" * 1000

        assert (await client.post(CHAT, content=chunked(), headers=bearer("key-a"))).status_code == 413
        assert (await client.post(CHAT, json=chat_body(), headers=bearer("key-a"))).status_code == 200


async def test_a_body_that_does_not_arrive_is_408(engine):
    async with client_of(engine, body_timeout_s=0.2) as client:

        async def slow():
            for _ in range(100):
                yield b"{"
                await asyncio.sleep(0.05)

        assert (await client.post(CHAT, content=slow())).status_code == 408


async def test_rate_limits_say_when_to_come_back(engine):
    async with client_of(engine, scopes=two_scopes(max_requests_per_minute=3)) as client:
        statuses = [(await client.get("/v1/models", headers=bearer("key-a"))).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        refused = await client.get("/v1/models", headers=bearer("key-a"))
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await client.get("/v1/models", headers=bearer("key-b"))).status_code == 200


def test_the_rate_is_even_after_the_burst_and_a_clock_that_stands_still_grants_nothing():
    now = [0.0]
    limiter, scope = RateLimiter(lambda: now[0]), ScopeConfig(max_requests_per_minute=60)
    for _ in range(60):
        limiter.check(scope)
    with pytest.raises(OverloadedError):
        limiter.check(scope)
    now[0] = 2.0
    limiter.check(scope)
    limiter.check(scope)
    with pytest.raises(OverloadedError) as caught:
        limiter.check(scope)
    assert caught.value.retry_after_s == pytest.approx(1.0)


# Admission


def scope(name, **options):
    return ScopeConfig(name=name, **options)


async def run_in_queue(queue, tenant, order, label, hold_s=0.0):
    async with queue.place(tenant, 10):
        order.append(label)
        await asyncio.sleep(hold_s)


async def test_a_flood_of_one_scope_does_not_delay_another():
    queue, order = AdmissionQueue(max_running=2, max_waiting=1000), []
    flood = [asyncio.create_task(run_in_queue(queue, scope("a"), order, "a", 0.001)) for _ in range(200)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(run_in_queue(queue, scope("b"), order, "b", 0.001)) for _ in range(3)]
    await asyncio.gather(*flood, *late)
    assert [place for place, label in enumerate(order) if label == "b"][-1] < 10
    assert (queue.num_running, queue.num_waiting) == (0, 0)


async def test_a_full_queue_refuses_and_a_free_place_is_given_at_once():
    queue, order = AdmissionQueue(max_running=1, max_waiting=1), []
    first = asyncio.create_task(run_in_queue(queue, scope("a"), order, 1, 0.05))
    await asyncio.sleep(0)
    second = asyncio.create_task(run_in_queue(queue, scope("a"), order, 2))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="queue is full"):
        await run_in_queue(queue, scope("b"), order, 3)
    await asyncio.gather(first, second)
    assert order == [1, 2]


async def test_waiting_ends_with_the_deadline_the_client_or_the_server():
    queue, order = AdmissionQueue(max_running=1, max_waiting=10), []
    async with queue.place(scope("a"), 1):
        with pytest.raises(DeadlineError):
            async with queue.place(scope("a"), 0.01):
                pass
        gone = asyncio.create_task(run_in_queue(queue, scope("a"), order, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        stays = asyncio.create_task(run_in_queue(queue, scope("a"), order, "stays"))
        await asyncio.sleep(0)
        assert queue.num_waiting == 1
        queue.close()
        with pytest.raises(ShuttingDownError):
            await stays
    assert order == []
    with pytest.raises(ShuttingDownError):
        await run_in_queue(queue, scope("a"), order, "late")
    assert (queue.num_running, queue.num_waiting) == (0, 0)


async def test_random_comings_and_goings_leave_the_queue_empty():
    generator = __import__("random").Random(3)
    queue, order = AdmissionQueue(max_running=3, max_waiting=20), []
    tasks = []
    for label in range(300):
        tenant = scope(generator.choice("abc"), max_concurrent_requests=10)
        tasks.append(asyncio.create_task(run_in_queue(queue, tenant, order, label, generator.random() * 0.003)))
        if generator.random() < 0.3:
            generator.choice(tasks).cancel()
        if generator.random() < 0.5:
            await asyncio.sleep(generator.random() * 0.002)
        assert queue.num_running <= 3
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.num_running, queue.num_waiting) == (0, 0)
    assert len(order) > 100


async def test_concurrency_of_a_scope_is_limited():
    engine = FakeEngine(step_s=0.05)
    async with client_of(engine, scopes=two_scopes(max_concurrent_requests=2)) as client:
        requests = [client.post(CHAT, json=chat_body(), headers=bearer("key-a")) for _ in range(4)]
        other = client.post(CHAT, json=chat_body(), headers=bearer("key-b"))
        *answers, theirs = await asyncio.gather(*requests, other)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    assert theirs.status_code == 200


async def test_no_more_than_max_running_are_in_the_engine():
    engine = FakeEngine(step_s=0.002)
    async with client_of(engine, max_running=4) as client:
        answers = await asyncio.gather(*(client.post(CHAT, json=chat_body(seed=n)) for n in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert engine.max_seen_running == 4


async def test_the_deadline_ends_a_request_and_frees_its_place():
    engine = FakeEngine(step_s=0.05)
    engine.script = "a long answer that takes its time and more"
    async with client_of(engine) as client:
        started = time.monotonic()
        response = await client.post(CHAT, json=chat_body(deadline_s=0.12, max_tokens=100))
        assert response.status_code == 504
        assert time.monotonic() - started < 0.5
        streamed = await client.post(CHAT, json=chat_body(deadline_s=0.12, max_tokens=100, stream=True))
        assert streamed.status_code == 200
        assert "deadline" in streamed.text.split("\n\n")[-3]
    assert engine.num_running == 0


# CORS


async def test_cors_is_off_unless_origins_are_named(engine):
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with client_of(engine) as client:
        response = await client.options(CHAT, headers=preflight)
        assert "access-control-allow-origin" not in response.headers
    async with client_of(engine, cors_origins=("https://app.example",), scopes=two_scopes()) as client:
        response = await client.options(CHAT, headers=preflight)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.options(CHAT, headers={**preflight, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = await client.get("/v1/models", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


async def test_a_full_pool_does_not_say_what_others_hold(engine):
    engine.fail_with = CapacityError("no room: of 80 KV blocks 70 are pinned")
    async with client_of(engine, scopes=two_scopes()) as client:
        response = await client.post(CHAT, json=chat_body(), headers=bearer("key-a"))
    assert response.status_code == 503
    assert "70" not in response.text
    async with client_of(engine) as client:
        assert "70" in (await client.post(CHAT, json=chat_body())).text


@pytest.mark.parametrize("value", [0, -1, 1.5, "x"])
def test_a_wrong_limit_of_pins_is_refused(value):
    with pytest.raises(ConfigError, match="max_pinned_bytes"):
        ScopeConfig(max_pinned_bytes=value)


@pytest.mark.parametrize("line", ['is_operator = "false"', "is_operator = 1", 'keys = [" sk-1"]', 'keys = ["sk-1\\n"]'])
def test_key_files_that_would_mean_something_else_are_refused(tmp_path, line):
    keys = "" if line.startswith("keys") else 'keys = ["sk-0"]\n'
    path = tmp_path / "keys.toml"
    path.write_text(f"[scopes.a]\n{keys}{line}\n")
    with pytest.raises(ConfigError, match="scope 'a'") as error:
        scopes_from_file(path)
    assert "sk-" not in str(error.value)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://app.example/page", "null", ""])
def test_origins_that_no_browser_sends_are_refused(origin):
    with pytest.raises(ConfigError, match="cors origin"):
        ServerConfig(cors_origins=(origin,))
    ServerConfig(cors_origins=("https://app.example", "http://localhost:3000", "*"))
