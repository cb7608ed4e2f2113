"""Wires what reads access logs: sockets bound, lines taken, all closed again."""

import socket
from collections.abc import Callable

from lean_selector.core.selection.selector import Selector
from lean_selector.gateway.access_logs import (
    LineReader,
    LogEnds,
    Senders,
    access_log_families,
    is_loopback,
    place_of,
    udp_socket,
    warn_of_a_short_queue,
)
from lean_selector.http.listener import UnixPath
from lean_selector.process.host import StartError, os_reason
from lean_selector.server.selector_flags import AccessLogs
from lean_selector.service.exposition import Families


class AccessLogPlane:
    """Reads from when it is made until it is closed."""

    def __init__(self, config: AccessLogs, selector: Selector, clock: Callable[[], float]) -> None:
        """Raises StartError."""
        self.ends = LogEnds(selector.free, selector.health, clock)
        self._paths: list[UnixPath] = []
        self._readers: list[LineReader] = []
        senders = Senders(config.allowed)
        try:
            for text in config.places:
                bound = self._bound(text, config)
                self._readers.append(LineReader(bound, self.ends.take, self.ends.refuse, senders))
        except BaseException:
            self.close()
            raise

    def _bound(self, text: str, config: AccessLogs) -> socket.socket:
        place = place_of(text)
        try:
            if place.path is None:
                bound = udp_socket(place.host, place.port)
                if not config.allowed and not is_loopback(bound.getsockname()[0]):
                    bound.close()
                    raise StartError(
                        f"--lifecycle-from {text}: this is no loopback address, and who can write "
                        "there can free and eject workers: name who may with --lifecycle-allow"
                    )
                return bound
            warn_of_a_short_queue(text)
            path = UnixPath(place.path, socket.SOCK_DGRAM)
            bound = path.take()
        except OSError as error:
            raise StartError(f"{os_reason(error)}: {text}") from None
        self._paths.append(path)
        return bound

    def families(self) -> Families:
        return access_log_families(self.ends, lambda: self._readers)

    def close(self) -> None:
        for path in self._paths:
            path.let_go()
        for reader in self._readers:
            reader.close()
