"""What is off is not imported: what a plain selector and a plain slot tracker have in memory."""

import re
from importlib.util import find_spec

import pytest

from tests.support.running_service import RunningService

OFF = (
    "lean_selector.client",
    "lean_selector.core.selection.explain",
    "lean_selector.events.curve_keys",
    "lean_selector.gateway",
    "lean_selector.http.outbound",
    "lean_selector.http.tls",
    "lean_selector.inprocess",
    "lean_selector.server.curve_settings",
    "lean_selector.server.decision_log",
    "lean_selector.server.discovery",
    "lean_selector.server.gateway_process",
    "lean_selector.server.gateway_routes",
    "lean_selector.server.peer_access",
    "lean_selector.server.replication",
    "lean_selector.server.server_tls",
    "lean_selector.server.state",
    "lean_selector.server.state_files",
    "lean_selector.service.fleet",
    "lean_selector.service.judgements",
    "lean_selector.service.selection_16",
    "lean_selector.service.ui",
    "lean_selector.replicas.recovery",
    "lean_selector.replicas.mesh",
    "lean_selector.tools",
    "lean_selector.wire.replica_frames",
    "lean_selector.workers",
)


@pytest.mark.parametrize("module", ["lean_selector", "lean_selector.slot_tracker"])
def test_what_is_off_is_not_imported(module: str) -> None:
    with RunningService(module=module, env={"PYTHONPROFILEIMPORTTIME": "1"}) as service:
        assert service.get("/health")[0] == 200
        assert service.post("/route/v1/completions", {"model": "m", "prompt": "a"})[0] == 404
        _, log = service.stop()
    imported = set(re.findall(r"\| +(lean_selector[\w.]*)$", log, re.M))
    assert len(imported) > 40
    off = tuple(f"{name}." for name in OFF)
    assert [name for name in sorted(imported) if f"{name}.".startswith(off)] == []


def test_what_is_looked_for_exists() -> None:
    assert [name for name in OFF if find_spec(name) is None] == []
