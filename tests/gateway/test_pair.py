"""What a prefill worker and a decode worker are sent of one request, and who is blamed for what."""

import json
from typing import Any, cast

import pytest

from lean_selector.core.selection.prompt import Prompt
from lean_selector.gateway.answers import Additions
from lean_selector.gateway.model_request import ModelRequest
from lean_selector.gateway.pair import decode_body, prefill_body
from lean_selector.gateway.prompts import Routed
from lean_selector.gateway.proxied_request import State
from lean_selector.http.client import ClientConnection
from tests.gateway.test_proxied_request import EVENT, FAILED, HEAD, PARAMS, BookedUse, Errand
from tests.http.test_protocol import Transport


class Pairing(Errand):
    """A request that a pair serves; its prefill workers answer as the test says."""

    def __init__(self, *, streams: bool = True, **told: Any) -> None:
        super().__init__(Routed("m", "default", PROMPT, b"{}", None, streams=streams, **told))
        self.legs: list[BookedUse] = []

    def prefilled(self, prefill: int, decode: int, told: object = None) -> BookedUse:
        """The prefill worker has answered. Return the use of the decode worker."""
        leg, worker, _ = self.sent_to_pair(prefill, decode)
        self.legs.append(leg)
        use = cast(BookedUse, self.of.use)
        usage = {"prompt_tokens": 99, "completion_tokens": 1}
        usage["prompt_tokens_details"] = {"cached_tokens": 48}  # type: ignore[assignment]
        answer = {"usage": usage, "kv_transfer_params": PARAMS} if told is None else told
        text = json.dumps(answer).encode()
        worker.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        return use

    def decodes(self, use: BookedUse | None = None, requests: int = 0) -> ClientConnection:
        """It is sent to the decode worker, with params that it had not before."""
        if use is not None:
            self.of.take_over(use)
        assert self.of.use is not None
        worker, transport = ClientConnection(self.of.use.endpoint), Transport()
        worker.connection_made(transport)
        worker.requests = requests
        self.of.sent(worker)
        body = json.loads(transport.take().partition(b"\r\n\r\n")[2])
        assert body == {"kv_transfer_params": PARAMS}
        return worker


PROMPT = Prompt(96, b"", 6, b"", bytes, None, 0)
BAD_IDS: list[object] = [None, [], [[]], [[], []], "12", [["1"]]]
ERROR = b"HTTP/1.1 %d x\r\ncontent-length: 2\r\n\r\n{}"


def test_a_pair_is_served_by_both_and_its_legs_end_when_they_do() -> None:
    errand = Pairing()
    use = errand.prefilled(1, 2)
    assert (errand.legs[0].told, use.told) == (["begun", "freed ok"], [])
    assert errand.transport.writes == []
    worker = errand.decodes()
    worker.data_received(HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))
    assert use.told == ["begun", "freed ok"]
    head = errand.transport.take().partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert {b"x-lean-worker: http://w2:1", b"x-lean-prefill-worker: http://w1:1"} <= set(head)
    counts = errand.of._counts
    assert (counts.compared_cached_tokens, counts.compared_prompt_tokens) == (48, 96)
    assert [sum(each.buckets) for each in counts.pair_stages.values()] == [1, 1, 1]


def test_what_the_decode_worker_says_of_cached_tokens_is_not_compared() -> None:
    errand = Pairing(streams=False)
    errand.prefilled(1, 2, {"usage": {"prompt_tokens": 99}, "kv_transfer_params": PARAMS})
    text = b'{"usage":{"prompt_tokens":99,"completion_tokens":2,"cached_tokens":99}}'
    errand.decodes().data_received(
        b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n" % len(text) + text
    )
    assert errand.of.is_over
    assert errand.of._counts.compared_prompt_tokens == 0
    assert errand.of.timing is not None
    assert (errand.of.timing.lengths, errand.of.timing.cached_tokens) == ((99, 2), None)


def test_a_refused_connection_moves_the_params_to_one_other_decode_worker() -> None:
    errand = Pairing()
    first = errand.prefilled(1, 2)
    errand.of.refused("connection refused")
    assert (first.told, errand.of.tried, errand.of.held is not None) == (
        ["freed refused"],
        {"http://w2:1"},
        True,
    )
    second = errand.use(3)
    errand.of.refused("connection refused")
    assert (second.told, errand.of.held) == (["freed refused"], None)
    assert errand.judged == ["refused", "refused"]
    errand.prefilled(1, 4)  # both legs anew
    errand.decodes()


@pytest.mark.parametrize("when", ["refused", "found"])
def test_params_that_are_old_are_sent_to_nobody(when: str) -> None:
    errand = Pairing()
    use = errand.prefilled(1, 2)
    held = errand.of.held
    assert held is not None
    told = [held.are_old]
    held.answered_at -= 20.5
    assert [*told, held.are_old] == [False, True]
    if when == "refused":
        errand.of.refused("connection refused")
        assert errand.judged == ["refused"]
    else:
        errand.of.run_anew()
        assert (use.told, errand.judged, errand.of.tried) == (["freed None"], [], set())
    assert (errand.of.held, errand.of.state) == (None, State.LOOKING)


def test_a_kept_connection_that_ends_may_have_used_the_params() -> None:
    errand = Pairing()
    use = errand.prefilled(1, 2)
    errand.decodes(requests=1).connection_lost(None)
    assert (errand.of.held, use.told, errand.of.tried) == (None, ["freed None"], set())


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'


@pytest.mark.parametrize(
    "answer", [ERROR % 500, FAILED % 500, ROLE + FAILED % 500, ROLE, CREATED, b"data: [DONE]\n\n"]
)
def test_a_500_with_params_is_nobody_s_fault_until_both_legs_were_run_anew(answer: bytes) -> None:
    """Neither is blamed for the first, and both are not for the second (SMG blames both)."""
    if not answer.startswith(b"HTTP"):
        answer = HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer), answer)
    errand = Pairing()
    first = errand.prefilled(1, 2)
    errand.decodes().data_received(answer)
    assert (first.told, errand.judged, errand.of.held) == (["freed None"], [], None)
    assert errand.of.tried == set()
    assert errand.of.doubted == {"http://w1:1", "http://w2:1"}
    second = errand.prefilled(3, 2)
    errand.decodes().data_received(answer)
    assert errand.of.is_over
    assert errand.transport.take().startswith(answer[:12])
    assert second.told[-1] == "freed failed"


@pytest.mark.parametrize("event", [b"", ROLE, CREATED, EVENT])
def test_a_stream_that_breaks_off_before_its_first_token_is_as_a_500(event: bytes) -> None:
    """vLLM's `/v1/responses` does so if the blocks cannot be fetched."""
    errand = Pairing()
    use = errand.prefilled(1, 2)
    worker = errand.decodes()
    worker.data_received(HEAD + (b"%x\r\n%b\r\n" % (len(event), event) if event else b""))
    worker.connection_lost(None)
    if event == EVENT:
        assert (use.told, errand.of.is_over) == (["begun", "freed failed"], True)
    else:
        assert (use.told, errand.judged, errand.of.held) == (["freed None"], [], None)
        assert errand.transport.writes == []


def test_an_answer_that_a_decode_worker_cuts_off_counts_against_it() -> None:
    errand = Pairing(streams=False)
    use = errand.prefilled(1, 2)
    worker = errand.decodes()
    worker.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
    worker.connection_lost(None)
    assert (use.told, errand.of.tried) == (["freed failed"], {"http://w2:1"})


@pytest.mark.parametrize("status", [400, 404, 501])
def test_what_a_prefill_worker_says_of_the_request_is_the_answer(status: int) -> None:
    errand = Pairing()
    leg, worker, _ = errand.sent_to_pair(1, 2)
    use = cast(BookedUse, errand.of.use)
    worker.data_received(ERROR % status)
    outcome = "failed" if status > 500 else "ok"
    assert (leg.told, use.told) == ([f"freed {outcome}"], ["freed None"])
    assert (errand.of.is_over, errand.of.status, errand.judged) == (True, status, [outcome])
    assert b"\r\nx-lean-worker: http://w1:1\r\n" in errand.transport.take()


def test_what_a_decode_worker_says_of_the_request_is_the_answer() -> None:
    """And nobody's fault (sglang#25811)."""
    errand = Pairing()
    use = errand.prefilled(1, 2)
    errand.decodes().data_received(ERROR % 400)
    assert (use.told, errand.of.status, errand.judged) == (["freed ok"], 400, [])


@pytest.mark.parametrize("answer", [ERROR % 503, ERROR % 500, b""])
def test_another_pair_is_tried_if_the_prefill_worker_fails(answer: bytes) -> None:
    errand = Pairing()
    leg, worker, _ = errand.sent_to_pair(1, 2)
    use = cast(BookedUse, errand.of.use)
    if answer:
        worker.data_received(answer)
    else:
        worker.connection_lost(None)
    outcome = None if b"503" in answer else "failed"
    assert (leg.told, use.told) == ([f"freed {outcome}"], ["freed None"])
    assert (errand.of.tried, errand.of.state) == ({"http://w1:1"}, State.LOOKING)


def test_an_answer_to_a_prefill_that_is_too_long_is_no_answer() -> None:
    errand = Pairing()
    leg, worker, _ = errand.sent_to_pair(1, 2)
    worker.data_received(b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
    while not leg.is_over:
        worker.data_received(b"x" * (1 << 20))
    assert leg.told == ["freed failed"]


@pytest.mark.parametrize(
    "params",
    [
        None,
        "a text",
        [],
        {},
        {**PARAMS, "do_remote_prefill": False},
        *({**PARAMS, "remote_block_ids": ids} for ids in BAD_IDS),
        *({**PARAMS, name: ""} for name in ("remote_engine_id", "remote_request_id")),
        {name: value for name, value in PARAMS.items() if name != "remote_host"},
    ],
)
def test_params_that_end_an_engine_are_sent_to_none(params: object) -> None:
    errand = Pairing()
    use = errand.prefilled(1, 2, {"kv_transfer_params": params})
    assert (errand.legs[0].told, use.told, errand.judged) == (["freed None"], ["freed None"], [])
    assert (errand.of.held, errand.of.state) == (None, State.LOOKING)
    assert errand.of.routed is not None
    assert errand.of.routed.bars_pair == "no_params"


@pytest.mark.parametrize("leaves", ["in the first leg", "between them", "in the second"])
def test_a_client_who_leaves_ends_what_is_under_way(leaves: str) -> None:
    """The worker need not go on, and no blocks stay held for long (llm-d#1138)."""
    errand = Pairing()
    leg, worker, transport = errand.sent_to_pair(1, 2)
    use = cast(BookedUse, errand.of.use)
    if leaves != "in the first leg":
        text = json.dumps({"kv_transfer_params": PARAMS}).encode()
        worker.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        assert worker.is_free
    if leaves == "in the second":
        transport = cast(Any, errand.decodes())._transport
    errand.client.connection_lost(None)
    assert (leg.is_over, use.told, errand.of.is_over) == (True, ["freed None"], True)
    assert (transport.state == "aborted") is (leaves != "between them")


@pytest.mark.parametrize("leg", [1, 2])
def test_the_time_to_the_first_byte_is_that_of_both_legs(leg: int) -> None:
    errand = Pairing()
    if leg == 1:
        _, _, transport = errand.sent_to_pair(1, 2)
    else:
        errand.prefilled(1, 2)
        transport = cast(Any, errand.decodes())._transport
    errand.of.time_out(0.5)
    assert (transport.state, errand.of.status, errand.judged) == ("aborted", 504, [])
    assert b"http://w%d:1 did not answer" % leg in errand.transport.take()


def test_the_prompt_is_learned_of_the_prefill_worker_s_answer() -> None:
    additions, learned = Additions(), list[tuple[bytes | None, bytes]]()
    request = ModelRequest("/v1/chat/completions", b'{"model":"m","messages":[],"stream":true}')
    additions.ask_for_ids(request, lambda prompt, output: learned.append((prompt, output)))
    errand = Pairing(additions=additions)
    errand.prefilled(1, 2, {"prompt_token_ids": [7, 8], "kv_transfer_params": PARAMS})
    assert learned == [(b"7, 8", b"")]


# -- bodies ---------------------------------------------------------------------------------------


def test_the_prefill_worker_s_body_is_the_client_s_but_for_the_length_of_the_answer() -> None:
    told: dict[str, object] = {
        **{"model": "m", "messages": [], "tools": [{}], "response_format": {}, "seed": 1},
        **{"cache_salt": "s", "temperature": 0.5, "return_token_ids": True},
    }
    of_answer = {"stream": True, "stream_options": {}, "min_tokens": 5, "n": 2, "max_tokens": 9}
    body = json.dumps({**told, **of_answer, "kv_transfer_params": None}).encode()
    given = json.loads(prefill_body(b"\xef\xbb\xbf" + body, b"/v1/chat/completions"))
    asked = given.pop("kv_transfer_params")
    assert given == {**told, "stream": False, "n": 1, "max_tokens": 1}
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    given = json.loads(decode_body(body, b'{"a":1}'))
    assert given == {**told, **of_answer, "kv_transfer_params": {"a": 1}}
    body = b'{"input":"x","max_completion_tokens":7}'
    given = json.loads(prefill_body(body, b"/v1/responses"))
    assert (given["max_output_tokens"], given["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("chat/completions", {"messages": [], "n": 2, "logprobs": True, "tools": [{}]}, ""),
        ("completions", {"prompt": ["one"]}, ""),
        ("completions", {"prompt": ["one", "two"]}, "several_prompts"),
        ("completions", {"prompt": "one", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"prompt": "one", "use_beam_search": True}, "beam_search"),
        ("completions", {"prompt": "one", "prompt_embeds": "x"}, "several_prompts"),
        ("completions", {"prompt_embeds": "x"}, "form"),
        ("embeddings", {"input": "one"}, "no_output"),
        ("responses", {"input": "one"}, ""),
        ("responses", {"input": "one", "background": True}, "kept_by_engine"),
        ("responses", {"input": "one", "previous_response_id": "r"}, "kept_by_engine"),
    ],
)
def test_some_requests_get_no_pair(path: str, fields: dict[str, Any], told: str) -> None:
    assert ModelRequest(f"/v1/{path}", json.dumps(fields).encode()).bars_pair == told
