"""Lines as nginx, HAProxy and envoy write them, and what they are taken for."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.gateway.access_logs import LONGEST_LINE, BadLine, ended_of

NGINX = b"<190>Nov 22 08:30:00 lean_selector: lean-end reservation=%b worker=7 rank=1"
HAPROXY = b"<134>Nov 22 08:30:00 haproxy[812]: lean-end reservation=%b worker=7 rank=1"
ENVOY = b"<13>Nov 22 08:30:00 gateway envoy: lean-end reservation=%b worker=7 rank=1"


def outcome(line: bytes) -> str | None:
    ended = ended_of(line % b"r-1" if b"%b" in line else line)
    assert (ended.reservation_id, ended.worker_id, ended.dp_rank) == ("r-1", 7, 1)
    return ended.outcome


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b'status=200 upstream="200" connect="0.001" done=OK', "ok"),
        (b'status=404 upstream="404" connect="0.001" done=OK', "ok"),
        (b'status=200 upstream="200" connect="0.001" done=', None),  # who broke it off?
        (b'status=499 upstream="-" connect="-" done=', None),
        (b'status=499 upstream="200" connect="0.000" done=', None),
        (b'status=502 upstream="502" connect="-" done=OK', "refused"),
        (b'status=504 upstream="504" connect="-" done=OK', "refused"),
        (b'status=502 upstream="502" connect="0.001" done=OK', "failed"),
        (b'status=500 upstream="500" connect="0.001" done=OK', "failed"),
        (b'status=503 upstream="503" connect="0.001" done=OK', None),
        (b'status=429 upstream="429" connect="0.001" done=OK', None),
        (b'status=529 upstream="529" connect="0.001" done=OK', None),
        # The first is the one that was booked, whoever answered in the end.
        (b'status=200 upstream="502, 200" connect="-, 0.000" done=OK', "refused"),
        (b'status=200 upstream="502, 200" connect="0.000, 0.000" done=OK', "failed"),
        (b'status=200 upstream="502 : 200" connect="- : 0.000" done=OK', "refused"),
    ],
)
def test_what_nginx_says_of_the_worker(fields: bytes, expected: str | None) -> None:
    assert outcome(NGINX + b" " + fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"status=200 termination=-- retries=0", "ok"),
        (b"status=503 termination=SC retries=3", "refused"),
        (b"status=503 termination=sC retries=3", "refused"),
        # Whether the first took no connection or ended a kept one, the line does not say.
        (b"status=200 termination=-- retries=+1", "failed"),
        (b"status=200 termination=CD retries=+1", "failed"),
        (b"status=503 termination=SC retries=+2", "refused"),
        (b"status=200 termination=SD retries=0", "failed"),
        (b"status=502 termination=SH retries=0", "failed"),
        (b"status=504 termination=sH retries=0", "failed"),
        (b"status=503 termination=sQ retries=0", None),
        (b"status=200 termination=CD retries=0", None),
        (b"status=-1 termination=CC retries=0", None),
        (b"status=400 termination=PR retries=0", None),
        (b"status=500 termination=-- retries=0", "failed"),
        (b"status=200 termination=CDVN retries=0", None),
    ],
)
def test_what_haproxy_says_of_the_worker(fields: bytes, expected: str | None) -> None:
    assert outcome(HAPROXY + b" " + fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"status=200 flags=- attempts=1", "ok"),
        (b"status=503 flags=UF attempts=1", "refused"),
        (b"status=503 flags=UF,URX attempts=3", "failed"),
        (b"status=200 flags=UC attempts=1", "failed"),
        (b"status=504 flags=UT attempts=1", "failed"),
        (b"status=200 flags=- attempts=2", "failed"),
        (b"status=200 flags=DC attempts=1", None),
        (b"status=0 flags=DC attempts=-", None),
        (b"status=429 flags=UAEX attempts=-", None),
        (b"status=503 flags=UH attempts=-", None),
        (b"status=500 flags=- attempts=1", "failed"),
    ],
)
def test_what_envoy_says_of_the_worker(fields: bytes, expected: str | None) -> None:
    assert outcome(ENVOY + b" " + fields) == expected


def test_a_status_alone_says_whether_the_worker_failed() -> None:
    def said(status: bytes) -> str | None:
        return outcome(b"lean-end rank=1 worker=7 reservation=r-1 status=" + status)

    assert [said(each) for each in (b"200", b"500", b"503", b"499", b"000")] == [
        *("ok", "failed", None, None, None)
    ]


def test_what_is_not_there_is_absent_and_other_fields_are_ignored() -> None:
    ended = ended_of(b'lean-end reservation=a worker=- rank= agent="x y" status=200 n=3\n')
    assert (ended.reservation_id, ended.worker_id, ended.dp_rank) == ("a", None, None)
    assert ended_of(b"lean-end reservation=- worker=3 status=200").reservation_id is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "it has no word lean-end"),
        (b"GET /lean-end HTTP/1.1", "it has no word lean-end"),
        (b"lean-end", "it has no word lean-end"),
        (b"lean-end reservation", "byte 0 behind lean-end begins no name=value"),
        (b'lean-end reservation="a', "byte 13 behind lean-end begins no name=value"),
        (b"lean-end reservation=a b", "byte 14 behind lean-end begins no name=value"),
        (b"lean-end reservation=a reservation=b", "it has reservation twice"),
        (b"lean-end reservation=\xff", "its reservation is not UTF-8"),
        (b"lean-end reservation=" + b"a" * 257, "its reservation is longer than 256 characters"),
        (b"lean-end worker=x", "its worker is not a number from 0 to 18446744073709551615"),
        (b"lean-end worker=1 rank=-1", "its rank is not a number from 0 to 4294967295"),
        (b"lean-end reservation=a status=2000", "its status is none"),
        (b"lean-end reservation=a upstream=x", "its upstream is no list of statuses"),
        (b"lean-end reservation=a termination=?", "its termination is none of HAProxy's"),
        (b'lean-end reservation=a flags="U F"', "its flags are none of envoy's"),
        (b"lean-end reservation=a attempts=x", "its attempts are not a number"),
        (b"lean-end reservation=a".ljust(LONGEST_LINE + 1), "it is longer than 8192 bytes"),
    ],
)
def test_a_bad_line_is_told_why(line: bytes, why: str) -> None:
    with pytest.raises(BadLine) as refused:
        ended_of(line)
    assert str(refused.value) == why


@given(st.binary(max_size=200), st.sampled_from([b"", b"lean-end ", b"lean-end reservation=a "]))
def test_no_datagram_does_more_than_be_refused(garbage: bytes, start: bytes) -> None:
    with contextlib.suppress(BadLine):
        ended_of(start + garbage)
