"""What the check makes of a selector's and an engine's answers: level, subject, and what counts."""

from typing import Any

import msgspec
import pytest

from lean_selector.api.judgements import (
    Level,
    can_be_chosen,
    judge_discoveries,
    judge_selector,
    judge_shared_endpoints,
    judge_source,
    judge_workers,
)
from lean_selector.discovery.particulars import Particulars
from lean_selector.tools.check import table
from lean_selector.tools.check_questions import judge_engine, judge_ports
from lean_selector.wire.discovery_states import (
    DiscoveredPeer,
    DiscoveredWorker,
    DiscoveryReport,
    DiscoveryState,
)
from lean_selector.wire.findings import CheckedReadiness, CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.selection_bodies import KvSource, RankHealthRow, WorkerHealthDetail

OK, NOTE, WARNING, ERROR = Level.OK, Level.NOTE, Level.WARNING, Level.ERROR
REFUSED = "GET http://gpu:8000/v1/models: Connection refused"
_SOURCE: dict[str, Any] = {
    **{"worker_id": 3, "dp_rank": 1, "endpoint": "tcp://gpu:5557", "replay_endpoint": None},
    **{"state_age_s": 1.0, "problem": None, "connection": "connected", "last_seq": None},
    **dict.fromkeys(("lag_batches", "lost_batches", "gaps", "replayed_batches", "restarts"), 0),
    **{"backlog_bytes": 0, "dropped_batches": 0, "messages": 0, "skipped": {}},
    **{"last_message_age_s": None, "last_error": None, "model_name": "m", "tenant_id": "default"},
}


def source(state: str, **fields: Any) -> KvSource:
    return KvSource(**{**_SOURCE, "state": state, **fields})


def test_a_tenant_has_either_name() -> None:
    body = b'{"worker_id":1,"model_name":"m","lifecycle":"schedulable","%b":"a"}'
    for name in (b"tenant_id", b"routing_group"):
        assert msgspec.json.decode(body % name, type=CheckedWorker).tenant_id == "a"


def worker(worker_id: int, *ranks: RankHealthRow, **fields: Any) -> CheckedWorker:
    health = WorkerHealthDetail("in_service", [*ranks])
    endpoint = f"http://gpu-{worker_id}"
    told: dict[str, Any] = {"endpoint": endpoint, "block_size": 16, "health": health, **fields}
    return CheckedWorker(worker_id, "m", "schedulable", **told)


def told(findings: Any) -> list[tuple[str, str]]:
    return [(each.level, each.subject) for each in findings]


def test_a_source_whose_index_is_inaccurate_is_a_warning() -> None:
    for accuracy, level in ((None, OK), (0.97, OK), (0.8, WARNING)):
        assert judge_source(source("live", index_accuracy=accuracy)).level is level


# -- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "level"),
    [
        *(("live", OK), ("replaying", OK), ("partial", NOTE), ("silent", NOTE)),
        *(("no_replay", WARNING), ("degraded", WARNING), ("connecting", WARNING)),
        *(("mismatch", ERROR), ("unreachable", ERROR), ("failed", ERROR)),
        ("of a later version", WARNING),
    ],
)
def test_each_state_of_a_source_has_its_weight(state: str, level: str) -> None:
    finding = judge_source(source(state))
    assert (finding.level, finding.subject) == (level, "worker 3 rank 1")
    assert state in finding.what


@pytest.mark.parametrize(
    ("state", "fields", "end"),
    [
        # A problem stands in place of what the state means, and of the last error.
        ("unreachable", {"problem": "it is lost", "last_error": "no"}, "gpu:5557: it is lost"),
        ("degraded", {"last_error": "2 batches are in no replay"}, "; 2 batches are in no replay"),
        ("live", {"last_error": "the last of yesterday"}, "followed"),
        (
            "mismatch",
            {"problem": "32 is not 16", "skipped": {"stored:block_size": 7}},
            "32 is not 16; skipped events: 7 stored:block_size",
        ),
    ],
)
def test_why_a_source_is_as_it_is(state: str, fields: dict[str, Any], end: str) -> None:
    assert judge_source(source(state, **fields)).what.endswith(end)


# -- endpoints that ranks share --------------------------------------------------------------------


def shared(workers: list[CheckedWorker], *sources: tuple[int, str, str | None]) -> list[Finding]:
    """`sources` are (worker, events endpoint, replay endpoint), each further one another rank."""
    ranks = [
        source(
            "live",
            worker_id=worker_id,
            dp_rank=sum(before[0] == worker_id for before in sources[:place]),
            endpoint=events,
            replay_endpoint=replay,
        )
        for place, (worker_id, events, replay) in enumerate(sources)
    ]
    found = list(judge_shared_endpoints(workers, ranks))
    assert {finding.level for finding in found} <= {ERROR}
    return found


def test_a_replay_endpoint_of_another_worker_is_named_at_both() -> None:
    pair = [worker(1), worker(2)]
    [found] = shared(pair, (1, "tcp://a:1", "tcp://a:2"), (2, "tcp://b:1", "tcp://a:2"))
    assert found.subject == "worker 1 rank 0"
    assert "replay_endpoint tcp://a:2: also given for worker 2 rank 0" in found.what
    three = [worker(1), worker(2), worker(3)]  # engines of one host, which one default describes
    both = shared(three, *((number, "tcp://a:1", "tcp://a:2") for number in (1, 2, 3)))
    for found, endpoint in zip(both, ("tcp://a:1", "tcp://a:2"), strict=True):
        assert f"{endpoint}: also given for worker 2 rank 0" in found.what
        assert "--discover file:" in (found.mend or "")


def test_an_engine_registered_twice_and_endpoints_of_their_own_are_fine() -> None:
    twice = [worker(1, endpoint="http://gpu"), worker(2, endpoint="http://gpu")]
    assert shared(twice, (1, "tcp://a:1", "tcp://a:2"), (2, "tcp://a:1", "tcp://a:2")) == []
    assert shared([worker(1), worker(2)], (1, "tcp://a:1", None), (2, "tcp://b:1", None)) == []


def test_a_port_that_did_not_answer_is_not_reported_again_by_its_source() -> None:
    heard = [source("unreachable"), source("connecting"), source("degraded")]
    facts = SelectorFacts(True, [worker(3)], heard, deaf_ports={"tcp://gpu:5557"})
    found = [each for each in judge_selector(facts) if each.subject == "worker 3 rank 1"]
    assert [each.what.partition(" ")[0] for each in found] == ["degraded"]


# -- discoveries -----------------------------------------------------------------------------------


def report(**found: list[Any]) -> DiscoveryReport:
    return DiscoveryReport(**{"discoveries": [], "workers": [], "peers": [], **found})


def discovery(state: str, found: int | None, error: str | None = None) -> DiscoveryState:
    return DiscoveryState("dns:gpu:8000", "workers", state, 1.0, found, 0, error)


@pytest.mark.parametrize(
    ("judged", "level", "words"),
    [
        (discovery("failing", None, "no name"), ERROR, " fails: no name"),
        (
            discovery("failing", 3, "late"),
            WARNING,
            "late; the 3 workers that it found before stay in use",
        ),
        (discovery("starting", None), NOTE, " has found nothing yet"),
        (discovery("watching", 0), NOTE, " finds no workers"),
        (discovery("watching", 3), None, ""),
    ],
)
def test_a_discovery_is_judged_by_what_it_found(
    judged: DiscoveryState, level: str | None, words: str
) -> None:
    found = list(judge_discoveries(report(discoveries=[judged])))
    assert told(found) == ([(level, "discovery")] if level else [])
    assert all(each.what.startswith("dns:gpu:8000") for each in found)
    assert all(each.what.endswith(words) for each in found)
    if level is ERROR:
        assert "DNS" in (found[0].mend or "")


@pytest.mark.parametrize(
    ("state", "error", "level", "words"),
    [
        ("asking", REFUSED, ERROR, f", not registered: its engine cannot be queried: {REFUSED}"),
        ("asking", None, NOTE, ": its engine is being queried"),
        ("refused", "no block size", ERROR, ", not registered: no block size"),
        ("removed", None, NOTE, ", deleted over HTTP: stays removed until it is found again"),
        ("registered", REFUSED, WARNING, f": its earlier registration stays in use: {REFUSED}"),
        ("registered", None, None, ""),
        ("by_http", None, None, ""),
    ],
)
def test_a_discovered_worker_is_told_of_with_the_reason(
    state: str, error: str | None, level: str | None, words: str
) -> None:
    row = DiscoveredWorker("http://gpu:8000", 7, ["dns:gpu:8000"], state, None, error)
    found = list(judge_discoveries(report(workers=[row])))
    assert told(found) == ([(level, "worker 7")] if level else [])
    assert [each.what for each in found] == [
        f"found at http://gpu:8000 by dns:gpu:8000{words}" for _ in found
    ]


def test_a_peer_that_is_refused_is_a_warning() -> None:
    peers = [
        DiscoveredPeer("tcp://10.0.0.1:9092", "registered", None, None),
        DiscoveredPeer("tcp://10.0.0.2:9092", "refused", None, "it is not allowed"),
    ]
    [finding] = judge_discoveries(report(peers=peers))
    assert finding.level is WARNING
    assert finding.what == "peer tcp://10.0.0.2:9092 is refused: it is not allowed"


# -- workers ---------------------------------------------------------------------------------------


def rank(dp_rank: int, state: str = "ejected", returns_in_s: float | None = 29.3) -> RankHealthRow:
    return RankHealthRow(dp_rank, state, "it is away", None, returns_in_s, 0, 0, 0)


def of(found: list[Finding], subject: str) -> str:
    [what] = [each.what for each in found if each.subject == subject]
    return what


def test_ejected_workers_and_ranks_are_named_with_the_reason_and_only_whole_ones_do_not_count() -> (
    None
):
    workers = [
        worker(1, rank(0)),
        worker(2, rank(0, returns_in_s=None)),
        worker(3, rank(1), data_parallel_size=2),
        worker(4, rank(0), rank(2), data_parallel_size=3),
        worker(5, rank(0, "probation")),
        worker(6, rank(0, "in_service")),
    ]
    found = list(judge_workers(workers))
    assert [each.level for each in found] == [WARNING] * 4 + [NOTE]
    assert of(found, "worker 1") == "ejected, for 29 s more: it is away"
    assert of(found, "worker 2").startswith("ejected, until a poll of it succeeds: ")
    assert of(found, "worker 3").startswith("rank 1 is ejected, ")
    assert of(found, "worker 4").startswith("ranks 0, 2 are ejected, ")
    assert of(found, "worker 5").startswith("rank 0 is on probation, ")
    assert can_be_chosen(workers) == 4


def test_where_all_of_a_model_are_ejected_that_is_an_error_and_they_are_tried() -> None:
    workers = [worker(1, rank(0)), worker(2, rank(0)), worker(3, tenant_id="other")]
    found = told(judge_workers(workers))
    assert found == [(ERROR, "model m"), (WARNING, "worker 1"), (WARNING, "worker 2")]
    assert can_be_chosen(workers) == 3


def test_a_worker_that_lacks_something_does_not_count_whatever_else_it_is() -> None:
    incomplete = worker(1, rank(0))
    incomplete.lifecycle, incomplete.not_schedulable_reasons = "incomplete", ["no endpoint"]
    [finding] = judge_workers([incomplete, worker(2)])
    assert (finding.level, finding.what) == (ERROR, "cannot be chosen: no endpoint")
    assert can_be_chosen([incomplete, worker(2)]) == 1


def test_of_a_worker_with_other_blocks_the_way_out_is_named() -> None:
    """Not PATCH: nothing is missing, and a PATCH does not free the size of the model."""
    other = worker(1)
    for field in ("block_size", "is_eagle"):
        reason = f"reconciliation failed: {field} mismatch for model=m tenant=t: existing=1"
        other.lifecycle, other.not_schedulable_reasons = "incomplete", [reason]
        [finding] = judge_workers([other, worker(2)])
        assert "DELETE" in (finding.mend or "")
        assert "PATCH" not in (finding.mend or "")


def test_block_sizes_of_a_model_that_differ_are_an_error_and_of_two_tenants_are_none() -> None:
    [finding] = judge_workers([worker(1), worker(2, block_size=32)])
    assert (finding.level, finding.subject) == (ERROR, "model m")
    assert "worker 1 of 16, worker 2 of 32" in finding.what
    other = worker(2, block_size=32, tenant_id="other")
    assert list(judge_workers([worker(1), other])) == []


# -- the selector as a whole -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        (SelectorFacts(True, [worker(1)], []), [OK, WARNING]),  # hears nothing
        (SelectorFacts(True, [worker(1, uses_kv_events=False)], []), [OK, NOTE]),  # as chosen
        (SelectorFacts(True, [worker(1)], None), [OK, NOTE]),  # tells no sources: the reference
        (
            SelectorFacts(
                True, [worker(1)], None, readiness=CheckedReadiness(True, "no space left")
            ),
            [OK, NOTE, WARNING, NOTE],  # a recovery under way, and a state that is not written
        ),
    ],
)
def test_a_selector_is_judged_by_what_it_tells(facts: SelectorFacts, levels: list[str]) -> None:
    found = list(judge_selector(facts))
    assert told(found) == [(level, "selector") for level in levels]
    assert facts.readiness.state_fault is None or "no space left" in found[2].what


def test_where_nobody_can_be_chosen_nothing_is_said_of_what_decides() -> None:
    incomplete = worker(3)
    incomplete.lifecycle, incomplete.not_schedulable_reasons = "incomplete", ["no endpoint"]
    found = list(judge_selector(SelectorFacts(False, [incomplete], [])))
    assert [each.level for each in found] == [ERROR, ERROR]


def test_a_worker_that_is_not_heard_beside_others_that_are_is_a_warning() -> None:
    incomplete = worker(3)
    incomplete.lifecycle, incomplete.not_schedulable_reasons = "incomplete", ["no endpoint"]
    heard = source("live", worker_id=1)
    found = list(judge_selector(SelectorFacts(True, [worker(1), worker(2), incomplete], [heard])))
    [deaf] = [each for each in found if each.level is WARNING]
    assert deaf.subject == "worker 2"
    assert "events_port" in (deaf.mend or "")


PEERS = DiscoveryState("dns:selector:9092", "peers", "watching", 1.0, 2, 0, None)


@pytest.mark.parametrize(
    ("discoveries", "mend"),
    [
        *((each, "--discover") for each in (None, report(), report(discoveries=[PEERS]))),
        (report(discoveries=[discovery("watching", 0)]), "its discoveries"),
    ],
    ids=["told of none", "without any", "of peers alone", "of workers"],
)
def test_a_selector_that_looks_for_workers_is_not_told_to_look(
    discoveries: DiscoveryReport | None, mend: str
) -> None:
    first = next(judge_selector(SelectorFacts(False, [], [], discoveries)))
    assert (first.level, first.what) == (ERROR, "no worker is registered")
    assert mend in (first.mend or "")
    assert ("--discover" in (first.mend or "")) == (mend == "--discover")


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told_by_it", "blocks", "levels", "words"),
    [
        (
            Particulars(model_name="m", block_size=16, total_kv_blocks=9),
            9,
            [OK],
            "has m, blocks of 16",
        ),
        (Particulars(), 9, [OK], "block size not reported"),  # what it does not tell is not judged
        (Particulars(block_size=32), None, [ERROR], "blocks of 16 tokens, the engine has 32"),
        (Particulars(model_name="other", total_kv_blocks=9), 8, [WARNING, WARNING], ""),
        (Particulars(total_kv_blocks=9), None, [NOTE], "without total_kv_blocks"),
    ],
)
def test_an_engine_is_held_against_its_registration(
    told_by_it: Particulars, blocks: int | None, levels: list[str], words: str
) -> None:
    found = list(judge_engine(worker(7, total_kv_blocks=blocks), told_by_it))
    assert [each.level for each in found] == levels
    assert words in found[0].what
    mends = {ERROR: '"block_size": 32', WARNING: 'PATCH /workers/7 {"total_kv_blocks": 9}'}
    if levels[0] in mends:
        assert mends[levels[0]] in (found[-1].mend or "")


# -- the table -------------------------------------------------------------------------------------


def test_what_is_wrong_stands_first_with_what_mends_it_below() -> None:
    found = [
        Finding(OK, "selector", "ready"),
        Finding(ERROR, "worker 1", "it is away", "check the engine"),
        Finding(NOTE, "engines", "they differ"),
    ]
    assert list(table(found, 80, {"worker 1": "http://a:8000"})) == [
        "error    worker 1  (http://a:8000) it is away",
        *("                   -> check the engine", "note     engines   they differ"),
        *("ok       selector  ready", "1 error, 0 warnings, 1 note, 1 ok"),
    ]
    assert list(table([], 80, {})) == ["0 errors, 0 warnings, 0 notes, 0 ok"]


@pytest.mark.parametrize(
    ("told", "levels"),
    [
        ({"kv_events_endpoints": {1: "tcp://gpu:5557"}}, []),
        ({"kv_events_endpoints": {1: "tcp://10.0.0.1:5557"}}, []),  # the host by another name
        ({"kv_events_endpoints": {0: "tcp://gpu:9"}}, []),  # of another rank
        ({"kv_events_endpoints": {1: "tcp://gpu:9"}}, [NOTE]),
        ({"replay_endpoints": {1: "tcp://gpu:9"}}, [NOTE]),
        ({"kv_events_endpoints": {1: "tcp://gpu:6557"}}, [ERROR]),
        ({"replay_endpoints": {1: "tcp://gpu:6558"}}, [ERROR]),
        ({}, []),
    ],
)
def test_where_an_engine_says_that_it_publishes_is_held_against_the_registration(
    told: dict[str, Any], levels: list[str]
) -> None:
    own = source("live", replay_endpoint="tcp://gpu:5558")
    endpoints = {"endpoint": "tcp://gpu:6557", "replay_endpoint": "tcp://gpu:6558"}
    other = source("live", worker_id=4, **endpoints)
    found = list(judge_ports(worker(3), Particulars(**told), [own, other]))
    assert [each.level for each in found] == levels
    assert {each.subject for each in found} <= {"worker 3 rank 1"}
