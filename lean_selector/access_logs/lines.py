"""A line of an access log -> which reservation ended, and how the worker did.

A line has the word `lean-end` and behind it fields, `name=value` or `name="value"`, in any order;
whatever stands before the word, such as a syslog header, is not looked at, and fields that are not
known are ignored, so that a gateway's other figures may stand there too. A value of `-`, or none,
is absent. What the words of each gateway mean is the business of `outcomes`.
"""

import re
from typing import Final

from lean_selector.access_logs.outcomes import outcome_of
from lean_selector.core.numbers import U64_MAX

LONGEST_LINE: Final = 8192  # bytes; nginx and HAProxy cut theirs earlier
LONGEST_ID: Final = 256
_WORD: Final = re.compile(rb"(?:^|[ :])lean-end(?= )")
_FIELD: Final = re.compile(rb' ([a-z_]+)=(?:"([^"]*)"|([^" ]*))')
_STATUS: Final = re.compile(r"-1|[0-9]{1,3}")  # HAProxy's -1 and envoy's 0: there was no answer


class Ended:
    """A request that is over. What a line does not say is None."""

    __slots__ = ("dp_rank", "outcome", "reservation_id", "worker_id")

    def __init__(
        self,
        reservation_id: str | None,
        worker_id: int | None,
        dp_rank: int | None,
        outcome: str | None,
    ) -> None:
        """`outcome` is that of the worker which was asked first: refused, failed or ok."""
        self.reservation_id = reservation_id
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.outcome = outcome


class BadLine(ValueError):
    """A datagram that is no such line. The message says why."""


class OtherLine(BadLine):
    """One without the word: gateways write notices of their own to the same target."""


def ended_of(line: bytes) -> Ended:
    """Raises BadLine, or OtherLine."""
    if len(line) > LONGEST_LINE:
        raise BadLine(f"it is longer than {LONGEST_LINE} bytes")
    found = _WORD.search(line)
    if found is None:
        raise OtherLine("it has no word lean-end")
    fields = _fields(line[found.end() :].rstrip(b"\r\n\0 "))
    reservation_id = fields.get("reservation")
    if reservation_id is not None and len(reservation_id) > LONGEST_ID:
        raise BadLine(f"its reservation is longer than {LONGEST_ID} characters")
    worker_id = _number(fields, "worker", U64_MAX)
    text = fields.get("status")
    if text is not None and _STATUS.fullmatch(text) is None:
        raise BadLine("its status is none")
    try:
        outcome = outcome_of(fields, None if text is None else int(text))
    except ValueError as error:
        raise BadLine(str(error)) from None
    return Ended(reservation_id, worker_id, _number(fields, "rank", 2**32 - 1), outcome)


def _fields(text: bytes) -> dict[str, str]:
    """Those that are there, by name. Raises BadLine."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _FIELD.match(text, at)
        if found is None:
            raise BadLine(f"byte {at} behind lean-end begins no name=value")
        at = found.end()
        name, quoted, plain = found.groups()
        value = plain if quoted is None else quoted
        if value in (b"", b"-"):
            continue
        key = name.decode("ascii")
        if key in fields:
            raise BadLine(f"it has {key} twice")
        try:
            fields[key] = value.decode()
        except UnicodeDecodeError:
            raise BadLine(f"its {key} is not UTF-8") from None
    return fields


def _number(fields: dict[str, str], name: str, most: int) -> int | None:
    text = fields.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= most):
        raise BadLine(f"its {name} is not a number from 0 to {most}")
    return int(text)
