"""A service of ours as a child process that speaks TLS on its port."""

import http.client
import json
import signal
import ssl
from typing import Any

from tests.support.certificates import HOST, Authority, Files
from tests.support.running_service import RunningService

ANSWER_TIMEOUT_S = 20.0


class TlsService(RunningService):
    """Asked by clients that believe `authority`, with the certificate `own` and a token."""

    def __init__(
        self,
        files: Files,
        authority: Authority,
        *flags: str,
        module: str = "lean_selector",
        own: Any = None,
        token: str | None = None,
    ) -> None:
        self._token = token
        super().__init__(
            *("--tls-cert", str(files.cert), "--tls-key", str(files.key), *flags), module=module
        )
        self.context = authority.client(own)
        self._connections: list[http.client.HTTPSConnection] = []

    def connection(self, context: ssl.SSLContext | None = None) -> http.client.HTTPSConnection:
        """One that may be kept; closed before the service is stopped on leaving."""
        made = http.client.HTTPSConnection(
            HOST, self.port, timeout=ANSWER_TIMEOUT_S, context=context or self.context
        )
        self._connections.append(made)
        return made

    def stop(self, signal_number: int = signal.SIGTERM) -> tuple[int, str]:
        for connection in self._connections:
            connection.close()
        return super().stop(signal_number)

    def is_healthy(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        connection = self.connection()
        try:
            content = raw if body is None else body
            return ask(connection, method, path, content, headers, self._token)
        finally:
            connection.close()


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    token: str | None = None,
) -> tuple[int, Any]:
    """One request on a connection that may be kept; JSON, or what else is answered as text."""
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    more = {} if content is None else {"content-type": "application/json"}
    lines = {**(more if headers is None else headers)}
    if token is not None:
        lines["authorization"] = f"Bearer {token}"
    connection.request(method, path, content, lines)
    answer = connection.getresponse()
    text = answer.read()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(text) if is_json and text else text.decode()


def shown_by(connection: http.client.HTTPSConnection) -> bytes:
    """The certificate of the server, in DER."""
    assert isinstance(connection.sock, ssl.SSLSocket)
    shown = connection.sock.getpeercert(True)
    assert shown is not None
    return shown
