"""Sends a span for each routed request over OTLP, with OpenTelemetry's SDK.

Imported only with `--otlp-endpoint`; requires the extra `otel`. The SDK queues ended spans, up to a
limit, and sends them in batches from its own thread. If the collector is slow or absent, spans are
lost and the SDK logs this, but the loop is never blocked. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER
and the SDK's other variables apply."""

import time
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lean_selector.gateway.genai_metrics import operation_of
from lean_selector.gateway.headers import traceparent_of
from lean_selector.gateway.proxied_request import ProxiedRequest

_CLOSING_MS: Final = 2_000  # time for pending spans at exit


def _server(url: str) -> dict[str, Any]:
    address, _, port = url.partition("://")[2].rpartition(":")
    return {"server.address": address, "server.port": int(port)}


class OtlpSpans:
    """Traces requests as OTLP spans. `close` blocks; call other methods on the loop's thread."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the collector's base URL, such as `http://HOST:4318`."""
        named = Resource({SERVICE_NAME: "lean-selector"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("lean_selector.gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[ProxiedRequest, tuple[trace.Span, int]] = {}  # (span, start time)

    def begin(self, proxied: ProxiedRequest) -> None:
        """Starts a span for the request, as a child of the span in the client's header
        `traceparent` (if present). The worker gets a `traceparent` that names the new span."""
        given = traceparent_of(proxied.request.section)
        parent = self._propagator.extract({} if given is None else {"traceparent": given})
        began = time.time_ns()
        operation, provider = operation_of(proxied.request.path)
        told = {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider}
        span = self._tracer.start_span(
            operation, parent, trace.SpanKind.SERVER, told, start_time=began
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        proxied.traceparent = carrier.get("traceparent")
        self._open[proxied] = span, began

    def end(self, proxied: ProxiedRequest) -> None:
        span, began = self._open.pop(proxied, (None, 0))
        if span is None or not span.is_recording():
            return
        routed, use, timing = proxied.routed, proxied.use, proxied.timing
        told: dict[str, Any] = {"http.response.status_code": proxied.status or 499}
        if routed is not None:
            told["gen_ai.request.model"] = routed.model_name
        if use is not None:
            told |= _server(use.endpoint.text)
            if use.overlap_tokens is not None:
                told["lean_selector.overlap_tokens"] = use.overlap_tokens
        if proxied.pair_reason:
            told["lean_selector.pd"] = proxied.pair_reason
        for name, url, begin_s, end_s in proxied.legs:
            above = trace.set_span_in_context(span)
            at = [began + round(seconds * 1e9) for seconds in (begin_s, end_s)]
            leg = self._tracer.start_span(name, above, trace.SpanKind.CLIENT, start_time=at[0])
            leg.set_attributes(_server(url))
            leg.end(at[1])
        if proxied.tried:
            told["lean_selector.tried"] = len(proxied.tried)
        if timing is not None and timing.lengths is not None:
            prompt, output = timing.lengths
            told |= {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
            if timing.cached_tokens is not None:
                told["gen_ai.usage.cache_read.input_tokens"] = timing.cached_tokens
        span.set_attributes(told)
        if timing is not None and timing.first_token_s is not None:
            span.add_event("first token", timestamp=began + round(timing.first_token_s * 1e9))
        if proxied.status >= 500 or (proxied.why and proxied.outcome != "ok"):
            span.set_status(trace.StatusCode.ERROR, proxied.why or None)
        span.end()

    def close(self) -> None:
        """Sends pending spans."""
        self._processor.force_flush(_CLOSING_MS)
        self._provider.shutdown()
