"""Pages that are written from the code, or list what the code has, are current."""

import re
import subprocess
import sys
from pathlib import Path

from lean_selector.gateway.prompt_shapes import Why
from tests.documents.pages import OURS, ROOT
from tests.gateway.running_gateway import RunningGateway
from tests.support.prometheus_tools import scrape
from tests.support.running_service import RunningService, free_port

# `..._lag_batches` goes on from the name before it in its row, at any underscore.
METRICS = re.findall(
    r"`((?:\.\.\.|lean_selector|dynamo|gen_ai_server|gen_ai_client)_[a-z0-9_]+)`",
    OURS["docs/reference/metrics.md"],
)


def test_the_generated_pages_are_current() -> None:
    subprocess.run([sys.executable, ".ci/pages.py", "--check"], check=True, cwd=ROOT)


def families(state: str) -> set[str]:
    """What scrapes of all three programs show, with each optional part switched on."""
    port = free_port()
    flags = (
        *("--replica-sync-bind", f"tcp://127.0.0.1:{port}"),
        *("--replica-sync-discover", f"dns:localhost:{port}"),
    )
    selector = (
        *("--session-affinity-ttl-secs", "60", "--state-dir", state),
        *("--lifecycle-from", f"syslog:127.0.0.1:{free_port()}"),
        *("--prompts", "tokenize", "--epp-port", str(free_port())),
    )
    found: set[str] = set()
    for module, more in (("lean_selector", selector), ("lean_selector.slot_tracker", ())):
        with RunningService(*flags, *more, module=module) as service:
            found |= set(re.findall(r"^# TYPE (\S+) ", scrape(service.port), re.M))
    with RunningGateway("http://127.0.0.1:1") as gateway:
        found |= set(re.findall(r"^# TYPE (\S+) ", scrape(gateway.api_port), re.M))
    return {name for name in found if not name.startswith("process_")}


def is_named(family: str) -> bool:
    return any(
        family == name or (name.startswith("...") and family.endswith(name[3:])) for name in METRICS
    )


def test_the_page_of_metrics_names_every_family_and_no_other(tmp_path: Path) -> None:
    found = families(str(tmp_path))
    assert len(found) > 40
    assert sorted(name for name in found if not is_named(name)) == []
    ends = [name.removeprefix("...") for name in METRICS]
    assert sorted(end for end in ends if not any(name.endswith(end) for name in found)) == []


def test_every_name_in_the_rules_for_prometheus_is_on_the_page_of_metrics() -> None:
    rules = (ROOT / "deploy/prometheus/lean_selector.rules.yml").read_text(encoding="utf-8")
    names = set(re.findall(r"\b((?:lean_selector|dynamo)_[a-z0-9_]+)", rules))
    assert len(names) > 15
    assert sorted(name for name in names if not is_named(re.sub("_bucket$", "", name))) == []


def test_the_page_of_prompts_has_each_reason_and_no_other() -> None:
    table = OURS["docs/guide/prompts.md"].partition("| `x-lean-prompt` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z]+)`", table, re.M) == [why.value for why in Why]
