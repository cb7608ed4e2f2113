"""TCP proxies: one keeps every byte that goes through, one holds the answers to bookings back."""

import contextlib
import socket
import threading
from typing import Self


class RecordingProxy:
    """Listens on a port of its own for what is meant for `port`, both on the loopback."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._bytes = bytearray()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def seen(self) -> bytes:
        return bytes(self._bytes)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += (near, far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self._bytes += data
                self._passes(data, source, sink)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _passes(self, data: bytes, source: socket.socket, sink: socket.socket) -> None:
        """Called before data goes on."""

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldAnswers(RecordingProxy):
    """Until `let_go` is set, no booking is answered."""

    def __init__(self, port: int) -> None:
        self.let_go = threading.Event()
        self._booking: set[socket.socket] = set()  # clients
        super().__init__(port)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def _passes(self, data: bytes, source: socket.socket, sink: socket.socket) -> None:
        if data.startswith(b"POST /select_and_reserve "):
            self._booking.add(source)
        if sink in self._booking:
            self.let_go.wait()

    def close(self) -> None:
        self.let_go.set()
        super().close()
