"""The gateway's counters and metrics. Labels are statuses, workers' base URLs, and fixed words."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from lean_selector.gateway.genai_metrics import GenAiMetrics
from lean_selector.gateway.upstreams import Rotation
from lean_selector.http.client import Upstream
from lean_selector.wire.exposition import (
    AnyFamily,
    Histogram,
    HistogramFamily,
    Sample,
    by,
    labels,
    table,
)

FIRST_BYTE_BOUNDS_S: Final[tuple[float, ...]] = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class RetryBudget:
    """Limits retries to a fifth of all requests, plus a few at the start, so that failing workers
    do not multiply the load."""

    SHARE: Final = 0.2
    FIRST: Final = 20.0
    MOST: Final = 1000.0  # maximum number of saved retries

    def __init__(self) -> None:
        self._left = self.FIRST
        self.denied = 0

    def add(self) -> None:
        """Counts a request, which permits a fifth of a retry."""
        self._left = min(self._left + self.SHARE, self.MOST)

    def take(self) -> bool:
        """Whether a retry is allowed. If so, the retry is counted."""
        if self._left < 1.0:
            self.denied += 1
            return False
        self._left -= 1.0
        return True


class Counts:
    """The gateway's counters since the process started, and the number of `active` requests."""

    def __init__(self) -> None:
        self.active = 0  # unfinished requests
        self.answers: Counter[int] = Counter()  # answers that began, by status
        self.hung_up = 0  # client disconnects
        self.broken = 0  # answers cut off after their first byte
        self.retries: Counter[str] = Counter()  # by the worker's failure
        self.retry_budget = RetryBudget()
        # Failures since the last log line: (failure, worker URL) -> number of requests.
        self.troubles: Counter[tuple[str, str]] = Counter()
        self.stale = 0  # stale connections, after which the request was sent again
        # Requests sent round-robin, by the reason that no worker was chosen.
        self.unrouted: Counter[str] = Counter()
        self.full_reports = 0  # requests that asked their engine to announce cached blocks again
        self.connections_made = 0
        # Totals of answers whose engine reported cached tokens: predicted tokens.
        self.compared_predicted_tokens = 0
        self.compared_cached_tokens = 0
        self.compared_prompt_tokens = 0
        self.first_byte = Histogram(FIRST_BYTE_BOUNDS_S)
        # Of requests that a pair served: the prefill worker's whole answer; from there to the first
        # token of a stream (the fetching of blocks, and one step); from the request to that token.
        self.pair_stages: Final = {
            stage: Histogram(FIRST_BYTE_BOUNDS_S)
            for stage in ("prefill", "transfer", "first_token")
        }
        self.genai = GenAiMetrics()


def gateway_families(counts: Counts, rotation: Rotation) -> list[AnyFamily]:
    """Return the gateway's metrics, which do not include the selector's metrics."""

    def of_each(value: Callable[[Upstream], int]) -> Callable[[], list[Sample]]:
        return lambda: [(labels(endpoint=each.text), value(each)) for each in rotation.in_turn]

    first_byte = counts.first_byte
    return [*table({
        "gateway_answers_total": (
            lambda: by("status", {str(each): n for each, n in sorted(counts.answers.items())}),
            "Answers that began, by status, including the gateway's own."),
        "gateway_active_requests": (lambda: counts.active, "Requests in progress."),
        "gateway_hang_ups_total": (lambda: counts.hung_up,
            "Clients that disconnected before the end of the answer."),
        "gateway_broken_answers_total": (lambda: counts.broken,
            "Answers that the worker ended early, after the first byte."),
        "gateway_retries_total": (lambda: by("outcome", dict(sorted(counts.retries.items()))),
            "Requests retried on another worker before the first byte, by reason."),
        "gateway_retries_denied_total": (lambda: counts.retry_budget.denied,
            "Requests not retried, because a fifth of all requests were retries."),
        "gateway_stale_connections_total": (lambda: counts.stale,
            "Requests sent again to the same worker, which had just closed an idle connection."),
        "gateway_unrouted_total": (lambda: by("reason", dict(sorted(counts.unrouted.items()))),
            "Requests sent round-robin because no worker was chosen, by reason."),
        "gateway_full_reports_total": (lambda: counts.full_reports,
            "Requests with which an engine was asked to announce blocks that it reuses, since the "
            "index missed some."),
        "gateway_worker_connections_total": (lambda: counts.connections_made,
            "Connections made to workers."),
        "gateway_open_worker_connections": (of_each(lambda each: len(each.open)),
            "Connections to a worker, including idle ones."),
        "gateway_worker_well": (of_each(lambda each: int(rotation.is_well(each))),
            "1, or 0 while round-robin skips the worker."),
        "gateway_compared_prompt_tokens_total": (lambda: counts.compared_prompt_tokens,
            "Prompt tokens of answers whose engine reported its cached tokens."),
        "gateway_compared_predicted_tokens_total": (lambda: counts.compared_predicted_tokens,
            "Of these, tokens predicted as cached."),
        "gateway_compared_cached_tokens_total": (lambda: counts.compared_cached_tokens,
            "Of these, tokens that the engines counted as cached."),
    }), HistogramFamily(
        "lean_selector_gateway_first_byte_seconds",
        "From the request to the first byte of the answer's body.",
        lambda: [("", FIRST_BYTE_BOUNDS_S, first_byte.buckets, first_byte.total)],
    ), HistogramFamily(
        "lean_selector_gateway_pair_seconds",
        "Of requests served by a pair: the prefill worker's answer, then the first token.",
        lambda: [
            (labels(stage=stage), each.bounds, each.buckets, each.total)
            for stage, each in counts.pair_stages.items()
            if each.total
        ],
    ), *counts.genai.families()]  # fmt: skip
