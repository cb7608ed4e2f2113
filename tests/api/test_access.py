"""Services that ask for tokens: nothing but /health and /ready answers without one."""

import http.client
import json
import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lean_selector.api.access import AccessTokens
from lean_selector.api.gate import Gate
from lean_selector.http.head import digest_of
from lean_selector.http.response import PendingReply
from tests.support.asked import worker
from tests.support.gates import described, request, routes_of
from tests.support.on_loop import on_loop
from tests.support.running_service import RunningService, unix_connection, wait_until
from tests.support.tls_service import ask

TOKENS = {"read": "r-0123456789", "write": "w-0123456789", "admin": "a-0123456789"}
RANKS = ["open", *TOKENS]
OPEN_PATHS = {"/health", "/ready", "/ui"}


def token_file(folder: Path) -> Path:
    path = folder / "tokens"
    lines = ["# who may what", *(f"{role} {token}" for role, token in TOKENS.items())]
    path.write_text("\n".join(lines))
    return path


class Service:
    """All routes of a service, behind tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.gate = Gate(routes_of(name), tokens=AccessTokens(str(token_file(folder))))
        self.document = described(name, asks_tokens=True)

    def ask(
        self, method: str, target: str, token: str | None = None, body: object = None
    ) -> tuple[int, str | None, bytes]:
        """Status, `www-authenticate`, body; 200 of an answer that is put off."""
        asked = request(method, target, b"" if body is None else json.dumps(body).encode())
        asked.credential = None if token is None else digest_of(token.encode())
        answer = self.gate(asked)
        if isinstance(answer, PendingReply):
            return 200, None, b""
        head, _, text = bytes(answer).partition(b"\r\n\r\n")
        lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        return int(head[9:12]), lines.get("www-authenticate"), text

    def operations(self) -> list[tuple[str, str, str, Any]]:
        """Method, target, role and an example of a body, of every route of the document."""
        assert self.document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
        found = []
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                target = path
                for parameter in operation.get("parameters", []):
                    if parameter["in"] == "path":
                        name, example = parameter["name"], str(parameter["example"])
                        target = target.replace(f"{{{name}}}", example)
                media = operation.get("requestBody", {}).get("content", {})
                example = media.get("application/json", {}).get("example")
                role = operation["x-role"]
                security = [] if role == "open" else [{"token": [role]}]
                assert operation.get("security", []) == security
                found.append((method.upper(), target, role, example))
        assert len(found) > 15
        return found


@pytest.fixture(params=["selector", "selector_16", "slot_tracker"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Service:
    return Service(request.param, tmp_path)


def error_of(target: str, message: str, code: str) -> dict[str, Any]:
    """The API's own shape; but what gateways may hand to their clients has OpenAI's."""
    if not target.startswith("/route/"):
        return {"error": message}
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@on_loop
async def test_every_route_of_the_document_asks_for_its_role(service: Service) -> None:
    routes = service.operations()
    assert {target for _, target, role, _ in routes if role == "open"} <= OPEN_PATHS
    for method, target, role, body in routes:
        if role == "open":
            assert service.ask(method, target)[0] in (200, 503)
            continue
        status, challenge, text = service.ask(method, target, None, body)
        assert (status, challenge) == (401, 'Bearer realm="lean-selector"'), (method, target)
        said = error_of(target, "a bearer token is required", "invalid_api_key")
        assert json.loads(text) == said
        for wrong in ("nonsense", TOKENS["admin"] + "x", TOKENS["admin"][:-1], ""):
            status, challenge, text = service.ask(method, target, wrong, body)
            assert (status, challenge) == (
                401,
                'Bearer realm="lean-selector", error="invalid_token"',
            ), (method, target)
            said = error_of(target, "the bearer token is unknown", "invalid_api_key")
            assert json.loads(text) == said
        for given, token in TOKENS.items():
            status, challenge, text = service.ask(method, target, token, body)
            if RANKS.index(given) >= RANKS.index(role):
                assert status not in (401, 403), (method, target, given)
                assert challenge is None
            else:
                assert (status, challenge) == (
                    403,
                    f'Bearer realm="lean-selector", error="insufficient_scope", scope="{role}"',
                ), (method, target, given)
                fault = f"the token's role is {given}, and this needs {role}"
                assert json.loads(text) == error_of(target, fault, "insufficient_permissions")


def test_a_client_without_a_token_does_not_learn_which_routes_there_are(service: Service) -> None:
    for method, target in (
        *(("GET", "/"), ("GET", "/nothing"), ("PUT", "/workers"), ("DELETE", "/health")),
        *(("OPTIONS", "/loads"), ("GET", "/workers/1/report"), ("GET", "/health/")),
        *(("GET", "//health"), ("GET", "/%68ealth"), ("TRACE", "/metrics")),
    ):
        assert service.ask(method, target)[0] == 401
        assert service.ask(method, target, "nonsense")[0] == 401
        assert service.ask(method, target, TOKENS["read"])[0] in (404, 405)


def test_ready_names_no_worker_to_a_client_without_a_token(service: Service) -> None:
    if service.name == "slot_tracker":  # has no such route
        assert service.ask("GET", "/ready")[0] == 401
        return
    assert service.ask("POST", "/workers", TOKENS["admin"], worker())[0] == 201
    for token in (None, "nonsense"):
        status, _, text = service.ask("GET", "/ready", token)
        body = json.loads(text)
        assert body.keys() == {"ready", "schedulable_workers"}
        assert status == (200 if body["ready"] else 503)
    for token in TOKENS.values():
        body = json.loads(service.ask("GET", "/ready", token)[2])
        assert [each["worker_id"] for each in body["workers"]] == [1]


def test_what_is_refused_changes_nothing_and_is_counted_by_its_route(service: Service) -> None:
    """Each route as its document shows it, from a client that may not send it."""

    def state() -> list[bytes]:
        paths = ("/workers", "/loads", "/replica_sync/peers")
        return [service.ask("GET", path, TOKENS["read"])[2] for path in paths]

    before = state()
    refused: Counter[tuple[str, str]] = Counter()
    for method, target, role, body in service.operations():
        if role in ("write", "admin"):
            for token in (None, "nonsense", TOKENS["read"]):
                status = service.ask(method, target, token, body)[0]
                assert status in (401, 403)
                refused[method, str(status)] += 1
    assert state() == before
    counted: Counter[tuple[str, str]] = Counter()
    for meter in service.gate.meters:
        for counted_status, count in meter.by_status().items():
            if counted_status in ("401", "403"):
                counted[meter.method, counted_status] += count
    assert counted == refused


@on_loop
async def test_without_tokens_a_client_may_do_everything(service: Service) -> None:
    """As with the reference."""
    service.gate = Gate(routes_of(service.name))
    for method, target, _, body in service.operations():
        assert service.ask(method, target, None, body)[0] not in (401, 403), (method, target)


def test_the_file_is_read_again_when_it_changes_and_on_sighup(tmp_path: Path) -> None:
    """Over TCP, and over the UNIX socket."""
    uds = str(tmp_path / "socket")
    flags = ("--auth-token-file", str(token_file(tmp_path)), "--uds", uds)
    with RunningService(*flags, module="lean_selector.slot_tracker") as service:

        def status(token: str | None) -> int:
            service.token = token
            return service.get("/loads")[0]

        with closing(unix_connection(uds)) as beside:
            for token, expected in ((None, 401), ("x", 401), (TOKENS["read"], 200)):
                assert status(token) == ask(beside, "GET", "/loads", token=token)[0] == expected
        with closing(http.client.HTTPConnection("127.0.0.1", service.port)) as connection:
            connection.putrequest("POST", "/register")  # a body that is not waited for
            connection.putheader("content-length", "1000000")
            connection.putheader("authorization", f"Bearer {TOKENS['read']}")
            connection.endheaders(b"{")
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("connection")) == (403, "close")
        (tmp_path / "new").write_text("read another-token\n")
        os.replace(tmp_path / "new", tmp_path / "tokens")
        wait_until(lambda: status("another-token") == 200, "the new token")
        assert status(TOKENS["read"]) == 401
        (tmp_path / "tokens").write_text("read very-secret\nvery-secret-too\n")
        service.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the last tokens stay in use" in service.log(), "the complaint")
        assert [status(token) for token in ("another-token", "very-secret")] == [200, 401]
        log = service.log()
    assert f"{tmp_path}/tokens, line 2: " in log
    assert not [token for token in ("very-secret", *TOKENS.values()) if token in log]
