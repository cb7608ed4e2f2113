"""What a request says is read, or refused with a status and words that say why."""

import msgspec
import pytest

from lean_selector.core.errors import BadRequest
from lean_selector.service.bodies import (
    LONG_BODY_BYTES,
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
from lean_selector.service.replies import MSGPACK
from lean_selector.wire.selection_bodies import PromptFields
from tests.support.gates import request


class Numbers(msgspec.Struct):
    numbers: list[float]


read_numbers = body_reader(Numbers)
read_prompt = body_reader(PromptFields)


def post(body: bytes, content_type: bytes | None = b"application/json") -> Numbers:
    return read_numbers(request("POST", "/", body, content_type=content_type))


@pytest.mark.parametrize(
    "content_type",
    [
        b"application/json",
        b"Application/JSON; charset=utf-8",
        b"application/vnd.api+json",
    ],
)
def test_json_is_read_under_any_of_its_names(content_type: bytes) -> None:
    assert post(b'{"numbers":[1,2.5]}', content_type) == Numbers([1, 2.5])


@pytest.mark.parametrize("content_type", [None, b"", b"text/json", b"application/jsonp", MSGPACK])
def test_what_is_not_called_json_is_not_looked_at(content_type: bytes | None) -> None:
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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"numbers":[]}x',
        b'{"numbers":[1,]}',
        b'{"other":"\xff","numbers":[]}',
        b'{"other":' + b"[" * 100000,
    ],
)
def test_what_is_no_json_is_400(body: bytes) -> None:
    with pytest.raises(BadBody, match="Failed to parse the request body as JSON: ") as refused:
        post(body)
    assert refused.value.status == 400


def test_a_long_body_full_of_costly_numbers_is_refused_and_a_short_one_is_read() -> None:
    numbers = b"1e-300," * 1001
    short = b'{"numbers":[' + numbers + b"1]}"
    assert len(post(short).numbers) == 1002
    with pytest.raises(BadBody, match="more than 1000 numbers") as refused:
        post(short + b" " * LONG_BODY_BYTES)
    assert refused.value.status == 400


def test_a_prompt_may_come_as_messagepack() -> None:
    fields = {"isl_tokens": 1, "block_hashes": [1], "sequence_hashes": [2]}
    packed = request("POST", "/", msgspec.msgpack.encode(fields), content_type=MSGPACK)
    text = request("POST", "/", msgspec.json.encode(fields))
    assert read_prompt(packed).isl_tokens == read_prompt(text).isl_tokens == 1


def test_what_is_no_messagepack_is_400() -> None:
    with pytest.raises(BadBody, match="Failed to parse the request body as MessagePack: "):
        read_prompt(request("POST", "/", b"\xc1", content_type=MSGPACK))


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param(
            b'{"numbers":["a"]}', 422, r"into the target type: .* at `\$\.numbers", id="shape"
        ),
        pytest.param(b'{"numbers":["a"]}}', 400, "as JSON: ", id="a wrong shape, and broken"),
        pytest.param(b'{"numbers":["a",1e999]}', 400, "out of range", id="no f64"),
    ],
)
def test_a_wrong_shape_is_422_unless_the_body_is_broken_as_a_whole(
    body: bytes, status: int, words: str
) -> None:
    asked = request("POST", "/", body)
    with pytest.raises(msgspec.ValidationError) as error:
        read_numbers(asked)
    with pytest.raises(BadBody, match=words) as refused:
        raise shape_fault(asked, error.value)
    assert refused.value.status == status


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


def test_a_route_may_know_other_fields() -> None:
    asked = request("GET", "/", query=b"detail&model_name=m")
    assert query_of(asked, frozenset({"detail"})) == {"detail": ""}


# Ids in a path.


@pytest.mark.parametrize(
    ("param", "worker_id"),
    [(b"0", 0), (b"007", 7), (b"%37", 7), (b"+7", 7), (b"18446744073709551615", 2**64 - 1)],
)
def test_a_worker_id_is_a_u64_in_digits(param: bytes, worker_id: int) -> None:
    assert worker_id_param(param) == worker_id


@pytest.mark.parametrize(
    "param", [b"", b"-1", b"+", b"1.0", b"1_0", b"18446744073709551616", "٣".encode(), b"%ff"]
)
def test_what_is_no_worker_id_is_400(param: bytes) -> None:
    with pytest.raises(BadRequest, match="Invalid URL"):
        worker_id_param(param)


def test_a_reservation_id_is_any_text() -> None:
    assert reservation_id_param(b"a%2Fb%C3%A4") == "a/bä"
    with pytest.raises(BadRequest, match="Invalid UTF-8 in `reservation_id`"):
        reservation_id_param(b"%ff")
