"""Keys at the services: replicas that encrypt."""

from pathlib import Path

from tests.support.key_files import KeyFiles
from tests.support.replica_member import BOOKED, IDLE, Member
from tests.support.running_service import free_port


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
