"""The selection service and some fake workers registered with it."""

import contextlib
import signal
from typing import Any

from tests.client.fake_worker import FakeWorker
from tests.support.running_service import RunningService, wait_until

MODEL = "model-name"
NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}


class Fleet:
    """`workers` by worker_id, from 1 on; with `service` in a service that others use after it."""

    def __init__(
        self,
        size: int = 2,
        *flags: str,
        block_size: int = 4,
        service: RunningService | None = None,
        **fields: Any,
    ) -> None:
        self.service = RunningService(*flags, env=NO_EVENTS) if service is None else service
        self._is_shared = service is not None
        self.workers = {number: FakeWorker() for number in range(1, size + 1)}
        self.block_size = block_size
        self._fields = fields

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    def __enter__(self) -> "Fleet":
        with contextlib.ExitStack() as stack:
            if self._is_shared:
                stack.callback(self._unregister_all)
            else:
                stack.enter_context(self.service)
            for worker_id, worker in self.workers.items():
                stack.enter_context(worker)
                self.register(worker_id, worker.url)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _unregister_all(self) -> None:
        for worker in self.service.get("/workers")[1]:
            self.service.request("DELETE", f"/workers/{worker['worker_id']}")

    def restart(self) -> None:
        """The service is killed and starts anew, on the same port, with the same workers."""
        workers = self.service.get("/workers")[1]
        self.service.stop(signal.SIGKILL)
        self.service.__enter__()
        for worker in workers:
            self.register(worker["worker_id"], worker["endpoint"])

    def register(self, worker_id: int, endpoint: str, **fields: Any) -> None:
        worker = {
            "worker_id": worker_id,
            "model_name": MODEL,
            "endpoint": endpoint,
            "block_size": self.block_size,
        }
        status, record = self.service.post("/workers", {**worker, **self._fields, **fields})
        assert (status, record["lifecycle"]) == (201, "schedulable"), record

    def loads(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """(prefill tokens, decode blocks, requests) of each rank."""
        status, partitions = self.service.get("/loads")
        assert status == 200
        return {
            (row["worker_id"], row["dp_rank"]): (
                row["potential_prefill_tokens"],
                row["potential_decode_blocks"],
                row["active_requests"],
            )
            for partition in partitions
            for row in partition["loads"]
        }

    def total(self) -> tuple[int, ...]:
        """The loads of all ranks together."""
        return tuple(map(sum, zip(*self.loads().values(), strict=True)))

    def wait_until_free(self) -> None:
        wait_until(lambda: self.total() == (0, 0, 0), "no load is left")
