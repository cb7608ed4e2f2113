"""A real HTTP server in threads of its own: a test says how it answers."""

import contextlib
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

HOST = "127.0.0.1"


class ThreadedServer:
    """Listens from the start until it is closed. `answer` is called for each GET and POST."""

    def __init__(
        self,
        answer: Callable[[BaseHTTPRequestHandler], None],
        *,
        port: int = 0,
        context: ssl.SSLContext | None = None,
        keeps: bool = True,
    ) -> None:
        """`keeps`: a connection serves several requests."""
        self.connections = 0

        counted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if keeps else "HTTP/1.0"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                counted.connections += 1

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):  # who asked has gone
                    answer(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, port), Handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_address[1]
        self.url = f"{'http' if context is None else 'https'}://{HOST}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def body_of(handler: BaseHTTPRequestHandler) -> bytes:
    """What was sent, whole, where its length is told."""
    return handler.rfile.read(int(handler.headers.get("content-length", "0")))


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"") -> None:
    handler.send_response(status)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
