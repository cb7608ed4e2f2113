"""Keys by flag: what goes together, and files that end the start."""

import asyncio
from pathlib import Path

import pytest
import zmq.asyncio

from lean_selector.events.curve_keys import new_pair
from lean_selector.server.curve_settings import engine_client_keys, replica_gate
from lean_selector.server.host import StartError
from lean_selector.server.selector_flags import EngineKeysFlags
from lean_selector.server.service_flags import ReplicaKeysFlags
from lean_selector.tools.keys import write_pair

OF_SERVERS = "--kv-events-curve-server-keys-file"
OF_US = "--kv-events-curve-secret-key-file"
PAIR = new_pair()


@pytest.fixture
def name(tmp_path: Path) -> str:
    write_pair(str(tmp_path / "a"), PAIR)
    return str(tmp_path / "a")


def test_without_a_list_all_replicas_have_our_own_pair(name: str) -> None:
    async def story() -> None:
        with zmq.asyncio.Context() as context:
            keys = ReplicaKeysFlags(secret_key_file=f"{name}.key_secret", peer_keys_file=None)
            gate = replica_gate(context, keys)
            assert gate.admitted == (gate.pair.public,) == (PAIR.public,)
            gate.close()

    asyncio.run(story())


def test_without_a_pair_for_engines_one_is_made(name: str) -> None:
    keys = EngineKeysFlags(server_keys_file=f"{name}.key", secret_key_file=None)
    one, other = engine_client_keys(keys), engine_client_keys(keys)
    assert one.believed == (PAIR.public,)
    assert one.pair.public != other.pair.public


def test_files_that_hold_no_keys_end_the_start_by_their_flag(name: str) -> None:
    public, secret, missing = f"{name}.key", f"{name}.key_secret", f"{name}.none"
    faults = []
    for keys in (
        EngineKeysFlags(server_keys_file=missing, secret_key_file=None),
        EngineKeysFlags(server_keys_file=secret, secret_key_file=None),
        EngineKeysFlags(server_keys_file=public, secret_key_file=public),
    ):
        with pytest.raises(StartError) as told:
            engine_client_keys(keys)
        faults.append(str(told.value))
    assert faults == [
        f"{OF_SERVERS}: {missing}: No such file or directory",
        f"{OF_SERVERS}: {secret} line 7 is a secret key; this file needs public keys",
        f"{OF_US}: {public} has no secret-key; `lean-selector keys` creates one",
    ]
