"""The check of a running selector: real services, real sockets, engines that answer and publish."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.key_files import KeyFiles
from tests.support.running_service import RunningService, free_port, wait_until
from tests.tools.api_engine import ApiEngine

LIMIT_S = 60.0

Findings = list[dict[str, Any]]


@pytest.fixture(scope="module")
def selector() -> Iterator[RunningService]:
    with RunningService() as service:
        yield service


@pytest.fixture(autouse=True)
def no_workers_stay(selector: RunningService) -> Iterator[None]:
    yield
    for record in selector.get("/workers")[1]:
        selector.request("DELETE", f"/workers/{record['worker_id']}")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lean_selector", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def findings(selector: RunningService, *flags: str, status: int) -> Findings:
    done = check(f"http://127.0.0.1:{selector.port}", "--json", "--seconds", "2", *flags)
    assert done.returncode == status, done.stdout + done.stderr
    found: Findings = json.loads(done.stdout)
    return found


def register(selector: RunningService, engine: ApiEngine, **more: object) -> None:
    status, answer = selector.post("/workers", engine.registration(**more))
    assert status == 201, answer


def followed(selector: RunningService, worker_id: int) -> bool:
    return any(
        source["worker_id"] == worker_id and source["connection"] == "connected"
        for source in selector.get("/kv_sources")[1]
    )


def is_in(selector: RunningService, worker_id: int, state: str) -> bool:
    """The source of its first rank."""
    rows = selector.get("/kv_sources")[1]
    return any(row["worker_id"] == worker_id and row["state"] == state for row in rows)


def what(found: Findings, level: str, subject: str) -> list[str]:
    return [
        finding["what"]
        for finding in found
        if finding["level"] == level and finding["subject"] == subject
    ]


def told(found: Findings, level: str, worker_id: int, state: str) -> list[str]:
    """What is said of the state of a worker's first rank."""
    lines = what(found, level, f"worker {worker_id} rank 0")
    return [line for line in lines if line.startswith(f"{state} at ")]


def test_a_fleet_where_all_is_well_has_no_errors_and_its_blocks_come(
    selector: RunningService,
) -> None:
    """An endpoint may end in /v1, as what OpenAI's clients are told does."""
    with ApiEngine(1) as one, ApiEngine(2) as two:
        for engine, version in ((one, ""), (two, "/v1")):
            register(selector, engine, endpoint=engine.endpoint + version)
            wait_until(partial(followed, selector, engine.worker_id), "its events are followed")
        found = findings(selector, "--probe", status=0)
        assert what(found, "ok", "selector") == ["ready: 2 of 2 workers can be chosen"]
        for worker_id in (1, 2):
            ok = what(found, "ok", f"worker {worker_id}")
            assert "the 2 blocks of a completion came into the index as events" in ok
            rank = what(found, "ok", f"worker {worker_id} rank 0")
            assert any("live at " in line for line in rank)  # though it was silent before
            assert any("ZMQ listens" in line for line in rank)
            assert any(line.endswith(": answers") for line in rank)
        # One prompt for all, of two full blocks.
        assert one.prompts == two.prompts
        assert [len(prompt) for prompt in one.prompts] == [33]
        assert what(found, "ok", "engines") == ["2 of them name the same block alike"]


def test_without_leave_no_engine_gets_a_prompt(selector: RunningService) -> None:
    with ApiEngine(1) as engine:
        register(selector, engine)
        wait_until(lambda: followed(selector, 1), "its events are followed")
        findings(selector, status=0)
        assert engine.prompts == []


def test_engines_with_seeds_of_their_own_are_told_of_and_do_not_matter(
    selector: RunningService,
) -> None:
    with ApiEngine(1, seed=1) as one, ApiEngine(2, seed=2) as two:
        for engine in (one, two):
            register(selector, engine)
            wait_until(partial(followed, selector, engine.worker_id), "its events are followed")
        found = findings(selector, "--probe", status=0)
        assert any("PYTHONHASHSEED" in line for line in what(found, "note", "engines"))


def test_an_engine_with_another_block_size_is_named_with_both(selector: RunningService) -> None:
    with ApiEngine(1, block_size=16) as engine:
        register(selector, engine, block_size=32)
        found = findings(selector, status=1)
        [error] = what(found, "error", "worker 1")
        assert "registered with blocks of 32 tokens, the engine has 16" in error


def test_an_engine_that_tells_no_events_is_found_by_a_completion(selector: RunningService) -> None:
    with ApiEngine(1, publishes=False) as engine:
        register(selector, engine)
        wait_until(lambda: followed(selector, 1), "its events are followed")
        found = findings(selector, "--probe", status=1)
        [error] = what(found, "error", "worker 1")
        assert "no event of them came" in error


def test_the_port_of_the_api_in_place_of_the_events_is_recognised(
    selector: RunningService,
) -> None:
    with ApiEngine(1) as engine:
        register(selector, engine, kv_events_endpoint=f"tcp://127.0.0.1:{engine.port}")
        found = findings(selector, status=1)
        errors = what(found, "error", "worker 1 rank 0")
        assert any("an HTTP server listens there, no ZMQ" in error for error in errors)


def test_a_port_where_nobody_listens_and_an_engine_that_is_gone(selector: RunningService) -> None:
    with ApiEngine(1) as engine:
        port = free_port()
        register(
            selector,
            engine,
            endpoint=f"http://127.0.0.1:{port}",
            kv_events_endpoint=f"tcp://127.0.0.1:{port}",
        )
        found = findings(selector, status=1)
        [error] = what(found, "error", "worker 1")
        assert "its engine does not tell what it is" in error
        assert "Connection refused" in error
        errors = what(found, "error", "worker 1 rank 0")
        assert any(f"kv_events_endpoint tcp://127.0.0.1:{port}" in line for line in errors)


def test_events_in_place_of_the_replay_are_no_answer(selector: RunningService) -> None:
    with ApiEngine(1) as engine:
        register(selector, engine, replay_endpoint=engine.events_endpoint)
        found = findings(selector, status=1)
        errors = what(found, "error", "worker 1 rank 0")
        assert any("no replay in 2 s" in line for line in errors)


def test_the_problem_of_a_source_is_told_in_the_selectors_own_words(
    selector: RunningService,
) -> None:
    with ApiEngine(1, block_size=16) as mismatched, ApiEngine(2) as unasked:
        body = unasked.registration()
        del body["replay_endpoint"]
        assert selector.post("/workers", body)[0] == 201
        with ApiEngine(3) as closing:
            register(selector, closing)
            wait_until(lambda: followed(selector, 3), "its events are followed")
        # Its API is away: nobody but its events tells the size of its blocks.
        away = f"http://127.0.0.1:{free_port()}"
        register(selector, mismatched, block_size=32, endpoint=away, model_name="other")

        def is_heard() -> bool:
            mismatched.cache(list(range(16)))
            return is_in(selector, 1, "mismatch")

        wait_until(is_heard, "its blocks are seen")
        for worker_id, state in ((2, "no_replay"), (3, "unreachable")):
            wait_until(partial(is_in, selector, worker_id, state), state)
        found = findings(selector, status=1)
        [mismatch] = told(found, "error", 1, "mismatch")
        assert "blocks are of 16 tokens, the worker's block_size is 32" in mismatch
        [no_replay] = what(found, "warning", "worker 2 rank 0")
        assert no_replay.endswith("connected, nothing heard, and no replay endpoint to ask")
        [unreachable] = told(found, "error", 3, "unreachable")
        assert "the connection was lost" in unreachable
        assert "never" not in unreachable


def test_a_replay_endpoint_of_another_worker_is_an_error_though_it_answers(
    selector: RunningService,
) -> None:
    with ApiEngine(1) as one, ApiEngine(2) as two:
        register(selector, one)
        register(selector, two, replay_endpoint=one.replay_endpoint)
        found = findings(selector, status=1)
        shared = f"replay_endpoint {one.replay_endpoint}"
        [error] = what(found, "error", "worker 1 rank 0")
        assert error.startswith(f"{shared} is also the replay_endpoint of worker 2 rank 0: ")
        assert f"{shared}: answers" in what(found, "ok", "worker 2 rank 0")


def test_an_address_that_is_only_bound_and_a_worker_without_a_replay(
    selector: RunningService,
) -> None:
    with ApiEngine(1) as engine:
        body = engine.registration(kv_events_endpoint="tcp://*:5557")
        del body["replay_endpoint"]
        assert selector.post("/workers", body)[0] == 201
        found = findings(selector, status=1)
        errors = what(found, "error", "worker 1 rank 0")
        assert any("tcp://*:5557 is no address" in line for line in errors)
        warnings = what(found, "warning", "worker 1 rank 0")
        assert any("no replay endpoint" in line for line in warnings)


def test_a_worker_that_lacks_something_is_told_with_its_reasons(selector: RunningService) -> None:
    assert selector.post("/workers", {"worker_id": 4, "model_name": "m"})[0] == 201
    found = findings(selector, status=1)
    [error] = what(found, "error", "worker 4")
    assert "endpoint is required" in error
    assert "block_size" in error


def test_a_worker_that_was_ejected_is_named_and_does_not_count(selector: RunningService) -> None:
    with ApiEngine(1) as one, ApiEngine(2) as two:
        for engine in (one, two):
            register(selector, engine)
        for _ in range(3):
            selector.post("/workers/1/report", {"outcome": "refused"})
        found = findings(selector, status=0)
        assert what(found, "ok", "selector") == ["ready: 1 of 2 workers can be chosen"]
        [warning] = what(found, "warning", "worker 1")
        assert warning.startswith("ejected, for ")
        assert "3 requests in a row failed, the last: connection refused" in warning
        assert what(found, "warning", "worker 2") == []


def test_engines_that_encrypt_are_asked_with_the_keys_of_the_selector_and_else_not_at_all(
    tmp_path: Path,
) -> None:
    keys = KeyFiles(tmp_path, "engine", "selector")
    servers = ("--kv-events-curve-server-keys-file", keys.list("them", "engine"))
    secret = ("--kv-events-curve-secret-key-file", keys.secret("selector"))
    clients = keys.list("us", "selector")
    with (
        ApiEngine(1, secret=keys.secret("engine"), clients=clients) as engine,
        RunningService(*servers, *secret) as service,
    ):
        engine.cache(list(range(16)))
        register(service, engine)
        wait_until(partial(is_in, service, 1, "live"), "its events are followed")
        replay = f"replay_endpoint {engine.replay_endpoint}: "
        not_asked = f"{replay}not asked from here: no connection: "
        found = findings(service, status=0)
        assert f"{not_asked}it asks for keys (CURVE), and none are given for it" in what(
            found, "note", "worker 1 rank 0"
        )
        found = findings(service, *servers, status=0)
        assert any(
            line.startswith(f"{not_asked}it does not admit our public key ")
            for line in what(found, "note", "worker 1 rank 0")
        )
        found = findings(service, "--probe", *servers, *secret, status=0)
        assert f"{replay}answers" in what(found, "ok", "worker 1 rank 0")
        assert what(found, "note", "worker 1 rank 0") == []


def test_a_selector_without_the_keys_of_its_engine_is_told_of_them(
    selector: RunningService, tmp_path: Path
) -> None:
    keys = KeyFiles(tmp_path, "engine")
    with ApiEngine(1, secret=keys.secret("engine")) as engine:
        register(selector, engine)
        wait_until(partial(is_in, selector, 1, "unreachable"), "it is not heard")
        found = findings(selector, status=1)
        [error] = told(found, "error", 1, "unreachable")
        assert "it asks for keys (CURVE), and none are given for it" in error
        [mend] = [line["mend"] for line in found if line["what"] == error]
        assert "--kv-events-curve-server-keys-file" in mend


def test_engines_that_want_a_token_get_that_of_the_file(
    selector: RunningService, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with ApiEngine(1, token="s3cret") as engine:
        register(selector, engine)
        wait_until(lambda: followed(selector, 1), "its events are followed")
        [error] = what(findings(selector, status=1), "error", "worker 1")
        assert "status 401" in error
        assert what(
            findings(selector, "--worker-token-file", str(token), status=0), "ok", "worker 1"
        )


def test_a_selector_without_workers_says_what_to_do(selector: RunningService) -> None:
    done = check(f"127.0.0.1:{selector.port}")
    assert done.returncode == 1
    assert "no worker is registered" in done.stdout
    assert "-> POST /workers for each engine" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 errors, 0 warnings, 0 notes, 0 ok"


def test_discoveries_that_find_nobody_are_told_with_their_reasons(tmp_path: Path) -> None:
    away, nowhere = f"http://127.0.0.1:{free_port()}", f"file:{tmp_path}/nothere.json"
    with RunningService("--discover", f"url:{away}", "--discover", nowhere) as service:

        def has_asked() -> bool:
            report = service.get("/discovery")[1]
            return all(
                any(row["last_error"] for row in report[of]) for of in ("discoveries", "workers")
            )

        wait_until(has_asked, "both have failed")
        found = findings(service, status=1)
        [none] = [finding for finding in found if finding["subject"] == "selector"]
        assert none["what"] == "no worker is registered"
        assert "--discover" not in none["mend"]
        assert what(found, "error", "discovery") == [f"{nowhere} fails: No such file or directory"]
        [asking] = [line["what"] for line in found if line["subject"].startswith("worker ")]
        assert asking.startswith(f"found at {away} by url:{away}, not registered: ")
        assert asking.endswith("/v1/models: Connection refused")


def test_a_state_directory_that_is_gone_is_told_of(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with RunningService("--state-dir", str(state)) as service:
        lost = "its state is not written, and a restart would lose it: "
        assert service.post("/workers", {"worker_id": 4, "model_name": "m"})[0] == 201
        warnings = what(findings(service, status=1), "warning", "selector")
        assert not any(line.startswith(lost) for line in warnings)
        state.rename(tmp_path / "elsewhere")
        assert service.post("/workers", {"worker_id": 5, "model_name": "m"})[0] == 201
        wait_until(lambda: "state_fault" in service.get("/ready")[1], "it says so")
        warnings = what(findings(service, status=1), "warning", "selector")
        [warning] = [line for line in warnings if line.startswith(lost)]
        assert "No such file or directory" in warning


def test_nobody_to_ask_is_a_status_of_its_own() -> None:
    done = check(f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert done.stderr.startswith("lean-selector check: error: ")
    assert "Connection refused" in done.stderr


def test_a_slot_tracker_is_no_selector() -> None:
    with RunningService(module="lean_selector.slot_tracker") as tracker:
        done = check(f"http://127.0.0.1:{tracker.port}")
        assert done.returncode == 2
        assert "this is no selection service" in done.stderr


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://x", "`ftp://x` is not an http:// or https:// URL"),
        ("http://", "`http://` names no host"),
        ("http://u:p@h:1", "credentials in a URL are not supported"),
    ],
)
def test_what_is_no_url_is_refused(url: str, why: str) -> None:
    done = check(url)
    assert done.returncode == 2
    assert why in done.stderr


def test_a_key_without_its_certificate_is_refused() -> None:
    done = check("--key-file", "key.pem")
    assert done.returncode == 2
    assert "--key-file requires --cert-file" in done.stderr


def test_a_pair_without_the_keys_of_the_engines_and_files_that_hold_none_are_refused(
    tmp_path: Path,
) -> None:
    keys = KeyFiles(tmp_path, "selector")
    done = check("--kv-events-curve-secret-key-file", keys.secret("selector"))
    assert done.returncode == 2
    assert "requires --kv-events-curve-server-keys-file" in done.stderr
    empty = tmp_path / "empty"
    empty.touch()
    done = check("--kv-events-curve-server-keys-file", str(empty))
    assert done.returncode == 2
    assert f"{empty} holds no public key" in done.stderr
