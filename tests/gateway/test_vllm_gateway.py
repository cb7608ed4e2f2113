"""The gateway in front of two real vLLM engines: what it predicts against what they report.

By hand, as tests/client/test_vllm_engine.py says:

    LEAN_SELECTOR_VLLM=/tmp/vllm/bin/python pytest -m engine --log-cli-level=WARNING \\
        tests/gateway/test_vllm_gateway.py

200 chat requests of 20 conversations, half of them streams. The prediction is the header
`x-lean-overlap`, the report `usage.prompt_tokens_details.cached_tokens` of the same answer.
"""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.test_vllm_engine import MODEL, PYTHON, Engine
from tests.client.tiny_model import write_model
from tests.gateway.running_gateway import Answer, RunningGateway

SESSIONS, TURNS = 20, 10
FIRST_WORDS, WORDS, ANSWER_TOKENS = 150, 30, 8

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="LEAN_SELECTOR_VLLM names no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model")
    started = [Engine(1, folder, int_hashes=True), Engine(2, folder, int_hashes=False)]
    with contextlib.ExitStack() as stack:
        for engine in started:
            stack.enter_context(engine.running())
        for engine in started:
            engine.wait()
        yield started


def words(drawn: random.Random, count: int) -> str:
    """As the tiny model's tokenizer tells them apart, wherever they stand."""
    return " " + " ".join(f"t{drawn.randrange(3, 4096)}" for _ in range(count)) + " "


def said(answer: Answer, streams: bool) -> tuple[str, dict[str, Any]]:
    """The text and the usage of an answer."""
    if not streams:
        body = answer.json()
        return body["choices"][0]["message"]["content"], body["usage"]
    chunks = answer.events()
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    return text, chunks[-1]["usage"]


@pytest.mark.parametrize("mode", ["learn", "tokenize"])
def test_what_is_predicted_is_what_the_engines_report(engines: list[Engine], mode: str) -> None:
    urls = [f"http://127.0.0.1:{each.port}" for each in engines]
    for engine in engines:
        engine.forget()
    rows: list[tuple[int, int, int]] = []  # predicted, reported, of so many tokens
    served: list[bool] = []  # by whom the turn before was

    async def session(gateway: RunningGateway, number: int) -> None:
        drawn = random.Random(f"{mode} {number}")
        messages = [{"role": "system", "content": words(drawn, FIRST_WORDS)}]
        before = None
        for turn in range(TURNS):
            messages.append({"role": "user", "content": words(drawn, WORDS)})
            streams = bool(turn % 2)
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "ignore_eos": True}
            body |= {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "stream": streams}
            if streams:
                body["stream_options"] = {"include_usage": True}
            answer = await asyncio.to_thread(gateway.ask, "POST", "/v1/chat/completions", body)
            assert answer.status == 200, answer.body
            text, usage = said(answer, streams)
            reported = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            predicted = int(answer.headers["x-lean-overlap"])
            rows.append((predicted, reported, usage["prompt_tokens"]))
            worker = answer.headers["x-lean-worker"]
            if before is not None:
                served.append(worker == before)
            before = worker
            messages.append({"role": "assistant", "content": text})
            assert "token_ids" not in json.dumps(text)

    with RunningGateway(*urls, "--prompts", mode, knows=2) as gateway:

        async def day() -> None:
            await asyncio.gather(*(session(gateway, number) for number in range(SESSIONS)))

        asyncio.run(day())
        gateway.wait_until_free()
        compared = [
            gateway.metric(f"lean_selector_gateway_compared_{name}_tokens_total")
            for name in ("predicted", "cached", "prompt")
        ]
    assert len(rows) == SESSIONS * TURNS
    predicted, reported, prompts = (sum(column) for column in zip(*rows, strict=True))
    exact = sum(row[0] == row[1] for row in rows)
    log.warning(
        "%s: predicted %d, reported %d of %d prompt tokens; %d of %d requests exact; "
        "%.2f of the turns on the worker of the one before; metrics %s",
        *(mode, predicted, reported, prompts, exact, len(rows)),
        *(sum(served) / len(served), compared),
    )
    assert reported > 0.5 * prompts
    assert abs(predicted - reported) <= 0.05 * reported
    assert compared[1] == reported
