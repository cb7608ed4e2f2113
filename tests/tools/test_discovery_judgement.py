"""What the check makes of the answer of GET /discovery."""

import pytest

from lean_selector.tools.check_judgements import (
    Finding,
    Level,
    SelectorFacts,
    judge_discoveries,
    judge_selector,
)
from lean_selector.wire.discovery_states import (
    DiscoveredPeer,
    DiscoveredWorker,
    DiscoveryReport,
    DiscoveryState,
)

from .selector_answers import report

REFUSED = "GET http://gpu:8000/v1/models: Connection refused"


def of_discovery(state: str, found: int | None, last_error: str | None = None) -> list[Finding]:
    discovery = DiscoveryState("dns:gpu:8000", "workers", state, 1.0, found, 0, last_error)
    return list(judge_discoveries(report(discoveries=[discovery])))


def of_worker(state: str, last_error: str | None = None) -> list[Finding]:
    worker = DiscoveredWorker("http://gpu:8000", 7, ["dns:gpu:8000"], state, None, last_error)
    return list(judge_discoveries(report(workers=[worker])))


def test_a_discovery_that_has_never_found_anything_fails_as_an_error() -> None:
    [finding] = of_discovery("failing", None, "Name or service not known")
    assert (finding.level, finding.subject) == (Level.ERROR, "discovery")
    assert finding.what == "dns:gpu:8000 fails: Name or service not known"
    assert finding.mend == "check the name in DNS, as the selector asks it"


def test_one_that_fails_and_has_found_somebody_before_is_a_warning_for_that_holds() -> None:
    [finding] = of_discovery("failing", 3, "timed out")
    assert finding.level is Level.WARNING
    assert finding.what.endswith("timed out; the 3 workers that it found before hold")


@pytest.mark.parametrize(
    ("found", "words"), [(None, "has found nothing yet"), (0, "finds no workers")]
)
def test_one_that_finds_nobody_without_failing_is_a_note(found: int | None, words: str) -> None:
    [finding] = of_discovery("starting" if found is None else "watching", found)
    assert (finding.level, finding.what) == (Level.NOTE, f"dns:gpu:8000 {words}")


def test_one_that_finds_workers_is_no_finding() -> None:
    assert of_discovery("watching", 3) == []


@pytest.mark.parametrize(
    ("state", "last_error", "level", "words"),
    [
        (
            "asking",
            REFUSED,
            Level.ERROR,
            f", not registered: it does not tell what it is: {REFUSED}",
        ),
        ("asking", None, Level.NOTE, ": it is being asked what it is"),
        ("refused", "no block size", Level.ERROR, ", not registered: no block size"),
        ("removed", None, Level.NOTE, ", deleted over HTTP: away until it is found anew"),
        ("registered", REFUSED, Level.WARNING, f": what it was registered as holds: {REFUSED}"),
    ],
)
def test_a_worker_that_is_not_as_it_was_found_is_told_with_the_reason(
    state: str, last_error: str | None, level: Level, words: str
) -> None:
    [finding] = of_worker(state, last_error)
    assert (finding.level, finding.subject) == (level, "worker 7")
    assert finding.what == f"found at http://gpu:8000 by dns:gpu:8000{words}"


@pytest.mark.parametrize("state", ["registered", "by_http"])
def test_a_worker_that_is_registered_is_no_finding_here(state: str) -> None:
    assert of_worker(state) == []


def test_a_peer_that_is_refused_or_not_caught_up_from_is_a_warning() -> None:
    peers = [
        DiscoveredPeer("tcp://10.0.0.1:9092", "registered", None, None),
        DiscoveredPeer("tcp://10.0.0.2:9092", "refused", None, "it is not allowed"),
    ]
    [finding] = judge_discoveries(report(peers=peers))
    assert finding.level is Level.WARNING
    assert finding.what == "peer tcp://10.0.0.2:9092 is refused: it is not allowed"


@pytest.mark.parametrize(
    ("discoveries", "mend"),
    [
        (None, "POST /workers for each engine, or start it with --discover"),
        (report(), "POST /workers for each engine, or start it with --discover"),
        (
            report(
                discoveries=[
                    DiscoveryState("dns:selector:9092", "peers", "watching", 1.0, 2, 0, None)
                ]
            ),
            "POST /workers for each engine, or start it with --discover",
        ),
        (
            report(
                discoveries=[DiscoveryState("dns:gpu:8000", "workers", "watching", 1.0, 0, 0, None)]
            ),
            "mend its discoveries, as told below, or POST /workers for each engine",
        ),
    ],
    ids=["told of none", "without any", "of peers alone", "of workers"],
)
def test_who_looks_for_workers_is_not_told_to_look(
    discoveries: DiscoveryReport | None, mend: str
) -> None:
    first = next(judge_selector(SelectorFacts(False, [], [], discoveries)))
    assert (first.what, first.mend) == ("no worker is registered", mend)
