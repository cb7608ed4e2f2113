"""Which requests reach a worker, by their paths; and what the gateway answers itself."""

import asyncio
from typing import Any, cast

import pytest

from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.gateway_metrics import Counts
from lean_selector.gateway.handler import GatewayHandler
from lean_selector.gateway.model_list import ModelList
from lean_selector.gateway.model_request import ROUTED_PATHS, ModelRequest
from lean_selector.gateway.placing import peeked_model
from lean_selector.gateway.proxied_request import ProxiedRequest
from lean_selector.gateway.upstreams import Rotation
from lean_selector.http.head import Request
from lean_selector.http.response import PendingReply, encode_response
from tests.gateway.test_route import asked, error, parted
from tests.support.on_loop import on_loop
from tests.support.outbound_server import client, response, serving

OPENAI = (
    *("/v1/messages/count_tokens", "/v1/responses/r-1/cancel", "/v1/audio/transcriptions"),
    *("/v1/files/f%2F1", "/v1/batches/"),
)
OWN_OF_ENGINES = (
    *("/metrics", "/v1/load_lora_adapter", "/pause", "/sleep", "/tokenize", "/", "/v1"),
    *("/v1/responses/../load_lora_adapter", "/v1/files/%2e%2e/load_lora_adapter", "/v1/filesystem"),
    *("/v1//chat/completions", "/V1/chat/completions", "/v1/models", "/v1/models/m", "/health"),
)


class Placing:
    """Remembers what was to be placed."""

    def __init__(self) -> None:
        self.begun: list[tuple[bytes, bool]] = []

    def begin(self, proxied: ProxiedRequest, is_completion: bool) -> Any:
        self.begun.append((proxied.request.path, is_completion))


def handler(placing: Placing, pass_through: str, models: Any = None) -> GatewayHandler:
    made = GatewayHandler(
        cast(Any, placing),
        Rotation(EjectionSettings(), 0.0),
        models,
        Counts(),
        silence_s=600.0,
        touch_after_s=100.0,
        token=None,
        access_log=False,
        most_body_bytes=1 << 20,
        pass_through=pass_through,
        selector_port=8092,
    )
    made.own = lambda request: encode_response(200, request.path)
    return made


def get(path: str) -> Request:
    request = asked(path, b"", {})
    request.method = b"GET"
    return request


@pytest.mark.parametrize("pass_through", ["all", "openai", "none"])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/chat/%63ompletions", "/v1/chat/completions/"),
        *("%2Fv1/chat%2fcompletions", "/v1/chat/completions%2f"),
    ],
)
def test_a_completion_is_one_however_its_path_is_spelled(path: str, pass_through: str) -> None:
    placing = Placing()
    assert isinstance(handler(placing, pass_through)(asked(path, b"{}", {})), PendingReply)
    assert placing.begun == [(b"/v1/chat/completions", True)]


@pytest.mark.parametrize("path", sorted(ROUTED_PATHS))
def test_a_worker_is_chosen_for_each_of_these_whatever_else_passes(path: str) -> None:
    placing = Placing()
    handler(placing, "none")(asked(path, b"{}", {}))
    assert placing.begun == [(path.encode(), True)]


@pytest.mark.parametrize(
    ("pass_through", "passed"),
    [("all", {*OPENAI, *OWN_OF_ENGINES}), ("openai", {*OPENAI}), ("none", set())],
)
def test_openai_s_routes_pass_unless_none_do_and_an_engine_s_own_only_where_all_do(
    pass_through: str, passed: set[str]
) -> None:
    for path in (*OPENAI, *OWN_OF_ENGINES):
        placing = Placing()
        answer = handler(placing, pass_through)(asked(path, b"{}", {}))
        assert placing.begun == ([(path.encode(), False)] if path in passed else [])
        if path not in passed:
            assert isinstance(answer, bytes)
            status, _, body = parted(answer)
            assert (status, error(body)["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("pass_through", ["all", "openai", "none"])
def test_a_browser_may_ask_what_it_may_send_wherever_it_may_send(pass_through: str) -> None:
    for path in (
        *sorted(ROUTED_PATHS),
        "/v1/models",
        "/v1/models/org/m",
        *OPENAI,
        "/sleep",
        "/ready",
    ):
        placing = Placing()
        request = get(path)
        request.method = b"OPTIONS"
        handler(placing, pass_through)(request)
        served = path in ROUTED_PATHS or path.startswith("/v1/models")
        passed = served or pass_through == "all" or (path in OPENAI and pass_through == "openai")
        assert placing.begun == ([(path.encode(), False)] if passed else [])


@pytest.mark.parametrize("pass_through", ["all", "openai", "none"])
def test_health_and_readiness_are_the_gateway_s_own(pass_through: str) -> None:
    placing = Placing()
    for path in ("/health", "/ready", "/%68ealth/"):
        answer = handler(placing, pass_through)(get(path))
        assert isinstance(answer, bytes)
        assert parted(answer)[2] in (b"/health", b"/ready")
    assert not placing.begun


async def told(answer: bytes | PendingReply) -> tuple[int, bytes]:
    if isinstance(answer, PendingReply):
        here: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        answer.observe(lambda given: here.set_result(bytes(given)), lambda: None)
        answer = await here
    status, _, body = parted(answer)
    return status, body


def cards(*names: str) -> bytes:
    rows = ",".join(f'{{"id":"{name}","x":1}}' for name in names)
    return response(f'{{"data":[{rows}]}}'.encode())


@on_loop
async def test_one_model_is_told_whichever_worker_has_it() -> None:
    async def serve_a(reader: Any, writer: Any) -> None:
        writer.write(cards("a"))

    async def serve_b(reader: Any, writer: Any) -> None:
        writer.write(cards("org/b"))

    async with serving(serve_a) as a, serving(serve_b) as b:
        rotation = Rotation(EjectionSettings(), 0.0)
        rotation.set([a.url, b.url])
        doorway = handler(Placing(), "openai", ModelList(rotation, client()))
        for path in ("/v1/models/a", "/v1/models/org/b", "/v1/models/org%2Fb"):
            name = "a" if path.endswith("a") else "org/b"
            assert await told(doorway(get(path))) == (200, f'{{"id":"{name}","x":1}}'.encode())
        status, body = await told(doorway(get("/v1/models/c")))
        assert (status, error(body)["code"]) == (404, "model_not_found")


@on_loop
async def test_an_ejected_worker_is_not_asked_for_its_models_and_counts_as_it_was() -> None:
    async def serve(reader: Any, writer: Any) -> None:
        writer.write(cards("a"))

    async with serving(serve) as well, serving(serve) as out:
        rotation = Rotation(EjectionSettings(), 0.0)
        rotation.set([well.url, out.url])
        models = ModelList(rotation, client())
        assert (await told(models.answer(b"")))[0] == 200
        rotation.ejected = frozenset({out.url})
        models._until = 0.0
        assert (await told(models.answer(b"")))[0] == 200
        assert (len(well.requests), len(out.requests)) == (2, 1)
        models._until = 0.0
        rotation.ejected = frozenset({out.url, well.url})
        assert (await told(models.answer(b"")))[0] == 200
        assert (len(well.requests), len(out.requests)) == (2, 1)


@on_loop
async def test_the_last_list_of_a_worker_counts_until_it_gives_another() -> None:
    answers = [
        (cards("a"), b"a"),
        (b"", b"a"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n{}", b"a"),
        *((response(text), b"a") for text in (b"{", b"{}", b'{"data":1}', b'{"data":[{}]}')),
        (response(b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), b"a"),
        (cards("b"), b"b"),
        (cards(), b""),
    ]

    async def serve(reader: Any, writer: Any) -> None:
        writer.write(answers[0][0])
        if not answers[0][0]:
            writer.close()

    async with serving(serve) as worker:
        rotation = Rotation(EjectionSettings(), 0.0)
        rotation.set([worker.url])
        models = ModelList(rotation, client())
        while answers:
            models._until = 0.0
            status, body = await told(models.answer(b""))
            name = answers.pop(0)[1]
            assert (status, name in body) == (200 if name else 503, True)


@pytest.mark.parametrize("start", [b"", b" ", b"\r\n\t ", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_passed_body_s_model_is_found_wherever_the_body_begins(start: bytes) -> None:
    for body in (b'{"model":"b"}', b'{\n "x": [1], "m\\u006fdel": "\\u0062"}'):
        assert peeked_model(start + body) == peeked_model(bytearray(start + body)) == "b"
        assert ModelRequest("/v1/completions", start + body).model == "b"
    for other in (b"", b"[]", b"x{}", b'"{}"', b"{"):
        assert peeked_model(start + other) is None
