"""Reads a decision log for a replay: requests, the workers that served them, and observed times."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.batching_engine import SimulatedRequest
from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulate import settings_with
from lean_selector.tools.simulation import requests_of
from lean_selector.tools.trace import log_lines
from lean_selector.wire.decision_lines import VERSION, DecisionLine, LogHeader

_LEAST_REQUESTS = 20


class Recording(msgspec.Struct, frozen=True):
    """The requests of one model in a decision log. In a simulation, engine number 1 stands for the
    first of `workers`, engine number 2 for the second, and so on."""

    lines: list[DecisionLine]  # by arrival
    settings: RouterSettings
    workers: list[tuple[int, int]]  # (worker, rank)
    notes: list[str]  # remarks about the data for the user

    @property
    def is_shadow(self) -> bool:
        """Whether another load balancer, and not lean-selector, chose the workers in the log."""
        return any(line.selected is not None for line in self.lines)

    def engine_of(self, line: DecisionLine) -> int:
        assert line.worker is not None
        return self.workers.index((line.worker, line.rank)) + 1

    def requests(self, output_tokens: Sequence[int]) -> list[SimulatedRequest]:
        """Return the recorded requests for a simulation. `output_tokens`: their output lengths."""
        made = requests_of(self.lines, 1.0)
        for request, line, output in zip(made, self.lines, output_tokens, strict=True):
            request.output_tokens = output
            if line.pinned:
                request.pinned = self.engine_of(line)
            elif line.allowed is not None:
                at = (n for n, (worker, _) in enumerate(self.workers, 1) if worker in line.allowed)
                request.allowed = frozenset(at)
        return made


def ttft_s(line: DecisionLine) -> float | None:
    """Return the time to first token in seconds, or None if the log does not have it."""
    at_ms = line.prefill_ms if line.ttft_ms is None else line.ttft_ms
    return None if at_ms is None else at_ms / 1e3


def decode_s(line: DecisionLine) -> float:
    """Return the seconds from the first token to the end; 0 if the log lacks either time."""
    first = ttft_s(line)
    return 0.0 if first is None or line.ended_ms is None else max(0.0, line.ended_ms / 1e3 - first)


def found_tokens(line: DecisionLine) -> int | None:
    """Return how many prompt tokens the KV index found cached on the rank; None: not logged."""
    return None if line.cached is None else min(line.cached, line.input_length)


def read_log(paths: Sequence[Path], model: str | None) -> Recording:
    """Return all requests of `model` (None: the only model) in the logs. Raises ServiceError."""
    headers: list[LogHeader] = []
    lines: list[DecisionLine] = []
    settings = RouterSettings()
    for path in paths:
        for number, line in log_lines(path):
            if isinstance(line, LogHeader):
                if line.decision_log != VERSION:
                    what = f"decision_log {line.decision_log}; this reads {VERSION}"
                    raise ServiceError(f"{path}:{number}: {what}")
                headers.append(line)
                try:
                    settings = settings_with(RouterSettings(), line.settings)
                except ValueError as error:
                    raise ServiceError(f"{path}:{number}: settings: {error}") from None
            elif line.worker is None:
                raise ServiceError(f"{path}:{number}: no worker: a trace, not a decision log")
            elif line.allowed is not None and line.worker not in line.allowed:
                what = f"worker {line.worker} is not in allowed"
                raise ServiceError(f"{path}:{number}: {what}")
            else:
                lines.append(line)
    models = sorted({(line.model, line.tenant) for line in lines})
    if model is not None:
        lines = [line for line in lines if line.model == model]
        models = [each for each in models if each[0] == model]
    if len(models) > 1:
        known = ", ".join(f"{name} ({tenant})" for name, tenant in models)
        raise ServiceError(f"the log has several models: choose one with --model: {known}")
    if len(lines) < _LEAST_REQUESTS:
        raise ServiceError(f"{len(lines)} requests are too few; {_LEAST_REQUESTS} are needed")
    lines.sort(key=lambda line: line.timestamp)
    workers = sorted({(line.worker or 0, line.rank) for line in lines})
    notes = []
    if any(header.share < 1.0 for header in headers):
        notes.append(
            "only a share of the requests was logged, so engines seem slower and caches smaller"
        )
    if any(header.settings != headers[-1].settings for header in headers):
        notes.append("the settings changed: the last ones are used for the whole log")
    return Recording(lines, settings, workers, notes)
