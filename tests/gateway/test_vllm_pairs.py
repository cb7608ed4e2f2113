"""Pairs of real vLLM engines behind the gateway: one engine prefills, two decode.

By hand, with 8 GB of free memory, and some 15 minutes of two cores:

    LEAN_SELECTOR_PAIRS=/tmp/pairs pytest -m engine --log-cli-level INFO \
        tests/gateway/test_vllm_pairs.py

The folder has `eng.sh NAME PORT EVENTS REPLAY [FLAG ...]`, which starts a vLLM (as
tests/client/test_vllm_engine.py says, with `pip install --no-deps nixl==1.5.2 nixl-cu12==1.5.1
nixl-cu13==1.5.1`) with the model in $MODELDIR, named `tiny`, with blocks of 32 tokens, and its side
channel at port $SIDE; `models/wordy2`, whose answers must depend on the whole prompt, else wrong
blocks go unseen; and `logs`. On few cores, preload a `poll` that waits 2 ms where NIXL's thread
polls without a pause, and a `sched_yield` that sleeps 0.2 ms: vLLM's readers call it in a loop, for
which Linux then lets them wait up to 40 s for a core. The witness of what is right is an engine
that answers alone.
"""

import contextlib
import http.client
import json
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.documents.pages import ROOT
from tests.gateway.running_gateway import RunningGateway
from tests.support.running_service import free_port, wait_until

FOLDER = os.environ.get("LEAN_SELECTOR_PAIRS", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not FOLDER, reason="LEAN_SELECTOR_PAIRS names no folder with vLLM and NIXL"),
]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
START_S = 600.0
LEASE_S = 60.0  # a prefill engine holds blocks for 30 s
LONG_CHATS, CLIENTS, PLAYED_S = 200, 16, 120.0

_log = logging.getLogger(__name__)
_WORDS = (ROOT / "docs" / "guide" / "choosing.md").read_text().split()


def words(count: int, seed: int) -> str:
    """About 1.5 tokens each."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


class PairEngine:
    def __init__(self, name: str, role: str) -> None:
        self.name, self.port, self._side = name, free_port(), free_port()
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"num_threads": 0},
        }
        ports = [str(port) for port in (self.port, free_port(), free_port())]
        self._command = [
            *("./eng.sh", name, *ports, "--kv-transfer-config", json.dumps(transfer)),
            *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        folder = Path(FOLDER)
        model = str(folder / "models" / "wordy2")
        env = {**os.environ, "PD": "1", "SIDE": str(self._side), "MODELDIR": model}
        with (folder / "logs" / f"{self.name}.log").open("w") as log:
            # The script begins a session of its own: all that the engine starts goes with it.
            self._process = subprocess.Popen(
                self._command, cwd=folder, env=env, stdout=log, stderr=log
            )

    def wait(self) -> None:
        wait_until(self.is_up, f"the engine {self.name} is up", START_S)

    def is_up(self) -> bool:
        assert self.runs(), f"the engine {self.name} ended"
        with contextlib.suppress(OSError):
            return self.ask("GET", "/health")[0] == 200
        return False

    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        self._process.wait()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def metric(self, name: str) -> float:
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(name + "{"))

    def is_idle(self) -> bool:
        """No request, and no block that is held for another engine."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        return not any(self.metric(name) for name in names)


class Rig:
    def __init__(self) -> None:
        self.prefill = PairEngine("p", "kv_producer")
        self.decode = [PairEngine(name, "kv_consumer") for name in ("d1", "d2")]
        self.engines = [self.prefill, *self.decode]
        self._known: dict[str, object] = {}

    def alone(self, path: str, body: dict[str, Any]) -> object:
        """What an engine answers without a pair."""
        key = json.dumps([path, body])
        if key not in self._known:
            status, answer = self.prefill.ask("POST", path, body)
            assert status == 200, answer
            self._known[key] = told(path, answer)
        return self._known[key]

    def forget(self) -> None:
        """Empties all caches."""
        for engine in self.engines:
            wait_until(engine.is_idle, f"the engine {engine.name} is idle", LEASE_S)
            engine.ask("POST", "/reset_prefix_cache", {})

    def gateway(self, *flags: str) -> RunningGateway:
        roles = [("--prefill", self.prefill), *(("--decode", each) for each in self.decode)]
        urls = [word for flag, engine in roles for word in (flag, engine.url)]
        return RunningGateway(*urls, *flags, knows=3)

    def wait_until_even(self, gateway: RunningGateway) -> None:
        """Nothing is booked and nothing is held, and each engine lives."""
        gateway.wait_until_free()
        for engine in self.engines:
            wait_until(engine.is_idle, f"the engine {engine.name} is idle", LEASE_S)
            assert engine.is_up()


@pytest.fixture(name="rig", scope="module")
def _rig() -> Iterator[Rig]:
    rig = Rig()
    try:
        for engine in rig.engines:
            engine.start()
        for engine in rig.engines:
            engine.wait()
        yield rig
    finally:
        for engine in rig.engines:
            engine.end(signal.SIGTERM)


# -- what an answer says ---------------------------------------------------------------------------


def told(path: str, answer: bytes) -> object:
    """What a client reads: the text, calls and reasons, and how many tokens there were. Of a
    stream, its pieces put together, since engines send several tokens at once if they are busy."""
    if answer.startswith((b"data:", b"event:")):
        events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        read = [json.loads(each) for each in events if each != "[DONE]"]
        assert not any("error" in each for each in read), answer
        pieces: dict[str, str] = {}
        for each in read:
            for kind, text in _pieces(each):
                pieces[kind] = pieces.get(kind, "") + text
        assert pieces, answer
        return pieces
    read = json.loads(answer)
    if path in (CHAT, TEXT):
        return [_without_ids(each) for each in read["choices"]], _tokens(read["usage"])
    said = read["output"] if path == RESPONSES else read["content"]
    return [_without_ids(each) for each in said], _tokens(read["usage"])


def _pieces(event: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Texts of an event of a stream, each with where it belongs."""
    if "choices" in event:
        for choice in event["choices"]:
            said = choice.get("delta", choice)
            yield f"text {choice['index']}", said.get("content") or said.get("text") or ""
            yield f"reason {choice['index']}", choice.get("finish_reason") or ""
            for call in said.get("tool_calls") or ():
                function = call.get("function") or {}
                yield f"call {call['index']}", function.get("name") or ""
                yield f"arguments {call['index']}", function.get("arguments") or ""
    delta = event.get("delta")
    if isinstance(delta, str):
        yield "text", delta
    elif delta:
        yield "text", delta.get("text") or delta.get("partial_json") or ""
        yield "reason", delta.get("stop_reason") or ""


def _without_ids(said: Any) -> Any:
    if isinstance(said, list):
        return [_without_ids(each) for each in said]
    if isinstance(said, dict):
        left = {name: _without_ids(each) for name, each in said.items() if each is not None}
        return {name: each for name, each in left.items() if name not in ("id", "call_id")}
    return said


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """Of the prompt and of the answer; how many were cached differs from time to time."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name) or 0 for name in names), usage["output_tokens"]


# -- answers ---------------------------------------------------------------------------------------

_SCHEMA = {
    "type": "object",
    "properties": {"where": {"type": "string", "maxLength": 8}},
    "required": ["where"],
}
_FUNCTION = {"name": "look", "description": "Looks", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_NAMED = {"type": "function", "function": {"name": "look"}}
_JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}


def body_of(path: str, which: int, count: int = 150, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0}
    text = words(count, which)
    if path == TEXT:
        asked |= {"prompt": text, "max_tokens": 12}
    elif path == RESPONSES:
        asked |= {"input": text, "max_output_tokens": 12}
    else:
        asked |= {"messages": [{"role": "user", "content": text}], "max_tokens": 12}
    return {**asked, **fields}


_TWO = {"n": 2, "temperature": 0.5, "seed": 3}  # n is 1 at temperature 0
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat of few words": (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "chat stream": (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
    "chat with max_completion_tokens": (CHAT, {"max_completion_tokens": 9}),
    "chat with stop": (CHAT, {"max_tokens": 40, "stop": ["e"], "min_tokens": 2}),
    "chat with logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat with salt": (CHAT, {"cache_salt": "pepper"}),
    "chat, n is 2": (CHAT, _TWO),
    "chat stream, n is 2": (CHAT, {**_TWO, "stream": True}),
    "chat with schema": (CHAT, {"max_tokens": 24, "response_format": _JSON}),
    "chat with tools": (CHAT, {"max_tokens": 24, "tools": _TOOLS}),
    "chat with required tool": (
        CHAT,
        {"max_tokens": 24, "tools": _TOOLS, "tool_choice": "required"},
    ),
    "chat with named tool": (CHAT, {"max_tokens": 24, "tools": _TOOLS, "tool_choice": _NAMED}),
    "chat stream with named tool": (
        CHAT,
        {"max_tokens": 24, "tools": _TOOLS, "tool_choice": _NAMED, "stream": True},
    ),
    "completion": (TEXT, {}),
    "completion of ids": (TEXT, {"prompt": list(range(300, 900))}),
    "completion of a list of one": (TEXT, {"prompt": [words(150, 77)]}),
    "completion stream": (TEXT, {"stream": True}),
    "completion with echo": (TEXT, {"echo": True}),
    "completion, n is 2": (TEXT, _TWO),
    "response": (RESPONSES, {"instructions": "Be brief"}),
    "response stream": (RESPONSES, {"stream": True}),
    "response with tools": (RESPONSES, {"tools": [{"type": "function", **_FUNCTION}]}),
    "message": (MESSAGES, {"system": "Be brief"}),
    "message stream": (MESSAGES, {"stream": True}),
    "message with tools": (
        MESSAGES,
        {"tools": [{"name": "look", "description": "Looks", "input_schema": _SCHEMA}]},
    ),
}
# What gets no pair, with the word that says why.
BARRED: dict[str, tuple[str, dict[str, Any]]] = {
    "several prompts": (TEXT, {"prompt": [words(150, 78), words(150, 79)]}),
    "prompt_logprobs": (CHAT, {"prompt_logprobs": 1}),
}


@pytest.fixture(name="gateway", scope="module")
def _gateway(rig: Rig) -> Iterator[RunningGateway]:
    with rig.gateway() as gateway:
        yield gateway


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_answers_as_one_engine_does(kind: str, rig: Rig, gateway: RunningGateway) -> None:
    path, fields = KINDS[kind]
    body = body_of(path, list(KINDS).index(kind), **fields)
    alone = rig.alone(path, body)
    rig.forget()
    answer = gateway.ask("POST", path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-lean-pd"].startswith("pair"), answer.headers
    assert told(path, answer.body) == alone
    assert b"kv_transfer_params" not in answer.body.replace(b'"kv_transfer_params":null', b"")
    rig.wait_until_even(gateway)


@pytest.mark.parametrize("kind", BARRED)
def test_what_a_pair_cannot_serve_is_answered_by_one(
    kind: str, rig: Rig, gateway: RunningGateway
) -> None:
    path, fields = BARRED[kind]
    body = body_of(path, 50 + list(BARRED).index(kind), **fields)
    answer = gateway.ask("POST", path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-lean-pd"].startswith("local"), answer.headers
    assert told(path, answer.body) == rig.alone(path, body)
    rig.wait_until_even(gateway)


def test_long_chats_get_pairs_and_the_index_knows_what_the_prefill_worker_has(rig: Rig) -> None:
    """Ten system prompts, each of 20 chats, whose caches do not fit."""

    def chat(number: int) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": words(700, 1_000 + number % 10)},
            {"role": "user", "content": words(1_700, 2_000 + number)},
        ]
        return {"model": "tiny", "temperature": 0, "max_tokens": 8, "messages": messages}

    rig.forget()
    with rig.gateway() as gateway, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda n: gateway.ask("POST", CHAT, chat(n)), range(LONG_CHATS)))
        assert Counter(each.status for each in answers) == {200: LONG_CHATS}
        reasons = Counter(each.headers["x-lean-pd"] for each in answers)
        rig.wait_until_even(gateway)
        name = "lean_selector_gateway_compared_"
        predicted, cached, tokens = (
            gateway.metric(f"{name}{each}_tokens_total")
            for each in ("predicted", "cached", "prompt")
        )
    _log.info("%s; of %d tokens %d predicted, %d cached", reasons, tokens, predicted, cached)
    assert sum(n for reason, n in reasons.items() if reason.startswith("pair")) >= 190
    assert cached > 0.1 * tokens
    assert abs(predicted - cached) <= 0.01 * cached


# -- faults ----------------------------------------------------------------------------------------


class Played:
    """Clients that ask until they are stopped. Every answer that is a 200 must be right."""

    def __init__(self, rig: Rig, gateway: RunningGateway, bodies: list[tuple[str, Any]]) -> None:
        self._rig, self._gateway, self._bodies = rig, gateway, bodies
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[object] = []
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self, clients: int, leaving: float = 0.0) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._play, args=(n, leaving), daemon=True)
            for n in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _play(self, number: int, leaving: float) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            path, body = chance.choice(self._bodies)
            if chance.random() < leaving:
                leave(self._gateway, path, body, lambda _: time.sleep(chance.random() ** 2))
                outcome = "left"
            else:
                outcome = self._asked(path, body)
            self.outcomes[outcome] += 1

    def _asked(self, path: str, body: dict[str, Any]) -> str:
        try:
            answer = self._gateway.ask("POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__  # a stream that had begun is cut
        if answer.status != 200:
            return f"{answer.status} {answer.body[:120]!r}"
        if b'"error":{' in answer.body.replace(b" ", b""):
            return "an error in a stream"
        said = told(path, answer.body)
        if said != self._rig.alone(path, body):
            self.wrong.append((path, body, said, self._rig.alone(path, body)))
        return answer.headers.get("x-lean-pd", "round-robin")


def leave(
    gateway: RunningGateway, path: str, body: object, wait: Callable[[socket.socket], object]
) -> None:
    """Asks, waits, and leaves."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.settimeout(60.0)
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + text)
        wait(connection)


def pool(count: int) -> list[tuple[str, Any]]:
    """Requests of all kinds, some long, whose blocks do not fit into a cache together."""
    chance = random.Random(7)
    # vLLM's CPU build ends if a request with a seed is in a batch with others, and a batch changes
    # the last digits of logprobs.
    unfit = {"seed", "logprobs"}
    kinds = sorted(kind for kind, (_, fields) in KINDS.items() if not unfit & fields.keys())
    bodies = []
    for number in range(count):
        path, fields = KINDS[chance.choice(kinds)]
        count = chance.choice((40, 300, 1_500, 2_500))
        bodies.append((path, {**body_of(path, 5_000 + number, count), **_lasting(fields)}))
    return bodies


def _lasting(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in fields.items() if name not in ("prompt", "messages")}


def test_clients_that_leave_at_each_stage(rig: Rig) -> None:
    long = body_of(CHAT, 90, 6_000, max_tokens=300, stream=True)
    with rig.gateway("--pd-local-max-tokens", "0") as gateway:
        rig.forget()
        running = "vllm:num_requests_running"
        leave(
            gateway,
            CHAT,
            long,
            lambda _: wait_until(lambda: rig.prefill.metric(running) > 0, "the prefill runs"),
        )
        rig.wait_until_even(gateway)
        leave(
            gateway,
            CHAT,
            body_of(CHAT, 91, 6_000, max_tokens=300, stream=True),
            lambda _: wait_until(
                lambda: any(each.metric(running) for each in rig.decode), "the decode runs"
            ),
        )
        rig.wait_until_even(gateway)
        leave(gateway, CHAT, long, lambda connection: connection.recv(65_536))
        rig.wait_until_even(gateway)
        for number in range(60):  # also between the legs
            body = body_of(CHAT, 100 + number, 1_500, stream=number % 2 == 0, max_tokens=40)
            leave(gateway, CHAT, body, lambda _, n=number: time.sleep(n / 200))  # type: ignore[misc]
        rig.wait_until_even(gateway)
        body = body_of(CHAT, 92)
        assert told(CHAT, gateway.ask("POST", CHAT, body).body) == rig.alone(CHAT, body)


def test_many_clients_get_right_answers(rig: Rig) -> None:
    bodies = pool(80)
    for path, body in bodies:
        rig.alone(path, body)
    with rig.gateway("--pd-local-max-tokens", "0") as gateway:
        played = Played(rig, gateway, bodies)
        with played.running(CLIENTS, leaving=0.1):
            time.sleep(PLAYED_S)
        rig.wait_until_even(gateway)
    _log.info("%s", played.outcomes)
    assert not played.wrong
    assert set(played.outcomes) <= {"left", "pair; uncached", "local; cached"}
    assert played.outcomes["pair; uncached"] > played.outcomes["local; cached"]


@pytest.mark.parametrize("kills", ["prefill", "decode"])
def test_a_killed_worker(rig: Rig, kills: str) -> None:
    bodies = pool(40)
    for path, body in bodies:
        rig.alone(path, body)
    victim = rig.prefill if kills == "prefill" else rig.decode[0]
    fallback = "local" if kills == "prefill" else "refuse"
    flags = ("--pd-local-max-tokens", "0", "--pd-fallback", fallback)
    with rig.gateway(*flags) as gateway:
        played = Played(rig, gateway, bodies)

        def wait_for_more(count: int, *outcomes: str) -> None:
            def seen() -> int:
                return sum(played.outcomes[each] for each in outcomes or list(played.outcomes))

            before = seen()
            wait_until(lambda: seen() > before + count, "requests are answered", 120.0)

        with played.running(3):
            wait_for_more(30)
            victim.end(signal.SIGKILL)
            wait_for_more(40)
            victim.start()
            victim.wait()
            wait_for_more(20, "pair; uncached")
        rig.wait_until_even(gateway)
    _log.info("%s", played.outcomes)
    assert not played.wrong
    cut = {"IncompleteRead", "ConnectionResetError", "RemoteDisconnected", "an error in a stream"}
    broken = [each for each in played.outcomes if not each.startswith(("pair; ", "local; "))]
    assert set(broken) <= (cut if kills == "decode" else set())
    assert sum(played.outcomes[each] for each in broken) <= 3  # of those that had begun
