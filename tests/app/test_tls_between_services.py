"""Services of ours that ask each other over mutual TLS, with tokens: replicas, check."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import HOST, Authority, Files
from tests.support.openai_worker import OpenAiWorker
from tests.support.running_service import RunningService, free_port, wait_until
from tests.support.tls_service import TlsService

OURS, STRANGERS = Authority(), Authority()
WORKER = {"worker_id": 1, "model_name": "n", "endpoint": "http://w:1", "block_size": 4}


class Fleet:
    """A selector that wants certificates and tokens, with a worker and a reservation."""

    def __init__(self, folder: Path, worker: OpenAiWorker) -> None:
        self.folder = folder
        self.files = Files(folder, OURS, OURS.issue(HOST))
        self.sync_port = free_port()
        tokens = folder / "tokens"
        tokens.write_text("read of-a-replica\nadmin of-the-test\n")
        flags = (
            *("--auth-token-file", str(tokens)),
            *("--tls-client-ca", str(self.files.ca), "--replica-sync-port", str(self.sync_port)),
            f"--discover=url:{worker.url}",
        )
        self.selector = TlsService(
            self.files, OURS, *flags, own=OURS.issue("test"), token="of-the-test"
        )
        self.url = ""

    def __enter__(self) -> "Fleet":
        self.selector.__enter__()
        self.url = f"https://{HOST}:{self.selector.port}"
        events = {"kv_events_endpoint": "tcp://127.0.0.1:9"}
        assert self.selector.post("/workers", {**WORKER, **events})[0] == 201
        booking = {"model_name": "n", "token_ids": list(range(16)), "allowed_worker_ids": [1]}
        booking["reservation_id"] = "a"
        assert self.selector.post("/select_and_reserve", booking)[0] == 200
        return self

    def __exit__(self, *_: object) -> None:
        self.selector.stop()

    def flags(self, whose: str, token: str = "of-a-replica") -> list[str]:
        """How a replica is told what to show: whose certificate, and whose authority to believe."""
        folder = self.folder / whose.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        own = Files(folder, OURS, OURS.issue("peer.test"))
        ca = self.files.ca if whose != "deceived" else self._strange_ca(folder)
        (folder / "token").write_text(token)
        return [
            *(f"--peer-ca-file={ca}", f"--peer-cert-file={own.cert}"),
            *(f"--peer-key-file={own.key}", f"--peer-token-file={folder / 'token'}"),
        ]

    def _strange_ca(self, folder: Path) -> Path:
        path = folder / "strange.pem"
        path.write_bytes(STRANGERS.pem)
        return path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with OpenAiWorker() as worker, Fleet(tmp_path_factory.mktemp("fleet"), worker) as running:
        yield running


def replica(fleet: Fleet, *flags: str) -> RunningService:
    sync = ("--replica-sync-port", str(free_port()))
    peers = ("--replica-sync-peers", f"tcp://{HOST}:{fleet.sync_port}")
    urls = ("--replica-sync-catch-up", fleet.url, "--indexer-peers", fleet.url)
    return RunningService(*sync, *peers, *urls, *flags)


def test_a_replica_recovers_and_catches_up_with_its_certificate(fleet: Fleet) -> None:
    with replica(fleet, *fleet.flags("ours")) as late:
        events = {"kv_events_endpoint": "tcp://127.0.0.1:9"}
        assert late.post("/workers", {**WORKER, **events})[0] == 201

        def booked() -> Any:
            rows = [rank for row in late.get("/loads")[1] for rank in row["loads"]]
            return [rank["active_requests"] for rank in rows if rank["worker_id"] == 1]

        wait_until(lambda: booked() == [1], "the reservation is taken over")
        wait_until(lambda: f"from {fleet.url} in" in late.log(), "the index is recovered")


@pytest.mark.parametrize(
    ("whose", "why"),
    [("deceived", "its certificate is not trusted: "), ("without a right token", "status 401: ")],
)
def test_a_replica_with_a_wrong_certificate_or_authority_gets_nothing(
    fleet: Fleet, whose: str, why: str
) -> None:
    token = "of-nobody" if whose == "without a right token" else "of-a-replica"
    with replica(fleet, *fleet.flags(whose, token)) as late:
        for line in ("catch-up: nothing from {}: {}", "no recovery from {}: {}"):
            wait_until(lambda line=line: line.format(fleet.url, why) in late.log(), line)  # type: ignore[misc]
        assert late.get("/ready")[0] == 503
