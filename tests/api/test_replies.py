"""Answers of handlers as whole responses."""

from math import nan

from lean_selector.api.replies import LaterReply, Queued, Reply, reply, sent
from lean_selector.core.errors import Unavailable
from lean_selector.core.selection.queue import Queue
from lean_selector.core.selection.router_settings import CostTerms
from lean_selector.core.selection.shapes import Overlap, Placement, SelectionRequest
from lean_selector.http.response import encode_response
from lean_selector.wire.scalars import JsonText
from tests.support.driven_selector import prompt_of

TERMS = CostTerms(1.0, 0.0, 1.0, 0.0, True)


def parts(answer: object) -> tuple[bytes, bytes, bytes]:
    """Status, content type and body of a finished answer, whose length is what it says."""
    assert isinstance(answer, (bytes, bytearray))
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    fields = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:])
    assert int(fields[b"content-length"]) == len(body)
    return head[9:12], fields[b"content-type"].strip(), body


def test_an_answer_is_json_and_keeps_its_header_lines() -> None:
    assert parts(reply(201, {"a": 1})) == (b"201", b"application/json", b'{"a":1}')
    assert b"\r\nallow: GET\r\n" in reply(405, "no", b"allow: GET\r\n")
    assert sent(201, {"a": 1}) == reply(201, {"a": 1})


def test_a_part_that_is_json_already_is_sent_as_it_is() -> None:
    body = {"workers": JsonText(b'[{"worker_id":1}]'), "no number": nan}
    assert parts(sent(200, body))[2] == b'{"workers":[{"worker_id":1}],"no number":null}'


def test_a_handler_may_choose_its_status() -> None:
    assert sent(200, Reply(503, [])) == reply(503, [])


def test_a_finished_answer_is_sent_as_it_is() -> None:
    made = encode_response(200, b'{"a":1}')
    assert sent(200, made) is made


def test_an_answer_that_comes_later_has_the_form_of_one_that_comes_at_once() -> None:
    later = LaterReply()
    assert sent(200, later) is later
    later.answer(404, {"a": 1})
    assert later.response == reply(404, {"a": 1})


def test_what_goes_wrong_with_an_answer_is_not_the_matter_of_who_lets_it_go() -> None:
    def broken(placed: Placement) -> object:
        raise RuntimeError("a bug")

    def refused(placed: Placement) -> object:
        raise Unavailable("not here")

    for shape, told in [
        (broken, (b"500", b'{"error":"internal error"}')),
        (refused, (b"503", b'{"error":"not here"}')),
    ]:
        waiting = Queue().add(SelectionRequest(prompt_of([], 1), TERMS), 0.0)
        answer = sent(200, Queued(waiting, shape, lambda: 0.0, 0))
        assert isinstance(answer, LaterReply)
        waiting.set_answer(Placement(1, 0, "", 4, Overlap(0, 0, {}, 0, 0), 0))
        assert parts(answer.response)[::2] == told
