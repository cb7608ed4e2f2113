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
from urllib.parse import urlsplit

from tests.support.openai_worker import MODEL, rendered, said
from tests.support.running_service import RunningService

REFUSED_SHARE = 0.01  # of those who stay
SESSIONS = 8  # each has one request under way
ANSWER_S = 60.0  # generous: an answer takes some tens of milliseconds
LINGER_S = 0.3  # at most, of one who leaves and reads on where nothing comes any more
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
    sessions: int = SESSIONS,
    hang_ups: float = 0.3,
    at: Mapping[float, Callable[[], object]] | None = None,
    max_tokens: int = 24,
    pause_s: float = 0.0,
    seed: int = 0,
    headers: Mapping[str, str] | None = None,
    model: str = MODEL,
    is_chosen: Callable[[], bool] = lambda: True,
) -> Outcome:
    """`at` has what is called, in a thread, when so large a part of the requests was begun.

    `headers` go with every request; `pause_s` is what a user thinks, on average. `is_chosen` tells
    whether somebody chooses workers now: other turns are asked, and do not count for stickiness.
    """
    day = _Day(
        url, requests, hang_ups, at or {}, max_tokens, pause_s, headers or {}, model, is_chosen
    )
    await asyncio.gather(*(day.session(number, seed) for number in range(sessions)))
    await day.rest()
    return day.outcome


class _Day:
    def __init__(
        self,
        url: str,
        requests: int,
        hang_ups: float,
        at: Mapping[float, Callable[[], object]],
        max_tokens: int,
        pause_s: float,
        headers: Mapping[str, str],
        model: str,
        is_chosen: Callable[[], bool],
    ) -> None:
        self.url = urlsplit(url)
        self.left = self.requests = requests
        self.hang_ups, self.max_tokens, self.pause_s = hang_ups, max_tokens, pause_s
        self.model, self.headers, self.is_chosen = model, headers, is_chosen
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
        connection = _Connection(self.url.hostname or "", self.url.port or 80)
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
                answer = await self._ask(connection, asked, drawn.random() < 0.7)
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
            connection.close()

    def _request(self, messages: list[dict[str, str]], streams: bool) -> bytes:
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        body["max_tokens"] = self.max_tokens
        if streams:
            body.update(stream=True, stream_options={"include_usage": True})
        raw = json.dumps(body).encode()
        path = self.url.path.rstrip("/") + "/v1/chat/completions"
        lines = [f"POST {path} HTTP/1.1", f"host: {self.url.netloc}"]
        lines += ["content-type: application/json", f"content-length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + raw

    async def _ask(
        self, connection: "_Connection", messages: list[dict[str, str]], streams: bool
    ) -> tuple[str, str] | None:
        """The answer, and who gave it; None where there is none, which is noted."""
        outcome = self.outcome
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body, is_whole = await connection.ask(self._request(messages, streams))
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            outcome.refused[type(error).__name__] += 1
            connection.close()
            return None
        if status != 200:
            outcome.refused[str(status)] += 1
            return None
        if not is_whole:
            outcome.broken += 1
            connection.close()
            return None
        prompt_tokens = len(rendered(messages).encode())
        try:
            text, usage, served = _read(body, streams)
        except (ValueError, LookupError):
            outcome.wrong.append(body[-200:].decode(errors="replace"))
            return None
        if text != said(prompt_tokens, self.max_tokens):
            outcome.wrong.append(text)
            return None
        outcome.complete += 1
        outcome.prompt_tokens += usage["prompt_tokens"]
        outcome.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        return text, served

    async def _hang_up(self, messages: list[dict[str, str]], drawn: random.Random) -> None:
        """Ask, and leave: in the middle of the request, behind it, or somewhere in the answer."""
        request = self._request(messages, drawn.random() < 0.8)
        kind = drawn.random()
        sent = request[: drawn.randrange(len(request))] if kind < 0.15 else request
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection(self.url.hostname, self.url.port)
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


class _Connection:
    """Of one client: kept while the door keeps it, and made anew as a browser would."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes, bool]:
        """Status, body, and whether all of it came. Raises OSError or IncompleteReadError when no
        answer began, on a new connection if a kept one was closed meanwhile."""
        kept, self._streams = self._streams, None
        if kept is not None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return await self._on(kept, request)
            kept[1].close()
        return await self._on(await asyncio.open_connection(self._host, self._port), request)

    async def _on(
        self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
    ) -> tuple[int, bytes, bool]:
        reader, writer = streams
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        except BaseException:
            writer.close()
            raise
        status = int(head[9:12])
        fields = dict(
            line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line
        )
        length = fields.get(b"content-length")
        body = bytearray()
        try:
            if length is not None:
                body += await reader.readexactly(int(length))
            elif b"chunked" in fields.get(b"transfer-encoding", b""):
                await _chunks(reader, body)
            else:
                body += await reader.read()
                writer.close()
                return status, bytes(body), True
        except (OSError, asyncio.IncompleteReadError, ValueError):
            writer.close()
            return status, bytes(body), False
        except BaseException:
            writer.close()
            raise
        if b"close" in fields.get(b"connection", b""):
            writer.close()
        else:
            self._streams = streams
        return status, bytes(body), True

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader, into: bytearray) -> None:
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if not size:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return
        into += await reader.readexactly(size)
        await reader.readexactly(2)
