"""Bookings as lines of a trace, which a simulation reads."""

import json
from pathlib import Path

import pytest

from lean_selector.core.hashing import sequence_hashes_bytes
from lean_selector.server.host import StartError
from lean_selector.server.trace_recorder import TraceRecorder, span_ids
from lean_selector.tools.trace import trace_lines
from tests.support.driven_selector import DrivenSelector
from tests.support.running_service import RunningService


def chain(*local: int) -> bytes:
    return sequence_hashes_bytes(b"".join(each.to_bytes(8, "little") for each in local))


@pytest.mark.parametrize("size", [16, 512, 768, 2_048])
def test_equal_beginnings_have_equal_ids_and_others_have_none_in_common(size: int) -> None:
    blocks = 3 * 2_048 // size
    one = span_ids(chain(*range(1, blocks + 1)), size)
    other = span_ids(chain(*range(1, blocks), 99_999), size)
    assert len(one) == len(set(one)) == 12
    alike = sum(first == second for first, second in zip(one, other, strict=True))
    assert alike == 12 - max(1, -(-size // 512)) == len(set(one) & set(other))
    assert max(one) < 2**53
    assert span_ids(b"", size) == []


def test_a_service_records_what_it_serves(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with RunningService("--use-kv-events", "false", "--record-trace", str(trace)) as service:
        worker = {"worker_id": 1, "model_name": "m", "endpoint": "http://w", "block_size": 16}
        assert service.request("POST", "/workers", worker)[0] == 201
        for name, first in (("a", 1), ("b", 1), ("c", 2)):
            tokens = [first, *range(1_039)]
            body = {"model_name": "m", "token_ids": tokens, "reservation_id": name}
            assert service.request("POST", "/select_and_reserve", body)[0] == 200
            assert service.request("POST", f"/reservations/{name}/output_block", {})[0] < 300
            assert service.request("DELETE", f"/reservations/{name}")[0] < 300
    a, b, c = trace_lines(trace)
    assert (a.input_length, a.output_length, len(a.hash_ids)) == (1_040, 16, 3)
    assert a.hash_ids == b.hash_ids
    assert not set(a.hash_ids) & set(c.hash_ids)
    assert a.timestamp <= b.timestamp <= c.timestamp


def test_a_recording_ends_at_its_size_and_goes_on_behind_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for requests, most_bytes in ((2, 1 << 20), (3, 1 << 20), (1, 10)):
        driven = DrivenSelector()
        recorder = TraceRecorder(str(path), most_bytes, None, lambda: 1.0)
        driven.selector.ledgers.events = recorder
        driven.register(1)
        for number in range(requests):
            driven.book(f"{number}", hashes=[1, 2])
            driven.selector.free(f"{number}", 0.0)
        recorder.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["timestamp"] for line in lines] == [1_000.0] * 5


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError):
        TraceRecorder(str(tmp_path / "none" / "t"), 1, None)
