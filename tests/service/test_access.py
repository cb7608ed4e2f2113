"""Services that ask for tokens: nothing but /health and /ready answers without one."""

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.running_service import DEADLINE_S, RunningService, wait_until

TOKENS = {"read": "r-0123456789", "write": "w-0123456789", "admin": "a-0123456789"}
RANKS = ["open", *TOKENS]
OPEN_PATHS = {"/health", "/ready"}
SERVICES = {
    "selector": ("lean_selector", ("--prompts", "off", "--use-kv-events", "false")),
    "selector_16": ("lean_selector", ("--api", "1.6")),
    "slot_tracker": ("lean_selector.slot_tracker", ()),
}


def token_file(folder: Path) -> Path:
    path = folder / "tokens"
    lines = ["# who may what", *(f"{role} {token}" for role, token in TOKENS.items())]
    path.write_text("\n".join(lines))
    return path


class Client:
    """Asks a service, over TCP or its UNIX socket, on one connection for all requests."""

    def __init__(self, port: int, path: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        if path is not None:
            self._connection.sock = socket.socket(socket.AF_UNIX)
            self._connection.sock.settimeout(DEADLINE_S)
            self._connection.sock.connect(path)

    def ask(
        self, method: str, target: str, token: str | None = None, body: object = None
    ) -> tuple[int, str | None, bytes]:
        """Status, `www-authenticate`, body."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        content = None if body is None else json.dumps(body)
        if content is not None:
            headers["Content-Type"] = "application/json"
        self._connection.request(method, target, content, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.getheader("www-authenticate"), answer.read()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module", params=list(SERVICES))
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningService, Path]]:
    module, flags = SERVICES[request.param]
    folder = tmp_path_factory.mktemp("access")
    with RunningService(
        *("--auth-token-file", str(token_file(folder)), "--uds", str(folder / "socket")),
        *flags,
        module=module,
    ) as running:
        yield running, folder / "socket"


@pytest.fixture(params=["tcp", "uds"])
def client(
    request: pytest.FixtureRequest, service: tuple[RunningService, Path]
) -> Iterator[Client]:
    running, path = service
    with closing(Client(running.port, str(path) if request.param == "uds" else None)) as client:
        yield client


def operations(client: Client) -> list[tuple[str, str, str, Any]]:
    """Method, target, role and an example of a body, of every route of the document."""
    status, _, text = client.ask("GET", "/openapi.json", TOKENS["read"])
    assert status == 200
    document = json.loads(text)
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            target = path
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path":
                    target = target.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
            media = operation.get("requestBody", {}).get("content", {})
            example = media.get("application/json", {}).get("example")
            role = operation["x-role"]
            security = [] if role == "open" else [{"token": [role]}]
            assert operation.get("security", []) == security
            responses = operation["responses"].keys()
            assert ("401" in responses) == (role != "open")
            assert ("403" in responses) == (role in ("write", "admin"))
            found.append((method.upper(), target, role, example))
    assert len(found) > 15
    return found


def error_of(target: str, message: str, code: str) -> dict[str, Any]:
    """The API's own shape; but what gateways may hand to their clients has OpenAI's."""
    if not target.startswith("/route/"):
        return {"error": message}
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def test_every_route_of_the_document_asks_for_its_role(client: Client) -> None:
    routes = operations(client)
    assert {target for _, target, role, _ in routes if role == "open"} <= OPEN_PATHS
    for method, target, role, body in routes:
        if role == "open":
            assert client.ask(method, target)[0] in (200, 503)
            continue
        status, challenge, text = client.ask(method, target, None, body)
        assert (status, challenge) == (401, 'Bearer realm="lean-selector"'), (method, target)
        said = error_of(target, "a bearer token is required", "invalid_api_key")
        assert json.loads(text) == said
        for wrong in ("nonsense", TOKENS["admin"] + "x", TOKENS["admin"][:-1], ""):
            status, challenge, text = client.ask(method, target, wrong, body)
            assert (status, challenge) == (
                401,
                'Bearer realm="lean-selector", error="invalid_token"',
            ), (method, target)
            said = error_of(target, "the bearer token is not known", "invalid_api_key")
            assert json.loads(text) == said
        for given, token in TOKENS.items():
            status, challenge, text = client.ask(method, target, token, body)
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


def test_nobody_without_a_token_learns_which_routes_there_are(client: Client) -> None:
    for method, target in (
        ("GET", "/"),
        ("GET", "/nothing"),
        ("PUT", "/workers"),
        ("DELETE", "/health"),
        ("OPTIONS", "/loads"),
        ("GET", "/workers/1/report"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/%68ealth"),
        ("TRACE", "/metrics"),
    ):
        assert client.ask(method, target)[0] == 401
        assert client.ask(method, target, "nonsense")[0] == 401
        assert client.ask(method, target, TOKENS["read"])[0] in (404, 405)


def test_ready_names_no_worker_to_whoever_has_no_token(
    service: tuple[RunningService, Path], client: Client
) -> None:
    running, _ = service
    if client.ask("GET", "/ready", TOKENS["read"])[0] == 404:  # the slot tracker has none
        assert client.ask("GET", "/ready")[0] == 401
        return
    worker = {"worker_id": 1, "endpoint": "http://worker-1:8000", "block_size": 16}
    with closing(Client(running.port)) as registrar:
        assert registrar.ask("POST", "/workers", TOKENS["admin"], worker)[0] == 201
    for token in (None, "nonsense"):
        status, _, text = client.ask("GET", "/ready", token)
        body = json.loads(text)
        assert body.keys() == {"ready", "schedulable_workers"}
        assert status == (200 if body["ready"] else 503)
    for token in TOKENS.values():
        body = json.loads(client.ask("GET", "/ready", token)[2])
        assert [each["worker_id"] for each in body["workers"]] == [1]


def state_of(client: Client, token: str | None) -> list[bytes]:
    """All that calls could have changed."""
    paths = ("/workers", "/loads", "/replica_sync/peers")
    return [client.ask("GET", path, token)[2] for path in paths]


def test_what_is_refused_changes_nothing(
    service: tuple[RunningService, Path], client: Client
) -> None:
    """Each route as its document shows it, but nobody who sends it may."""
    running, _ = service
    with closing(Client(running.port)) as watcher:
        before = state_of(watcher, TOKENS["read"])
        for method, target, role, body in operations(client):
            if role in ("write", "admin"):
                for token in (None, "nonsense", TOKENS["read"]):
                    assert client.ask(method, target, token, body)[0] in (401, 403)
        assert state_of(watcher, TOKENS["read"]) == before


def test_without_tokens_whoever_connects_may_do_everything() -> None:
    """As the reference has it: what --auth-token-file is for."""
    with (
        RunningService("--use-kv-events", "false") as running,
        closing(Client(running.port)) as mine,
        closing(Client(running.port)) as stranger,
    ):
        worker = {"worker_id": 1, "endpoint": "http://worker-1:8000", "block_size": 16}
        assert mine.ask("POST", "/workers", None, worker)[0] == 201
        prompt = {"token_ids": list(range(32)), "reservation_id": "mine"}
        assert mine.ask("POST", "/select_and_reserve", None, prompt)[0] == 200
        assert json.loads(stranger.ask("GET", "/loads")[2])[0]["loads"][0]["active_requests"] == 1
        assert stranger.ask("DELETE", "/reservations/mine")[0] == 200
        theirs = {**worker, "endpoint": "http://elsewhere:8000"}
        assert stranger.ask("POST", "/workers", None, theirs)[0] == 201
        answer = json.loads(mine.ask("POST", "/select", None, {"token_ids": [1]})[2])
        assert answer["endpoint"] == "http://elsewhere:8000"


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("none", 401), ("read", 403)])
def test_a_body_that_is_still_to_come_is_not_waited_for(
    service: tuple[RunningService, Path], client: Client, token: str | None, status: int
) -> None:
    admin = [each[1] for each in operations(client) if each[0] == "POST" and each[2] == "admin"]
    with closing(http.client.HTTPConnection("127.0.0.1", service[0].port)) as connection:
        connection.putrequest("POST", admin[0])
        connection.putheader("content-length", "1000000")
        if token is not None:
            connection.putheader("authorization", f"Bearer {TOKENS.get(token, token)}")
        connection.endheaders(b"{")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("connection")) == (status, "close")


def test_refusals_are_counted_by_their_route(service: tuple[RunningService, Path]) -> None:
    running, _ = service
    with closing(Client(running.port)) as client:
        for token in (None, "nonsense"):
            assert client.ask("GET", "/loads", token)[0] == 401
        metrics = client.ask("GET", "/metrics", TOKENS["read"])[2].decode()
    line = 'lean_selector_http_requests_total{method="GET",route="/loads",status="401"} '
    (count,) = [each.removeprefix(line) for each in metrics.splitlines() if each.startswith(line)]
    assert float(count) >= 2


# -- the file while the service runs ---------------------------------------------------------------


def flags(path: Path) -> tuple[str, ...]:
    return ("--auth-token-file", str(path), "--log-format", "json")


def test_a_file_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    with RunningService(*flags(path)) as running, closing(Client(running.port)) as client:
        assert client.ask("GET", "/workers", TOKENS["read"])[0] == 200
        new = tmp_path / "new"
        new.write_text("read another-token\n")
        os.replace(new, path)
        wait_until(
            lambda: client.ask("GET", "/workers", "another-token")[0] == 200, "the new token"
        )
        assert client.ask("GET", "/workers", TOKENS["read"])[0] == 401
        assert "tokens were read again" in running.log()


def test_sighup_has_it_read_and_a_broken_one_leaves_the_tokens(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    with RunningService(*flags(path)) as running, closing(Client(running.port)) as client:
        path.write_text("read very-secret\nvery-secret-too\n")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the last tokens are used" in running.log(), "the complaint")
        assert client.ask("GET", "/workers", TOKENS["read"])[0] == 200
        assert client.ask("GET", "/workers", "very-secret")[0] == 401
        log = running.log()
        assert f"{path}, line 2: the first word is none of read, write, admin" in log
        assert "very-secret" not in log
        assert not [token for token in TOKENS.values() if token in log]


@pytest.mark.parametrize("module", ["lean_selector", "lean_selector.slot_tracker"])
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("read very-secret\nvery-secret", "line 2: the first word is none of read, write, admin"),
        (None, "No such file or directory (os error 2)"),
    ],
    ids=["broken", "missing"],
)
def test_a_file_that_is_broken_at_the_start_ends_it(
    tmp_path: Path, module: str, text: str | None, complaint: str
) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
    running = RunningService("--auth-token-file", str(path), module=module)
    with pytest.raises(AssertionError) as caught, running:
        pass
    said = str(caught.value)
    assert "--auth-token-file: " in said
    assert complaint in said
    assert str(path) in said
    assert "very-secret" not in said
    assert running.process.wait() != 0
