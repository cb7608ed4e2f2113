"""A relay before a service that can keep the answers to bookings back."""

import contextlib
import socket
import threading

START_S = 20.0


class HeldAnswers:
    """Relays to a port of this host; until `let_go` is set, no booking is answered."""

    def __init__(self, port: int) -> None:
        self.let_go = threading.Event()
        self._to = ("127.0.0.1", port)

    def __enter__(self) -> "HeldAnswers":
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                service = socket.create_connection(self._to)
                books = threading.Event()
                for work in (self._requests, self._answers):
                    thread = threading.Thread(
                        target=work, args=(client, service, books), daemon=True
                    )
                    thread.start()

    def _requests(
        self, client: socket.socket, service: socket.socket, books: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if data.startswith(b"POST /select_and_reserve "):
                    books.set()
                service.sendall(data)
        with contextlib.suppress(OSError):
            service.shutdown(socket.SHUT_RDWR)

    def _answers(
        self, client: socket.socket, service: socket.socket, books: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := service.recv(65536):
                if books.is_set():
                    self.let_go.wait(START_S)
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
        client.close()
        service.close()
