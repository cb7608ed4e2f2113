"""A hard day for a door in front of workers: clients who hang up, a worker and a selector killed.

`hard_day` plays conversations of several sessions against any OpenAI-compatible URL behind which
`tests.support.openai_worker` workers answer, whatever gateway is in between, and judges every
answer: clients that stay are to get a complete one, or one that is visibly broken. What fails
meanwhile is the caller's to arrange, by functions that are called at given points of the day.
"""

import asyncio
import contextlib
import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tests.support.openai_worker import MODEL, rendered, said
from tests.support.running_service import RunningService

REFUSED_SHARE = 0.01  # of those who stay
SESSIONS = 8  # each has one request under way
ANSWER_S = 60.0  # generous: an answer takes some tens of milliseconds
LINGER_S = 0.3  # at most, of one who leaves and reads on where nothing comes any more
CHAT, MAX_TOKENS = "/v1/chat/completions", 24
TURNS = 20  # of a conversation, before another begins
_GROUP = "You are a helpful assistant of team {0}. " * 4


class Outcome:
    """What became of the requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.hung_up = 0
        self.complete = 0
        self.refused: Counter[str] = (
            Counter()
        )  # of those who stayed: by status, or why there was none
        self.broken = 0  # of those who stayed: a 200 that was visibly cut short
        self.wrong: list[str] = []  # complete by its framing, and not what the worker said
        # Turns behind another of the same conversation, both chosen and with an answer.
        self.followed = 0
        self.stuck = 0  # of those, on the same worker
        self.prompt_tokens = 0
        self.cached_tokens = 0  # as the engines counted them
        self.workers: Counter[str] = Counter()  # answers of each

    @property
    def stayed(self) -> int:
        return self.complete + self.broken + sum(self.refused.values()) + len(self.wrong)

    @property
    def stickiness(self) -> float:
        return self.stuck / max(1, self.followed)

    def __repr__(self) -> str:
        return (
            f"{self.asked} asked, {self.hung_up} hung up, {self.complete} complete, "
            f"{self.broken} broken, refused {dict(self.refused)}, wrong {self.wrong[:3]}, "
            f"stickiness {self.stickiness:.2f} of {self.followed}, "
            f"cached {self.cached_tokens / max(1, self.prompt_tokens):.2f}, {dict(self.workers)}"
        )


def judge(outcome: Outcome, worker_kills: int) -> None:
    """What is owed to those who stay, when so many workers were killed."""
    assert outcome.wrong == []
    assert sum(outcome.refused.values()) <= REFUSED_SHARE * outcome.stayed, outcome
    # An answer that has begun ends with its worker, and nothing else breaks one.
    assert outcome.broken <= SESSIONS * worker_kills, outcome


class Absence:
    """A selector that is killed in the course of a day and brought back: meanwhile workers are
    taken in turn, however long it is."""

    def __init__(self, selector: RunningService, until_known: Callable[[], object]) -> None:
        """`until_known()` returns once it knows all workers again."""
        self._selector, self._until_known = selector, until_known
        self._is_away = threading.Event()

    def begin(self) -> None:
        self._is_away.set()
        self._selector.stop(signal.SIGKILL)

    def end(self) -> None:
        self._selector.__enter__()
        self._until_known()
        self._is_away.clear()

    def is_over(self) -> bool:
        return not self._is_away.is_set()


async def hard_day(
    url: str,
    *,
    requests: int = 500,
    hang_ups: float = 0.3,
    at: Mapping[float, Callable[[], object]] | None = None,
    pause_s: float = 0.0,
    seed: int = 0,
    is_chosen: Callable[[], bool] = lambda: True,
) -> Outcome:
    """`at` has what is called, in a thread, when so large a part of the requests was begun.

    `pause_s` is what a user thinks, on average. `is_chosen` tells whether workers are chosen now:
    other turns are asked, and do not count for stickiness.
    """
    day = _Day(url, requests, hang_ups, at or {}, pause_s, is_chosen)
    await asyncio.gather(*(day.session(number, seed) for number in range(SESSIONS)))
    await day.rest()
    return day.outcome


class _Day:
    def __init__(
        self,
        url: str,
        requests: int,
        hang_ups: float,
        at: Mapping[float, Callable[[], object]],
        pause_s: float,
        is_chosen: Callable[[], bool],
    ) -> None:
        self.url = httpx.URL(url)
        self.left = self.requests = requests
        self.hang_ups, self.pause_s, self.is_chosen = hang_ups, pause_s, is_chosen
        self.due = sorted(at.items(), key=lambda item: item[0])
        self.under_way: list[asyncio.Task[object]] = []
        self.outcome = Outcome()

    def _next(self) -> bool:
        """Whether there is one more request to make; what is due is begun."""
        if not self.left:
            return False
        self.left -= 1
        while self.due and 1.0 - self.left / self.requests >= self.due[0][0]:
            _, act = self.due.pop(0)
            self.under_way.append(asyncio.create_task(asyncio.to_thread(act)))
        return True

    async def rest(self) -> None:
        for _, act in self.due:
            await asyncio.to_thread(act)
        for task in self.under_way:
            await task

    async def session(self, number: int, seed: int) -> None:
        drawn = random.Random(1_000 * seed + number)
        client = _Client(self.url)
        messages: list[dict[str, str]] = []
        conversation = 0
        worker = ""  # of the last turn of this conversation, if it was chosen
        try:
            while self._next():
                if self.pause_s:
                    await asyncio.sleep(drawn.expovariate(1.0 / self.pause_s))
                if not messages or len(messages) > 2 * TURNS:
                    conversation += 1
                    worker = ""
                    messages = [{"role": "system", "content": _GROUP.format(number % 3)}]
                question = f"Session {number}, {conversation}: tell me {drawn.randbytes(24).hex()}"
                asked = [*messages, {"role": "user", "content": question}]
                self.outcome.asked += 1
                if drawn.random() < self.hang_ups:
                    self.outcome.hung_up += 1
                    await self._hang_up(asked, drawn)
                    continue
                was_chosen = self.is_chosen()
                answer = await self._ask(client, asked, drawn.random() < 0.7)
                if answer is None:
                    continue
                text, served = answer
                self.outcome.workers[served] += 1
                if worker and was_chosen:
                    self.outcome.followed += 1
                    self.outcome.stuck += served == worker
                worker = served if was_chosen else ""
                messages = [*asked, {"role": "assistant", "content": text}]
        finally:
            await client.aclose()

    def _body(self, messages: list[dict[str, str]], streams: bool) -> bytes:
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS}
        if streams:
            body.update(stream=True, stream_options={"include_usage": True})
        return json.dumps(body).encode()

    async def _ask(
        self, client: "_Client", messages: list[dict[str, str]], streams: bool
    ) -> tuple[str, str] | None:
        """The answer, and who gave it; None where there is none, which is noted."""
        outcome = self.outcome
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body = await client.ask(self._body(messages, streams))
        except (httpx.TransportError, TimeoutError) as error:
            outcome.refused[type(error).__name__] += 1
            return None
        if status != 200:
            outcome.refused[str(status)] += 1
            return None
        if body is None:
            outcome.broken += 1
            return None
        prompt_tokens = len(rendered(messages).encode())
        try:
            text, usage, served = _read(body, streams)
        except (ValueError, LookupError):
            outcome.wrong.append(body[-200:].decode(errors="replace"))
            return None
        if text != said(prompt_tokens, MAX_TOKENS):
            outcome.wrong.append(text)
            return None
        outcome.complete += 1
        outcome.prompt_tokens += usage["prompt_tokens"]
        outcome.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        return text, served

    async def _hang_up(self, messages: list[dict[str, str]], drawn: random.Random) -> None:
        """Ask, and leave: in the middle of the request, behind it, or somewhere in the answer."""
        raw = self._body(messages, drawn.random() < 0.8)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw
        kind = drawn.random()
        sent = request[: drawn.randrange(len(request))] if kind < 0.15 else request
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection(self.url.host, self.url.port)
                try:
                    writer.write(sent)
                    await writer.drain()
                    if kind >= 0.4:
                        async with asyncio.timeout(LINGER_S):
                            for _ in range(drawn.randrange(1, 8)):
                                if not await reader.read(drawn.choice((1, 100, 1_000))):
                                    break
                    elif kind >= 0.15:
                        await asyncio.sleep(drawn.uniform(0.0, 0.02))
                finally:
                    if drawn.random() < 0.5:
                        writer.transport.abort()
                    else:
                        writer.close()


def _read(body: bytes, streams: bool) -> tuple[str, dict[str, Any], str]:
    """Text, usage and worker of a whole answer. Raises ValueError or LookupError."""
    if not streams:
        answer = json.loads(body)
        text = answer["choices"][0]["message"]["content"]
        return text, answer["usage"], answer["system_fingerprint"]
    events = [event for event in body.decode().split("\n\n") if event]
    if events[-1] != "data: [DONE]":
        raise ValueError("the stream has no end")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return text, usage, chunks[0]["system_fingerprint"]


class _Client(httpx.AsyncClient):
    """One that keeps its connection while the door keeps it, as a browser does."""

    def __init__(self, url: httpx.URL) -> None:
        super().__init__(base_url=url, timeout=None, trust_env=False)
        self._is_kept = False

    async def ask(self, body: bytes) -> tuple[int, bytes | None]:
        """Status, and the body if all of it came. Raises TransportError when no answer began, on
        a new connection if a kept one was closed meanwhile."""
        kept, self._is_kept = self._is_kept, False
        if kept:
            with contextlib.suppress(httpx.TransportError):
                return await self._once(body)
        return await self._once(body)

    async def _once(self, body: bytes) -> tuple[int, bytes | None]:
        headers = {"content-type": "application/json"}
        async with self.stream("POST", CHAT, content=body, headers=headers) as answer:
            try:
                whole = await answer.aread()
            except httpx.TransportError:
                return answer.status_code, None
            self._is_kept = answer.headers.get("connection") != "close"
            return answer.status_code, whole
