"""The exchanges with the slot tracker, for one model: what to send. No I/O.

Routes and fields of the slot tracker's document, "Topology API", "Lifecycle API", "Load API" and
"Replica Synchronization". Both clients send what this builds.
"""

from collections.abc import Sequence
from urllib.parse import urlencode

import msgspec

from lean_selector.client.exchanges import Call
from lean_selector.client.service_calls import nothing, post

Row = dict[str, str | int]

_read_rows = msgspec.json.Decoder(list[Row]).decode
_read_projection = msgspec.json.Decoder(list[dict[str, int]]).decode
_read_peers = msgspec.json.Decoder(list[str]).decode


class SlotTrackerCalls:
    """`sequence_hashes` are signed or unsigned, one for each block of the prompt, in order."""

    def __init__(self, model_name: str, tenant_id: str) -> None:
        self._scope = {"model_name": model_name, "tenant_id": tenant_id}

    def register(self, worker_id: int, block_size: int, dp_start: int, dp_size: int) -> Call[None]:
        ranks = {"block_size": block_size, "dp_start": dp_start, "dp_size": dp_size}
        return post("/register", {**self._scope, "worker_id": worker_id, **ranks}, nothing)

    def unregister(self, worker_id: int) -> Call[None]:
        return post("/unregister", {**self._scope, "worker_id": worker_id}, nothing)

    def workers(self) -> Call[list[Row]]:
        return Call("GET", "/workers?" + urlencode(self._scope), _read_rows)

    def add(
        self,
        request_id: str,
        worker_id: int,
        dp_rank: int,
        hashes: Sequence[int],
        new_isl_tokens: int,
    ) -> Call[None]:
        body = {
            **self._scope,
            "request_id": request_id,
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "sequence_hashes": signed(hashes),
            "new_isl_tokens": new_isl_tokens,
        }
        return post("/add", body, nothing)

    def prefill_complete(self, request_id: str) -> Call[None]:
        return post("/prefill_complete", {**self._scope, "request_id": request_id}, nothing)

    def free(self, request_id: str) -> Call[None]:
        return post("/free", {**self._scope, "request_id": request_id}, nothing)

    def loads(self) -> Call[list[Row]]:
        return Call("GET", "/loads?" + urlencode(self._scope), _read_rows)

    def potential_loads(
        self, hashes: Sequence[int], new_isl_tokens: int
    ) -> Call[list[dict[str, int]]]:
        prompt = {"sequence_hashes": signed(hashes), "new_isl_tokens": new_isl_tokens}
        return post("/potential_loads", {**self._scope, **prompt}, _read_projection)

    def register_peer(self, url: str) -> Call[None]:
        return post("/register_peer", {"url": url}, nothing)

    def deregister_peer(self, url: str) -> Call[None]:
        return post("/deregister_peer", {"url": url}, nothing)

    def peers(self) -> Call[list[str]]:
        return Call("GET", "/peers", _read_peers)


def signed(hashes: Sequence[int]) -> list[int]:
    """The same 64 bits as signed integers, which is how hashes travel. Raises ValueError beyond."""
    if hashes and not (min(hashes) >= -(2**63) and max(hashes) < 2**64):
        raise ValueError("a sequence hash does not fit into 64 bits")
    return [value - 2**64 if value >= 2**63 else value for value in hashes]
