"""Findings as lines for people: what is wrong stands first, with what mends it below."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from lean_selector.doctor.findings import Finding, Level

_ORDER: Final = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
_LEAST_WIDTH: Final = 60


def table(findings: Sequence[Finding], width: int) -> Iterator[str]:
    """Lines of at most `width` characters, where words are no longer than that."""
    subject_width = max((len(finding.subject) for finding in findings), default=0)
    margin = len(Level.WARNING) + 2 + subject_width + 2
    room = max(width, _LEAST_WIDTH, margin + 30)
    for level in _ORDER:
        for finding in findings:
            if finding.level is level:
                head = f"{level:<{len(Level.WARNING)}}  {finding.subject:<{subject_width}}  "
                yield from _wrapped(head, finding.what, room)
                if finding.mend is not None:
                    yield from _wrapped(" " * margin, f"-> {finding.mend}", room)
    yield summary(findings)


def _wrapped(head: str, text: str, width: int) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def summary(findings: Sequence[Finding]) -> str:
    """How many of each, in one line."""
    counts = {level: sum(finding.level is level for finding in findings) for level in _ORDER}
    return (
        f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, "
        f"{counts[Level.NOTE]} notes, {counts[Level.OK]} ok"
    )
