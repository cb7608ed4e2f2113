"""The check of a running selector: real services, real sockets, engines that answer and publish."""

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lean_selector.tools.check import main
from lean_selector.tools.check_questions import AskedSelector, NotASelector
from tests.support.fake_engine import FakeEngine
from tests.support.on_loop import on_loop
from tests.support.outbound_server import Serve, client, response, serving
from tests.support.running_service import RunningService, free_port, wait_until

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


def check(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        return main(arguments), out.getvalue(), err.getvalue()


def findings(
    selector: RunningService, *flags: str, status: int, patience_s: float = 20.0
) -> Findings:
    """`patience_s`: short where an answer is waited for that does not come."""
    patience = ("--seconds", str(patience_s))
    ended, out, err = check(f"http://127.0.0.1:{selector.port}", "--json", *patience, *flags)
    assert ended == status, out + err
    found: Findings = json.loads(out)
    return found


class ApiEngine(FakeEngine):
    """It completes prompts, and has a replay of its events."""

    def __init__(self, worker_id: int, **options: Any) -> None:
        replay: dict[str, Any] = {"worker_id": worker_id, "replay_endpoint": "tcp://127.0.0.1:0"}
        super().__init__("tiny", tells_sources=False, **replay, **options)
        self.worker_id = worker_id


def register(selector: RunningService, engine: ApiEngine, **more: object) -> None:
    """`more` replaces what is told."""
    status, answer = selector.post("/workers", engine.registration(engine.worker_id, **more))
    assert status == 201, answer


def follow(selector: RunningService, *engines: ApiEngine, **more: object) -> None:
    """Registers them, and waits until their events are followed."""
    for engine in engines:
        register(selector, engine, **more)
        wait_until(partial(is_connected, selector, engine.worker_id), "its events are followed")


def is_connected(selector: RunningService, worker_id: int) -> bool:
    rows = selector.get("/kv_sources")[1]
    return any(row["worker_id"] == worker_id and row["connection"] == "connected" for row in rows)


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
    """An endpoint may end in /v1, as what OpenAI's clients are told does, and have no scheme."""
    with ApiEngine(1) as one, ApiEngine(2) as two:
        follow(selector, one)
        follow(selector, two, endpoint=f"{two.url.removeprefix('http://')}/v1")
        findings(selector, status=0)
        assert one.prompts == []  # without --probe no engine gets a prompt
        found = findings(selector, "--probe", status=0)
        assert what(found, "ok", "selector") == ["ready: 2 of 2 workers can be chosen"]
        for worker_id in (1, 2):
            ok = what(found, "ok", f"worker {worker_id}")
            assert "the 2 blocks of a completion arrived in the index as events" in ok
            rank = what(found, "ok", f"worker {worker_id} rank 0")
            assert any("live at " in line for line in rank)  # though it was silent before
            assert any("ZMQ listens" in line for line in rank)
            assert any(line.endswith(": answers") for line in rank)
        # One first block for all, and one of each engine's own.
        [[*first], [*second]] = one.prompts, two.prompts
        assert [len(*first), len(*second)] == [33, 33]
        assert first[0][:16] == second[0][:16]
        assert first[0][16:32] != second[0][16:32]
        assert what(found, "ok", "engines") == ["2 of them give the same block the same hash"]


def test_engines_with_seeds_of_their_own_and_one_that_tells_no_events_are_found_by_completions(
    selector: RunningService,
) -> None:
    with (
        ApiEngine(1, seed=1) as one,
        ApiEngine(2, seed=2) as two,
        ApiEngine(3, publishes=False) as silent,
    ):
        follow(selector, one, two, silent)
        found = findings(selector, "--probe", status=1, patience_s=3.0)
        assert any("PYTHONHASHSEED" in line for line in what(found, "note", "engines"))
        [error] = what(found, "error", "worker 3")
        assert "none of their events" in error


@pytest.mark.parametrize("field", ["endpoint", "kv_events_endpoint", "replay_endpoint"])
def test_endpoints_of_two_workers_that_are_exchanged_are_named(
    selector: RunningService, field: str
) -> None:
    with ApiEngine(1, seed=1) as one, ApiEngine(2, seed=2) as two:
        for engine, other in ((one, two), (two, one)):
            for number in range(3 * engine.worker_id):
                engine.cache([number] * 16)
            follow(selector, engine, **{field: other.registration(other.worker_id)[field]})
        found = findings(selector, "--probe", status=1, patience_s=6.0)
        errors = [each for each in found if each["level"] == "error"]
        assert any(field in each["mend"] for each in errors), errors
        named, both = {each["subject"][:8] for each in errors}, {"worker 1", "worker 2"}
        # A replay, which is requested at the right endpoint, may bring one of them its own blocks.
        assert named == both or (field == "kv_events_endpoint" and len(named & both) == 1)
        assert not any("prefix caching" in each["mend"] for each in errors)


@pytest.mark.parametrize(
    ("wrong", "words"), [({"is_eagle": True}, "single tokens"), ({"block_size": 32}, "skipped")]
)
def test_a_probe_names_the_field_that_is_wrong(
    selector: RunningService, wrong: dict[str, object], words: str
) -> None:
    with ApiEngine(1) as engine:
        follow(selector, engine, model_name=f"of {words}", **wrong)
        found = findings(selector, "--probe", status=1, patience_s=1.0)
        lines = what(found, "error", "worker 1")
        assert any(words in line for line in lines), lines


def test_wrong_ports_are_recognised_by_what_listens_there(selector: RunningService) -> None:
    nobody = free_port()
    with ApiEngine(1) as api, ApiEngine(2) as gone, ApiEngine(3) as swapped, ApiEngine(4) as bound:
        register(selector, api, kv_events_endpoint=f"tcp://127.0.0.1:{api.port}", block_size=32)
        register(
            selector,
            gone,
            endpoint=f"http://127.0.0.1:{nobody}",
            kv_events_endpoint=f"tcp://127.0.0.1:{nobody}",
            block_size=32,
        )
        register(selector, swapped, replay_endpoint=swapped.publisher.endpoint, block_size=32)
        register(
            selector, bound, kv_events_endpoint="tcp://*:5557", replay_endpoint=None, block_size=32
        )
        found = findings(selector, status=1, patience_s=2.0)
        [error] = what(found, "error", "worker 1")
        assert "registered with blocks of 32 tokens, the engine has 16" in error
        [error] = what(found, "error", "worker 2")
        assert error.endswith("Connection refused")
        for worker_id, level, words in (
            (1, "error", "HTTP"),
            (2, "error", f"kv_events_endpoint tcp://127.0.0.1:{nobody}"),
            (3, "error", "no replay in 2"),
            (4, "error", "tcp://*:5557"),
            (4, "warning", "no replay endpoint"),
        ):
            lines = what(found, level, f"worker {worker_id} rank 0")
            assert any(words in line for line in lines), words


def test_engines_that_want_a_token_get_that_of_the_file(
    selector: RunningService, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with ApiEngine(1, token="s3cret") as engine:
        follow(selector, engine)
        [error] = what(findings(selector, status=1), "error", "worker 1")
        assert "status 401" in error
        found = findings(selector, "--worker-token-file", str(token), status=0)
        assert what(found, "ok", "worker 1")


def test_without_a_selector_to_ask_the_status_is_2() -> None:
    status, _, err = check(f"http://127.0.0.1:{free_port()}")
    assert (status, "Connection refused" in err) == (2, True)
    with RunningService(module="lean_selector.slot_tracker") as tracker:
        status, _, err = check(f"http://127.0.0.1:{tracker.port}")
        assert (status, "/ready" in err) == (2, True)


def test_bad_arguments_are_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        (["ftp://x"], "`ftp://x`"),
        (["http://"], "`http://` has no host"),
        (["http://u:p@h:1"], "credentials"),
        (["--key-file", "key.pem"], "--key-file requires --cert-file"),
        (["--kv-events-curve-secret-key-file", "x"], "was removed"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert why in capsys.readouterr().err


WORKERS = 6_000
RECORD = {
    "model_name": "m" * 800,  # as long as a record with its health and sources is
    "lifecycle": "schedulable",
}


def answering(*bodies: bytes) -> Serve:
    """One body after the other, in the order of the questions; 404 to what is none of them."""
    asked = iter(bodies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = next(asked, None)
        writer.write(response(body or b"", "404 Not Found" if body is None else "200 OK"))

    return serve


@on_loop
async def test_a_fleet_of_thousands_is_read_whole() -> None:
    workers = json.dumps([{**RECORD, "worker_id": number} for number in range(WORKERS)]).encode()
    assert len(workers) > 4 << 20
    async with serving(answering(b"{}", workers)) as served:
        facts = await AskedSelector(client(), served.url, 20.0).facts()
    assert len(facts.workers) == WORKERS
    assert (facts.sources, facts.discoveries) == (None, None)
    assert served.paths() == ["/ready", "/workers?detail=true", "/kv_sources", "/discovery"]


@on_loop
async def test_an_answer_that_is_none_of_a_selectors_is_named_by_its_route() -> None:
    async with serving(answering(b"up", b"[]", b'{"sources": []}')) as served:
        with pytest.raises(NotASelector, match="/kv_sources: "):
            await AskedSelector(client(), served.url, 20.0).facts()
