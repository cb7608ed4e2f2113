"""What is off is not imported: what a plain selector and a plain slot tracker have in memory."""

import re
from importlib.util import find_spec

import pytest

from tests.support.running_service import RunningService

OFF = (
    *("lean_selector.client", "lean_selector.core.selection.explain"),
    *("lean_selector.links.curve_keys", "lean_selector.gateway", "lean_selector.http.outbound"),
    *("lean_selector.http.tls", "lean_selector.embedded", "lean_selector.app.decision_log"),
    *("lean_selector.app.discovery", "lean_selector.app.gateway_process"),
    *("lean_selector.app.gateway_routes", "lean_selector.app.peer_access"),
    *("lean_selector.app.replication", "lean_selector.app.server_tls", "lean_selector.app.state"),
    *("lean_selector.app.state_files", "lean_selector.api.fleet", "lean_selector.api.judgements"),
    *("lean_selector.api.selection_16", "lean_selector.api.ui", "lean_selector.replicas.recovery"),
    *("lean_selector.replicas.mesh", "lean_selector.tools", "lean_selector.wire.replica_frames"),
    "lean_selector.discovery",
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
