# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: one span per generation request, with its wait, prefill and decode as children. An extra."""

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lazyattention.engine.outputs import RequestOutput
from lazyattention.errors import ConfigError, LazyAttentionError, UnsupportedError

if TYPE_CHECKING:
    from lazyattention.server.generation import Job


class Tracer:
    """Writes spans at a request's end, when all its times are known."""

    def __init__(self, provider: Any = None) -> None:  # noqa: ANN401  # optional package
        """`provider`: a TracerProvider; None uses the globally configured one.

        Raises:
            UnsupportedError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.propagate import extract
            from opentelemetry.trace import Status, StatusCode, set_span_in_context
        except ImportError:
            raise UnsupportedError("traces need OpenTelemetry; install lazyattention[tracing]") from None
        self._tracer = (provider or trace.get_tracer_provider()).get_tracer("lazyattention")
        self._extract, self._in_span = extract, set_span_in_context
        self._status: Any = lambda text: Status(StatusCode.ERROR, text)

    def note_end(
        self, job: "Job", arrival_s: float, last: RequestOutput | None, error: LazyAttentionError | None
    ) -> None:
        """Record one request; `arrival_s`: monotonic seconds."""
        # Spans want wall-clock nanoseconds; a change of the wall clock during the request moves them together.
        wall_minus_monotonic = time.time() - time.monotonic()

        def wall_ns(monotonic_s: float) -> int:
            return int((monotonic_s + wall_minus_monotonic) * 1e9)

        end_s = time.monotonic()
        attributes: dict[str, Any] = {"request.id": job.request_id, "tenant.scope": job.tenant.name}
        if last is not None:
            attributes |= {
                "gen_ai.usage.input_tokens": last.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in last.outputs),
                "lazyattention.reused_tokens": last.num_reused_tokens,
                "lazyattention.recomputed_tokens": last.num_recomputed_tokens,
                "lazyattention.documents": len(last.documents),
            }
        root = self._tracer.start_span(
            "generate", context=self._extract(job.headers), start_time=wall_ns(arrival_s), attributes=attributes
        )
        if error is not None:
            root.set_status(self._status(f"{type(error).__name__}: {error}"))
        times = [arrival_s]
        if last is not None:
            times += [t for t in (last.timings.first_scheduled_s, last.timings.first_token_s) if t is not None]
        for name, start_s, stop_s in zip(("wait", "prefill", "decode"), times, [*times[1:], end_s], strict=False):
            child = self._tracer.start_span(name, context=self._in_span(root), start_time=wall_ns(start_s))
            child.end(end_time=wall_ns(stop_s))
        root.end(end_time=wall_ns(end_s))


def tracer_to(endpoint: str) -> Tracer:
    """A tracer that exports to an OTLP/HTTP collector, such as http://localhost:4318/v1/traces.

    Raises:
        ConfigError: The address is none.
        UnsupportedError: OpenTelemetry's SDK or its OTLP exporter is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"the OTLP endpoint {endpoint!r} must be an address such as http://localhost:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UnsupportedError("traces need OpenTelemetry; install lazyattention[tracing]") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "lazyattention"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)
