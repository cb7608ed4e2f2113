"""Workers and peers that a running service finds by itself, while it is used.

What each kind of discovery reads, what engines answer, and who is registered when, is in
`discovery/`.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lean_selector.discovery.particulars import worker_id_of
from lean_selector.wire.discovery_states import EVENTS_PORT
from tests.support.certificates import Authority
from tests.support.fake_engine import BLOCK_SIZE, FakeEngine
from tests.support.running_service import RunningService, wait_until

QUICK = (
    *("--discover-interval-secs", "0.05", "--discover-grace-secs", "0.1"),
    *("--discover-refresh-secs", "0.1"),
)
TOKENS = list(range(4 * BLOCK_SIZE))


def workers(service: RunningService) -> dict[int, dict[str, Any]]:
    return {row["worker_id"]: row for row in service.get("/workers")[1]}


def sources(service: RunningService) -> dict[int, str]:
    return {row["worker_id"]: row["endpoint"] for row in service.get("/kv_sources")[1]}


def wait_for_workers(service: RunningService, engines: list[FakeEngine]) -> None:
    """And that their events are listened to."""
    expected = {worker_id_of(each.url): each.block_size for each in engines}

    def they_are_there() -> bool:
        rows = workers(service).values()
        found = {
            row["worker_id"]: row["block_size"] for row in rows if row["lifecycle"] == "schedulable"
        }
        return found == expected and len(rows) == len(expected)

    wait_until(they_are_there, f"{expected} are registered")
    events = {worker_id_of(each.url): f"tcp://127.0.0.1:{each.events_port}" for each in engines}
    assert sources(service) == events


def test_workers_come_and_go_while_requests_are_placed(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    with ExitStack() as stack:
        stays, goes, comes = (stack.enter_context(FakeEngine()) for _ in range(3))

        def name(*engines: FakeEngine) -> None:
            (tmp_path / "new").write_text(json.dumps([{"endpoint": each.url} for each in engines]))
            os.replace(tmp_path / "new", path)

        name(stays, goes)
        service = stack.enter_context(RunningService(*QUICK, "--discover", f"file:{path}"))
        wait_for_workers(service, [stays, goes])
        body = {"model_name": "m", "token_ids": TOKENS}
        held = {**body, "worker_id": worker_id_of(stays.url), "reservation_id": "held"}
        assert service.post("/reservations", held)[0] == 201
        for found in ([stays, goes, comes], [stays, comes], [stays, goes]):
            name(*found)
            wait_for_workers(service, found)
            chosen = [service.post("/select_and_reserve", body) for _ in range(6)]
            assert {status for status, _ in chosen} == {200}
            known = {worker_id_of(each.url) for each in found}
            assert {answer["worker_id"] for _, answer in chosen} == known
            for _, answer in chosen:  # the next ones begin with equal loads
                assert service.end(answer["reservation_id"]) == 200
        assert service.end("held") == 200
        report = service.get("/discovery")[1]
        (row,) = report["discoveries"]
        assert (row["state"], row["found"], row["failures"]) == ("watching", 2, 0)
        assert {each["state"] for each in report["workers"]} == {"registered"}


def test_what_a_newcomer_left_out_is_a_warning_that_names_the_flag() -> None:
    with FakeEngine(tells_sources=False) as a, FakeEngine(tells_sources=False) as b:
        found = [part for each in (a, b) for part in ("--discover", f"url:{each.url}")]
        with RunningService(*QUICK, *found) as service:
            wait_until(lambda: service.log().count("lifecycle=incomplete") == 2, "both are logged")
            lines = [line for line in service.log().splitlines() if "--use-kv-events false" in line]
            assert [" WARNING " in line and EVENTS_PORT in line for line in lines] == [True, True]
        defaults = ("--discover-defaults", '{"events_port": 5557}')
        with RunningService(*QUICK, *found, *defaults) as service:
            wait_until(lambda: "--discover file:" in service.log(), "they share a port")


def test_a_url_a_token_and_what_no_engine_tells_are_all_that_a_selector_needs_to_know(
    tmp_path: Path,
) -> None:
    authority = Authority()
    (tmp_path / "ca").write_bytes(authority.pem)
    token = tmp_path / "token"
    token.write_text("old")
    context = authority.server("127.0.0.1")
    with FakeEngine(token="new", context=context, tells_sources=False) as engine:
        defaults = {"events_port": engine.events_port, "tenant_id": "t", "taints": ["spot"]}
        flags = (
            *("--worker-token-file", str(token), "--worker-ca-file", str(tmp_path / "ca")),
            *("--discover-defaults", json.dumps(defaults), "--discover", f"url:{engine.url}/v1"),
        )
        with RunningService(*QUICK, *flags) as service:

            def is_refused() -> bool:
                (row,) = service.get("/discovery")[1]["workers"]
                return row["endpoint"] == engine.url and "status 401" in (row["last_error"] or "")

            wait_until(is_refused, "the old token is refused")
            assert service.get("/ready")[0] == 503
            token.write_text("new")
            wait_for_workers(service, [engine])
            told = [line for line in service.log().splitlines() if "status 401" in line]
            assert [" WARNING " in line for line in told] == [True], "once"
            row = workers(service)[worker_id_of(engine.url)]
            assert (row["model_name"], row["total_kv_blocks"]) == ("m", 1000)
            assert (row["tenant_id"], row["taints"]) == ("t", ["spot"])

            def is_known() -> bool:
                engine.store(TOKENS, 1)
                asked = {"model_name": "m", "tenant_id": "t", "token_ids": TOKENS}
                scores = service.post("/overlap_scores", asked)[1]
                return bool(scores["workers"][0]["device_blocks"] == 4)

            wait_until(is_known, "its events are heard")
