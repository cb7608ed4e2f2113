"""The HTTP client of the load tests: requests as prepared bytes, sockets, and answers taken apart.

Plain blocking sockets, so that one core of ours keeps a service of one core busy.
"""

import re
import socket

SEND_BUFFER = 1 << 20  # a request of 4 096 blocks is 170 KB, and must not wait for the reader
_HEAD = re.compile(
    rb"HTTP/1\.1 (\d{3}) [ A-Za-z]+\r\n"
    rb"(?:[A-Za-z-]+: [^\r\n]*\r\n)*?(?i:content-length): *(\d+)\r\n"
    rb"(?:[A-Za-z-]+: [^\r\n]*\r\n)*\r\n"
)


class Malformed(ValueError):
    """Bytes that begin no answer, or a body that is not what the route promises."""


def http(
    method: str, path: str, body: bytes = b"", content: str = "application/json", token: str = ""
) -> bytes:
    """A whole request as it goes over the wire."""
    head = f"{method} {path} HTTP/1.1\r\nhost: loadtest\r\ncontent-type: {content}\r\n"
    head += token and f"authorization: Bearer {token}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def answer_at(data: bytes, at: int = 0) -> tuple[int, int, int] | None:
    """Status, and where the body begins and ends; None while it is not whole. Raises Malformed."""
    head = _HEAD.match(data, at)
    if head is None:
        if b"\r\n\r\n" in data[at:]:
            raise Malformed(f"no answer begins with {data[at : at + 120]!r}")
        return None
    begin = head.end()
    end = begin + int(head[2])
    return (int(head[1]), begin, end) if end <= len(data) else None


def connected(address: int | str, timeout_s: float | None = None) -> socket.socket:
    """A socket to a port of this host, or to the path of a UNIX socket. Raises OSError."""
    made = socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX)
    try:
        made.settimeout(timeout_s)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if isinstance(address, int):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.connect(("127.0.0.1", address))
        else:
            made.connect(address)
    except OSError:
        made.close()
        raise
    return made


class Connection:
    """A kept connection with one request under way, or several that are answered in order."""

    def __init__(self, address: int | str, timeout_s: float | None = None) -> None:
        self.socket = connected(address, timeout_s)
        self._received = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def receive(self) -> int | None:
        """Read what is there; the status of the next answer once it is whole.

        Raises Malformed, also where the service closes the connection.
        """
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise Malformed("the service closed a connection")
        self._received += piece
        return self._next()

    def _next(self) -> int | None:
        found = answer_at(self._received)
        if found is not None:
            self._received = self._received[found[2] :]
        return found and found[0]

    def ask(self, *requests: bytes) -> list[int]:
        """Send all of them at once; the statuses of their answers. Raises OSError, Malformed."""
        self.socket.sendall(b"".join(requests))
        statuses = list[int]()
        while len(statuses) < len(requests):
            status = self._next()
            while status is None:
                status = self.receive()
            statuses.append(status)
        if self._received:
            raise Malformed(f"an answer more than was asked for: {self._received[:120]!r}")
        return statuses

    def close(self) -> None:
        self.socket.close()
