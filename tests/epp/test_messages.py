"""The codec beside Envoy's own definitions: golden bytes, and a random play both ways."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.epp import messages
from tests.epp.envoy_messages import pb

KINDS = {
    messages.REQUEST_HEADERS: "request_headers",
    messages.RESPONSE_HEADERS: "response_headers",
    messages.REQUEST_BODY: "request_body",
    messages.RESPONSE_BODY: "response_body",
    messages.REQUEST_TRAILERS: "request_trailers",
    messages.RESPONSE_TRAILERS: "response_trailers",
}
BODIES = (messages.REQUEST_BODY, messages.RESPONSE_BODY)
HEADERS = (messages.REQUEST_HEADERS, messages.RESPONSE_HEADERS)
names = st.binary(min_size=1, max_size=300).map(lambda data: data.hex().encode())
texts = st.binary(max_size=300)
SUBSET, SERVED = (f"x-gateway-destination-endpoint-{word}" for word in ("subset", "served"))


def response(data: bytes) -> Any:
    """As Envoy reads it."""
    return pb.ProcessingResponse.FromString(data)


def test_the_numbers_are_those_of_the_definition() -> None:
    fields = {field.name: field.number for field in pb.ProcessingRequest.DESCRIPTOR.fields}
    assert {name: number for number, name in KINDS.items()}.items() <= fields.items()
    answers = {field.name: field.number for field in pb.ProcessingResponse.DESCRIPTOR.fields}
    assert all(answers[name] == number - 1 for number, name in KINDS.items())


# -- what is read ----------------------------------------------------------------------------------


@given(headers=st.dictionaries(names, texts, max_size=20), is_last=st.booleans())
def test_headers_are_read(headers: dict[bytes, bytes], is_last: bool) -> None:
    for kind in HEADERS:
        request = pb.ProcessingRequest()
        told = getattr(request, KINDS[kind])
        told.end_of_stream = is_last
        told.SetInParent()
        for name, text in headers.items():
            told.headers.headers.add(key=name.decode(), raw_value=text)
        read = messages.ProcessingRequest(request.SerializeToString())
        assert read.kind == kind
        assert messages.headers_of(read.payload) == (headers, is_last)


def test_a_text_that_is_not_raw_is_read_too() -> None:
    request = pb.ProcessingRequest()
    request.request_headers.headers.headers.add(key=":path", value="/x")
    read = messages.ProcessingRequest(request.SerializeToString())
    assert messages.headers_of(read.payload) == ({b":path": b"/x"}, False)


@given(
    kind=st.sampled_from(BODIES),
    body=st.binary(max_size=2000),
    is_last=st.booleans(),
    modes=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    observes=st.booleans(),
)
def test_bodies_and_modes_are_read(
    kind: int, body: bytes, is_last: bool, modes: tuple[int, int] | None, observes: bool
) -> None:
    request = pb.ProcessingRequest(observability_mode=observes)
    told = getattr(request, KINDS[kind])
    told.body, told.end_of_stream = body, is_last
    told.SetInParent()
    if modes is not None:
        request.protocol_config.request_body_mode = modes[0]
        request.protocol_config.response_body_mode = modes[1]
        request.protocol_config.SetInParent()
        request.protocol_config.send_body_without_waiting_for_header_response = True
    request.attributes["x"].update({"y": "z"})
    read = messages.ProcessingRequest(request.SerializeToString())
    assert (read.kind, read.modes, read.observes) == (kind, modes, observes)
    assert messages.body_of(read.payload) == (body, is_last)


@given(st.none() | st.lists(st.text("0123456789.:", min_size=1), max_size=5), st.booleans())
def test_a_subset_is_a_list_or_a_text(endpoints: list[str] | None, is_text: bool) -> None:
    request = pb.ProcessingRequest()
    filters = request.metadata_context.filter_metadata
    filters["envoy.lb"].update({"other": 1.0, SERVED: "10.0.0.1:8000"})
    if endpoints is not None:
        told: Any = " , ".join(endpoints) if is_text else endpoints
        filters["envoy.lb.subset_hint"].update({"a": {"b": [1]}, SUBSET: told})
    metadata = messages.ProcessingRequest(request.SerializeToString()).metadata
    expected = None if endpoints is None else [each.encode() for each in endpoints]
    assert messages.subset_of(metadata) == expected
    assert messages.served_of(metadata) == b"10.0.0.1:8000"


@given(st.binary(max_size=200))
def test_anything_else_is_read_or_malformed(data: bytes) -> None:
    try:
        request = messages.ProcessingRequest(data)
        messages.body_of(request.payload)
        messages.headers_of(request.payload)
        messages.subset_of(request.metadata)
        messages.served_of(request.metadata)
        messages.health_service(data)
    except messages.Malformed:
        return


@pytest.mark.parametrize("data", [
    *(b"\x0a\x05abc", b"\x0a", b"\x80", b"\x0b", b"\x00\x00", b"\x09abc", b"\x0a" + b"\xff" * 11),
])  # fmt: skip
def test_what_is_cut_or_of_another_form_is_malformed(data: bytes) -> None:
    with pytest.raises(messages.Malformed):
        list(messages.fields(data))


def test_nesting_does_not_exhaust_the_stack() -> None:
    value = b""
    for _ in range(5_000):
        value = messages.part(6, messages.part(1, value))
    entry = messages.part(1, messages.part(1, SUBSET.encode()) + messages.part(2, value))
    hint = messages.part(1, b"envoy.lb.subset_hint") + messages.part(2, entry)
    assert messages.subset_of(messages.part(1, hint)) == []


# -- what is written -------------------------------------------------------------------------------


@given(st.sampled_from(BODIES), st.integers(0, 140_000), st.booleans())
def test_a_body_is_sent_on_in_pieces_and_ends_once(kind: int, size: int, is_last: bool) -> None:
    body = (b"0123456789abcdef" * 8751)[:size]
    answers = [response(data) for data in messages.pieces(kind, body, is_last)]
    told = [
        getattr(answer, KINDS[kind]).response.body_mutation.streamed_response for answer in answers
    ]
    assert b"".join(each.body for each in told) == body
    assert [each.end_of_stream for each in told] == [False] * (len(told) - 1) + [is_last] * bool(
        told
    )
    assert all(len(each.body) <= messages.MOST_PIECE for each in told)
    assert bool(told) == bool(body or is_last)
    for data, answer in zip(messages.pieces(kind, body, is_last), answers, strict=True):
        assert data == answer.SerializeToString()


def test_what_passes_unchanged_has_no_mutation() -> None:
    for kind, name in KINDS.items():
        expected = pb.ProcessingResponse()
        getattr(expected, name).SetInParent()
        assert messages.unchanged(kind) == expected.SerializeToString()


@given(
    st.sampled_from((messages.REQUEST_HEADERS, messages.REQUEST_BODY)),
    st.dictionaries(names, texts, max_size=4),
    st.lists(names, max_size=3),
)
def test_the_endpoint_is_told_in_a_header_and_in_the_metadata(
    kind: int, headers: dict[bytes, bytes], removed: list[bytes]
) -> None:
    endpoint = b"[fd00::2]:8000,10.0.0.2:8000"
    headers[messages.DESTINATION] = endpoint
    answer = response(messages.destination(kind, headers, removed))
    told = getattr(answer, KINDS[kind]).response
    assert told.clear_route_cache
    assert [
        (each.header.key.encode(), each.header.raw_value)
        for each in told.header_mutation.set_headers
    ] == list(headers.items())
    assert {each.append_action for each in told.header_mutation.set_headers} == {2}  # overwrites
    assert [each.encode() for each in told.header_mutation.remove_headers] == removed
    lb = answer.dynamic_metadata["envoy.lb"]
    assert lb["x-gateway-destination-endpoint"] == endpoint.decode()
    assert not told.HasField("body_mutation")


def test_golden_bytes() -> None:
    """As Envoy 1.40 has them, whatever the installed definitions say."""
    assert messages.unchanged(messages.REQUEST_HEADERS) == b"\x0a\x00"
    assert messages.pieces(messages.RESPONSE_BODY, b"hi", True) == [
        b"\x22\x0c\x0a\x0a\x1a\x08\x1a\x06\x0a\x02hi\x10\x01"
    ]
    assert messages.immediate(429, b"{}", {b"a": b"b"}) == (
        b"\x3a\x17\x0a\x03\x08\xad\x03\x12\x0c\x0a\x0a\x0a\x06\x0a\x01a\x1a\x01b\x18\x02\x1a\x02{}"
    )
    assert response(messages.immediate(503, b"x", {})).immediate_response.status.code == 503
