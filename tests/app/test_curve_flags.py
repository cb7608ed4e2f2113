"""Keys by flag: what goes together, and files that end the start."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.asyncio
import zmq.auth

from lean_selector.app.host import StartError
from lean_selector.app.replication import replica_gate
from lean_selector.app.service_flags import ReplicaFlags
from lean_selector.links.curve_keys import CurveGate, read_pair

OF_PEERS = "--replica-sync-curve-peer-keys-file"
OF_US = "--replica-sync-curve-secret-key-file"


@pytest.fixture
def name(tmp_path: Path) -> str:
    zmq.auth.create_certificates(tmp_path, "a")
    return str(tmp_path / "a")


def made(secret: str, peers: str | None, then: Callable[[CurveGate], None]) -> None:
    async def story() -> None:
        with zmq.asyncio.Context() as context:
            keys = ReplicaFlags(secret_key_file=secret, peer_keys_file=peers)
            gate = replica_gate(context, keys)
            then(gate)
            gate.close()

    asyncio.run(story())


def test_without_a_list_all_replicas_have_our_own_pair(name: str) -> None:
    def then(gate: CurveGate) -> None:
        assert gate.admitted == (read_pair(f"{name}.key_secret").public,)

    made(f"{name}.key_secret", None, then)


def test_files_that_hold_no_keys_end_the_start_by_their_flag(name: str) -> None:
    public, secret, missing = f"{name}.key", f"{name}.key_secret", f"{name}.none"
    faults = []
    files = [(missing, None), (public, None), (secret, missing), (secret, secret)]
    for of_us, of_peers in files:
        with pytest.raises(StartError) as told:
            made(of_us, of_peers, lambda gate: None)
        faults.append(str(told.value))
    assert faults == [
        f"{OF_US}: {missing}: No such file or directory",
        f"{OF_US}: {public} has no secret-key; zmq.auth.create_certificates creates one",
        f"{OF_PEERS}: {missing}: No such file or directory",
        f"{OF_PEERS}: {secret} line 8 is a secret key; this file needs public keys",
    ]
