"""What a request says is read, or refused with a status and words that say why."""

from collections.abc import Callable

import msgspec
import pytest

from lean_selector.api.bodies import (
    MSGPACK,
    NOT_JSON,
    TOO_LARGE,
    BadBody,
    BadQuery,
    body_reader,
    query_of,
    reservation_id_param,
    shape_fault,
    worker_id_param,
)
from lean_selector.core.errors import BadRequest
from lean_selector.http.head import Request
from lean_selector.wire.selection_bodies import PromptFields
from tests.support.gates import answered, request, selection_gate


class Numbers(msgspec.Struct):
    numbers: list[float]


class Anything(msgspec.Struct):
    """Takes any object."""


read_numbers, read_anything = body_reader(Numbers), body_reader(Anything)
read_prompt = body_reader(PromptFields)


def post(body: bytes, content_type: bytes | None = b"application/json") -> Numbers:
    return read_numbers(request("POST", "/", body, content_type=content_type))


# More names are in the recordings.
@pytest.mark.parametrize("content_type", [b"application/json;", b"application/problem+JSON ; a=b"])
def test_json_is_read_under_any_of_its_names(content_type: bytes) -> None:
    assert post(b'{"numbers":[1,2.5]}', content_type) == Numbers([1, 2.5])


@pytest.mark.parametrize("content_type", [b"application/json+x", b"json", MSGPACK])
def test_what_is_not_called_json_is_not_looked_at(content_type: bytes) -> None:
    with pytest.raises(BadBody, match=NOT_JSON) as refused:
        post(b"\xff", content_type)
    assert refused.value.status == 415


@pytest.mark.parametrize("content_type", [b"application/json", MSGPACK])
def test_a_body_that_was_too_large_to_keep_is_413(content_type: bytes) -> None:
    asked = request("POST", "/", content_type=content_type)
    asked.body_too_large = True
    with pytest.raises(BadBody, match=TOO_LARGE) as refused:
        read_prompt(asked)
    assert refused.value.status == 413


BROKEN = {  # beside those that the recordings have
    "nothing": b"",
    "blanks": b" \n",
    "single quotes": b"{'a':1}",
    "Infinity": b'{"a":-Infinity}',
    "half an escape": b'{"a":"\\u12"}',
    "bytes after the value": b"{} x",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "bad UTF-8 in an ignored string": b'{"a":"\xff"}',
    "bad UTF-8 in an ignored key": b'{"\xc3\x28":1}',
    "overlong UTF-8": b'{"a":"\xc0\xaf"}',
    "surrogate in UTF-8": b'{"a":"\xed\xa0\x80"}',
    "deep nesting": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep nesting in objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "comment": b"{} // x",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("read", [read_anything, read_prompt])
def test_what_is_no_json_is_400(read: Callable[[Request], object], text: bytes) -> None:
    with pytest.raises(BadBody, match="Failed to parse the request body as JSON: ") as refused:
        read(request("POST", "/", text))
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b'{"numbers":["a"]}', b'{"numbers":["a"]}}'])
def test_a_wrong_shape_is_422_and_names_the_field(body: bytes) -> None:
    asked = request("POST", "/", body)
    with pytest.raises(msgspec.ValidationError) as error:
        read_numbers(asked)
    refused = shape_fault(asked, error.value)
    assert refused.status == 422
    assert "$.numbers" in refused.message


# Queries.


def test_a_request_without_a_query_names_nothing() -> None:
    assert query_of(request("GET", "/")) == {}
    assert query_of(request("GET", "/", query=b"")) == {}


def test_a_routing_group_is_another_name_of_the_tenant() -> None:
    for query in (b"tenant_id=a", b"routing_group=a", b"routing_group=a&tenant_id=a"):
        assert query_of(request("GET", "/", query=query)) == {"tenant_id": "a"}
    with pytest.raises(BadQuery, match="must not differ"):
        query_of(request("GET", "/", query=b"routing_group=a&tenant_id=b"))


def test_a_known_field_stands_once_and_others_as_often_as_they_like() -> None:
    assert query_of(request("GET", "/", query=b"x=1&x=2&model_name=m")) == {"model_name": "m"}
    with pytest.raises(BadQuery, match="duplicate field `model_name`"):
        query_of(request("GET", "/", query=b"model_name=m&model_name=m"))


# Ids in a path.


@pytest.mark.parametrize(
    ("param", "worker_id"),
    [
        *((b"0", 0), (b"007", 7), (b"%37", 7), (b"+7", 7), (b"18446744073709551615", 2**64 - 1)),
        *((b"0" * 5000 + b"7", 7), (b"0" * 25, 0)),
    ],
)
def test_a_worker_id_is_a_u64_in_digits(param: bytes, worker_id: int) -> None:
    assert worker_id_param(param) == worker_id


@pytest.mark.parametrize(
    "param",
    [
        *(b"", b"-1", b"+", b"1.0", b"1_0", b"0x1", b"1%20", b"%", b"%zz", b"%D9%A1", b"%ff"),
        *(b"18446744073709551616", b"9" * 5000, "٣".encode()),
    ],
)
def test_what_is_no_worker_id_is_400(param: bytes) -> None:
    with pytest.raises(BadRequest, match="Invalid URL"):
        worker_id_param(param)


@pytest.mark.parametrize(
    ("param", "text"),
    [
        *((b"a%2Fb", "a/b"), (b"%C3%A4", "ä"), (b"a+b", "a+b"), (b"%zz", "%zz"), (b"%", "%")),
        *((b"a%20b", "a b"), (b"", "")),
    ],
)
def test_a_reservation_id_is_any_text(param: bytes, text: str) -> None:
    assert reservation_id_param(param) == text


@pytest.mark.parametrize("param", [b"%FF", b"%C3", b"a%ED%A0%80"])
def test_a_reservation_id_that_is_no_utf_8_is_400(param: bytes) -> None:
    with pytest.raises(BadRequest, match="Invalid UTF-8 in `reservation_id`"):
        reservation_id_param(param)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/select", "selection_id"),
        ("/select_and_reserve", "reservation_id"),
        ("/reservations", "reservation_id"),
    ],
)
def test_an_id_fits_into_a_path(path: str, field: str) -> None:
    gate = selection_gate()
    worker = b'{"worker_id":1,"endpoint":"http://w","block_size":16}'
    assert answered(gate, request("POST", "/workers", worker))[0] == 201
    for length, status in ((4096, 201 if path == "/reservations" else 200), (4097, 422)):
        fields = {"token_ids": [1] * 16, "worker_id": 1, field: "\u00e9" * length}
        found, answer = answered(gate, request("POST", path, msgspec.json.encode(fields)))
        assert found == status
        assert (field.encode() in answer and b"4096" in answer) is (status == 422)
