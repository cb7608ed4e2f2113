"""Bodies judged as a whole: exactly as value by value, but without a step of Python for each."""

import json

import msgspec
import pytest

from lean_selector.api.bodies import LONG_BODY_BYTES, MSGPACK
from lean_selector.wire.body_text import (
    COSTLY_BODY_BYTES,
    MOST_COSTLY_NUMBERS,
    MOST_ESCAPES,
    MOST_PACKED,
    MOST_STRINGS_AND_LISTS,
    MOST_VALUES,
    has_costly_numbers,
    json_excess,
    messagepack_excess,
)
from lean_selector.wire.scalars import KEPT_BYTES, hashes_from_integers, hashes_from_json
from tests.support.gates import answered, request, selection_gate
from tests.support.operations import lines_run


def test_a_quote_may_fall_anywhere_in_a_long_text() -> None:
    for length in range(1, 6):
        strings = ",".join(['"' + "1e999" * 5 + "x" * length + '"'] * 20_000)
        assert not has_costly_numbers(f"[{strings},1e5]".encode())
        assert has_costly_numbers(f"[{strings}{',1e100' * 1001}]".encode())


def listed(item: bytes, length: int, last: bytes | None = None) -> bytes:
    count = length // (len(item) + 1)
    return b"[" + (item + b",") * count + (item if last is None else last) + b"]"


# What was walked over in Python, or read a number at a time by a parser that is slow at it.
SLOW_VALUES = {
    "ints and a string": (b"1", b'"x"'),
    "strings": (b'""', b"5"),
    "strings like numbers": (b'"1e999"', b"5"),
    "escapes": (b'"\\"\\\\"', b"5"),
    "negative": (b"-1", None),
    "floats": (b"1.5", None),
    "an int too large": (b"1", b"9223372036854775808"),
    "lists": (b"[]", None),
    "nested lists": (b"[" * 300 + b"]" * 300, None),
    "objects": (b'{"a":1}', None),
    "ints of hundreds of digits": (b"1" * 300, None),
}
FIELDS = ("token_ids", "block_hashes", "sequence_hashes", "routing_constraints", "unknown")


@pytest.mark.parametrize(("item", "last"), SLOW_VALUES.values(), ids=SLOW_VALUES)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", ["/select", "/reservations"])
def test_a_body_costs_no_step_for_each_of_its_values(
    path: str, field: str, item: bytes, last: bytes | None
) -> None:
    gate = selection_gate()
    statuses = set()

    def post(length: int) -> None:
        body = b'{"isl_tokens":"x","%b":%b}' % (field.encode(), listed(item, length, last))
        statuses.add(answered(gate, request("POST", path, body))[0])

    post(100_000)  # what is made once is made
    few, many = lines_run(post, 100_000), lines_run(post, 800_000)
    assert statuses <= {400, 422}
    assert many <= few + 40 * (700_000 // KEPT_BYTES + 1), "a list is read in pieces"


@pytest.mark.parametrize(
    "item", [b"\x01", b"\xa1x", b"\x90", b"\x81\x01\x02", b"\xcb" + b"\x40" * 8, b"\xff"]
)
def test_a_body_in_messagepack_costs_no_step_for_each_of_its_values(item: bytes) -> None:
    gate = selection_gate()
    statuses = set()

    def post(count: int) -> None:
        body = b"\x81\xa9token_ids\xdd" + (count + 1).to_bytes(4, "big") + item * count + b"\xc0"
        asked = request("POST", "/select", body, content_type=MSGPACK)
        statuses.add(answered(gate, asked)[0])

    post(10_000)
    few, many = lines_run(post, 10_000), lines_run(post, 80_000)
    assert statuses == {422}
    assert many <= few + 30  # of what is done once for a long one


def test_hashes_of_either_sign_cost_no_step_for_each() -> None:
    def packed(count: int) -> None:
        hashes_from_integers("f", [-1, 2**64 - 1] * count)
        with pytest.raises(msgspec.ValidationError, match="of 64 bits"):
            hashes_from_integers("f", [1] * count + [2**64])
        with pytest.raises(msgspec.ValidationError, match=r"at `\$.f`"):
            hashes_from_json("f", msgspec.Raw(json.dumps([1] * count + [2**63, 2**64]).encode()))

    for count in (4100, 9 * 4096 + 4):  # what is made once is made, patterns among it
        packed(count)
    few, many = lines_run(packed, 4100), lines_run(packed, 9 * 4096 + 4)
    assert many <= few + 200  # 4 096 are looked at together, and at most as many one by one
    assert hashes_from_integers("f", [-1, 2**64 - 1, 0]) == b"\xff" * 16 + bytes(8)


# -- numbers that are slow to parse (D32) ----------------------------------------------------------


@pytest.mark.parametrize("number", [b"1e308", b"1E+308", b"-2.5e-310", b"1e0000308"])
def test_more_than_a_thousand_costly_numbers_are_refused(number: bytes) -> None:
    gate = selection_gate()
    for count, status in ((MOST_COSTLY_NUMBERS, 422), (MOST_COSTLY_NUMBERS + 1, 400)):
        taints = b",".join(b'"t%d":%b' % (i, number) for i in range(count))
        body = b'{"model_name":5,"pad":"%b","routing_constraints":{"preferred_taints":{%b}}}' % (
            b"x" * LONG_BODY_BYTES,
            taints,
        )
        answer = answered(gate, request("POST", "/select", body))
        assert answer[0] == status, answer
        assert (b"numbers with an exponent" in answer[1]) is (status == 400)


@pytest.mark.parametrize(
    "item", [b'"1e308"', b'"\\"1e308"', b"1e99", b"true", b'"e"', b"1.5", b"10", b'"bee100"']
)
def test_other_values_may_be_as_many_as_they_like(item: bytes) -> None:
    assert not has_costly_numbers(listed(item, 100_000))


def test_a_body_of_tokens_is_hardly_looked_at() -> None:
    body = b'{"model_name":"m","token_ids":%b,"isl_tokens":5}' % listed(b"12345", 500_000)
    assert lines_run(has_costly_numbers, body) < 50


# -- bodies that would hold the loop ---------------------------------------------------------------


def many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]" + b" " * COSTLY_BODY_BYTES


@pytest.mark.parametrize(
    ("item", "most"),
    [
        (b"[]", MOST_STRINGS_AND_LISTS - 1),  # the list that they stand in is one
        *((b'"x"', MOST_STRINGS_AND_LISTS - 1), (b'{"a":[]}', MOST_STRINGS_AND_LISTS // 2 - 1)),
        *((b"1", MOST_VALUES + 1), (b"null", MOST_VALUES + 1)),
    ],
)
def test_a_long_body_may_have_so_many_values_and_no_more(item: bytes, most: int) -> None:
    assert json_excess(many(item, most)) == ""
    assert "more than" in json_excess(many(item, most + 1))


def test_a_short_body_may_have_any() -> None:
    assert json_excess(many(b"[]", MOST_STRINGS_AND_LISTS + 1)[:-COSTLY_BODY_BYTES]) == ""


def test_what_stands_in_strings_is_no_value() -> None:
    assert json_excess(b'{"x":"%b"}' % (b"[," * MOST_VALUES)) == ""
    assert json_excess(b'{"x":"%b"}' % (b'\\"' * (3 * MOST_STRINGS_AND_LISTS))) == ""
    assert json_excess(b'{"x":"\\"%b"}' % (b"," * (MOST_VALUES + 1))) == ""


def test_escapes_are_bounded() -> None:
    assert json_excess(b'"%b"' % (b"\\n" * MOST_ESCAPES)) == ""
    assert "escapes" in json_excess(b'"%b"' % (b"\\n" * (MOST_ESCAPES + 1)))


def test_a_body_that_has_too_much_is_no_json_for_us() -> None:
    gate = selection_gate()
    body = b'{"token_ids":[1],"x":%b}' % many(b"[]", MOST_STRINGS_AND_LISTS)
    status, answer = answered(gate, request("POST", "/select", body))
    assert (status, str(MOST_STRINGS_AND_LISTS).encode() in answer) == (400, True)


@pytest.mark.parametrize("name", ["token_ids", "block_hashes"])
def test_a_list_that_is_packed_is_bounded_too(name: str) -> None:
    gate = selection_gate()
    for count, said in ((MOST_PACKED, False), (MOST_PACKED + 1, True)):
        body = b'{"%b":%b}' % (name.encode(), many(b"1", count).rstrip())
        answer = answered(gate, request("POST", "/select", body))
        assert (answer[0], f"{name} has more than {MOST_PACKED}".encode() in answer[1]) == (
            400 if said else 503,
            said,
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_mm_infos": [None] * COSTLY_BODY_BYTES}, "block_mm_infos"),
        ({"mm_routing_info": {"block_mm_infos": [[]] * 2**19}}, "block_mm_infos"),
        ({"mm_routing_info": {"routing_token_ids": [1] * (MOST_VALUES + 1)}}, "routing_token_ids"),
        ({"token_ids": [1] * (MOST_VALUES + 1)}, "token_ids"),
        ({"token_ids": [1] * MOST_VALUES}, ""),
        ({"mm_routing_info": {}, "pad": b"x" * COSTLY_BODY_BYTES}, ""),
        ({"unknown": [None] * 2**20}, ""),
        ({f"f{number}": number for number in range(60_000)}, "fields"),
        ({"block_hashes": b"x" * 2**20}, ""),
    ],
)
def test_fields_of_a_messagepack_body_are_bounded(fields: dict[str, object], said: str) -> None:
    body = msgspec.msgpack.encode(fields)
    excess = messagepack_excess(body, frozenset({"block_mm_infos", "token_ids", "block_hashes"}))
    assert ("more than" in excess) == (said != "")
    assert said in excess


def test_what_is_no_messagepack_is_left_to_its_decoder() -> None:
    body = b"\xc1" * COSTLY_BODY_BYTES
    assert messagepack_excess(body, frozenset()) == ""
    asked = request("POST", "/select", body, content_type=MSGPACK)
    assert answered(selection_gate(), asked)[0] == 400


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"routing_constraints": {"required_taints": [f"t{n}" for n in range(4097)]}},
            "required_taints",
        ),
        (
            {"routing_constraints": {"preferred_taints": {f"t{n}": 1.0 for n in range(4097)}}},
            "preferred_taints",
        ),
        ({"allowed_worker_ids": [1] * 65_537}, "allowed_worker_ids"),
    ],
)
def test_ties_of_a_request_are_bounded(fields: dict[str, object], name: str) -> None:
    gate = selection_gate()
    worker = b'{"worker_id":1,"endpoint":"http://w","block_size":16}'
    assert answered(gate, request("POST", "/workers", worker))[0] == 201
    body = json.dumps({"token_ids": [1] * 16, **fields}).encode()
    status, answer = answered(gate, request("POST", "/select", body))
    assert status == 422
    assert name in json.loads(answer)["error"]
