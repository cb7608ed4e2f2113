"""GET /ready and GET /workers show every worker as it is, and encode each once."""

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lean_selector.api.gate import Gate
from lean_selector.wire.scalars import JsonText
from tests.support.gates import answered, request, selection_gate, selection_service

ids = st.integers(0, 6)
names = st.sampled_from(["a", "b", "ä\n"])


def post(gate: Gate, worker_id: int, **fields: object) -> tuple[int, bytes]:
    body = {"worker_id": worker_id, "endpoint": "http://w", "block_size": 16, **fields}
    return answered(gate, request("POST", "/workers", json.dumps(body).encode()))


class Fleet(RuleBasedStateMachine):
    """What is shown is what the answers to the changes said, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = selection_gate()
        self.known: dict[int, dict[str, Any]] = {}

    @rule(
        worker_id=ids,
        model=names,
        tenant=names,
        block_size=st.sampled_from([16, 32, None]),
        endpoint=st.sampled_from(["http://w", "", None]),
        ranks=st.integers(0, 3),
    )
    def register(
        self,
        worker_id: int,
        model: str,
        tenant: str,
        block_size: int | None,
        endpoint: str | None,
        ranks: int,
    ) -> None:
        fields = {"model_name": model, "tenant_id": tenant, "block_size": block_size}
        fields |= {"endpoint": endpoint, "data_parallel_size": ranks}
        status, record = post(self.gate, worker_id, **fields)
        assert status == 201
        self.known[worker_id] = json.loads(record)

    @rule(worker_id=ids, endpoint=st.sampled_from(["http://x", ""]), taint=names)
    def patch(self, worker_id: int, endpoint: str, taint: str) -> None:
        body = json.dumps({"endpoint": endpoint, "taints": [taint]}).encode()
        status, record = answered(self.gate, request("PATCH", f"/workers/{worker_id}", body))
        assert status == (200 if worker_id in self.known else 404)
        if worker_id in self.known:
            self.known[worker_id] = json.loads(record)

    @rule(worker_id=ids)
    def delete(self, worker_id: int) -> None:
        status, record = answered(self.gate, request("DELETE", f"/workers/{worker_id}"))
        assert status == (200 if worker_id in self.known else 404)
        if self.known.pop(worker_id, None) is not None:
            assert json.loads(record)["lifecycle"] == "unschedulable"

    @invariant()
    def all_are_shown_in_order(self) -> None:
        ready = json.loads(answered(self.gate, request("GET", "/ready"))[1])
        shown = json.loads(answered(self.gate, request("GET", "/workers"))[1])
        assert ready["workers"] == shown
        order = [(row["model_name"], row["tenant_id"], row["worker_id"]) for row in shown]
        assert order == sorted(order)
        for row in shown:
            before = self.known[row["worker_id"]]
            if before["lifecycle"] == "incomplete":
                # One refused for its partition's block size comes in when the last of that goes.
                assert without_verdict(row) == without_verdict(before)
                self.known[row["worker_id"]] = row
            else:
                assert row == before
        assert len(shown) == len(self.known)
        assert ready["schedulable_workers"] == sum(
            row["lifecycle"] == "schedulable" for row in shown
        )

    @rule(model=names, tenant=names)
    def filtered(self, model: str, tenant: str) -> None:
        everyone = json.loads(answered(self.gate, request("GET", "/workers"))[1])
        asked = request("GET", "/workers", query=b"tenant_id=a")
        tenants = json.loads(answered(self.gate, asked)[1])
        assert tenants == [row for row in everyone if row["tenant_id"] == "a"]


def without_verdict(row: dict[str, Any]) -> dict[str, Any]:
    verdict = ("lifecycle", "not_schedulable_reasons")
    return {name: value for name, value in row.items() if name not in verdict}


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_bytes_are_those_of_the_records() -> None:
    gate = selection_gate()
    records = [post(gate, worker_id, taints=["ä", "b"])[1] for worker_id in (3, 1, 2)]
    listed = b"[" + b",".join([records[1], records[2], records[0]]) + b"]"
    assert answered(gate, request("GET", "/workers")) == (200, listed)
    assert answered(gate, request("GET", "/ready")) == (
        200,
        b'{"ready":true,"schedulable_workers":3,"workers":' + listed + b"}",
    )
    assert answered(selection_gate(), request("GET", "/ready")) == (
        503,
        b'{"ready":false,"schedulable_workers":0,"workers":[]}',
    )


def test_a_probe_encodes_nothing_until_a_worker_changes() -> None:
    service = selection_service()
    gate = selection_gate(service=service)
    assert post(gate, 7)[0] == 201

    def listed() -> JsonText:
        """The text of which the answer to a probe is made."""
        assert answered(gate, request("GET", "/ready"))[0] == 200
        return service._listed

    first = listed()
    assert listed() is first
    assert answered(gate, request("GET", "/workers")) == (200, first.text)
    assert listed() is first
    assert post(gate, 7, taints=["a"])[0] == 201
    assert listed() is not first
