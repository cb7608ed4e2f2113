"""The page of metrics names what a scrape of either service shows, and nothing else."""

import re
from pathlib import Path

from tests.documents.pages import OURS
from tests.gateway.running_gateway import RunningGateway
from tests.support.prometheus_tools import scrape
from tests.support.running_service import RunningService, free_port

PAGE = OURS["docs/reference/metrics.md"]
# `..._lag_batches` goes on from the name before it in its row, at any underscore.
NAMED = re.findall(r"`((?:\.\.\.|lean_selector|dynamo)_[a-z0-9_]+)`", PAGE)


def families(state: str) -> set[str]:
    port = free_port()
    flags = (
        *("--replica-sync-bind", f"tcp://127.0.0.1:{port}"),
        *("--replica-sync-discover", f"dns:localhost:{port}"),
    )
    kept = ("--state-dir", state)
    sessions = ("--session-affinity-ttl-secs", "60")
    found: set[str] = set()
    selector = (*sessions, *kept, "--lifecycle-from", f"syslog:127.0.0.1:{free_port()}")
    for module, more in (("lean_selector", selector), ("lean_selector.slot_tracker", ())):
        with RunningService(*flags, *more, module=module) as service:
            found |= set(re.findall(r"^# TYPE (\S+) ", scrape(service.port), re.M))
    with RunningGateway("http://127.0.0.1:1") as gateway:
        found |= set(re.findall(r"^# TYPE (\S+) ", scrape(gateway.api_port), re.M))
    return {name for name in found if not name.startswith("process_")}


def is_named(family: str) -> bool:
    return any(
        family == name or (name.startswith("...") and family.endswith(name[3:])) for name in NAMED
    )


def test_every_family_is_on_the_page_and_every_name_of_the_page_is_a_family(
    tmp_path: Path,
) -> None:
    found = families(str(tmp_path))
    assert len(found) > 40
    assert sorted(name for name in found if not is_named(name)) == []
    ends = [name.removeprefix("...") for name in NAMED]
    assert sorted(end for end in ends if not any(name.endswith(end) for name in found)) == []
