"""A worker's address: the connections that are kept to it, and what they are told of time."""

from typing import Final

from lean_selector.gateway.worker_connection import WorkerConnection
from lean_selector.outbound.url import Url

# Less than the five seconds after which uvicorn, under vLLM and SGLang, lets go of an idle
# connection: who asks on one in that moment has to ask again.
IDLE_S: Final = 3.5
_MOST_IDLE: Final = 256


class Endpoint:
    """One base URL. From the loop's thread only."""

    __slots__ = ("_idle", "host_line", "leases", "now", "number", "open", "text", "url")

    def __init__(self, text: str, number: int, now: float) -> None:
        """Raises ValueError for what is no URL."""
        self.text: Final = text.rstrip("/")
        self.number: Final = number
        self.url: Final = Url(self.text)
        self.host_line: Final = b"host: %b" % self.url.authority.encode()
        self.now = now  # monotonic seconds at the last sweep
        self.leases = 0  # of requests, who may be connecting
        self.open: set[WorkerConnection] = set()
        self._idle: list[WorkerConnection] = []

    @property
    def is_used(self) -> bool:
        return bool(self.open or self.leases)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    def kept(self) -> WorkerConnection | None:
        """A connection that may be used at once: the one that was used last."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def opened(self, connection: WorkerConnection) -> None:
        self.open.add(connection)

    def closed(self, connection: WorkerConnection) -> None:
        self.open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def put_aside(self, connection: WorkerConnection) -> None:
        if len(self._idle) >= _MOST_IDLE:
            connection.drop()
            return
        connection.heard_at = self.now
        self._idle.append(connection)

    def sweep(self, now: float, silence_s: float) -> None:
        """Gives up what is idle for too long, or waits for too long for its worker."""
        self.now = now
        for connection in list(self.open):
            age_s = now - connection.heard_at
            if connection.is_free:
                if age_s > IDLE_S:
                    connection.drop()
            elif connection.waits and age_s > silence_s:
                connection.time_out(f"nothing came from it in {silence_s:g} s")

    def close(self) -> None:
        for connection in list(self.open):
            connection.drop()
