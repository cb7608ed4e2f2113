"""A gateway of ours as a child process, in front of workers of a test."""

import http.client
import json
import sys
from contextlib import ExitStack, closing
from typing import Any, Self

from loadtest.child_service import ChildService, plain_environment
from tests.support.running_service import DEADLINE_S, free_port, wait_until


class Answer:
    """What came back: names of `headers` in lower case."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Of a stream; its last is `[DONE]`."""
        events = [each for each in self.body.decode().split("\n\n") if each]
        assert events[-1] == "data: [DONE]", events[-1:]
        return [json.loads(each.removeprefix("data: ")) for each in events[:-1]]


class RunningGateway:
    """Starts on entering, and is stopped on leaving."""

    def __init__(self, *arguments: str, knows: int = 0) -> None:
        """`arguments` are worker URLs and flags. Entering waits until so many workers `knows`."""
        self.port, self.api_port = free_port(), free_port()
        self._knows = knows
        ports = ("--port", str(self.port), "--selector-port", str(self.api_port))
        self._command = [sys.executable, "-m", "lean_selector", "gateway", *ports, *arguments]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            child = ChildService(self._command, self.api_port, env=plain_environment())
            self.child = stack.enter_context(child)
            if self._knows:
                wait_until(self._knows_all, "the gateway knows its workers")
            stack.pop_all()
        return self

    def _knows_all(self) -> bool:
        """Registered, and their events are heard."""
        sources = self.api("GET", "/kv_sources")
        live = [each for each in sources if each["state"] in ("live", "idle", "silent")]
        workers = [
            each for each in self.api("GET", "/workers") if each["lifecycle"] == "schedulable"
        ]
        return len(workers) >= self._knows and len(live) == len(sources)

    def __exit__(self, *_: object) -> None:
        self.child.stop(15, DEADLINE_S)

    def log(self) -> str:
        return self.child.log()

    def api(self, method: str, path: str, body: object = None) -> Any:
        """The selector's own API."""
        raw = None if body is None else json.dumps(body).encode()
        headers = {} if raw is None else {"content-type": "application/json"}
        text = self.child.request(method, path, raw, headers)[1]
        return json.loads(text)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return self.child.metric(name)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            content = raw if body is None else json.dumps(body).encode()
            own = {} if content is None else {"content-type": "application/json"}
            connection.request(method, path, content, {**own, **(headers or {})})
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, named, answer.read())

    def chat(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": text}]
        body = {"model": "m", "messages": messages, "max_tokens": 4, **fields}
        return self.ask("POST", "/v1/chat/completions", body, headers)

    def begin(
        self, running: ExitStack, prompt: str, request_id: str = "r", **fields: Any
    ) -> http.client.HTTPConnection:
        """Sends a completion to be streamed. Return its connection, which `running` closes."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        running.callback(client.close)
        body = {"model": "m", "prompt": prompt, "stream": True, **fields}
        client.request("POST", "/v1/completions", json.dumps(body), {"x-request-id": request_id})
        return client

    def load(self) -> int:
        """Of all workers together: requests, blocks and tokens."""
        return sum(
            row["active_requests"]
            + row["potential_decode_blocks"]
            + row["potential_prefill_tokens"]
            for partition in self.api("GET", "/loads")
            for row in partition["loads"]
        )

    def wait_until_free(self) -> None:
        wait_until(lambda: self.load() == 0, "no load is left")
