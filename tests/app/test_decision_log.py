"""What was chosen, and what came of it, as lines of a log that are those of a trace too."""

import errno
import json
import os
from pathlib import Path
from urllib.request import urlopen

import pytest

from lean_selector.app.decision_log import DecisionLog, RotatingFile, span_ids
from lean_selector.app.host import StartError
from lean_selector.core.errors import Conflict
from lean_selector.core.hashing import sequence_hashes_bytes
from lean_selector.core.index.shapes import Tier
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.gateway.access_logs import LogEnds
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, pack
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
    assert max(one) < 2**32
    assert span_ids(b"", size) == []


def logged(service: RunningService) -> float:
    with urlopen(f"http://127.0.0.1:{service.port}/metrics") as answer:
        text = answer.read().decode()
    return float(text.split("\nlean_selector_decision_log_requests_total ")[1].split("\n")[0])


class LoggedSelector(DrivenSelector):
    """With a decision log, one block of 512 tokens a prompt, and a clock that is set."""

    def __init__(self, path: Path, most_bytes: int = 1 << 20, share: float = 1.0) -> None:
        self.at = 0.0
        log = DecisionLog(str(path), share, RouterSettings(), None, lambda: self.at, most_bytes)
        super().__init__(decisions=log)
        self.log = log
        self.selector.ledgers.events = log
        self.register(1)

    def serve(self, *names: str) -> None:
        for name in names:
            self.book(name, hashes=[1, 2])
            self.selector.reservations.free(name, self.at)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_has_what_came_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    logged = LoggedSelector(tmp_path / "log")
    logged.register(2)
    logged.now = 1.0
    logged.book("a", hashes=[1, 2])
    selector = logged.selector
    selector.reservations.prefill_complete("a", 3.5, 2.25)
    selector.reservations.output_block("a", None, 4.0)
    logged.at = 6.0
    selector.reservations.end("a", "ok", 4, 6.0)
    logged.log.close()
    header, text = lines_of(tmp_path / "log")
    assert header == '{"decision_log":1,"share":1.0,"settings":{}}'
    line = json.loads(text)
    golden = (
        '{"timestamp":1001000.0,"input_length":16,"output_length":4,"hash_ids":[0],'
        f'"model":"default","tenant":"default","worker":{line["worker"]},"prefill_ms":2500.0,'
        '"ttft_ms":2250.0,"ended_ms":5000.0,"cached":0,"engine_cached":4}'
    )
    assert text == golden


def test_a_log_goes_on_behind_what_there_is_and_begins_anew_at_its_size(tmp_path: Path) -> None:
    path, before = tmp_path / "log", tmp_path / "log.1"
    for most_bytes in (1 << 20, 1 << 20):
        logged = LoggedSelector(path, most_bytes)
        logged.serve("a", "b")
        logged.log.close()
    assert len(lines_of(path)) == 6  # each process has a header
    most = path.stat().st_size
    logged = LoggedSelector(path, most)
    for name in map(str, range(20)):
        logged.serve(name)
        logged.log.hand_over()
        logged.log._file.flush(60.0)
    logged.log.close()
    for each in (path, before):
        assert each.stat().st_size <= most
        first, *rest = map(json.loads, lines_of(each))
        assert "decision_log" in first
        assert rest
        assert all("hash_ids" in line for line in rest)
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"]


def test_a_line_that_cannot_be_written_is_counted_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    file = RotatingFile(str(path), 1 << 20, b"{}\n")
    whole = os.write
    left = [5]

    def full(descriptor: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "full")
        return whole(descriptor, data[: left.pop()])

    monkeypatch.setattr(os, "write", full)
    file.write("lost line")
    assert file.flush(10.0)
    monkeypatch.undo()
    file.write("next")
    assert file.flush(10.0)
    assert lines_of(path) == ["{}", "next"]
    assert file.failed == 1


def test_a_share_of_the_requests_is_logged_and_what_is_not_booked_is_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logged = LoggedSelector(path, share=0.5)
    logged.serve(*(f"request {number}" for number in range(200)))
    logged.log.close()
    assert 60 < logged.log.requests < 140
    assert len(lines_of(path)) == 1 + logged.log.requests
    logged = LoggedSelector(tmp_path / "other")
    logged.book("a", hashes=[1])
    with pytest.raises(Conflict):
        logged.book("a", hashes=[2])
    logged.serve("b")
    logged.selector.reservations.free("a", 0.0)
    logged.log.close()
    assert logged.log.requests == 2


def test_a_line_of_an_access_log_tells_who_served_a_request(tmp_path: Path) -> None:
    logged = LoggedSelector(tmp_path / "log")
    logged.log.keeps_matches = True
    logged.register(2)
    store_blocks(logged.partition.index, (2, 0), Tier.DEVICE, None, [11], pack([1]))
    for name in ("elsewhere", "here", "unknown"):
        logged.book(name, hashes=[1, 2], pin=(1, 0))
    lines = LogEnds(
        logged.selector,
        lambda: 0.0,
        logged.log.served,
    )
    lines.take(b'lean-end reservation=elsewhere worker=2 ttft="0.010, 0.250" status=200')
    lines.take(b"lean-end reservation=here worker=1 ttft=- status=200")
    lines.take(b"lean-end reservation=unknown worker=9 status=200")
    lines.take(b"lean-end reservation=none worker=2 ttft=soon status=200")
    logged.log.close()
    elsewhere, here, unknown = map(json.loads, lines_of(tmp_path / "log")[1:])
    fields = ("worker", "selected", "cached", "ttft_ms")
    assert [elsewhere.get(field) for field in fields] == [2, 1, 4, 250.0]
    assert [here.get(field) for field in fields] == [1, None, 0, None]
    assert [unknown.get(field) for field in fields] == [9, 1, None, None]
    assert lines.results["malformed"] == 1


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError):
        DecisionLog(str(tmp_path / "none" / "t"), 1.0, RouterSettings(), None)


def test_a_pair_is_one_line(tmp_path: Path) -> None:
    """Of its decode worker, with who did the prefill and what was cached there."""
    logged = LoggedSelector(tmp_path / "log")
    logged.register(1, worker_role="prefill")
    logged.register(2, worker_role="decode")
    store_blocks(logged.partition.index, (1, 0), Tier.DEVICE, None, [1], pack([1]))
    logged.book("a", hashes=[1, 2], isl_tokens=512, disaggregate="always")
    logged.selector.reservations.end("a", "ok", 4, 1.0)
    logged.log.close()
    (text,) = lines_of(tmp_path / "log")[1:]
    line = json.loads(text)
    assert (line["worker"], line["prefill_worker"], line["cached"]) == (2, 1, 4)
    assert line["engine_cached"] == 4
