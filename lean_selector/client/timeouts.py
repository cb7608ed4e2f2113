"""How long a client waits for what."""

import httpx
import msgspec


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. None waits for ever."""

    connect_s: float = 5.0
    service_s: float = 10.0  # for the selector's ordinary answers
    queue_s: float | None = 60.0  # for a selection, which may wait in the selector's queue
    worker_s: float | None = 300.0  # for the next piece of a worker's answer

    def of_call(self, waits: bool) -> httpx.Timeout:
        read_s = self.queue_s if waits else self.service_s
        return httpx.Timeout(self.service_s, connect=self.connect_s, read=read_s)

    def of_stream(self) -> httpx.Timeout:
        return httpx.Timeout(self.connect_s, read=self.worker_s, write=self.worker_s)
