"""Keys at the services: who encrypts and is heard, and what is told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lean_selector.publisher import KvEventPublisher
from tests.support.key_files import KeyFiles
from tests.support.replica_member import BOOKED, IDLE, Member
from tests.support.running_service import RunningService, free_port, wait_until
from tests.support.tuned import TUNED

BLOCK_SIZE = 4
TOKENS = [11, 12, 13, 14]
SECRET = "an adapter that nobody else may read of"


@contextlib.contextmanager
def engine(secret: str | None = None, clients: str | None = None) -> Iterator[KvEventPublisher]:
    """It has published one block; who wants that must ask for its replay."""
    with KvEventPublisher(
        kv_block_size=BLOCK_SIZE,
        endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        curve_secret_key_file=secret,
        curve_client_keys_file=clients,
    ) as publisher:
        store(publisher, 0)
        yield publisher


def store(publisher: KvEventPublisher, number: int) -> None:
    publisher.publish_stored(
        token_ids=TOKENS,
        block_hashes=[100 + number],
        parent_hash=99 + number if number else None,
        lora_name=SECRET,
    )


def tells(service: RunningService, worker_id: int, words: str) -> bool:
    row = service.kv_source(worker_id)
    return words in (row["last_error"] or "") and words in (row["problem"] or "")


def is_live(service: RunningService, worker_id: int, batches: int) -> bool:
    row = service.kv_source(worker_id)
    return bool(row["state"] in ("live", "idle") and row["replayed_batches"] >= batches)


def test_engines_are_heard_with_right_keys_and_of_another_it_is_told_why(tmp_path: Path) -> None:
    """Each of the reasons is in tests/replicas/test_curve.py."""
    keys = KeyFiles(tmp_path, "selector", "engine")
    us, them = keys.list("us", "selector"), keys.list("them", "engine")
    flags = (
        *("--kv-events-curve-server-keys-file", them),
        *("--kv-events-curve-secret-key-file", keys.secret("selector")),
    )
    with (
        RunningService(*flags, module=TUNED) as service,
        engine(keys.secret("engine"), us) as right,
        engine() as plain,
    ):
        for worker_id, each in enumerate((right, plain), 1):
            where = {"kv_events_endpoint": each.endpoint, "replay_endpoint": each.replay_endpoint}
            service.add_worker(worker_id, block_size=BLOCK_SIZE, **where)
        wait_until(lambda: is_live(service, 1, 1), "the first is heard, and replayed from")
        store(right, 1)
        wait_until(lambda: service.kv_source(1)["last_seq"] == 1, "what is new is heard")
        words = "it does not encrypt"
        wait_until(lambda: tells(service, 2, words), "the other is plain")


def test_replicas_that_encrypt_hear_each_other_and_catch_up(tmp_path: Path) -> None:
    keys = KeyFiles(tmp_path, "one", "other")
    ports = free_port(), free_port()
    flags = [
        (
            *("--replica-sync-curve-secret-key-file", keys.secret(name)),
            *("--replica-sync-curve-peer-keys-file", keys.list(f"of {name}", "one", "other")),
        )
        for name in ("one", "other")
    ]
    with Member("tracker", *flags[0], sync_port=ports[0]) as one:
        one.register()
        one.add("before")
        urls = ("--replica-sync-catch-up", f"http://127.0.0.1:{one.port}")
        with Member(
            "selector", *flags[1], *urls, peers=[one.endpoint], sync_port=ports[1]
        ) as other:
            other.register()
            other.shows([BOOKED, (0, 0)])
            one.free("before")
            other.shows(IDLE)
            other.hears(one)
            curve = one.detail()["curve"]
            assert curve == {
                "public_key": keys.public("one"),
                "peer_keys": 2,
                "refused": 0,
                "last_refused": None,
            }


def test_a_publisher_is_not_made_with_keys_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    anywhere = "tcp://127.0.0.1:*"
    with pytest.raises(ValueError, match="curve_client_keys_file requires curve_secret_key_file"):
        KvEventPublisher(kv_block_size=4, endpoint=anywhere, curve_client_keys_file="x")
    with pytest.raises(ValueError, match="has no secret-key"):
        KvEventPublisher(kv_block_size=4, endpoint=anywhere, curve_secret_key_file=str(path))
