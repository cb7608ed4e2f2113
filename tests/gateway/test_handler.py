"""What a client of the gateway sees: answers as the workers gave them, and who gave them."""

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
import trustme

from lean_selector.tools.check import main as check_main
from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import MODEL, OpenAiWorker
from tests.support.running_service import free_port, wait_until

TEXT = "Tell me of the sea. " * 20
WEBSOCKET = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}


def request_text(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    return "\r\n".join([*head, "content-type: application/json", *lines, "", ""]).encode() + body


NAMED = b'{"model":"m","prompt":"a"}'


def chat_body(text: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 4, **fields}).encode()


# -- answers ---------------------------------------------------------------------------------------


def test_blocks_that_are_not_known_are_told_of_with_the_reason(gateway: RunningGateway) -> None:
    before = gateway.metric("lean_selector_unknown_prompts_total")
    text = "It was the best of times, " * 20
    assert gateway.chat(text).headers["x-lean-prompt"] == "new"
    assert "x-lean-prompt" not in gateway.chat(text).headers  # learned from the answer
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, image]}]
    told = gateway.ask("POST", "/v1/chat/completions", {"model": "m", "messages": messages})
    assert (told.headers["x-lean-overlap"], told.headers["x-lean-prompt"]) == ("0", "media")
    assert gateway.metric("lean_selector_unknown_prompts_total") == before + 2
    listed = gateway.ask("GET", "/echo")
    assert "x-lean-prompt" not in listed.headers


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("GET", "/v1/models", None, {}, 200, None),
        ("GET", "/v1/realtime", None, WEBSOCKET, 501, "no_websocket"),
        ("POST", "/v1/completions", b" " * ((1 << 20) + 1), {}, 413, "request_too_large"),
        ("POST", "/v1/completions", b"{", {}, 400, "invalid_request"),
        ("POST", "/v1/completions", NAMED, {"x-lean-priority": "urgent"}, 400, "invalid_request"),
        ("POST", "/v1/completions", b'{"model":"gpt-9"}', {}, 404, "model_not_found"),
        ("POST", "/echo", b" " * (1 << 20), {}, 200, None),
    ],
)
def test_an_answer_has_a_request_id_and_an_error_openai_s_form(
    gateway: RunningGateway,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    code: str | None,
) -> None:
    mine = {**headers, "x-request-id": "mine-1"}
    given = [gateway.ask(method, path, raw=body, headers=each) for each in (headers, headers, mine)]
    assert [each.status for each in given] == [status] * 3
    first, second, third = (each.headers["x-request-id"] for each in given)
    assert third == "mine-1"
    assert first != second
    if status >= 400:
        error = given[0].json()["error"]
        kind = "server_error" if status >= 500 else "invalid_request_error"
        assert (error["type"], error["param"], error["code"]) == (kind, None, code)
        assert status != 404 or "`gpt-9`" in error["message"]


def test_an_unknown_model_names_those_that_are_known_and_the_urls_that_are_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = f"http://127.0.0.1:{free_port()}"
    with OpenAiWorker() as worker, RunningGateway(worker.url, silent) as gateway:
        wait_until(lambda: gateway.chat(TEXT).status == 200, "the worker is known")
        answer = gateway.ask("POST", "/v1/completions", raw=b'{"model":"gpt-9"}')
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (503, "model_not_known_yet")
        assert all(name in error["message"] for name in ("`gpt-9`", f"`{MODEL}`", silent))
        assert check_main([gateway.url]) == 2
        said = capsys.readouterr().err
        assert said.endswith(f"--selector-port, {gateway.api_port}\n")
        assert "{" not in said
        assert check_main([f"http://127.0.0.1:{gateway.api_port}"]) == 1
        assert "ready: 1 of 2 workers" in capsys.readouterr().out


def test_one_request_id_twice_at_a_time_is_two_requests(gateway: RunningGateway) -> None:
    with closing(socket.create_connection(("127.0.0.1", gateway.port))) as one:
        one.sendall(
            request_text(
                "/v1/chat/completions",
                chat_body(TEXT, fake={"stall_after": 2}, stream=True),
                "x-request-id: twin",
            )
        )
        assert one.recv(1)
        assert gateway.chat(TEXT, {"x-request-id": "twin"}).status == 200
    gateway.wait_until_free()


def test_other_paths_are_passed_through(gateway: RunningGateway) -> None:
    blob = os.urandom(300_000)
    answer = gateway.ask("POST", "/echo?a=b", raw=blob, headers={"content-type": "x/y"})
    assert (answer.status, answer.body) == (200, blob)
    assert gateway.ask("GET", "/nowhere").json() == {"detail": "Not Found"}
    assert gateway.ask("GET", "/health").json() == {"status": "ok"}
    assert gateway.ask("GET", "/ready").json()["schedulable_workers"] == 2
    head = gateway.ask("HEAD", "/v1/models")
    assert (head.status, head.body) == (200, b"")


# -- who the workers are ---------------------------------------------------------------------------


def test_it_serves_before_it_knows_its_workers_and_while_there_are_none() -> None:
    worker = OpenAiWorker()
    with RunningGateway(worker.url) as gateway:
        nobody = gateway.chat(TEXT)
        assert nobody.status in (502, 503)
        assert nobody.json()["error"]["type"] == "server_error"
        models = gateway.ask("GET", "/v1/models", headers={"x-request-id": "mine-1"})
        assert (models.status, models.headers["x-request-id"]) == (503, "mine-1")
        with worker:
            wait_until(lambda: gateway.chat(TEXT).status == 200, "it serves as soon as it can")


def test_each_model_goes_to_its_own_workers() -> None:
    with (
        OpenAiWorker("one") as first,
        OpenAiWorker("two") as second,
        RunningGateway(f"{first.url}/v1", f"{second.url}/v1/", knows=2) as gateway,
    ):
        for model, worker in (("one", first), ("two", second)):
            for stream in (False, True):
                answer = gateway.chat(TEXT, model=model, stream=stream)
                assert answer.headers["x-lean-worker"] == worker.url
        listed = gateway.ask("GET", "/v1/models").json()["data"]
        assert sorted(each["id"] for each in listed) == ["one", "two"]


def test_a_session_stays_where_it_is_and_moves_when_that_worker_is_gone() -> None:
    flags = ("--prompts", "off", "--session-affinity-ttl-secs", "60")
    names: dict[str, object] = {"session_id": "s", "metadata": {"user_id": "u"}}
    headers = {"x-session-id": "h"}
    with (
        OpenAiWorker() as one,
        OpenAiWorker() as other,
        RunningGateway(one.url, other.url, *flags, knows=2) as gateway,
    ):

        def served(count: int, **named: object) -> set[str]:
            answers = [gateway.chat(TEXT, headers, **named) for _ in range(count)]
            return {each.headers["x-lean-worker"] for each in answers}

        for name, value in names.items():
            assert len(served(8, **{name: value})) == 1
        where = served(8)
        assert len(where) == 1
        (one if where == {one.url} else other).kill()
        assert served(4) == {one.url, other.url} - where
        assert gateway.metric("lean_selector_session_bookings_total") > 0
        gateway.wait_until_free()


def test_workers_over_https_with_a_token_of_a_file(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, trusted = tmp_path / "worker.pem", tmp_path / "ca.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    authority.cert_pem.write_to_path(trusted)
    token = tmp_path / "token"
    token.write_text("of-the-workers")
    with OpenAiWorker(certificate=str(certificate)) as worker:
        flags = ("--worker-ca-file", str(trusted), "--worker-token-file", str(token))
        with RunningGateway(worker.url, *flags, knows=1) as gateway:
            for stream in (False, True):
                answer = gateway.chat(TEXT, {"authorization": "Bearer mine"}, stream=stream)
                assert answer.status == 200, answer.body
            assert gateway.metric("lean_selector_gateway_worker_connections_total") == 1
