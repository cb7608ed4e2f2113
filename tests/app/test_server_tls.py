"""TLS as the services have it: their files, what is refused, and real processes that speak it."""

import asyncio
import datetime
import re
import signal
from contextlib import closing
from datetime import UTC
from pathlib import Path

import pytest

from lean_selector.app.server_tls import ServerTls, server_context
from lean_selector.app.service_flags import TlsFiles
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from tests.support.certificates import HOST, LOCKED_KEY, Authority, Files
from tests.support.on_loop import on_loop
from tests.support.running_service import free_port, unix_connection, wait_until
from tests.support.tls_service import TlsService, ask, shown_by

OURS, STRANGERS = Authority(), Authority()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, OURS, OURS.issue(HOST))


def other_key() -> bytes:
    return bytes(OURS.issue(HOST).private_key_pem.bytes())


def not_its_key(files: Files) -> str:
    files.key.write_bytes(other_key())
    return f"--tls-key: {files.key} is not the key of the certificate in {files.cert}"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("key", other_key(), "--tls-key: {} is not the key of the certificate in "),
        ("cert", None, "--tls-cert: {}: No such file or directory"),
        ("key", None, "--tls-key: {}: No such file or directory"),
        ("cert", b"hello", "--tls-cert: {} has no certificates in PEM"),
        ("key", b"hello", "--tls-key: {} has no private key in PEM"),
        ("key", LOCKED_KEY.encode(), "--tls-key: {}: a key with a passphrase is not supported"),
        ("ca", b"hello", "--tls-client-ca: {} has no certificates in PEM"),
    ],
    ids=lambda given: None if isinstance(given, str) else "content",  # keys are new in each process
)
def test_files_that_do_not_fit_are_named_with_their_flag(
    files: Files, name: str, content: bytes | None, said: str
) -> None:
    path: Path = getattr(files, name)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said.format(path))):
        server_context(TlsFiles(cert=str(files.cert), key=str(files.key), client_ca=str(files.ca)))


def test_the_slot_tracker_speaks_it_too_and_the_unix_socket_does_not(
    files: Files, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    module = "lean_selector.slot_tracker"
    with TlsService(files, OURS, "--uds", path, module=module) as service:
        assert service.get("/health")[0] == 200
        with closing(unix_connection(path)) as beside:
            assert ask(beside, "GET", "/health")[0] == 200


def test_the_gateway_speaks_it_on_both_of_its_ports(files: Files) -> None:
    with _Gateway(files, OURS, "--worker-health-interval-secs", "none") as gateway:
        assert gateway.get("/v1/models")[0] == 503  # no worker has told its model


class _Gateway(TlsService):
    """In front of a worker that is away; whether it is up is seen at its selector's port."""

    _selector_port = 0

    def _command(self) -> list[str]:
        python, m, module, *flags = super()._command()
        self._selector_port = free_port()
        port = ["--selector-port", str(self._selector_port)]
        return [python, m, module, "gateway", "http://127.0.0.1:9", *flags, *port]

    def is_healthy(self) -> bool:
        port, self.port = self.port, self._selector_port
        try:
            return super().is_healthy()
        finally:
            self.port = port


def test_new_files_are_for_new_connections_and_files_are_read_on_sighup(files: Files) -> None:
    with TlsService(files, OURS) as service:
        kept = service.connection()
        assert ask(kept, "GET", "/health")[0] == 200
        shown = shown_by(kept)
        files.write(OURS.issue(HOST))

        def is_new() -> bool:
            newcomer = service.connection()
            assert ask(newcomer, "GET", "/health")[0] == 200
            other = shown_by(newcomer) != shown
            newcomer.close()
            return other

        def reloads() -> int:
            return service.log().count("the TLS files were reloaded")

        wait_until(is_new, "the new certificate is shown")
        before = reloads()
        service.process.send_signal(signal.SIGHUP)
        wait_until(lambda: reloads() > before, "they are read as they are")
        assert ask(kept, "GET", "/health")[0] == 200
        assert shown_by(kept) == shown


@on_loop
async def test_a_pair_that_fits_again_is_taken_over_and_a_broken_one_is_not(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (datetime.datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC) for year in (2051, 2052))
    connections = Connections(asyncio.get_running_loop().call_soon, Limits(), max_connections=10)
    counts = connections.tls

    def looked_at() -> list[object]:
        """What is counted and shown after two looks, the first of which may be amid a change."""
        for _ in range(2):
            tls.reload(False)
        return [counts.reloads, counts.reload_failures, counts.not_after]

    files.write(OURS.issue(HOST, not_after=first))
    named = TlsFiles(cert=str(files.cert), key=str(files.key), client_ca=None)
    tls = ServerTls(named, connections, asyncio.Protocol)
    assert looked_at() == [0, 0, first.timestamp()]
    files.write(OURS.issue(HOST, not_after=second))
    assert looked_at() == [1, 0, second.timestamp()]
    files.write(OURS.issue(HOST, not_after=first))
    said = not_its_key(files)
    assert looked_at() == [1, 1, second.timestamp()]  # the last one stays
    assert [vars(each)["error"] for each in caplog.records] == [said]
    assert looked_at() == [1, 1, second.timestamp()]  # and it is not tried again as it is
    files.write(OURS.issue(HOST, not_after=first))
    assert looked_at() == [2, 1, first.timestamp()]
