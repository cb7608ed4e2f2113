"""The gateway's ports where tokens are asked for."""

from collections.abc import Iterator

import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.running_service import wait_until

READ, WRITE = "r-0123456789", "w-0123456789"
TEXT = "Tell me of the sea. " * 20


@pytest.fixture(scope="module")
def worker() -> Iterator[OpenAiWorker]:
    with OpenAiWorker() as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(
    worker: OpenAiWorker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    path = tmp_path_factory.mktemp("access") / "tokens"
    path.write_text(f"read {READ}\nwrite {WRITE}\n")
    with RunningGateway(worker.url, "--auth-token-file", str(path)) as running:
        wait_until(lambda: running.ask("GET", "/ready").status == 200, "the worker is known")
        yield running


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_the_door_asks_for_a_token_and_keeps_it_from_the_workers(
    gateway: RunningGateway, worker: OpenAiWorker
) -> None:
    for headers in ({}, bearer("nonsense"), {"authorization": f"Basic {WRITE}"}):
        answer = gateway.chat(TEXT, headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith('Bearer realm="lean-selector"')
        assert answer.headers["x-request-id"]
        assert answer.json()["error"]["code"] == "invalid_api_key"
    mine = {**bearer(READ), "x-request-id": "mine-1"}
    refused = gateway.chat(TEXT, mine)
    assert (refused.status, refused.headers["x-request-id"]) == (403, "mine-1")
    lines = [each["line"] for each in worker.seen()["requests"]]
    assert not [line for line in lines if "completions" in line]
    for name in ("authorization", "Authorization", "AUTHORIZATION"):
        assert gateway.chat(TEXT, {name: f"Bearer {WRITE}", "x-mark": "1"}).status == 200
    passed = [each["headers"] for each in worker.seen()["requests"] if "x-mark" in each["headers"]]
    assert len(passed) == 3
    assert not [headers for headers in passed if "authorization" in headers]


def test_models_are_for_those_who_may_look_and_anything_else_for_those_who_may_ask(
    gateway: RunningGateway,
) -> None:
    assert gateway.ask("GET", "/v1/models").status == 401
    assert gateway.ask("GET", "/v1/models", headers=bearer(READ)).status == 200
    for path in ("/health", "/ready"):
        assert gateway.ask("GET", path).status in (200, 503)
    for path in ("/metrics", "/version", "/nothing"):
        assert gateway.ask("GET", path).status == 401
        assert gateway.ask("GET", path, headers=bearer(READ)).status == 403
    assert gateway.ask("POST", "/nothing", {}, bearer(WRITE)).status == 404
