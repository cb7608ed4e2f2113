"""Estimates cache size and speed of engines from a decision log, to simulate these engines.

The cache capacity is chosen so that simulated caches have as many hits as the selector's index
predicted. The speeds are chosen so that the simulation has the observed mean time to first token,
and the observed mean time from the first token to the end."""

import math
from collections.abc import Sequence
from itertools import islice
from statistics import fmean, median

import msgspec

from lean_selector.tools.batching_engine import IterationTimes, SimulatedRequest
from lean_selector.tools.recording import Recording, decode_s, found_tokens, ttft_s
from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulated_engines import BlockCache
from lean_selector.tools.simulation import (
    BLOCK_SIZE,
    Policy,
    SimulatedFleet,
    Simulation,
    requests_of,
)

_MOST_REQUESTS = 4_000  # used to fit speeds
_MOST_PLAYS = 8
_CLOSE = 0.01
_NO_MORE = 0.002  # share of the hits
_TYPICAL_GAP_S = 0.02  # between output tokens, for the engine that IterationTimes describes
_ALIKE = 1.25  # engines whose speeds differ by less than this factor count as equally fast
_FEW = 20  # below this number of requests, the speed of an engine is unknown
_DEFAULT = IterationTimes()


class Engines(msgspec.Struct, frozen=True):
    """Engines estimated from a log, and the estimated number of output tokens of each request."""

    fleet: SimulatedFleet
    output_tokens: list[int]


def calibrated(
    recording: Recording,
    capacity: int | None = None,
    prefill_tokens_per_s: float | None = None,
    token_s: float | None = None,
) -> Engines:
    """Return engines with the given values; estimates values that are None from the log."""
    chains = [request.chain for request in requests_of(recording.lines, 1.0)]
    if capacity is None:
        capacity = capacity_of(recording, chains)
    ratios = _ratios(recording)
    every = [ratio for each in ratios.values() for ratio in each]
    if not every and prefill_tokens_per_s is None:
        raise ServiceError("no line has prefill_ms or ttft_ms: set --prefill-tokens-per-s")
    slowness = _slowness(recording, ratios, every)
    prompt_token_s = 1 / prefill_tokens_per_s if prefill_tokens_per_s else median(every)
    scale = prompt_token_s / _DEFAULT.prompt_token_s
    if token_s is None:
        token_s = _gap_s(recording) or _TYPICAL_GAP_S * scale
    output_tokens = [1 + round(decode_s(line) / token_s) for line in recording.lines]
    pace = token_s / _TYPICAL_GAP_S
    fleet = SimulatedFleet(len(recording.workers), capacity, slowness)
    if prefill_tokens_per_s is None:
        fleet = _fitted(recording, fleet, output_tokens, prompt_token_s, pace)
    else:
        fleet = msgspec.structs.replace(fleet, times=_times(prompt_token_s, pace))
    return Engines(fleet, output_tokens)


def _times(prompt_token_s: float, pace: float) -> IterationTimes:
    return msgspec.structs.replace(
        _DEFAULT,
        base_s=_DEFAULT.base_s * pace,
        prompt_token_s=prompt_token_s,
        running_request_s=_DEFAULT.running_request_s * pace,
        context_token_s=_DEFAULT.context_token_s * pace,
    )


# -- capacity --------------------------------------------------------------------------------------


def capacity_of(recording: Recording, chains: Sequence[Sequence[int]]) -> int:
    """Estimates an engine's cache size in 512-token blocks. `chains`: block hashes per prompt."""
    lines = recording.lines
    observed = sum(found_tokens(line) or 0 for line in lines)
    steps: list[tuple[float, int, int]] = []  # (time, 0: look up or 1: store, index of the request)
    for at, line in enumerate(lines):
        placed = line.timestamp + line.waited_ms
        first_s = ttft_s(line)
        stored = placed if first_s is None else line.timestamp + first_s * 1e3
        steps += [(placed, 0, at), (stored, 1, at)]
    steps.sort()
    engines = [recording.engine_of(line) for line in lines]

    def found(capacity: int) -> int:
        caches = [BlockCache(capacity) for _ in range(len(recording.workers) + 1)]
        total = 0
        for _, stores, at in steps:
            cache, chain = caches[engines[at]], chains[at]
            if stores:
                placed = cache.hold(chain)
                cache.release(chain[: placed.hit + placed.stored])
            elif lines[at].cached is not None:
                held = next((n for n, block in enumerate(chain) if block not in cache), len(chain))
                total += held * BLOCK_SIZE
        return total

    low = max(1, max(len(chain) for chain in chains))
    high = max(low, len({block for chain in chains for block in chain}))
    # The largest capacity with about the observed hits; the upper bound if no cache ever filled.
    while low < high:
        middle = (low + high + 1) // 2
        if found(middle) <= observed * (1 + _NO_MORE):
            low = middle
        else:
            high = middle - 1
    return low


# -- speeds ----------------------------------------------------------------------------------------


def _ratios(recording: Recording) -> dict[int, list[float]]:
    """Return engine -> prefill seconds per computed prompt token, one value per request."""
    waiting: dict[int, list[tuple[float, float]]] = {}  # engine -> (end of prefill, tokens)
    ratios: dict[int, list[float]] = {}
    for line in recording.lines:
        first_s = ttft_s(line)
        if first_s is None:
            continue
        engine, began = recording.engine_of(line), line.timestamp + line.waited_ms
        own = line.input_length - (found_tokens(line) or 0)
        ahead = [each for each in waiting.get(engine, ()) if each[0] > began]
        tokens = own + sum(each[1] for each in ahead)
        waiting[engine] = [*ahead, (line.timestamp + first_s * 1e3, own)]
        took_s = first_s - line.waited_ms / 1e3
        if tokens >= BLOCK_SIZE and took_s > 0.0:
            ratios.setdefault(engine, []).append(took_s / tokens)
    return ratios


def _slowness(
    recording: Recording, ratios: dict[int, list[float]], every: list[float]
) -> list[float]:
    factors = []
    for engine in range(1, len(recording.workers) + 1):
        own = ratios.get(engine, [])
        factor = median(own) / median(every) if len(own) >= _FEW else 1.0
        factors.append(1.0 if 1 / _ALIKE < factor < _ALIKE else min(4.0, max(0.25, factor)))
    return factors


def _gap_s(recording: Recording) -> float | None:
    """Return the median time between output tokens in seconds; None if too few lines of the log
    have a number of output tokens."""
    gaps = [
        decode_s(line) / line.output_length
        for line in recording.lines
        if line.output_length and decode_s(line)
    ]
    return median(gaps) if len(gaps) >= _FEW else None


def play_recorded(
    recording: Recording, engines: Engines, most: int | None = None
) -> tuple[Simulation, list[SimulatedRequest]]:
    """Simulates the first `most` requests (None: all), each at its logged time and engine."""
    requests = requests_of(recording.lines, 1.0)[:most]
    for request, line, tokens in zip(
        requests, recording.lines, engines.output_tokens, strict=False
    ):
        request.output_tokens = tokens
        request.arrived_at += line.waited_ms / 1e3
        request.pinned = recording.engine_of(line)
    simulation = Simulation(Policy("recorded choices"), engines.fleet)
    simulation.run(sorted(requests, key=lambda request: request.arrived_at))
    for request, line in zip(requests, recording.lines, strict=False):
        request.arrived_at -= line.waited_ms / 1e3
    return simulation, requests


def _fitted(
    recording: Recording,
    fleet: SimulatedFleet,
    output_tokens: list[int],
    prompt_token_s: float,
    pace: float,
) -> SimulatedFleet:
    """Return `fleet` with speeds fitted to the log, starting from `prompt_token_s` and `pace`."""
    lines = list(islice(recording.lines, _MOST_REQUESTS))
    timed = [(at, each) for at, line in enumerate(lines) if (each := ttft_s(line)) is not None]
    wanted_s = fmean(each for _, each in timed)
    wanted_decode_s = fmean(decode_s(lines[at]) for at, _ in timed)
    best, least = fleet, math.inf
    before: tuple[float, float] | None = None  # logarithms of the speed and of the result
    for _ in range(_MOST_PLAYS):
        tried = msgspec.structs.replace(fleet, times=_times(prompt_token_s, pace))
        _, played = play_recorded(recording, Engines(tried, output_tokens), _MOST_REQUESTS)
        got_s = fmean(played[at].ttft_s for at, _ in timed)
        got_decode_s = fmean(played[at].ended_at - played[at].first_token_at for at, _ in timed)
        error = abs(got_s / wanted_s - 1.0)
        if error < least:
            best, least = tried, error
        off = math.log(wanted_s / got_s)
        decodes = wanted_decode_s > 0.0 and got_decode_s > 0.0
        decode_off = math.log(wanted_decode_s / got_decode_s) if decodes else 0.0
        if max(abs(off), abs(decode_off) / 3) < _CLOSE:
            break
        here = math.log(prompt_token_s), math.log(got_s)
        slope = 2.0
        if before is not None and here[0] != before[0]:
            slope = min(8.0, max(1.0, (here[1] - before[1]) / (here[0] - before[0])))
        before = here
        prompt_token_s *= math.exp(off / slope)
        pace *= math.exp(0.7 * decode_off)
    return best
