"""Histograms of durations and token counts by model and worker, for Prometheus. Names follow
OpenTelemetry's conventions for generative AI.

Labels are bounded: registered models and existing workers."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from lean_selector.http.client import Upstream
from lean_selector.wire.exposition import Histogram, HistogramFamily, labels

# As the conventions recommend.
_FIRST_TOKEN_S: Final[tuple[float, ...]] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_S: Final[tuple[float, ...]] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_DURATION_S: Final[tuple[float, ...]] = tuple([0.01 * 2**n for n in range(14)])
_TOKENS: Final[tuple[float, ...]] = tuple([float(4**n) for n in range(14)])
_SHARES: Final[tuple[float, ...]] = tuple([n / 10 for n in range(1, 10)])
_MOST_SERIES: Final = 1024  # of a model at a worker; above this, the oldest are dropped

# path -> operation and provider
_OPERATIONS: Final = {
    b"/v1/completions": ("text_completion", "openai"),
    b"/v1/chat/completions": ("chat", "openai"),
    b"/v1/responses": ("chat", "openai"),
    b"/v1/messages": ("chat", "anthropic"),
    b"/v1/embeddings": ("embeddings", "openai"),
}


def operation_of(path: bytes) -> tuple[str, str]:
    """Return OpenTelemetry's names of a path's operation and provider, such as (chat, openai)."""
    return _OPERATIONS.get(path, (path.rpartition(b"/")[2].decode(), "openai"))


class Timing(NamedTuple):
    """The measurements of a complete answer. The token counts are the engine's."""

    duration_s: float
    first_token_s: float | None  # only for a stream
    lengths: tuple[int, int] | None  # prompt and answer tokens
    cached_tokens: int | None


class _Series:
    """Histograms for one worker, one model and one kind of request."""

    def __init__(self) -> None:
        self.duration = Histogram(_DURATION_S)
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.per_token = Histogram(_PER_TOKEN_S)
        self.input = Histogram(_TOKENS)
        self.output = Histogram(_TOKENS)
        self.share = Histogram(_SHARES)

    def add(self, timing: Timing) -> None:
        first_s, lengths = timing.first_token_s, timing.lengths
        self.duration.add(timing.duration_s)
        if first_s is not None:
            self.first_token.add(first_s)
        if lengths is None:
            return
        prompt, output = lengths
        self.input.add(float(prompt))
        self.output.add(float(output))
        if first_s is not None and output > 1:
            self.per_token.add((timing.duration_s - first_s) / (output - 1))
        if timing.cached_tokens is not None and prompt:
            self.share.add(timing.cached_tokens / prompt)


class GenAiMetrics:
    """Histograms of durations and token counts of complete answers with status 200."""

    def __init__(self) -> None:
        # By operation (several paths may have one), model and base URL
        self._series: dict[tuple[tuple[str, str], str, str], _Series] = {}

    def add(self, path: bytes, model: str, worker: Upstream, timing: Timing) -> None:
        key = _OPERATIONS.get(path) or operation_of(path), model, worker.text
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series()
            if len(self._series) > _MOST_SERIES:
                del self._series[next(iter(self._series))]
        series.add(timing)

    def keep(self, workers: Iterable[Upstream]) -> None:
        """Deletes the histograms of all workers that are not in `workers`."""
        there = {each.text for each in workers}
        for key in [each for each in self._series if each[2] not in there]:
            del self._series[key]

    def _rows(self, name: str) -> list[tuple[str, tuple[float, ...], list[int], float]]:
        rows = []
        for ((operation, provider), model, worker), series in self._series.items():
            address, _, port = worker.partition("://")[2].rpartition(":")
            told = {
                "gen_ai_operation_name": operation,
                "gen_ai_provider_name": provider,
                "gen_ai_request_model": model,
                "server_address": address,
                "server_port": port,
            }
            for part in name.split():
                found: Histogram = getattr(series, part)
                kind = {"gen_ai_token_type": part} if name == "input output" else {}
                rows.append((labels(**told, **kind), found.bounds, found.buckets, found.total))
        return rows

    def families(self) -> list[HistogramFamily]:
        return [
            HistogramFamily(name, text, lambda part=part: self._rows(part))  # type: ignore[misc]
            for name, part, text in (
                ("gen_ai_server_request_duration_seconds", "duration",
                    "From the request to the end of its answer."),
                ("gen_ai_server_time_to_first_token_seconds", "first_token",
                    "From the request to the first token of a stream."),
                ("gen_ai_server_time_per_output_token_seconds", "per_token",
                    "Between the tokens of a stream after the first."),
                ("gen_ai_client_token_usage", "input output",
                    "Tokens of prompts and answers, counted by the engines."),
                ("lean_selector_gateway_cached_share", "share",
                    "Share of a prompt's tokens that was cached, counted by the engines."),
            )
        ]  # fmt: skip
