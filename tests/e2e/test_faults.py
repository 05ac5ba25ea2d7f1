# SPDX-License-Identifier: Apache-2.0
"""Whatever clients, the model or the system do: the service answers afterwards, and no block has leaked."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from fixtures.fake_engine import FakeEngine
from fixtures.live_server import live_server, running_engine
from fixtures.tiny_models import save_tiny
from lazyattention.config import CacheConfig, EngineConfig
from lazyattention.errors import ConfigError, EngineDeadError
from lazyattention.server.config import ScopeConfig, key_digest

COMMAND = str(Path(sys.executable).with_name("lazyattention"))
CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 3000, "ignore_eos": True, "stream": True}


def body(text="why?", **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def assert_serves(server, **more):
    response = httpx.post(f"{server.url}{CHAT}", json=body(**more), timeout=60)
    assert response.status_code == 200, response.text


def wait_until(condition, timeout_s=10):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        time.sleep(0.02)


def send_raw(url, raw):
    """Send bytes on a fresh connection and return the head of what comes back, if anything does."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(raw)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while b"\r\n\r\n" not in answer and (chunk := connection.recv(65536)):
                answer += chunk
        return answer


# Clients


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_blocks_at_once(engine, server, streams):
    assert_serves(server)
    request = httpx.Client(timeout=30)
    if streams:
        with request.stream("POST", f"{server.url}{CHAT}", json=body(**LONG)) as response:
            next(response.iter_lines())
            assert engine.engine.scheduler.running
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{CHAT}", json=body(**LONG | {"stream": False}), timeout=0.5)
    wait_until(lambda: not engine.engine.has_work)
    request.close()
    assert_serves(server)


def test_many_clients_that_leave_at_random_moments_leave_nothing_behind(engine, server):
    async def leave(client, number):
        generator = random.Random(number)
        with contextlib.suppress(httpx.HTTPError, TimeoutError, json.JSONDecodeError):
            async with asyncio.timeout(generator.random() * 0.6):
                options = LONG if number % 2 else {"max_tokens": 300}
                await client.post(CHAT, json=body(str(number), documents=[f"text {number % 5} " * 20], **options))

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            await asyncio.gather(*(leave(client, number) for number in range(60)))

    asyncio.run(main())
    wait_until(lambda: not engine.engine.has_work)
    assert_serves(server)


def test_a_client_that_never_reads_does_not_stop_others(server):
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body(**LONG | {"max_tokens": 2000})).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.sendall(head.encode() + payload)
        assert_serves(server)


def test_slow_heads_are_cut_off_and_others_are_served_meanwhile():
    engine = FakeEngine()
    with live_server(engine, header_timeout_s=0.6) as server:
        host, port = server.url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port)), timeout=10) for _ in range(150)]
        for connection in slow:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
        response = httpx.post(f"{server.url}{CHAT}", json=body() | {"model": "fake"}, timeout=5)
        assert response.status_code == 200
        start = time.monotonic()
        for connection in slow:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            connection.close()
        assert time.monotonic() - start < 5


def test_a_slow_head_on_a_used_connection_is_cut_off_too():
    with live_server(FakeEngine(), header_timeout_s=0.4) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
            connection.sendall(b"GET /health HTT")
            start = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
            assert time.monotonic() - start < 3


def test_a_long_answer_is_not_cut_off_by_the_head_timeout():
    engine = FakeEngine(step_s=0.05)
    engine.script = "a long answer " * 5
    with live_server(engine, header_timeout_s=0.2) as server:
        response = httpx.post(f"{server.url}{CHAT}", json=body(max_tokens=30) | {"model": "fake"}, timeout=20)
        assert response.status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff\xfe garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /v1/documents/%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /static/..%2f..%2fapp.py HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b'GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\xff"{}\r\nConnection: close\r\n\r\n',
    ],
)
def test_malformed_http_is_never_a_500(raw):
    with live_server(FakeEngine()) as server:
        answer = send_raw(server.url, raw)
        assert b" 500 " not in answer.split(b"\r\n")[0]
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_body_of_100_mb_is_refused_without_being_kept(server):
    before = _resident_bytes()
    blob = b'{"model": "tiny", "messages": "' + b"x" * 100_000_000 + b'"}'
    response = httpx.post(f"{server.url}{CHAT}", content=blob, headers={"content-type": "application/json"}, timeout=60)
    del blob
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert _resident_bytes() - before < 150_000_000  # the client's own copy among it
    assert_serves(server)


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_documents(loaded):
    scopes = {"default": ScopeConfig(max_documents=20_000)}
    config = EngineConfig(cache=CacheConfig(num_blocks=300))
    with running_engine(loaded, config) as engine, live_server(engine, scopes=scopes) as server:
        many = httpx.post(f"{server.url}{CHAT}", json=body(documents=["the lamp"] * 10_000), timeout=120)
        assert many.status_code == 400  # more tokens than the model has positions
        assert "tokens" in many.json()["error"]["message"]
        different = [f"text {n}" for n in range(10_000)]
        upload = httpx.post(f"{server.url}/v1/documents", json={"documents": different, "warm": False}, timeout=120)
        assert upload.status_code == 200
        page = httpx.get(f"{server.url}/v1/documents?limit=1000", timeout=60).json()
        assert (page["num_documents"], len(page["data"])) == (10_000, 1000)
        assert_serves(server)


def test_answers_are_not_held_back_by_the_network():
    """Headers and body are two writes; with Nagle's algorithm on, the second waits 40 ms for a delayed acknowledgement."""
    with live_server(FakeEngine()) as server, httpx.Client(base_url=server.url) as client:
        times = []
        for _ in range(30):
            start = time.perf_counter()
            assert client.get("/v1/models").status_code == 200
            times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 4] < 0.03


def test_a_wall_clock_that_jumps_changes_nothing(server, monkeypatch):
    real = time.time
    jumps = iter(range(10**9))
    # Back and forth by years, differently at each call.
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e8)
    for _ in range(5):
        assert_serves(server, documents=["the lamp"], deadline_s=30)
    upload = httpx.post(f"{server.url}/v1/documents", json={"documents": [{"text": "x", "id": "x"}], "pin": True})
    assert upload.json()["data"][0]["status"] == "warmed"
    assert_serves(server, documents=[{"id": "x"}])
    (entry,) = httpx.get(f"{server.url}/v1/documents").json()["data"]
    assert entry["idle_s"] >= 0


def test_tls_serves_https_and_nothing_else(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    with live_server(FakeEngine(), tls_cert_file=cert, tls_key_file=key) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{server.url}/health", verify=context).json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
    with pytest.raises(ConfigError, match="TLS"), live_server(FakeEngine(), tls_cert_file=key, tls_key_file=cert):
        pass


# The engine


def test_a_model_that_raises_fails_its_requests_and_serves_the_next(engine, server):
    real = engine.engine.model_runner.run

    def fail(batch):
        engine.engine.model_runner.run = real
        raise RuntimeError("device lost")

    engine.engine.model_runner.run = fail
    response = httpx.post(f"{server.url}{CHAT}", json=body(documents=["the lamp"]), timeout=30)
    assert response.status_code >= 500
    assert "device lost" in response.json()["error"]["message"]
    assert_serves(server, documents=["the lamp"])


def test_a_dead_engine_is_reported_and_streams_end_with_an_error(loaded):
    with running_engine(loaded) as engine, live_server(engine) as server:
        with httpx.stream("POST", f"{server.url}{CHAT}", json=body(**LONG), timeout=30) as response:
            lines = response.iter_lines()
            next(lines)

            def die(batch):
                raise KeyboardInterrupt("the thread is gone")

            engine.engine.model_runner.run = die
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "engine" in json.loads(rest[-2][6:])["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.get(f"{server.url}/health").json()["status"] == "dead"
        refused = httpx.post(f"{server.url}{CHAT}", json=body(), timeout=30)
        assert refused.status_code == EngineDeadError.http_status
        assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_a_pool_that_is_too_small_refuses_what_can_never_fit_and_queues_what_can(loaded):
    config = EngineConfig(cache=CacheConfig(num_blocks=20))
    with running_engine(loaded, config) as engine, live_server(engine) as server:
        response = httpx.post(f"{server.url}{CHAT}", json=body("x " * 400), timeout=30)
        assert response.status_code == 400
        assert "KV blocks" in response.json()["error"]["message"]

        async def flood():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                requests = [client.post(CHAT, json=body(f"{n}?", documents=[f"text {n}"])) for n in range(30)]
                return await asyncio.gather(*requests)

        answers = asyncio.run(flood())
        assert {answer.status_code for answer in answers} == {200}


# The server's end


def test_shutdown_lets_streams_end_and_refuses_new_requests():
    engine = FakeEngine(step_s=0.02)
    engine.script = "one two three four five six"
    with (
        live_server(engine, shutdown_grace_s=10.0) as server,
        httpx.Client(timeout=20) as client,
        client.stream("POST", f"{server.url}{CHAT}", json=body(max_tokens=20, stream=True) | {"model": "fake"}) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        server.stop()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] in ("stop", "length")


def test_streams_beyond_the_grace_period_end_with_an_error_event():
    engine = FakeEngine(step_s=0.05)
    engine.script = "a very long answer " * 50
    with (
        live_server(engine, shutdown_grace_s=0.3) as server,
        httpx.Client(timeout=20) as client,
        client.stream("POST", f"{server.url}{CHAT}", json=body(max_tokens=900, stream=True) | {"model": "fake"}) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        start = time.monotonic()
        server.stop()
        rest = [line for line in lines if line]
    assert time.monotonic() - start < 4
    assert rest[-1] == "data: [DONE]"
    assert "shutting down" in json.loads(rest[-2][6:])["error"]["message"]
    assert engine.num_running == 0


# Processes


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def process(model_folder, *options, stderr=None, **environment):
    """`lazyattention serve` as a process of its own; yields it and its address."""
    port = _free_port()
    command = [COMMAND, "serve", "--model", str(model_folder), "--port", str(port), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    child = subprocess.Popen(command, stderr=stderr or subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: child.poll() is not None or _is_up(url), 60)
        assert child.poll() is None, "the server did not start"
        yield child, url
    finally:
        child.kill()
        child.wait()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_up(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    return False


def _model_of(url):
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def test_sigterm_ends_the_process_cleanly_after_its_streams(model_folder, tmp_path):
    log_path = tmp_path / "log"
    options = ("--shutdown-grace-s", "5", "--log-format", "json", "--log-level", "DEBUG")
    with log_path.open("wb") as log_file, process(model_folder, *options, stderr=log_file) as (child, url):
        name = _model_of(url)
        more = {"model": name, "documents": ["the lamp"], "user": "ann"}
        with httpx.stream("POST", f"{url}{CHAT}", json=body(max_tokens=30, stream=True) | more, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert child.wait(20) == 0
    log = [json.loads(line) for line in log_path.read_text().splitlines() if line.startswith("{")]
    (access,) = (line for line in log if line["logger"] == "lazyattention.server.access" and "chat" in line["message"])
    assert (access["status"], access["scope"], access["user"]) == (200, "default", "ann")
    (reuse,) = (line for line in log if line["message"] == "what was reused")
    assert reuse["request_id"] == "chatcmpl-" + access["request_id"]
    assert reuse["documents"][0]["status"] == "miss"
    assert not [line for line in log if "traceback" in line]


@pytest.mark.slow
def test_after_sigkill_a_new_process_serves(model_folder):
    with process(model_folder) as (child, url):
        more = {"model": _model_of(url), "max_tokens": 100}
        with httpx.stream("POST", f"{url}{CHAT}", json=body(**LONG) | more) as response:
            lines = response.iter_lines()
            next(lines)
            child.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
    with process(model_folder) as (_, url):
        assert httpx.post(f"{url}{CHAT}", json=body() | {"model": _model_of(url)}, timeout=30).status_code == 200


@pytest.mark.slow
def test_a_log_that_cannot_be_written_fails_no_request(model_folder):
    with Path("/dev/full").open("wb") as full, process(model_folder, "--log-level", "DEBUG", stderr=full) as (_, url):
        name = _model_of(url)
        for _ in range(3):
            response = httpx.post(f"{url}{CHAT}", json=body(documents=["the lamp"]) | {"model": name}, timeout=30)
            assert response.status_code == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "1", "--host", "203.0.113.1", "--allow-anonymous"], "cannot listen"),
        (["--host", "0.0.0.0"], "allow-anonymous"),
        (["--key-file", "/nowhere.toml"], "/nowhere.toml"),
        (["--tls-cert-file", "/nowhere.pem"], "go together"),
        (["--log-format", "xml"], "text or json"),
    ],
)
def test_wrong_options_end_the_start_with_one_readable_line(model_folder, options, said):
    command = [COMMAND, "serve", "--model", str(model_folder), *options]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_absurd_numbers_of_one_client_do_not_end_the_others_requests(server):
    url = server.url + "/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    with httpx.stream("POST", url, json={**body, "max_tokens": 300, "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        for field in ({"top_k": 10**400}, {"top_k": 2**63}, {"repetition_penalty": 1e-320}, {"seed": 2**63 - 1}):
            answer = httpx.post(url, json={**body, "max_tokens": 2, "temperature": 1.0, **field}, timeout=30)
            assert answer.status_code in (200, 400)
        assert not any("error" in line for line in lines)


def test_each_scope_may_pin_its_part_of_the_pool_and_no_more(loaded):
    scopes = {name: ScopeConfig(name=name, key_digests=(key_digest(name),)) for name in "ab"}
    config = EngineConfig(cache=CacheConfig(num_blocks=120))
    with running_engine(loaded, config) as engine, live_server(engine, scopes=scopes) as server:

        def post(name, path, body):
            headers = {"Authorization": f"Bearer {name}"}
            return httpx.post(server.url + path, json=body, headers=headers, timeout=30)

        statuses = {"a": [], "b": []}
        for number in range(12):
            for name in "ab":
                document = {"id": f"d{number}", "text": f"number {number} of {name} " * 8}
                answer = post(name, "/v1/documents", {"documents": [document], "pin": True})
                statuses[name].append(answer.json()["data"][0]["status"])
        assert statuses["a"] == statuses["b"]
        assert (statuses["a"][0], statuses["a"][-1]) == ("warmed", "failed")
        for name in "ab":
            body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
            assert post(name, "/v1/chat/completions", {**body, "documents": ["a text " * 20]}).status_code == 200
