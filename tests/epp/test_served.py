"""The picker of a running selector, asked by grpcio: health, tokens, TLS, and its metrics."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lean_selector.epp.connection import EXT_PROC
from loadtest.child_service import free_port, rss_mb
from tests.epp.envoy_messages import pb
from tests.epp.test_connection import ATTACKS, GOAWAY, GREETING, OPEN, RESET, frames_in
from tests.support.certificates import Authority
from tests.support.prometheus_tools import scrape
from tests.support.running_service import RunningService, wait_until

READINESS, LIVENESS = b"\n\x09readiness", b"\n\x08liveness"


def raw(data: bytes) -> bytes:
    return data


class Served:
    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self.selector = RunningService(
            *("--prompts", "off", "--use-kv-events", "false"),
            *("--epp-port", str(self.port), "--epp-host", "127.0.0.1"),
            *flags,
        )

    def channel(self, authority: bytes | None = None) -> Any:
        target = f"127.0.0.1:{self.port}"
        if authority is None:
            return grpc.insecure_channel(target)
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(authority))


def health(channel: Any, service: bytes = LIVENESS) -> bytes:
    check = channel.unary_unary("/grpc.health.v1.Health/Check", raw, raw)
    return bytes(check(service, timeout=30))


def picked(channel: Any, token: str | None = None, **headers: str) -> Any:
    """The answer to one request without a subset."""
    request = pb.ProcessingRequest()
    request.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/chat/completions")
    for name, text in headers.items():
        told = name.replace("_", "-")
        request.request_headers.headers.headers.add(key=told, raw_value=text.encode())
    request.protocol_config.request_body_mode = request.protocol_config.response_body_mode = 4
    body = pb.ProcessingRequest()
    body.request_body.body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    body.request_body.end_of_stream = True

    answered = threading.Event()

    def requests() -> Iterator[bytes]:
        yield request.SerializeToString()
        yield body.SerializeToString()
        answered.wait(60)  # a stream that ends is a client that has left

    call = channel.stream_stream(f"/{EXT_PROC}/Process", raw, raw)
    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    try:
        answer = next(call(requests(), timeout=30, metadata=metadata))
    finally:
        answered.set()
    return pb.ProcessingResponse.FromString(answer)


def destination(answer: Any) -> str:
    return str(answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"])


@contextlib.contextmanager
def held(channel: Any) -> Iterator[Any]:
    """A stream whose request was answered, and whose response does not begin."""
    over = threading.Event()
    request = pb.ProcessingRequest()
    request.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
    request.request_headers.end_of_stream = True

    def requests() -> Iterator[bytes]:
        yield request.SerializeToString()
        over.wait(60)

    call = channel.stream_stream(f"/{EXT_PROC}/Process", raw, raw)(requests(), timeout=60)
    try:
        next(call)
        yield call
    finally:
        over.set()


@pytest.fixture(scope="module")
def served_once() -> Iterator[Served]:
    served = Served()
    with served.selector:
        yield served


WORKER = {"worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:9", "block_size": 16}


def test_a_client_of_grpc_is_served_and_counted() -> None:
    served = Served()
    with served.selector, served.channel() as channel:
        assert health(channel) == b"\x08\x01"
        assert health(channel, READINESS) == b"\x08\x02"
        assert picked(channel).immediate_response.status.code == 503
        assert served.selector.request("POST", "/workers", WORKER)[0] == 201
        assert health(channel, READINESS) == b"\x08\x01"
        answer = picked(channel)
        told = answer.request_headers.response.header_mutation.set_headers
        assert told[0].header.raw_value == b"127.0.0.1:9"
        lines = scrape(served.selector.port, None).splitlines()
        assert 'lean_selector_epp_events_total{event="reserved"} 1' in lines
        assert 'lean_selector_epp_refused_total{status="503"} 1' in lines


def test_a_pair_s_prefill_worker_is_named_as_in_the_answers_of_route() -> None:
    served = Served()
    prefill = {**WORKER, "worker_id": 2, "endpoint": "http://127.0.0.1:8", "worker_role": "prefill"}
    with served.selector, served.channel() as channel:
        for worker in ({**WORKER, "worker_role": "decode"}, prefill):
            assert served.selector.request("POST", "/workers", worker)[0] == 201
        changes = picked(channel).request_headers.response.header_mutation
        told = {each.header.key: each.header.raw_value for each in changes.set_headers}
        assert told["x-gateway-destination-endpoint"] == b"127.0.0.1:9"
        assert told["x-prefiller-host-port"] == b"127.0.0.1:8"
        assert told["x-prefill-worker-id"] == b"2"
        assert "x-prefill-data-parallel-rank" in changes.remove_headers  # it has one
        assert served.selector.request("DELETE", "/workers/2")[0] == 200
        refused = picked(channel).immediate_response
        assert refused.status.code == 503
        assert b"no_prefill_worker" in refused.body


def test_a_token_is_needed_and_health_needs_none(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("read reads\nwrite writes\nadmin admins\n")
    served = Served("--auth-token-file", str(tokens))
    with served.selector, served.channel() as channel:
        assert health(channel) == b"\x08\x01"
        for token in (None, "reads", "unknown"):
            with pytest.raises(grpc.RpcError) as refused:
                picked(channel, token)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for token in ("writes", "admins"):
            assert picked(channel, token).immediate_response.status.code == 503


def test_tls_is_spoken_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority()
    leaf = authority.issue("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    served = Served("--epp-tls-cert", str(cert), "--epp-tls-key", str(key))
    with served.selector, served.channel(authority.pem) as channel:
        assert health(channel) == b"\x08\x01"
        assert picked(channel).immediate_response.status.code == 503


def test_the_headers_of_a_request_say_how_urgent_it_is() -> None:
    served = Served("--queue-threshold", "1")
    worker = {**WORKER, "max_num_batched_tokens": 8192}
    with served.selector, served.channel() as channel:
        assert served.selector.request("POST", "/workers", worker)[0] == 201
        assert destination(picked(channel, x_lean_priority="low")) == "127.0.0.1:9"
        refused = picked(channel, x_lean_priority="soon").immediate_response
        assert refused.status.code == 400
        assert b"x-lean-priority" in refused.body


def test_the_workers_of_a_tenant_are_chosen_by_their_addresses() -> None:
    """An address of IPv6, and a second one behind a comma."""
    served = Served("--epp-tenant", "a", "--epp-fallbacks", "1")
    endpoints = ["http://[::1]:9", "http://127.0.0.1:9"]
    with served.selector, served.channel() as channel:
        assert served.selector.request("POST", "/workers", WORKER)[0] == 201
        assert picked(channel).immediate_response.status.code == 503  # it is another tenant's
        for number, endpoint in enumerate(endpoints):
            worker = {**WORKER, "worker_id": 2 + number, "endpoint": endpoint, "tenant_id": "a"}
            assert served.selector.request("POST", "/workers", worker)[0] == 201
        told = destination(picked(channel))
        assert sorted(told.split(",")) == ["127.0.0.1:9", "[::1]:9"]


def test_a_drain_says_so_first_and_resets_what_is_left() -> None:
    served = Served("--drain-secs", "1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(served.selector)
        channel, other = (stack.enter_context(served.channel()) for _ in range(2))
        address = "127.0.0.1", served.port
        raw_one = stack.enter_context(socket.create_connection(address, timeout=60))
        raw_one.sendall(GREETING + OPEN)
        assert served.selector.request("POST", "/workers", WORKER)[0] == 201
        with held(channel) as call:
            assert health(other, READINESS) == b"\x08\x01"
            served.selector.process.terminate()
            wait_until(lambda: health(other, READINESS) == b"\x08\x02", "it says that it drains")
            with pytest.raises(grpc.RpcError) as reset:
                next(call)
            assert reset.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        served.selector.process.wait(60)
        assert re.search(r"streams of gateways were reset.*streams\W+2", served.selector.log())
        told = b""
        while more := raw_one.recv(1 << 16):
            told += more
        *_, last, goaway = frames_in(told)
        assert (last[0], goaway[0], goaway[3][4:8]) == (RESET, GOAWAY, b"\0\0\0\0")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_over_a_socket_hurts_nobody(served_once: Served, name: str) -> None:
    """Nothing of it is left, and others are answered."""
    with socket.create_connection(("127.0.0.1", served_once.port), timeout=60) as attacker:
        with contextlib.suppress(OSError):  # it is closed before all is sent
            attacker.sendall(GREETING + ATTACKS[name])
            attacker.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while attacker.recv(1 << 16):
                pass
    with served_once.channel() as channel:
        assert health(channel) == b"\x08\x01"
    lines = scrape(served_once.selector.port, None).splitlines()
    assert "lean_selector_epp_streams 0" in lines
    assert rss_mb(served_once.selector.process.pid) < 200


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--epp-port", "0"], "--prompts"),
        (["--epp-fallbacks", "1"], "--epp-port"),
        (["--prompts", "learn"], "--epp-port"),
        (["--prompts", "off", "--epp-port", "0", "--epp-tls-cert", "x"], "--epp-tls-key"),
        (["--prompts", "off", "--epp-port", "0", "--epp-tls-cert", "x", "--epp-tls-key", "x"],
         "--epp-tls-cert"),
    ],
)  # fmt: skip
def test_a_bad_setting_stops_the_start(flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "lean_selector", "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert said in ended.stderr.splitlines()[-1]


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, lean_selector.app.selector_process;"
        "print([name for name in sys.modules if name.split('.')[0] == 'h2' or '.epp' in name])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[]\n"
