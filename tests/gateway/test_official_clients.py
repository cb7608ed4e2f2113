"""The routes of both APIs, as the official Python clients speak them, on simulated engines."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, Self

import httpx
import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker, rendered, said, tokens_of
from tests.support.running_service import wait_until

SYSTEM = "You know all about the sea, and are brief. " * 10
TEXT = "Tell me of the sea. " * 20
COUNT = 6
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]


class Clients:
    def __init__(self, gateway: RunningGateway) -> None:
        import anthropic  # here, since it takes seconds in each process that collects
        import openai

        self.gateway = gateway
        self.headers: list[Any] = []  # of the answers, in their order
        hooks = {"response": [lambda answer: self.headers.append(answer.headers)]}
        self.openai = openai.OpenAI(
            base_url=f"{gateway.url}/v1",
            api_key="k",
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
            max_retries=0,
        )
        self.anthropic = anthropic.Anthropic(
            base_url=gateway.url,
            api_key="k",
            http_client=anthropic.DefaultHttpxClient(event_hooks=hooks),
            max_retries=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.openai.close()
        self.anthropic.close()

    def completion(self, streams: bool) -> tuple[str, int]:
        create = self.openai.completions.create
        return self._created(create, lambda choice: choice.text, streams, prompt=TEXT)

    def chat(self, streams: bool) -> tuple[str, int]:
        def text(choice: Any) -> str:
            return (choice.delta if streams else choice.message).content or ""

        create = self.openai.chat.completions.create
        return self._created(create, text, streams, messages=MESSAGES)

    def _created(
        self, create: Any, text: Callable[[Any], str], streams: bool, **asked: object
    ) -> tuple[str, int]:
        if streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = create(model="m", max_tokens=COUNT, **asked)
        *chunks, last = answer if streams else (answer, answer)
        return "".join(text(each.choices[0]) for each in chunks), last.usage.prompt_tokens

    def responses(self, streams: bool) -> tuple[str, int]:
        asked: Any = {"model": "m", "instructions": SYSTEM, "input": TEXT}
        if not streams:
            answer = self.openai.responses.create(**asked, max_output_tokens=COUNT)
        else:
            with self.openai.responses.stream(**asked, max_output_tokens=COUNT) as stream:
                answer = stream.get_final_response()
        assert answer.usage is not None
        return answer.output_text, answer.usage.input_tokens

    def messages(self, streams: bool) -> tuple[str, int]:
        asked: Any = {"model": "m", "system": SYSTEM, "messages": MESSAGES, "max_tokens": COUNT}
        if not streams:
            answer = self.anthropic.messages.create(**asked)
        else:
            with self.anthropic.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        used = answer.usage
        text = "".join(each.text for each in answer.content if each.type == "text")
        return text, used.input_tokens + (used.cache_read_input_tokens or 0)


@pytest.fixture(name="clients", scope="module")
def _clients(gateway: RunningGateway) -> Iterator[Clients]:
    with Clients(gateway) as clients:
        yield clients


SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}
PROMPTS = {
    "completion": TEXT,
    "chat": rendered(MESSAGES),
    "responses": rendered([SYSTEM_MESSAGE, *MESSAGES]),
    "messages": rendered([SYSTEM_MESSAGE, *MESSAGES]),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("route", PROMPTS)
def test_a_prompt_goes_where_it_is_cached(clients: Clients, route: str, streams: bool) -> None:
    ask: Callable[[bool], tuple[str, int]] = getattr(clients, route)
    tokens = len(tokens_of(PROMPTS[route]))
    cached = 16 * ((tokens - 1) // 16)

    def is_cached() -> bool:
        assert ask(streams) == (said(tokens, COUNT), tokens)
        return int(clients.headers[-1]["x-lean-overlap"]) >= cached

    wait_until(is_cached, "the index has the prompt")
    before = clients.gateway.metric("lean_selector_gateway_compared_cached_tokens_total")
    assert is_cached()
    assert clients.headers[-1]["x-lean-worker"] == clients.headers[-2]["x-lean-worker"]
    assert "x-lean-prompt" not in clients.headers[-1]
    assert clients.gateway.metric("lean_selector_gateway_compared_predicted_tokens_total") > 0
    clients.gateway.wait_until_free()
    after = clients.gateway.metric("lean_selector_gateway_compared_cached_tokens_total")
    assert after - before >= cached


BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": COUNT},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": COUNT},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": COUNT, "system": SYSTEM},
    "/v1/responses": {"input": TEXT, "max_output_tokens": COUNT},
    "/v1/embeddings": {"input": TEXT},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_is_the_worker_s_own_byte_for_byte(
    clients: Clients, path: str, streams: bool
) -> None:
    """Also where the gateway asked for ids and for usage."""
    body = {"model": "m", **BODIES[path], "stream": streams}
    mine = {"x-request-id": "mine"}  # which the worker's own id is made of
    for _ in range(2):  # then its prompt is cached, and known
        clients.gateway.ask("POST", path, body, mine)
    answer = clients.gateway.ask("POST", path, body, mine)
    url = answer.headers["x-lean-worker"]
    own = httpx.post(f"{url}{path}", content=json.dumps(body), headers=mine, trust_env=False)
    assert (answer.status, answer.body) == (own.status_code, own.content)
    assert answer.headers["content-type"] == own.headers["content-type"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
def test_what_has_no_cached_prompt_is_booked_by_load(clients: Clients, path: str) -> None:
    if path == "/v1/embeddings":
        answer = clients.openai.embeddings.create(model="m", input=[TEXT])
        assert answer.data[0].embedding == [0.5, 0.25]
    else:
        clients.openai.post(
            path.removeprefix("/v1"), body={"model": "m", "query": TEXT}, cast_to=object
        )
    headers = clients.headers[-1]
    assert (headers["x-lean-overlap"], headers["x-lean-prompt"]) == ("0", "path")
    clients.gateway.wait_until_free()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_hangs_up_frees_its_worker_which_prefills_until_the_first_token(
    clients: Clients, workers: list[OpenAiWorker], path: str
) -> None:
    gateway, name = clients.gateway, "input" if path == "/v1/responses" else "messages"
    body = {"model": "m", name: MESSAGES, "max_tokens": 9, "stream": True}
    before = sum(each.seen()["hung_up"] for each in workers)
    with closing(HTTPConnection("127.0.0.1", gateway.port, timeout=60)) as connection:
        text = json.dumps({**body, "fake": {"stall_after": 0}})
        connection.request("POST", path, text, {"content-type": "application/json"})
        answer = connection.getresponse()
        begun = b"response.created" if path == "/v1/responses" else b"content_block_start"
        while begun not in (line := answer.readline()):
            assert line, "the stream has ended"
        [partition] = gateway.api("GET", "/loads")
        prefilling = sum(row["potential_prefill_tokens"] for row in partition["loads"])
        assert bool(prefilling) == (path == "/v1/responses")  # it opens its streams at once
        answer.close()
    gateway.wait_until_free()
    wait_until(
        lambda: sum(each.seen()["hung_up"] for each in workers) == before + 1,
        "the worker was told, too",
    )
