"""Draws the CPU per request of every case as an SVG: one bar per target, the shortest is best.

Written by hand so that nothing has to be installed. Bars are relative to the first reference, since
cases differ by a factor of thirty; the figures themselves stand at the bars.
"""

from html import escape

from loadtest.duel.report import figure
from loadtest.duel.results import Results

METRIC = "cpu_us"
WIDTH, LABEL, BAR, GAP = 920, 430, 13, 10  # pixels; LABEL is the width of the words on the left
UNIT = 300  # pixels of a bar as long as the first reference's
LONGEST = 1.4  # bars beyond this many times the reference are cut
COLOURS = ("#2f6fb3", "#c8743c", "#dcb08c", "#8a8a8a", "#b5b5b5")


def draw(results: Results, about: str) -> str:
    """An SVG document; `about` is its last line."""
    cases = [
        case
        for case, found in results.rounds.items()
        if any(METRIC in metrics for metrics in found.values())
    ]
    parts = [_text(12, 22, "CPU of the server process per request, µs", "bold 15px")]
    at = 12
    for number, target in enumerate(results.targets):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{at}" y="34" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(at + 16, 44, target))
        at += 40 + 7 * len(target)
    y = 62
    for case in cases:
        parts.append(_text(12, y + BAR * len(results.targets) // 2 + 4, case))
        base = next(
            (v for name in results.references if (v := results.value(case, name, METRIC))),
            results.value(case, results.ours, METRIC),
        )
        for number, target in enumerate(results.targets):
            value = results.value(case, target, METRIC)
            if value is not None and base:
                width = max(1.0, min(LONGEST, value / base) * UNIT)
                colour = COLOURS[number % len(COLOURS)]
                parts.append(
                    f'<rect x="{LABEL}" y="{y}" width="{width:.0f}" height="{BAR - 2}"'
                    f' fill="{colour}"/>'
                )
                parts.append(_text(LABEL + width + 6, y + BAR - 3, figure(value), "11px"))
            y += BAR
        y += GAP
    parts.append(_text(12, y + 12, about, "11px"))
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, font: str = "12px") -> str:
    return f'<text x="{x:.0f}" y="{y}" style="font: {font} sans-serif">{escape(words)}</text>'
