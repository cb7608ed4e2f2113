"""Datagram sockets on the loop: a datagram is a line.

A turn of the loop takes so many and no more, so that a burst of lines delays no selection by much.
What the kernel had no room for is counted where it says so, which is on UDP. Over a UNIX socket it
queues by number, whatever the buffer, and refuses the sender, who drops the line.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lean_selector.access_logs.lines import LONGEST_LINE
from lean_selector.access_logs.places import Senders

LINES_PER_TURN: Final = 64  # some 10 us each
RECEIVE_BUFFER_BYTES: Final = 4 * 1024 * 1024  # as far as net.core.rmem_max lets us
ENOUGH_QUEUED: Final = 512  # lines, for what may end between two turns of the loop
_QUEUE_LENGTH: Final = Path("/proc/sys/net/unix/max_dgram_qlen")
_SO_RXQ_OVFL: Final = 40  # Linux: each datagram says how many were dropped before it
_DROPS: Final = struct.Struct("I")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DROPS.size)

_log = logging.getLogger("lean_selector.access_logs")


def udp_socket(host: str, port: int) -> socket.socket:
    """Bound; raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def warn_of_a_short_queue(place: str) -> None:
    """For a UNIX socket: it keeps what the sysctl says when the socket is made."""
    try:
        length = int(_QUEUE_LENGTH.read_text())
    except (OSError, ValueError):
        return  # no Linux, or it shows nothing
    if length < ENOUGH_QUEUED:
        _log.warning(
            "lines of access logs that come in a burst will be lost: net.unix.max_dgram_qlen is %d;"
            " set it to %d or more before the selector starts, or read lines over UDP",
            length,
            ENOUGH_QUEUED,
            extra={"place": place},
        )


class LineReader:
    """One socket. Begins to read when it is made."""

    def __init__(
        self,
        bound: socket.socket,
        take: Callable[[bytes], None],
        refuse: Callable[[str], None],
        senders: Senders,
    ) -> None:
        """`take` gets the lines of `senders`, or all that came over a UNIX socket, whose path has
        permissions; `refuse` hears of the others' addresses."""
        self._socket = bound
        self._take = take
        self._refuse = refuse
        self._senders = None if bound.family == socket.AF_UNIX else senders
        self.dropped = 0  # datagrams that the kernel had no room for
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if self._senders is not None:
            bound.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound.fileno(), self._read)

    def _read(self) -> None:
        for _ in range(LINES_PER_TURN):
            try:
                # One byte more than a line may have, so that a longer one is seen to be.
                line, ancillary, _, sender = self._socket.recvmsg(
                    LONGEST_LINE + 1, _ANCILLARY_BYTES
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("lines of access logs cannot be read", extra={"error": str(error)})
                return
            for _, kind, data in ancillary:
                if kind == _SO_RXQ_OVFL and len(data) == _DROPS.size:
                    self.dropped = _DROPS.unpack(data)[0]
            if self._senders is None or self._senders.may_write(sender[0]):
                self._take(line)
            else:
                self._refuse(sender[0])

    def close(self) -> None:
        """Takes what has come already."""
        self._read()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
