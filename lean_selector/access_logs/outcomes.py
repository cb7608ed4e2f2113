"""What nginx, HAProxy and envoy say of how a request went, as what became of its worker.

The words are theirs: nginx's `$upstream_status`, `$upstream_connect_time` and
`$request_completion`, HAProxy's `%ts` and `%rc`, envoy's `%RESPONSE_FLAGS%` and
`%UPSTREAM_REQUEST_ATTEMPT_COUNT%`. Where a gateway went on to another worker, the line is about the
one that was asked first, which is the one that was booked. None is a request that says nothing of
its worker: the client gave it up, or the gateway did, or the worker was full.
"""

import re
from collections.abc import Mapping
from typing import Final

from lean_selector.core.health.ejections import FAILED, OK, REFUSED, outcome_of_status

_GAVE_UP: Final = 499  # nginx's word for a client that left
_LIST: Final = re.compile(r" ?[,:] ")  # between the tries of one request, in nginx's variables
_TERMINATION: Final = re.compile(r"[-A-Za-z]{2,4}")
_FLAGS: Final = re.compile(r"[A-Za-z]+(?:,[A-Za-z]+)*")
# Of envoy's flags, in the order in which one decides.
_OF_ENVOY: Final[tuple[tuple[str, str | None], ...]] = (
    ("DC", None),
    ("UF", REFUSED),
    ("UC", FAILED),
    ("UT", FAILED),
    ("UR", FAILED),
    ("UPE", FAILED),
)


def outcome_of(fields: Mapping[str, str], status: int | None) -> str | None:
    """`fields` are those of a line, absent ones left out. Raises ValueError."""
    if "upstream" in fields:
        return _of_nginx(fields)
    if "termination" in fields or "retries" in fields:
        return _of_haproxy(fields, status)
    if "flags" in fields or "attempts" in fields:
        return _of_envoy(fields, status)
    return _of_status(status)


def _of_status(status: int | None) -> str | None:
    if status is None or status < 100 or status == _GAVE_UP:
        return None
    return outcome_of_status(status)


def _of_nginx(fields: Mapping[str, str]) -> str | None:
    tries = _LIST.split(fields["upstream"])
    first = tries[0]
    if first == "-":
        return None
    if not (first.isascii() and first.isdigit() and len(first) == 3):
        raise ValueError("its upstream is no list of statuses")
    connects = _LIST.split(fields.get("connect", "-"))
    if first in ("502", "504") and connects[0] == "-":
        return REFUSED
    outcome = _of_status(int(first))
    # An answer that broke off: whether by the client or by the worker, nginx does not say.
    return None if outcome == OK and fields.get("done") != "OK" else outcome


def _of_haproxy(fields: Mapping[str, str], status: int | None) -> str | None:
    state = fields.get("termination", "--")
    if _TERMINATION.fullmatch(state) is None:
        raise ValueError("its termination is none of HAProxy's")
    cause, phase = state[0], state[1]
    if cause in "sS":
        return REFUSED if phase == "C" else None if phase == "Q" else FAILED
    if fields.get("retries", "").startswith("+"):
        # It was sent to another server: the first took no connection, or ended one that was kept,
        # which tells of no more than its own request.
        return FAILED
    return _of_status(status) if cause == "-" else None


def _of_envoy(fields: Mapping[str, str], status: int | None) -> str | None:
    attempts = fields.get("attempts", "1")
    if not (attempts.isascii() and attempts.isdigit()):
        raise ValueError("its attempts are not a number")
    flags = fields.get("flags", "")
    if flags and _FLAGS.fullmatch(flags) is None:
        raise ValueError("its flags are none of envoy's")
    if len(attempts) > 1 or attempts > "1":
        return FAILED
    if not flags:
        return _of_status(status)
    said = set(flags.split(","))
    return next((outcome for flag, outcome in _OF_ENVOY if flag in said), None)
