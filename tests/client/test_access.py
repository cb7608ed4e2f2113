"""Clients of a service over TLS, with a certificate and a token of their own."""

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.client import KvRouter, ServiceRefused, ServiceUnreachable, SyncKvRouter
from lean_selector.client.client_settings import Backoff
from tests.support.certificates import HOST, LOCKED_KEY, Authority, Files
from tests.support.on_loop import on_loop
from tests.support.outbound_server import response, says, serving
from tests.support.tls_service import TlsService

OURS, STRANGERS = Authority(), Authority()
MODEL = "m"
PROMPT = list(range(32))
WORKER = {"worker_id": 1, "model_name": MODEL, "endpoint": "http://w:1", "block_size": 16}
AT_ONCE = Backoff(max_retries=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("server"), OURS, OURS.issue(HOST))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("client"), OURS, OURS.issue("client.test"))


@pytest.fixture(scope="module")
def selector(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mutual TLS and tokens, with a worker."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("write of-a-client\nadmin of-the-test\n")
    flags = ("--tls-client-ca", str(files.ca), "--auth-token-file", str(tokens))
    own = OURS.issue("test")
    with TlsService(
        files, OURS, *flags, "--use-kv-events=false", own=own, token="of-the-test"
    ) as service:
        assert service.post("/workers", WORKER)[0] == 201
        yield f"https://{HOST}:{service.port}"


@on_loop
async def test_a_client_shows_its_certificate_and_believes_whom_it_is_told_to(
    router_of: Callable[..., Any], selector: str, own: Files, tmp_path: Path
) -> None:
    async def ask(**access: Any) -> int:
        settings = {"model_name": MODEL, "backoff": AT_ONCE, **access}
        async with router_of(selector, 16, **settings) as router:
            chosen: tuple[int, int, int] = await router.best_worker(PROMPT)
            return chosen[0]

    cert, token = (str(own.cert), own.key), "of-a-client"
    assert await ask(verify=own.ca, cert=cert, token=token) == 1
    assert await ask(verify=False, cert=cert, token=lambda: token) == 1
    context = OURS.client(OURS.issue("client.test"))
    assert await ask(verify=context, token=token) == 1
    both = tmp_path / "both.pem"
    both.write_bytes(own.key.read_bytes() + own.cert.read_bytes())
    assert await ask(verify=str(own.ca), cert=both, token=token) == 1
    strangers = Files(tmp_path, STRANGERS, STRANGERS.issue("client.test"))
    for wrong in (
        {"verify": own.ca},
        {"verify": own.ca, "cert": (strangers.cert, strangers.key)},
        {"verify": strangers.ca, "cert": cert},
        {"cert": cert},
    ):
        with pytest.raises(ServiceUnreachable):
            await ask(token=token, **wrong)
    for other in (None, "of-nobody"):
        with pytest.raises(ServiceRefused, match="token"):
            await ask(verify=own.ca, cert=cert, token=other)


@pytest.mark.parametrize("token", ["secret", lambda: "secret"])
@on_loop
async def test_a_token_goes_with_every_request(token: Any) -> None:
    async with (
        serving(says(response(b"[]"))) as running,
        KvRouter(running.url, 16, model_name=MODEL, token=token) as router,
    ):
        for _ in range(2):
            await router.get_potential_loads(PROMPT)
    for request in running.requests:
        assert b"\r\nauthorization: bearer secret\r\n" in request.lower()


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schön"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="a token is printable ASCII without blanks"):
        KvRouter("http://127.0.0.1:1", token=token)


def test_files_that_are_missing_are_told_of_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SyncKvRouter("https://127.0.0.1:1", verify=tmp_path / "none.pem")
    with pytest.raises((FileNotFoundError, ssl.SSLError)):
        SyncKvRouter("https://127.0.0.1:1", cert=tmp_path / "none.pem")


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    files = Files(tmp_path, OURS, OURS.issue("client.test"))
    files.key.write_text(LOCKED_KEY)
    with pytest.raises(OSError, match=f"{files.key} are not .* without a passphrase"):
        SyncKvRouter("https://127.0.0.1:1", cert=(files.cert, files.key))
