"""An answer says the same in JSON and in MessagePack."""

from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.wire.answer_forms import (
    LONGEST_TRANSCODED,
    JsonText,
    json_form,
    messagepack_form,
    messagepack_of,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def unpacked(body: object) -> Any:
    packed = messagepack_form(body)
    assert packed is not None
    return msgspec.msgpack.decode(packed)


@given(values)
def test_both_forms_say_the_same(body: object) -> None:
    assert unpacked(body) == msgspec.json.decode(json_form(body))


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_what_is_no_number_in_json_is_null_in_both(value: float) -> None:
    assert json_form([value, 1.5]) == b"[null,1.5]"
    assert unpacked([value, 1.5]) == [None, 1.5]


def test_a_part_that_is_kept_as_json_stands_in_either_form() -> None:
    body = {"workers": JsonText(b'[{"worker_id":1}]')}
    assert json_form(body) == b'{"workers":[{"worker_id":1}]}'
    assert unpacked(body) == {"workers": [{"worker_id": 1}]}
    assert messagepack_of(b"[1]") == b"\x91\x01"


def test_a_long_text_stays_json() -> None:
    text = b'"' + b"x" * (LONGEST_TRANSCODED - 2) + b'"'
    assert unpacked({"a": JsonText(text)}) == {"a": "x" * (LONGEST_TRANSCODED - 2)}
    assert messagepack_form({"a": JsonText(text + b" ")}) is None
    assert messagepack_of(text + b" ") is None


def test_a_long_answer_that_is_not_kept_as_text_is_packed() -> None:
    body = ["x" * 1000] * 1000
    assert unpacked(body) == body


def test_an_integer_beyond_64_bits_stays_json() -> None:
    assert json_form([2**64]) == b"[18446744073709551616]"
    assert messagepack_form([2**64]) is None
