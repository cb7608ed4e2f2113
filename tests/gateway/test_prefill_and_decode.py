"""A gateway before workers that only prefill and workers that only decode: what clients get."""

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from tests.gateway.running_gateway import Answer, RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import wait_until

TEXT = "The quick brown fox jumps over the lazy dog. " * 100


class Fleet:
    """Prefill and decode workers, and a gateway before them."""

    def __init__(self, prefill: int = 1, decode: int = 1, *flags: str, **options: Any) -> None:
        options = {"transfers": True, **options}
        self.prefill = [OpenAiWorker(**options) for _ in range(prefill)]
        self.decode = [OpenAiWorker(**options) for _ in range(decode)]
        named = [("--prefill", each.url) for each in self.prefill]
        named += [("--decode", each.url) for each in self.decode]
        urls = [part for pair in named for part in pair]
        self.gateway = RunningGateway(*urls, *flags, knows=len(named))
        self._texts = 0

    def __enter__(self) -> "Fleet":
        with ExitStack() as stack:
            for each in self.workers:
                stack.enter_context(each)
            stack.enter_context(self.gateway)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def workers(self) -> list[OpenAiWorker]:
        return [*self.prefill, *self.decode]

    def chat(self, **fields: Any) -> Answer:
        """A chat that nobody asked before."""
        self._texts += 1
        return self.gateway.chat(f"{self._texts} {TEXT}", **fields)

    def begin(self, running: ExitStack, text: str, **fake: Any) -> None:
        """Asks for a stream of which a worker does something odd."""
        self.gateway.begin(running, f"{text} {TEXT}", fake=fake)

    def active(self) -> tuple[list[int], list[int]]:
        """Requests at each prefill worker, and at each decode worker."""
        gateway = self.gateway
        ids = {each["endpoint"]: each["worker_id"] for each in gateway.api("GET", "/workers")}
        (loads,) = gateway.api("GET", "/loads")
        rows = {each["worker_id"]: each["active_requests"] for each in loads["loads"]}
        prefill, decode = (
            [rows[ids[each.url]] for each in workers] for workers in (self.prefill, self.decode)
        )
        return prefill, decode

    def ejected(self) -> list[str]:
        workers = self.gateway.api("GET", "/workers")
        return [each["endpoint"] for each in workers if each.get("ejected_ranks")]

    def reports(self, outcome: str) -> float:
        """Outcomes of requests so far, of all workers."""
        samples = parsed(scrape(self.gateway.api_port))
        name = "lean_selector_worker_reports_total"
        return value(samples, name, outcome=outcome) if samples.get(name) else 0

    def wait_until_heard(self) -> None:
        """What the workers published: the next choice counts with it."""

        def is_heard() -> bool:
            told = sorted(each.seen()["published_batches"] for each in self.workers)
            rows = self.gateway.api("GET", "/kv_sources")
            heard = sorted(0 if row["last_seq"] is None else row["last_seq"] + 1 for row in rows)
            return heard == told and all(row["lag_batches"] == 0 for row in rows)

        wait_until(is_heard, "the workers' events are applied")

    def check(self) -> None:
        """What must hold whatever happened: nothing wrong, and nothing sent twice."""
        self.gateway.wait_until_free()
        for each in self.workers:
            if each.process is not None:
                assert each.process.poll() is None
                seen = each.seen()
                assert (seen["poisoned"], max(seen["pulls"], default=0) <= 1) == (0, True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(2, 2) as fleet:
        yield fleet


PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 8},
    "/v1/completions": {"max_tokens": 8},
    "/v1/messages": {"max_tokens": 8},
    "/v1/responses": {"max_output_tokens": 8},
}


def asked(path: str, text: str) -> dict[str, Any]:
    """The body of a request with this prompt."""
    messages = [{"role": "user", "content": text}]
    prompts = {"completions": {"prompt": text}, "responses": {"input": text}}
    prompt = prompts.get(path.removeprefix("/v1/"), {"messages": messages})
    return {"model": "m", **prompt, **PATHS[path]}


def legs(worker: OpenAiWorker, request_id: str) -> list[dict[str, Any]]:
    """The bodies of this request that a worker was sent."""
    return [
        json.loads(each["body"])
        for each in worker.seen()["requests"]
        if each["headers"].get("x-request-id") == request_id
    ]


def texts(value: Any) -> str:
    """All that an answer, or the events of a stream, say."""
    if isinstance(value, list):
        return "".join(map(texts, value))
    if not isinstance(value, dict) or value.get("type") in ("response.completed", "message"):
        of_message = value.get("content", []) if isinstance(value, dict) else []
        return texts(of_message)
    found = [value[name] for name in ("text", "content") if isinstance(value.get(name), str)]
    if isinstance(value.get("delta"), str):
        found.append(value["delta"])
    return "".join(found) + "".join(texts(each) for each in value.values())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_the_answer_of_a_pair_is_that_of_one_worker(fleet: Fleet, path: str, streams: bool) -> None:
    gateway, request_id = fleet.gateway, f"{path}-{streams}"
    body = asked(path, f"{request_id} {TEXT}") | {"stream": streams, "n": 1, "temperature": 0}
    answer = gateway.ask("POST", path, body, {"x-request-id": request_id})
    assert (answer.status, answer.headers["x-lean-pd"]) == (200, "pair; uncached")
    (prefill,) = (each for each in fleet.prefill if legs(each, request_id))
    (decode,) = (each for each in fleet.decode if legs(each, request_id))
    named = [answer.headers[name] for name in ("x-lean-prefill-worker", "x-lean-worker")]
    assert named == [prefill.url, decode.url]
    alone = gateway.ask("POST", path, body, {"x-request-id": request_id})  # D has it now
    assert (alone.headers["x-lean-pd"], alone.headers["x-lean-worker"]) == (
        "local; cached",
        decode.url,
    )
    assert text_of(answer) == text_of(alone) != ""
    ((first,), (second, _)) = (legs(each, request_id) for each in (prefill, decode))
    asks, params = first.pop("kv_transfer_params"), second.pop("kv_transfer_params")
    assert (asks["do_remote_decode"], params["do_remote_prefill"]) == (True, True)
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    assert (first.pop("stream"), first.pop(most), second.pop(most)) == (False, 1, 8)
    assert second.pop("stream") == streams
    second.pop("stream_options", None)
    assert first == second
    fleet.check()


def text_of(answer: Answer) -> str:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return texts(answer.json())
    lines = [each for each in answer.body.decode().split("\n") if each.startswith("data: {")]
    return texts([json.loads(each.removeprefix("data: ")) for each in lines])


def test_cached_tokens_are_the_prefill_worker_s_and_as_predicted(fleet: Fleet) -> None:
    """What the decode worker says of them is none of its own cache's (router#193)."""
    gateway = fleet.gateway
    names = [
        f"lean_selector_gateway_compared_{each}_tokens_total" for each in ("cached", "predicted")
    ]
    before = [gateway.metric(name) for name in names]
    for number in range(4):
        turns = [{"role": "user", "content": f"cached {number} {TEXT}"}]
        for turn in range(3):
            body = {"model": "m", "messages": turns, "max_tokens": 24, "session_id": f"{number}"}
            answer = gateway.ask("POST", "/v1/chat/completions", body)
            assert answer.headers["x-lean-pd"] == "pair; uncached"
            said = answer.json()["choices"][0]["message"]
            turns += [said, {"role": "user", "content": f"{turn} {TEXT}"}]
            fleet.wait_until_heard()
    cached, predicted = (gateway.metric(n) - b for n, b in zip(names, before, strict=True))
    assert cached > 4 * 4_500
    assert abs(predicted - cached) <= 0.01 * cached
    for stage in ("prefill", "transfer", "first_token"):
        text = gateway.child.request("GET", "/metrics")[1].decode()
        assert f'lean_selector_gateway_pair_seconds_count{{stage="{stage}"}}' in text


def test_the_prefill_worker_s_load_ends_with_its_answer(fleet: Fleet) -> None:
    """It is not held through the decode (llm-d-router#2174), and the decode worker has its own
    from the choice on, so two requests go to two (aibrix#2070)."""
    with ExitStack() as running:
        for number in range(2):
            fleet.begin(running, f"load {number}", prefill={"stall_after": 0})
        wait_until(lambda: fleet.active() == ([1, 1], [1, 1]), "both prefill")
    fleet.gateway.wait_until_free()
    with ExitStack() as running:
        fleet.begin(running, "load", decode={"stall_after": 1})
        wait_until(lambda: sorted(fleet.active()[1]) == [0, 1], "one decodes")
        wait_until(lambda: fleet.active()[0] == [0, 0], "and none prefills")
    fleet.check()


def test_why_no_pair_serves_a_request_is_in_its_answer_and_counted(fleet: Fleet) -> None:
    """llm-d-router#792"""
    answer = fleet.gateway.ask("POST", "/v1/embeddings", {"model": "m", "input": TEXT})
    assert answer.headers["x-lean-pd"] == "local; no_output"
    assert answer.headers["x-lean-worker"] in [each.url for each in fleet.decode]
    text = fleet.gateway.child.request("GET", "/metrics")[1].decode()
    assert 'lean_selector_pairs_total{reason="no_output"} 1' in text


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_prefill_worker_that_dies_between_the_legs_costs_no_request(
    path: str, streams: bool
) -> None:
    """What the decode worker says before it has the blocks is not passed on."""
    with Fleet(2, 1) as fleet:
        dying = fleet.prefill[0]
        assert dying.process is not None
        fake = {str(dying.port): {"dies_after": True}}
        number = 0
        while dying.process.poll() is None:
            number += 1
            body = {**asked(path, f"it dies {number} {TEXT}"), "stream": streams, "fake": fake}
            answer = fleet.gateway.ask("POST", path, body)
            assert answer.status == 200
            assert b"error" not in answer.body
            assert text_of(answer)
        dying.kill()
        assert fleet.reports("failed") == 0
        if path != "/v1/chat/completions" or streams:
            fleet.check()
            return
        answers = [fleet.chat() for _ in range(4)]
        assert {each.status for each in answers} == {200}
        assert {each.headers["x-lean-prefill-worker"] for each in answers} == {fleet.prefill[1].url}
        dying.start()  # its engine has another id now
        wait_until(
            lambda: fleet.chat().headers.get("x-lean-prefill-worker") == dying.url, "it is back"
        )
        fleet.check()
        assert fleet.decode[0].url not in fleet.ejected()


def test_decode_workers_that_come_and_go() -> None:
    """A dead one costs no request: another gets the same params. And without any of them nothing
    is served, but as soon as one is back, it is (dynamo#8965)."""
    with Fleet(1, 2, "--worker-health-interval-secs", "0.2") as fleet:
        fleet.decode[0].kill()
        answers = [fleet.chat() for _ in range(6)]
        assert {each.status for each in answers} == {200}
        assert {each.headers["x-lean-worker"] for each in answers} == {fleet.decode[1].url}
        assert fleet.prefill[0].seen()["legs"] == 6  # none ran twice
        fleet.decode[1].kill()
        assert fleet.chat().status in (502, 503)
        fleet.decode[0].start()
        wait_until(lambda: fleet.chat().status == 200, "one is back")
        fleet.check()


@pytest.mark.parametrize("fallback", ["refuse", "local"])
def test_without_a_prefill_worker_a_decode_worker_prefills_only_if_it_may(fallback: str) -> None:
    """llm-d-router#2427. And one without a connector is as none, and is no success."""
    with Fleet(1, 1, "--pd-fallback", fallback, transfers=False) as fleet:
        answer = fleet.chat()
        assert fleet.reports("ok") == (fallback == "local")
        if fallback == "local":
            assert (answer.status, answer.headers["x-lean-pd"]) == (200, "local; no_params")
        else:
            assert (answer.status, answer.json()["error"]["code"]) == (502, "bad_gateway")
            assert "no usable kv_transfer_params" in answer.json()["error"]["message"]
        [worker_id] = [
            each["worker_id"]
            for each in fleet.gateway.api("GET", "/workers")
            if each["endpoint"] == fleet.prefill[0].url
        ]
        fleet.gateway.api("DELETE", f"/workers/{worker_id}")
        answer = fleet.chat()
        if fallback == "local":
            assert (answer.status, answer.headers["x-lean-pd"]) == (200, "local; no_prefill_worker")
        else:
            assert (answer.status, answer.json()["error"]["code"]) == (503, "no_pair")
            assert "no_prefill_worker" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
        assert (
            fleet.gateway.ask("POST", "/v1/embeddings", {"model": "m", "input": "x"}).status == 200
        )
        fleet.check()


def test_a_worker_of_another_model_is_no_partner() -> None:
    """aibrix#2605"""
    with ExitStack() as running:
        prefill = running.enter_context(OpenAiWorker(transfers=True))
        other = running.enter_context(OpenAiWorker("x", transfers=True))
        urls = ("--prefill", prefill.url, "--decode", other.url)
        gateway = running.enter_context(RunningGateway(*urls, knows=2))
        assert gateway.chat(TEXT).status == 503
        assert not [e for e in other.seen()["requests"] if e["line"].startswith("POST")]


def test_whatever_happens_no_text_is_wrong_and_nothing_stays_behind() -> None:
    """Clients that leave, workers that refuse, fail and die, all at once."""
    rng = random.Random(43)
    manners: list[dict[str, Any]] = [
        *({}, {}, {"prefill": {"status": 503}}, {"prefill": {"status": 500}}),
        *({"prefill": {"breaks": True}}, {"prefill": {"lacks_params": True}}),
        *({"decode": {"status": 500}}, {"decode": {"status": 429}}, {"decode": {"breaks": True}}),
        *({"prefill": {"stall_after": 0}}, {"decode": {"stall_after": 1}}),
    ]
    with Fleet(2, 2, "--worker-health-interval-secs", "0.2", lease_s=1.0) as fleet:

        def client(seed: int) -> None:
            own = random.Random(seed)
            for number in range(12):
                fake = own.choice(manners)
                stalls = "stall_after" in str(fake)
                text = f"{seed} {number} {TEXT}"
                body = {"model": "m", "prompt": text, "max_tokens": 8, "fake": fake}
                connection = http.client.HTTPConnection("127.0.0.1", fleet.gateway.port, timeout=60)
                with closing(connection):
                    body["stream"] = own.random() < 0.5
                    connection.request("POST", "/v1/completions", json.dumps(body))
                    if stalls:
                        time.sleep(own.random() / 10)
                        continue
                    with suppress(http.client.HTTPException):
                        answer = connection.getresponse()
                        if answer.status == 200:
                            assert b"wrong" not in answer.read()

        threads = ThreadPoolExecutor(8)
        asked = [threads.submit(client, seed) for seed in range(8)]
        for _ in range(3):
            dying = rng.choice(fleet.workers)
            dying.kill()
            dying.start()
        for each in asked:
            each.result()
        threads.shutdown()
        fleet.check()
        wait_until(
            lambda: not sum(each.seen()["leases"] for each in fleet.prefill), "no blocks are held"
        )
        wait_until(lambda: fleet.chat().status == 200, "it serves")
