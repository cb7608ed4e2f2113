"""An index that lost events, and what the gateway does about it with engines that can help."""

import json
from typing import Any

import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.running_service import wait_until

# What is predicted would hide for some seconds what the index lacks.
FLAGS = ("--prompts", "tokenize", "--router-predicted-ttl-secs", "0")
SESSIONS, LOST = 10, {3}  # the events of a first turn are lost


def turn(gateway: RunningGateway, session: int, number: int, **fields: Any) -> None:
    text = "".join(f"Turn {each} of session {session} says this. " for each in range(number + 4))
    assert gateway.chat(text, **fields).status == 200


def is_followed(gateway: RunningGateway) -> bool:
    return [each["connection"] for each in gateway.api("GET", "/kv_sources")] == ["connected"]


def accuracy(gateway: RunningGateway) -> float:
    (source,) = gateway.api("GET", "/kv_sources")
    return source["index_accuracy"] or 0.0


def bodies(worker: OpenAiWorker) -> list[dict[str, Any]]:
    return [
        json.loads(each["body"])
        for each in worker.seen()["requests"]
        if each["line"].startswith("POST /v1/chat/completions")
    ]


@pytest.mark.parametrize("version", ["0.33.0", "0.31.2"])
def test_a_damaged_index_is_mended_by_engines_that_announce_blocks_again(version: str) -> None:
    with (
        OpenAiWorker(version=version, replays=False, blocks=20_000) as worker,
        RunningGateway(worker.url, *FLAGS) as gateway,
    ):
        wait_until(lambda: is_followed(gateway), "its events are followed")
        for session in range(SESSIONS):
            lost = {"fake": {"loses_events": True}} if session in LOST else {}
            turn(gateway, session, 0, **lost)
        for session in range(SESSIONS):
            turn(gateway, session, 1)
        assert accuracy(gateway) < 0.96
        for number in range(2, 12):
            for session in range(SESSIONS):
                turn(gateway, session, number)
        full = [each for each in bodies(worker) if "vllm_xargs" in each]
        assert all(each["vllm_xargs"] == {"kv_cache_report_mode": "full"} for each in full)
        assert gateway.metric("lean_selector_gateway_full_reports_total") == len(full)
        if version == "0.33.0":
            wait_until(lambda: accuracy(gateway) >= 0.99, "the index is what the engine has")
            assert len(full) > 0
            assert not any("vllm_xargs" in each for each in bodies(worker)[-SESSIONS:])
        else:
            assert full == []
            assert accuracy(gateway) < 0.96
