"""The gateway's hard days: clients hang up and read slowly, workers are killed, hang and drain."""

import asyncio
import contextlib
import json
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from lean_selector.gateway.gateway_metrics import RetryBudget
from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import (
    GENERATING,
    POOLED,
    RESPONSES,
    OpenAiWorker,
    rendered,
    said,
    tokens_of,
)

# -- all routes, and all that may happen -----------------------------------------------------------

CLIENTS, REQUESTS = 12, 300
ANSWER_S = 120.0
SAYS = {"text", "content", "delta"}  # fields of answers of any API
HANGS_UP, READS_SLOWLY, FAILS = 0.15, 0.05, 0.015  # shares of the requests


class Day:
    """Requests of all routes by clients of their own, each under an id of its own."""

    def __init__(self, gateway: RunningGateway, at: dict[int, Callable[[], object]]) -> None:
        """`at`: what is called, in a thread, when so many requests were begun."""
        self.gateway, self.at = gateway, at
        self.begun = 0
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.answered_by: dict[str, int] = {}  # the port of whose answer there was a byte, by id
        self._under_way: list[asyncio.Task[None]] = []
        self._one_after_another = asyncio.Lock()

    async def run(self) -> None:
        await asyncio.gather(*map(self._client, range(CLIENTS)))
        await asyncio.gather(*self._under_way)

    async def _client(self, number: int) -> None:
        drawn = random.Random(number)
        # The kernel is to take little for who reads slowly.
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
        transport = httpx.AsyncHTTPTransport(socket_options=small)
        async with httpx.AsyncClient(
            base_url=self.gateway.url, timeout=None, trust_env=False, transport=transport
        ) as client:
            while self.begun < REQUESTS:
                self.begun += 1
                if (act := self.at.get(self.begun)) is not None:
                    self._under_way.append(asyncio.create_task(self._happens(act)))
                await self._ask(client, f"day-{self.begun}", drawn)

    async def _happens(self, act: Callable[[], object]) -> None:
        async with self._one_after_another:
            await asyncio.to_thread(act)

    async def _ask(self, client: httpx.AsyncClient, request_id: str, drawn: random.Random) -> None:
        path, streams = drawn.choice(GENERATING), drawn.random() < 0.6
        manner = drawn.random()
        is_slow = 0.0 <= manner - HANGS_UP < READS_SLOWLY
        messages = [{"role": "user", "content": f"{drawn.randrange(9)} of the sea. " * 20}]
        count = 400 if is_slow else 12
        body, text = _body(path, messages, count)
        if path not in POOLED:
            body["stream"] = streams
        if manner > 1.0 - FAILS and path not in POOLED:
            body["fake"] = drawn.choice([{"status": 500}, {"break_after": 0}])
        received = bytearray()
        try:
            async with asyncio.timeout(ANSWER_S):
                headers = {"x-request-id": request_id}
                async with client.stream("POST", path, json=body, headers=headers) as answer:
                    async for piece in answer.aiter_bytes(512 if is_slow else None):
                        worker = answer.headers.get("x-lean-worker", ":0")
                        self.answered_by[request_id] = int(worker.rpartition(":")[2])
                        received += piece
                        if is_slow:
                            await asyncio.sleep(0.002)
                        if manner < HANGS_UP:
                            self.ends["hung up"] += 1
                            return
        except httpx.TransportError:
            self.ends["broken" if request_id in self.answered_by else "refused"] += 1
            return
        if answer.status_code != 200:
            self.ends["as asked" if "fake" in body else str(answer.status_code)] += 1
            return
        self.ends["complete"] += 1
        if (got := _text(path, bytes(received), bool(body.get("stream")))) != text:
            self.wrong.append(f"{path}: {got[-200:]!r}")


def _body(path: str, messages: list[dict[str, str]], count: int) -> tuple[dict[str, Any], str]:
    """A request of this path, and what is answered to it."""
    prompt = rendered(messages)
    body: dict[str, Any] = {"model": "m", "max_tokens": count, "messages": messages}
    if path in POOLED:
        return {"model": "m", "input": prompt, "query": prompt}, "0.5"
    if path == "/v1/completions":
        body = {"model": "m", "max_tokens": count, "prompt": prompt}
    elif path == RESPONSES:
        body = {"model": "m", "max_output_tokens": count, "input": messages}
    return body, said(len(tokens_of(prompt)), count)


def _text(path: str, received: bytes, streams: bool) -> str:
    if path in POOLED:
        return str(json.loads(received)["data"][0]["embedding"][0])
    if not streams:
        return _words(json.loads(received))
    text = ""
    for event in received.decode().split("\n\n")[:-1]:
        data = event.rpartition("data: ")[2]
        told = {} if data == "[DONE]" else json.loads(data)
        text += _words({name: told[name] for name in ("choices", "delta") if name in told})
    return text


def _words(told: Any, name: str = "") -> str:
    """What an answer or an event of any API says in its fields."""
    if isinstance(told, str):
        return told if name in SAYS else ""
    if isinstance(told, list):
        return "".join(_words(each, name) for each in told)
    named = told.items() if isinstance(told, dict) else ()
    return "".join(_words(each, field) for field, each in named)


def test_on_the_hardest_day_nothing_stays_booked_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    with contextlib.ExitStack() as running:
        killed, hanging, draining = (
            running.enter_context(OpenAiWorker(ledger=str(ledger))) for _ in range(3)
        )
        workers, prompt = (killed, hanging, draining), (killed.port, draining.port)
        flags = ("--worker-silence-secs", "3", "--worker-health-interval-secs", "0.5")
        urls = [each.url for each in workers]
        gateway = running.enter_context(RunningGateway(*urls, *flags, knows=3))
        ids = {each["endpoint"]: each["worker_id"] for each in gateway.api("GET", "/workers")}

        def send(worker: OpenAiWorker, number: signal.Signals) -> None:
            assert worker.process is not None
            worker.process.send_signal(number)

        def turn(lifecycle: str) -> None:
            path = f"/workers/{ids[draining.url]}"
            gateway.api("PATCH", path, {"lifecycle": lifecycle})

        day = Day(
            gateway,
            {
                30: killed.kill,
                60: killed.start,
                90: lambda: send(hanging, signal.SIGSTOP),
                130: lambda: send(hanging, signal.SIGCONT),
                170: lambda: turn("draining"),
                230: lambda: turn("schedulable"),
                250: killed.kill,
                270: killed.start,
            },
        )
        asyncio.run(day.run())
        assert day.wrong == []
        asked: dict[str, list[int]] = {}
        for line in ledger.read_text().splitlines():
            request_id, _, at = line.partition(" ")
            asked.setdefault(request_id, []).append(int(at))
        # Whose answer had a byte was the last that was asked. One that hangs reads late.
        for request_id, port in day.answered_by.items():
            ports = [each for each in asked.get(request_id, ()) if each in (port, *prompt)]
            assert not port or ports[-1] == port, (request_id, asked[request_id], port)
        metric = gateway.metric
        again = sum(len(each) - 1 for each in asked.values())
        counted = metric("lean_selector_gateway_stale_connections_total")
        counted += metric("lean_selector_gateway_retries_total")
        assert again <= min(counted, RetryBudget.FIRST + RetryBudget.SHARE * REQUESTS)
        denied = metric("lean_selector_gateway_retries_denied_total")
        lost = day.ends["refused"] + day.ends["502"] + day.ends["503"]
        assert lost <= denied + CLIENTS, day.ends
        assert day.ends["broken"] <= 3 * CLIENTS, day.ends  # of those that were killed or hung
        assert day.ends.total() == day.begun
        gateway.wait_until_free()
        for worker in workers:
            worker.wait_until_idle()
        assert metric("lean_selector_gateway_active_requests") == 0
        assert gateway.ask("GET", "/ready").status == 200
