"""Every text of a fault below was given by the reference (1.3.1) for the same endpoint."""

import pytest

from lean_selector.core.zmq_endpoints import check_endpoint, replay_endpoint_for, zmq_key

EMPTY = "invalid TCP port: cannot parse integer from empty string"
DIGIT = "invalid TCP port: invalid digit found in string"
LARGE = "invalid TCP port: number too large to fit in target type"


TAKEN = [
    *("tcp://h:0", "tcp://h:65535", "tcp://h:00005", "tcp://h:+80", "tcp://*:5", "tcp://[::1]:5"),
    *("tcp://[]:5", "tcp://a]:5", "tcp://h/p:5", "tcp://eth0;h:5", "tcp:// :5", "tcp://é:5"),
    *("ipc:///tmp/x", "ipc:// ", "inproc://a"),
]
REFUSED = {
    "missing scheme": ["", "foo"],
    "missing address": ["://", "http://", "tcp://", "ipc://", "inproc://"],
    "unsupported scheme ``": ["://x"],
    "unsupported scheme `http`": ["http://a:1"],
    "unsupported scheme `TCP`": ["TCP://a:1"],
    "unsupported scheme ` tcp`": [" tcp://h:1"],
    "unsupported scheme `x `": ["x ://a"],
    "missing TCP port": ["tcp://h", "tcp://a:b:5", "tcp://::1:5", "tcp://a://b:1"],
    "missing TCP host": ["tcp://:", "tcp://:5"],
    "missing closing `]`": ["tcp://[::1]", "tcp://[::1", "tcp://[::1]x:5"],
    EMPTY: ["tcp://h:", "tcp://[::1]:"],
    LARGE: ["tcp://h:65536", "tcp://h:99999x"],
    DIGIT: [
        *("tcp://h:9999x", "tcp://h:-1", "tcp://h:+", "tcp://h: 5", "tcp://h:5/p"),
        "tcp://h:０",  # noqa: RUF001 (a full-width zero is the point)
    ],
}


def test_each_endpoint_is_taken_or_refused_in_the_documented_words() -> None:
    for endpoint in TAKEN:
        check_endpoint(endpoint)
    for reason, endpoints in REFUSED.items():
        for endpoint in endpoints:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole text is compared)
                check_endpoint(endpoint)
            assert str(caught.value) == f"invalid ZMQ endpoint `{endpoint}`: {reason}"


@pytest.mark.parametrize(
    ("endpoint", "offset", "expected"),
    [
        ("tcp://h:5560", 0, "tcp://h:5560"),
        ("tcp://h:5560", 3, "tcp://h:5563"),
        ("tcp://[::1]:5560", 1, "tcp://[::1]:5561"),
        ("ipc:///tmp/replay", 3, "ipc:///tmp/replay"),
    ],
)
def test_replay_port_moves_with_the_rank(endpoint: str, offset: int, expected: str) -> None:
    assert replay_endpoint_for(endpoint, offset) == expected


@pytest.mark.parametrize(("endpoint", "offset"), [("tcp://h:65535", 1), ("tcp://h", 0)])
def test_replay_endpoint_must_exist(endpoint: str, offset: int) -> None:
    with pytest.raises(ValueError, match="invalid ZMQ endpoint"):
        replay_endpoint_for(endpoint, offset)


@pytest.mark.parametrize(
    ("endpoint", "key"),
    [
        *(("tcp://Host:05557", "tcp://host:5557"), ("tcp://h:+80", "tcp://h:80")),
        *(("tcp://[FE80::1]:5", "tcp://[fe80::1]:5"), ("tcp://h:000", "tcp://h:0")),
        ("ipc:///Run/a:05", "ipc:///Run/a:05"),
    ],
)
def test_every_spelling_of_a_zmq_endpoint_has_one_key(endpoint: str, key: str) -> None:
    assert zmq_key(endpoint) == key
