"""An OpenAI-compatible worker: a real HTTP server in threads, with the manners of vLLM.

How a request is treated, it says itself, in the field `fake`:
    status            answer with this status and no stream
    break_after       cut the connection after so many tokens
    ends_after        end the response after so many tokens
    error_after       report an error in the stream after so many tokens
    stall_after       say nothing more after so many tokens
    step_s            pause between two tokens
    never_ends        leave the response open after the last event
    cached            tokens of the prompt that were cached, in the usage
    without           names that the chunks and the end leave out: token_ids, usage, done
"""

import json
import select
import socket
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.threaded_server import ThreadedServer, body_of, send


class _HungUp(Exception):
    pass


class FakeWorker(ThreadedServer):
    """`requests` keeps the bodies, `headers` their headers."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = 0  # requests whose client went away before the end
        self.status: int | None = None  # of every answer, if given
        super().__init__(self._answer_one)

    def _answer_one(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(body_of(handler))
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        fake = body.get("fake", {})
        status = self.status or fake.get("status")
        if handler.requestline != "POST /v1/completions HTTP/1.1":
            status = 404
        if status:
            error = {"message": "the fake refuses", "code": status}
            send(handler, status, json.dumps({"error": error}).encode())
            return
        try:
            handler.close_connection = not _streamed(handler, body, fake)
        except (OSError, _HungUp):
            self.hung_up += 1
            handler.close_connection = True


def _wait(handler: BaseHTTPRequestHandler, seconds: float | None) -> None:
    """Who streams is sent nothing by a client but its end."""
    if select.select([handler.connection], [], [], seconds)[0]:
        assert not handler.connection.recv(1, socket.MSG_PEEK)
        raise _HungUp


def _streamed(handler: BaseHTTPRequestHandler, body: dict[str, Any], fake: Any) -> bool:
    """Whether the whole answer was sent, and the connection may be used again."""
    without = fake.get("without", [])
    tokens = body.get("max_tokens", 4)
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()

    def event(value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    for number in range(tokens + 1):
        if number == fake.get("break_after"):
            return False
        if number == fake.get("ends_after"):
            handler.wfile.write(b"0\r\n\r\n")
            return True
        if number == fake.get("stall_after"):
            _wait(handler, None)
        if number == fake.get("error_after"):
            event({"error": {"message": "the fake fails", "code": 500}})
            break
        if number == tokens:
            break
        _wait(handler, fake.get("step_s", 0.0))
        choice = {
            "index": 0,
            "text": f" t{number}",
            "token_ids": [1000 + number],
            "finish_reason": "length" if number == tokens - 1 else None,
            "logprobs": None,
        }
        if "token_ids" in without or not body.get("return_token_ids"):
            del choice["token_ids"]
        event({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
    if "usage" not in without:
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        if "cached" in fake:
            usage["prompt_tokens_details"] = {"cached_tokens": fake["cached"]}
        event({"choices": [], "usage": usage})
    if "done" not in without:
        event("[DONE]")
    if fake.get("never_ends"):
        _wait(handler, None)
    handler.wfile.write(b"0\r\n\r\n")
    return True
