"""Draws simulations as SVG, without a library: time to first token, cache hits and load."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

import msgspec

from lean_selector.tools.batching_engine import SimulatedRequest

WINDOWS = 60  # intervals of a trace's duration
_WIDTH, _LEFT, _PANEL_HEIGHT = 900, 60, 180
_PLOT_WIDTH = _WIDTH - _LEFT - 20
_COLOURS = ("#8a8a8a", "#b58900", "#6a9f3f", "#c8743c", "#a0489c", "#2f6fb3", "#d1495b", "#17807e")
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

Points = list[tuple[float, float]]


class Curves(msgspec.Struct, frozen=True):
    """The curves of one simulation: the points of one line in each of the three diagrams."""

    policy: str
    ttft: Points  # (seconds, share of requests)
    hits: Points  # (seconds, share of prompt tokens)
    load: Points  # (seconds, requests on the engine with the most)


def curves_of(policy: str, requests: Sequence[SimulatedRequest]) -> Curves:
    """Return the curves of a simulation that has ended, from its requests in order of arrival."""
    ttft = sorted(request.ttft_s for request in requests)
    step = max(1, len(ttft) // 400)
    shares = [(ttft[at], (at + 1) / len(ttft)) for at in range(0, len(ttft), step)]
    shares.append((ttft[-1], 1.0))
    window_s = max(1e-9, max(request.ended_at for request in requests) / WINDOWS)
    cached, tokens = [0] * (WINDOWS + 1), [0] * (WINDOWS + 1)
    began: dict[int, list[float]] = {}
    ended: dict[int, list[float]] = {}
    for request in requests:
        window = int(request.arrived_at / window_s)
        cached[window] += request.hit_tokens
        tokens[window] += request.isl_tokens
        began.setdefault(request.worker_id, []).append(request.arrived_at)
        ended.setdefault(request.worker_id, []).append(request.ended_at)
    for times in ended.values():
        times.sort()
    hits = [(at * window_s, cached[at] / tokens[at]) for at in range(WINDOWS) if tokens[at]]
    load = []
    for at in range(WINDOWS + 1):
        now = at * window_s
        most = max(bisect_right(began[key], now) - bisect_right(ended[key], now) for key in began)
        load.append((now, float(most)))
    return Curves(policy, shares, hits, load)


def draw(runs: Sequence[Curves]) -> str:
    """Return an SVG document with three diagrams. Each has one line per simulation."""
    parts = []
    for number, run in enumerate(runs):
        x, y = 12 + 290 * (number % 3), 20 + 18 * (number // 3)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 16, y, run.policy))
    top = 40 + 18 * math.ceil(len(runs) / 3)
    fastest = min(run.ttft[0][0] for run in runs)
    slowest = max(run.ttft[-1][0] for run in runs)
    decades = range(math.floor(math.log10(fastest)), math.ceil(math.log10(slowest)) + 1)
    longest = max(run.load[-1][0] for run in runs)
    most = max(1.0, *(y for run in runs for _, y in run.load))
    minutes = [longest * part for part in _SHARES]
    parts += _panel(
        top,
        "share of requests that have their first token, by seconds since arrival",
        [run.ttft for run in runs],
        [(10.0**each, f"{10.0**each:g} s") for each in decades],
        [(each, f"{each:.0%}") for each in _SHARES],
        math.log10,
    )
    parts += _panel(
        top + _PANEL_HEIGHT + 60,
        "share of prompt tokens that were cached, over time",
        [run.hits for run in runs],
        [(at, f"{at:.0f} s") for at in minutes],
        [(each, f"{each:.0%}") for each in _SHARES],
    )
    parts += _panel(
        top + 2 * (_PANEL_HEIGHT + 60),
        "requests on the busiest engine, over time",
        [run.load for run in runs],
        [(at, f"{at:.0f} s") for at in minutes],
        [(most * part, f"{most * part:.0f}") for part in _SHARES],
    )
    size = f'width="{_WIDTH}" height="{top + 3 * (_PANEL_HEIGHT + 60)}"'
    view = f'viewBox="0 0 {_WIDTH} {top + 3 * (_PANEL_HEIGHT + 60)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} {size} fill="#222">\n'
        f'<rect {size} fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(
    top: float,
    title: str,
    lines: Sequence[Points],
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    scaled: Callable[[float], float] = float,
) -> list[str]:
    """Return the SVG of a diagram with `lines`. Each axis reaches from its first to its last tick.
    `scaled` transforms the values on the x axis, for example to logarithms."""
    first, last = scaled(x_ticks[0][0]), scaled(x_ticks[-1][0])
    highest = y_ticks[-1][0]
    bottom = top + 20 + _PANEL_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        along = (scaled(x) - first) / max(1e-9, last - first)
        return _LEFT + along * _PLOT_WIDTH, bottom - y / highest * _PANEL_HEIGHT

    parts = [_text(12, top + 6, title, "bold 13px")]
    for value, label in y_ticks:
        y = place(x_ticks[0][0], value)[1]
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}h{_PLOT_WIDTH}" stroke="#ddd" fill="none"/>'
            + _text(12, y + 4, label, "11px")
        )
    for value, label in x_ticks:
        parts.append(_text(place(value, 0.0)[0] - 12, bottom + 16, label, "11px"))
    for number, points in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
    return parts


def _text(x: float, y: float, words: str, font: str = "12px") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" style="font: {font} sans-serif">{escape(words)}</text>'
