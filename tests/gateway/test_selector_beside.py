"""The gateway beside a real selector, in each of the dialects that it may speak."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.openai_worker import OpenAiWorker
from tests.running_service import RunningService, wait_until

TEXT = "The quick brown fox jumps over the lazy dog. " * 10
DIALECTS = ("1.3", "1.6")


@pytest.fixture(scope="module")
def workers() -> Iterator[list[OpenAiWorker]]:
    with OpenAiWorker() as first, OpenAiWorker() as second:
        yield [first, second]


def selector_of(workers: list[OpenAiWorker], *flags: str) -> RunningService:
    return RunningService(*(f"--discover=url:{each.url}" for each in workers), *flags)


def beside(selector: RunningService) -> RunningGateway:
    return RunningGateway("--selector", f"http://127.0.0.1:{selector.port}")


def ranks(selector: RunningService) -> list[dict[str, Any]]:
    return [row for each in selector.get("/loads")[1] for row in each["loads"]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_requests_go_where_they_are_cached_whatever_the_selector_calls_things(
    workers: list[OpenAiWorker], dialect: str
) -> None:
    with selector_of(workers, "--api", dialect) as selector, beside(selector) as gateway:
        wait_until(lambda: gateway.chat(TEXT).status == 200, "it serves")
        wait_until(lambda: "x-lean-overlap" in gateway.chat(TEXT).headers, "the selector is asked")
        wait_until(lambda: int(gateway.chat(TEXT).headers["x-lean-overlap"]) > 300, "it is cached")
        assert gateway.chat("Nobody asked this before.").headers["x-lean-overlap"] == "0"
        assert "WARNING lean_selector.gateway" not in gateway.log()
        wait_until(lambda: not any(row["active_requests"] for row in ranks(selector)), "all free")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_worker_that_fails_is_reported_whatever_the_selector_calls_things(dialect: str) -> None:
    with OpenAiWorker() as good, OpenAiWorker() as bad:
        flags = ("--api", dialect, "--worker-ejection-failures", "1")
        with selector_of([good, bad], *flags) as selector, beside(selector) as gateway:
            wait_until(lambda: len(ranks(selector)) == 2, "both are known")
            wait_until(lambda: "x-lean-overlap" in gateway.chat(TEXT).headers, "it is asked")
            bad.kill()
            asked = itertools.count()

            def is_ejected() -> bool:
                assert gateway.chat(f"{next(asked)} {TEXT}").status == 200
                return len(selector.get("/ready")[1].get("ejected", ())) == 1

            wait_until(is_ejected, "the selector avoids it")


@pytest.mark.parametrize(("dialect", "status"), [("1.3", 503), ("1.6", 429)])
def test_what_the_selector_sheds_is_told_to_the_client(
    workers: list[OpenAiWorker], dialect: str, status: int
) -> None:
    flags = ("--api", dialect, "--active-decode-blocks-threshold", "0.01")
    with selector_of(workers[:1], *flags) as selector, beside(selector) as gateway:
        wait_until(lambda: "x-lean-overlap" in gateway.chat(TEXT).headers, "it is asked")
        held = {"model_name": "m", "token_ids": list(range(1_000))}
        assert selector.post("/select_and_reserve", held)[0] == 200
        answer = gateway.chat(TEXT)
        assert (answer.status, answer.json()["error"]["code"]) == (status, "overloaded")
        assert answer.headers["retry-after"] == "1"
