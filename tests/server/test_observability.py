# SPDX-License-Identifier: Apache-2.0
"""Metrics, log lines and traces."""

import io
import json
import logging
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import bearer, chat_body, client_of, two_scopes

from lazyattention.errors import CapacityError, ConfigError
from lazyattention.server.app import create_app
from lazyattention.server.config import ServerConfig
from lazyattention.server.logs import JsonFormatter, configure_server_logging
from lazyattention.server.tracing import Tracer, tracer_to

CHAT = "/v1/chat/completions"


async def metrics_of(client, **headers):
    text = (await client.get("/metrics", **headers)).text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.anyio
async def test_metrics_count_what_clients_saw(engine):
    async with client_of(engine, scopes=two_scopes()) as client:
        body = chat_body(documents=["the lamp"], temperature=0)
        answers = [
            (await client.post(CHAT, json=body, headers=bearer(key))).json() for key in ("key-a", "key-a", "key-b")
        ]
        await client.post(CHAT, json=chat_body(n=0), headers=bearer("key-a"))
        values = await metrics_of(client, headers=bearer("key-operator"))
    usages = [answer["usage"] for answer in answers[:2]]
    a = ("scope", "a")
    assert values["lazyattention_prompt_tokens_total", a] == sum(usage["prompt_tokens"] for usage in usages)
    assert values["lazyattention_output_tokens_total", a] == sum(usage["completion_tokens"] for usage in usages)
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert values["lazyattention_reused_tokens_total", a] == cached > 0
    assert values["lazyattention_documents_total", ("reason", "new"), a, ("status", "miss")] == 1
    assert values["lazyattention_documents_total", ("reason", "reused"), a, ("status", "hit")] == 1
    assert values["lazyattention_http_requests_total", ("route", CHAT), a, ("status", "400")] == 1
    assert values["lazyattention_http_requests_total", ("route", CHAT), a, ("status", "200")] == 2
    assert values["lazyattention_ttft_seconds_count",] == 3
    tier = ("tier", "device")
    assert values["lazyattention_store_bytes", a, tier] == values["lazyattention_store_bytes", ("scope", "b"), tier] > 0
    assert values["lazyattention_queued_requests",] == 0


@pytest.mark.anyio
async def test_paths_that_do_not_exist_make_no_labels_of_their_own(client):
    for number in range(20):
        await client.get(f"/nothing/{number}")
    names = {key for key in await metrics_of(client) if key[0] == "lazyattention_http_requests_total"}
    assert {dict(key[1:])["route"] for key in names} == {"other"}


@pytest.mark.anyio
async def test_a_fully_cold_workload_reports_no_reuse(client):
    for number in range(5):
        await client.post(CHAT, json=chat_body(documents=[f"text {number}"]))
    values = await metrics_of(client)
    assert values["lazyattention_reused_tokens_total", ("scope", "default")] == 0


@pytest.mark.anyio
async def test_metrics_survive_the_engine(client, engine):
    before = await metrics_of(client)
    engine.is_running = False
    engine.stats = None
    from lazyattention.errors import EngineDeadError

    async def dead():
        raise EngineDeadError("gone")

    engine.stats = dead
    assert set(await metrics_of(client)) >= set(before) - {("lazyattention_store_bytes",)}
    assert (await client.get("/health")).status_code == 503
    assert (await client.head("/health")).status_code == 503


def test_every_metric_of_the_dashboard_exists():
    from fixtures.fake_engine import FakeEngine

    app = create_app(FakeEngine(), ServerConfig())
    metrics = app.state.context.metrics
    import asyncio

    metrics.engine_values = asyncio.run(app.state.context.engine.stats())
    known = {m.name for m in metrics.registry.collect()}
    dashboard = json.loads((Path(__file__).parents[2] / "docs/grafana/lazyattention.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for expr in expressions for name in re.findall(r"lazyattention_\w+", expr)}
    assert len(used) > 15
    missing = {name for name in used if re.sub(r"_(total|bucket|sum|count)$", "", name) not in known}
    assert not missing
    assert all(panel["title"] and panel["type"] for panel in dashboard["panels"])


# Logs


@pytest.fixture
def log():
    stream = io.StringIO()
    before = {
        name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in ("lazyattention", "uvicorn")
    }
    configure_server_logging("DEBUG", as_json=True, stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    for name, (handlers, level) in before.items():
        logging.getLogger(name).handlers = handlers
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = True


@pytest.mark.anyio
async def test_one_line_per_request_with_its_id(client, log):
    body = chat_body(documents=["the lamp"], user="ann", metadata={"team": "x"}, safety_identifier="s")
    response = await client.post(CHAT, json=body, headers={"X-Request-Id": "my-id.7"})
    assert response.headers["x-request-id"] == "my-id.7"
    (access,) = [line for line in log() if line["logger"].endswith("access")]
    assert (access["request_id"], access["status"], access["user"]) == ("my-id.7", 200, "ann")
    assert (access["metadata"], access["safety_identifier"], access["level"]) == ({"team": "x"}, "s", "INFO")
    (reuse,) = [line for line in log() if "documents" in line]
    assert (reuse["request_id"], reuse["level"]) == ("chatcmpl-" + access["unique_id"], "DEBUG")
    assert reuse["documents"][0]["reason"] == "new"


@pytest.mark.anyio
async def test_probes_do_not_fill_the_log(client, engine, log):
    await client.get("/health")
    await client.get("/metrics")
    engine.is_running = False
    await client.get("/health")
    assert [line["level"] for line in log() if line["logger"].endswith("access")] == ["DEBUG", "DEBUG", "INFO"]


@pytest.mark.anyio
async def test_strange_request_ids_are_replaced(client):
    for strange in ('a"b', "x" * 200, "a b", "\u00e9"):
        response = await client.get("/v1/models", headers={"X-Request-Id": strange.encode("latin-1")})
        assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.anyio
async def test_keys_and_texts_are_not_logged(engine, log):
    async with client_of(engine, scopes=two_scopes()) as client:
        await client.post(
            CHAT, json=chat_body("a secret question", documents=["a secret text"]), headers=bearer("key-a")
        )
        await client.post(CHAT, json=chat_body(), headers=bearer("key-wrong"))
    assert "secret" not in json.dumps(log())
    assert "key-" not in json.dumps(log())


@pytest.mark.anyio
async def test_bugs_are_logged_with_their_traceback(client, engine, log):
    engine.generate = None
    response = await client.post(CHAT, json=chat_body())
    (line,) = [line for line in log() if "traceback" in line]
    assert line["request_id"] == response.headers["x-request-id"]


def test_line_breaks_cannot_forge_log_lines():
    record = logging.LogRecord("x", logging.INFO, "", 1, "GET %s", ("/a\n{}",), None)
    assert "\n" not in JsonFormatter().format(record)


# Traces


@pytest.mark.anyio
async def test_traces_hold_the_request_and_its_phases(engine):
    import httpx

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(engine, ServerConfig(), tracer=Tracer(provider))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        await client.post(CHAT, json=chat_body(documents=["the lamp"]), headers=headers)
        engine.fail_with = CapacityError("no room")
        await client.post(CHAT, json=chat_body())
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.name == "generate"]
    assert f"{roots[0].context.trace_id:032x}" == trace_id
    assert roots[0].attributes["lazyattention.documents"] == 1
    children = [span for span in spans if span.parent and span.parent.span_id == roots[0].context.span_id]
    assert [span.name for span in children] == ["wait", "prefill", "decode"]
    assert all(roots[0].start_time <= span.start_time <= span.end_time <= roots[0].end_time for span in children)
    assert "no room" in roots[1].status.description


@pytest.mark.parametrize("endpoint", ["nonsense", "localhost:4318", "grpc://localhost:4317", "http://"])
def test_addresses_that_are_none_are_refused(endpoint):
    with pytest.raises(ConfigError, match="OTLP"):
        tracer_to(endpoint)
