# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics. Counted here: what clients see; read at scrape time: the engine's own counters and gauges."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lazyattention.engine.outputs import RequestOutput
from lazyattention.errors import LazyAttentionError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_QUEUE_BUCKETS_S = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60)
# Names in the engine's description -> (our metric, help). Counters first, then gauges.
_ENGINE_COUNTERS = {
    "num_steps": ("engine_steps", "Forward passes."),
    "num_computed_tokens": ("engine_computed_tokens", "Tokens computed, prompts and outputs."),
    "num_preemptions": ("engine_preemptions", "Requests whose KV was taken to let others go on."),
    "forward_s": ("engine_forward_seconds", "Time inside the model's forward."),
    "step_s": ("engine_step_seconds", "Time inside engine steps, the forward included."),
    "num_recomputed_tokens": ("recomputed_tokens", "Tokens of stored documents computed anew at requests' wish."),
    "num_selections": ("recompute_selections", "Requests for which it was measured what to compute anew."),
    "selection_s": ("recompute_selection_seconds", "Time in passes made for that alone."),
    "num_hit_tokens": ("store_hit_tokens", "Document tokens found stored at admission."),
    "num_miss_tokens": ("store_miss_tokens", "Document tokens not found stored at admission."),
    "num_hit_text_tokens": ("store_hit_text_tokens", "Text tokens found stored at admission."),
}
_EVICTIONS = {
    ("chunk", "room"): "num_evicted_chunks",
    ("chunk", "expired"): "num_expired_chunks",
    ("chunk", "deleted"): "num_deleted_chunks",
    ("text_block", "room"): "num_evicted_text_blocks",
}
_ENGINE_GAUGES = {
    "num_running": ("engine_running_sequences", "Sequences in the running batch."),
    "num_waiting": ("engine_waiting_sequences", "Sequences that wait inside the engine."),
    "num_blocks": ("kv_blocks", "KV blocks of the pool."),
    "num_free_blocks": ("kv_free_blocks", "KV blocks that hold nothing."),
    "num_chunks": ("store_chunks", "Stored chunks."),
    "num_text_blocks": ("store_text_blocks", "KV blocks with stored text."),
}
_PREFIX = "lazyattention_"


class Metrics:
    """All metrics of one server.

    Attributes:
        engine_values: The engine's counters and gauges by name, as of the last scrape.
        queue_s: Seconds of wait for a place in the engine.
        queued: Requests that wait for one.
        stored_bytes: KV of stored documents, by tier and scope.
    """

    def __init__(self) -> None:
        self.engine_values: Mapping[str, Any] = {}
        self.registry = CollectorRegistry()
        self.queue_s = self._histogram("queue_seconds", "Wait for a place in the engine.", _QUEUE_BUCKETS_S)
        self._ttft_s = self._histogram("ttft_seconds", "Arrival in the engine to first token.", _TTFT_BUCKETS_S)
        self._itl_s = self._histogram("itl_seconds", "Gap between two outputs of one request.", _ITL_BUCKETS_S)
        self._e2e_s = self._histogram("request_seconds", "Arrival in the engine to end.", _TTFT_BUCKETS_S)
        self._http = self._counter("http_requests", "HTTP requests.", ["scope", "route", "status"])
        self._ended = self._counter("requests", "Generation requests that ended.", ["scope", "reason"])
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, documents included.", ["scope"])
        self._reused_tokens = self._counter("reused_tokens", "Prompt tokens not computed.", ["scope"])
        self._output_tokens = self._counter("output_tokens", "Tokens generated.", ["scope"])
        self._documents = self._counter("documents", "Chunks of documents in prompts.", ["scope", "status", "reason"])
        self.queued = Gauge(_PREFIX + "queued_requests", "Requests that wait for the engine.", registry=self.registry)
        self.stored_bytes = Gauge(
            _PREFIX + "store_bytes", "KV of stored documents.", ["tier", "scope"], registry=self.registry
        )
        self.registry.register(_EngineCollector(lambda: self.engine_values))

    def note_http(self, scope: str, route: str, status: int) -> None:
        """Count an HTTP request at its end; status 0 = the client left."""
        self._http.labels(scope, route, str(status)).inc()

    def note_output(self, output: RequestOutput, last_token_s: float | None) -> float | None:
        """Observe one output; returns when the request's last token came."""
        if not any(one.delta_token_ids for one in output.outputs):
            return last_token_s
        now = time.monotonic()
        if last_token_s is None:
            self._ttft_s.observe(output.timings.ttft_s or 0.0)
        else:
            self._itl_s.observe(now - last_token_s)
        return now

    def note_end(self, scope: str, last: RequestOutput | None, error: LazyAttentionError | None) -> None:
        """Count a generation request at its end. `last`: its last output, if there was one."""
        if error is not None:
            reason = type(error).__name__
        elif last is None or not last.finished:
            reason = "client left"
        else:
            reason = last.outputs[0].finish_reason or "stop"
        self._ended.labels(scope, reason).inc()
        if last is None:
            return
        self._prompt_tokens.labels(scope).inc(last.num_prompt_tokens)
        self._reused_tokens.labels(scope).inc(last.num_reused_tokens)
        self._output_tokens.labels(scope).inc(sum(len(one.token_ids) for one in last.outputs))
        for entry in last.documents:
            # "identical prefix: 12 tokens" and the like would make a label of every number.
            self._documents.labels(scope, entry.status, entry.reason.split(":")[0].rstrip("0123456789 ")).inc()
        if last.finished:
            self._e2e_s.observe(last.timings.e2e_s or 0.0)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)


class _EngineCollector(Collector):
    def __init__(self, values: Callable[[], Mapping[str, Any]]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        """Read the engine's counters now."""
        values = self._values()
        if not values:
            return
        for name, (metric, text) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + metric, text, value=values[name])
        evictions = CounterMetricFamily(_PREFIX + "store_evictions", "What left the store.", labels=["kind", "reason"])
        for labels, name in _EVICTIONS.items():
            evictions.add_metric(labels, values[name])
        yield evictions
        for name, (metric, text) in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + metric, text, value=values[name])
        used = (values["num_blocks"] - values["num_free_blocks"]) * values["block_size"] * values["kv_bytes_per_token"]
        yield GaugeMetricFamily(_PREFIX + "kv_used_bytes", "KV memory in use.", value=used)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not need a running engine."""
        return []
