"""What tests ask of a service, in a process of its own or in this one, and the usual bodies."""

from typing import Any


def worker(worker_id: int = 1, **fields: object) -> dict[str, object]:
    """The body of a registration; `fields` replace what is usual."""
    endpoint = f"http://w{worker_id}"
    return {"worker_id": worker_id, "endpoint": endpoint, "block_size": 16, **fields}


def prompt(*hashes: int, **fields: object) -> dict[str, object]:
    """Of blocks with these hashes, 1 if none is named, of 16 tokens each."""
    blocks = list(hashes or (1,))
    lists = {"block_hashes": blocks, "sequence_hashes": blocks, "isl_tokens": 16 * len(blocks)}
    return {**lists, **fields}


class Asked:
    """A service that answers `request`."""

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and parsed body."""
        raise NotImplementedError

    def post(self, path: str, body: object = None) -> tuple[int, Any]:
        return self.request("POST", path, body)

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)

    def add_worker(self, worker_id: int = 1, **fields: object) -> dict[str, Any]:
        """Registers it; its record."""
        status, record = self.post("/workers", worker(worker_id, **fields))
        assert status == 201, record
        found: dict[str, Any] = record
        return found

    def book(self, reservation_id: str, **fields: object) -> dict[str, Any]:
        """Selects a worker for `prompt(**fields)` and books it there; the answer."""
        body = prompt(reservation_id=reservation_id, **fields)
        status, answer = self.post("/select_and_reserve", body)
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def reserve(self, reservation_id: str, worker_id: int, tokens: int, **fields: object) -> None:
        """Books so many prompt tokens, without blocks, at this worker."""
        load = {"isl_tokens": tokens, "effective_prefill_tokens": tokens, "sequence_hashes": []}
        booked = {"reservation_id": reservation_id, "worker_id": worker_id, **load, **fields}
        assert self.post("/reservations", booked)[0] == 201

    def end(self, reservation_id: str) -> int:
        """The status."""
        return self.request("DELETE", f"/reservations/{reservation_id}")[0]

    def active(self) -> int:
        """Requests that count as running, on all ranks."""
        loads = self.get("/loads")[1]
        return sum(rank["active_requests"] for row in loads for rank in row["loads"])

    def kv_source(self, worker_id: int) -> dict[str, Any]:
        """How the events of a worker's first rank come."""
        rows = self.get("/kv_sources")[1]
        found: dict[str, Any] = next(row for row in rows if row["worker_id"] == worker_id)
        return found
