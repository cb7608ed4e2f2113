"""What is off is not imported: what a plain selector and a plain slot tracker have in memory."""

import re

import pytest

from tests.running_service import RunningService

OFF = (
    *("process.replica_plane", "sockets.replica_mesh", "sockets.recovery", "sockets.peer_fetch"),
    *("wire.replica_frames", "wire.session_frames", "wire.replica_snapshot"),
    *("process.discovery_plane", "workers", "process.state_plane", "server.state_files"),
    *("process.curve_plane", "curve.gate", "process.server_tls", "http.tls"),
    *("gateway", "process.gateway", "process.gateway_doors"),
    *("process.outbound_access", "http.outbound", "service.selection_16"),
    *("service.openapi", "inprocess", "client", "tools"),
)


@pytest.mark.parametrize("module", ["lean_selector", "lean_selector.slot_tracker"])
def test_what_is_off_is_not_imported(module: str) -> None:
    with RunningService(module=module, env={"PYTHONPROFILEIMPORTTIME": "1"}) as service:
        assert service.get("/health")[0] == 200
        _, log = service.stop()
    imported = set(re.findall(r"\| +(lean_selector[\w.]*)$", log, re.M))
    assert len(imported) > 80
    unwanted = tuple(f"lean_selector.{name}" for name in OFF)
    assert [
        n for n in sorted(imported) if f"{n}.".startswith(tuple(f"{u}." for u in unwanted))
    ] == []
