"""One GET of a peer's /dump, in a thread of its own, because name look-up and TLS block.

The thread only waits and copies: what it received is read by the loop's thread, in slices. It is a
daemon and is never waited for, so that a peer that hangs delays neither the next peer nor the end
of the process. http.client knows no proxies, which the environment may name for other traffic.
Spec: indexer.md 4.2.
"""

import asyncio
import contextlib
import http.client
import threading
from urllib.parse import urlsplit

from lean_selector.wire.dump import DumpedPartition, split_dump

# 12 million blocks of 86 bytes: more than one process should index, and what memory may hold twice.
MAX_DUMP_BYTES = 1 << 30
_READ_BYTES = 256 * 1024

Dump = tuple[list[DumpedPartition], list[str]]  # see split_dump


class PeerFailed(Exception):
    """No usable dump from this peer; the message is one clear line."""


class DumpFetch:
    """Starts at once. `done` gets the dump, or PeerFailed; it may be dropped at any time."""

    def __init__(self, peer: str, timeout_s: float) -> None:
        """`peer` is a base URL; `timeout_s` bounds each wait of the thread, not their sum."""
        self.progress = 0  # grows with whatever arrives
        self._peer = peer
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Dump] = self._loop.create_future()
        threading.Thread(target=self._run, name="dump-fetch", daemon=True).start()

    def _run(self) -> None:
        result: Dump | Exception
        try:
            result = split_dump(self._fetch())
        except Exception as error:  # whatever it is, it is the next peer's turn
            result = PeerFailed(str(error) or type(error).__name__)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the service has stopped
            self._loop.call_soon_threadsafe(self._finish, result)

    def _finish(self, result: Dump | Exception) -> None:
        if self.done.done():
            return
        if isinstance(result, Exception):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)

    def _fetch(self) -> bytes:
        url = urlsplit(self._peer)
        secure = url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self._timeout_s)
        try:
            connection.request("GET", f"{url.path}/dump", headers={"accept": "application/json"})
            response = connection.getresponse()
            self.progress += 1
            if not 200 <= response.status < 300:
                said = response.read(200).decode(errors="replace")
                raise PeerFailed(f"status {response.status}: {said}")
            return self._body(response)
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := response.read1(_READ_BYTES):
            self.progress += 1
            parts.append(part)
            size += len(part)
            if size > MAX_DUMP_BYTES:
                raise PeerFailed(f"more than {MAX_DUMP_BYTES} bytes")
            if self.done.cancelled():
                raise PeerFailed("given up")
        if response.length:
            raise PeerFailed(f"{response.length} bytes short of its content-length")
        return b"".join(parts)
