"""What a selector knew, written and read back: the same. And files that are not as written."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lean_selector.app.peer_access import check_worker
from lean_selector.app.state import OtherService, restore_catalog, restore_reservation
from lean_selector.app.state_files import CATALOG, RESERVATIONS, StateDirectory, opened, sealed
from lean_selector.core.load.shapes import BusyThreshold, ReservationSpec
from lean_selector.core.replication.shapes import LiveReservation
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.core.settings import API_1_3
from lean_selector.http.allowed_endpoints import AllowedEndpoints
from tests.app.kept_selector import Kept
from tests.support.driven_selector import DrivenSelector, pack

SCOPE = ("m", "default")


def spec(worker_id: int = 1, **fields: object) -> WorkerSpec:
    fields = {"model_name": "m", "endpoint": "http://w", "block_size": 4, **fields}
    return WorkerSpec(worker_id=worker_id, **fields)  # type: ignore[arg-type]


def book(
    kept: Kept, request_id: str, now: float, router_id: int | None = None, **fields: object
) -> None:
    """As a call here did, or a peer."""
    spec = ReservationSpec(request_id, 1, 0, **fields)  # type: ignore[arg-type]
    live = LiveReservation(*SCOPE, 4, 0, spec, pack([1, 2]), False, now)
    assert restore_reservation(kept.selector, live, router_id)


def filled(path: Path) -> Kept:
    """Two workers, a threshold, a booking of ours and one of a peer."""
    kept = Kept(path)
    kept.selector.upsert_worker(spec(1, taints=frozenset({"a", "b"}), data_parallel_size=2), 0.0)
    kept.selector.upsert_worker(spec(2, block_size=8), 0.0)
    kept.selector.change_threshold(SCOPE, BusyThreshold(active_prefill_tokens=9), 0.0)
    book(kept, "ours", 10.0, prefill_tokens=5, expected_output_tokens=3, lora_name="l")
    book(kept, "theirs", 20.0, 99, prefill_tokens=7)
    kept.selector.reservations.prefill_complete("theirs", 20.0)
    return kept


def told(kept: Kept) -> object:
    """All that can be asked of it."""
    partitions = kept.selector.catalog.partitions
    return (
        [worker.shown(API_1_3) for worker in kept.selector.catalog.matching(None, None)],
        kept.selector.thresholds(),
        {
            key: (each.block_size, each.members, each.established)
            for key, each in partitions.items()
        },
        {
            held.request_id: (
                *held.rank_load.key,
                *(held.prefill_tokens, held.prefill_done, held.router_id, held.block_count),
            )
            for each in partitions.values()
            for held in each.slots.reservations.values()
        },
    )


def test_a_selector_is_what_it_was(tmp_path: Path) -> None:
    before = filled(tmp_path)
    before.save(30.0, 1000.0)
    after = Kept(tmp_path)
    assert after.restore(500.0, 1000.0) == (2, 0)
    assert told(after) == told(before)
    assert after.driven.told == []  # no peer hears of it


def test_a_worker_that_did_not_fit_its_partition_does_not_now(tmp_path: Path) -> None:
    """Also where it is the only one that is left of those that fixed the block size."""
    before = Kept(tmp_path)
    before.selector.upsert_worker(spec(1), 0.0)
    before.selector.upsert_worker(spec(1, block_size=8), 0.0)
    assert before.selector.catalog.workers[1].reasons
    before.save(0.0)
    after = Kept(tmp_path)
    after.restore(0.0)
    assert told(after) == told(before)
    after.selector.remove_worker(1, 0.0)
    assert after.selector.catalog.partitions == {}


def test_a_size_that_no_restored_worker_has_is_free(tmp_path: Path) -> None:
    """The worker that held it is no longer allowed."""
    before = Kept(tmp_path)
    before.selector.upsert_worker(spec(1, endpoint="http://w1"), 0.0)
    before.selector.upsert_worker(spec(2, endpoint="http://w2"), 0.0)
    before.selector.upsert_worker(spec(2, endpoint="http://w2", block_size=8), 0.0)
    before.save(0.0)
    check = partial(check_worker, AllowedEndpoints(["w2"]))
    after = Kept(tmp_path, DrivenSelector(check_worker=check))
    after.restore(0.0)
    workers = after.selector.catalog.workers
    assert {each: workers[each].lifecycle for each in workers} == {2: "schedulable"}


def test_a_restored_id_is_taken_and_can_be_ended(tmp_path: Path) -> None:
    filled(tmp_path).save(30.0)
    after = Kept(tmp_path)
    after.restore(30.0)
    partition = after.selector.catalog.partitions[SCOPE]
    assert after.selector.reservations.local_holder("ours") is partition
    after.selector.reservations.free("ours", 31.0)
    assert after.driven.told == [("freed", "ours")]
    assert list(partition.slots.reservations) == ["theirs"]


def test_an_id_is_ours_once_in_the_process(tmp_path: Path) -> None:
    """Also where a file says otherwise (D4)."""
    kept = filled(tmp_path)
    kept.selector.upsert_worker(spec(3, model_name="n"), 0.0)
    live = LiveReservation("n", "default", 4, 0, ReservationSpec("ours", 3, 0), b"", False, 1.0)
    assert not restore_reservation(kept.selector, live, None)
    assert restore_reservation(kept.selector, live, 99)  # a peer's copy may have it
    assert (
        kept.selector.reservations.local_holder("ours") is kept.selector.catalog.partitions[SCOPE]
    )


def test_reservations_keep_their_age(tmp_path: Path) -> None:
    before = filled(tmp_path)
    before.save(30.0, 1000.0)  # 20 s after the touch of ours, 10 s after that of the copy
    after = Kept(tmp_path)
    assert after.restore(500.0, 1060.0) == (2, 0)
    slots = after.selector.catalog.partitions[SCOPE].slots
    assert slots.reservations["ours"].touched_at == 420.0
    assert slots.reservations["theirs"].touched_at == 430.0
    gone = [held.request_id for _, held in after.selector.reservations.expire(720.5, 10)]
    assert gone == ["ours"]
    assert [held.request_id for _, held in after.selector.reservations.expire(790.5, 10)] == [
        "theirs"
    ]


def test_what_expired_while_nobody_ran_is_not_restored(tmp_path: Path) -> None:
    filled(tmp_path).save(30.0, 1000.0)
    after = Kept(tmp_path)
    assert after.restore(0.0, 1285.0) == (1, 1)  # ours is 305 s old, the copy 295 s
    assert list(after.selector.catalog.partitions[SCOPE].slots.reservations) == ["theirs"]


def test_a_threshold_of_a_model_without_workers_waits_for_them(tmp_path: Path) -> None:
    before = filled(tmp_path)
    for worker_id in (1, 2):
        before.selector.remove_worker(worker_id, 40.0)
    before.save(40.0)
    after = Kept(tmp_path)
    assert after.restore(40.0) == (0, 0)
    assert after.selector.thresholds() == []
    after.selector.upsert_worker(spec(), 41.0)
    [(_, threshold)] = after.selector.thresholds()
    assert threshold.active_prefill_tokens == 9


def test_what_a_mistyped_flag_keeps_out_is_kept_beside(tmp_path: Path) -> None:
    before = Kept(tmp_path)
    for worker_id in (1, 2):
        before.selector.upsert_worker(spec(worker_id, endpoint=f"http://w{worker_id}"), 0.0)
    before.save(0.0)
    written = (tmp_path / CATALOG).read_bytes()
    check = partial(check_worker, AllowedEndpoints(["w2"]))
    after = Kept(tmp_path, DrivenSelector(check_worker=check))
    after.restore(0.0)
    assert sorted(after.selector.catalog.workers) == [2]
    after.save(0.0)  # the catalog is written anew
    assert (tmp_path / f"{CATALOG}.unfit").read_bytes() == written


def test_an_empty_directory_restores_nothing(tmp_path: Path) -> None:
    assert Kept(tmp_path).restore(0.0) == (0, 0)


def test_the_directory_of_a_slot_tracker_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    kept = filled(tmp_path)
    kept.save(30.0)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    after = Kept(tmp_path)
    after.contents.service = "slot_tracker"  # type: ignore[assignment,misc]
    with pytest.raises(OtherService, match="has the state of a selector"):
        restore_catalog(after.directory, after.contents, 0.0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


# -- files that are not what was written -----------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole")
    kept = filled(path)
    kept.save(30.0)
    return {name: (path / name).read_bytes() for name in (CATALOG, RESERVATIONS)}


def is_set_aside(directory: StateDirectory, name: str, kept: Kept) -> None:
    """Nothing of it is believed, and it is there to be looked at."""
    aside = Path(directory.path, f"{name}.damaged")
    assert aside.exists()
    aside.unlink()
    assert not Path(directory.path, name).exists()
    assert kept.selector.catalog.workers == {}
    assert kept.selector.limits.own() == []


FLIPS = (0x01, 0x20, 0xFF)


def cut_anywhere(text: bytes) -> Iterator[bytes]:
    return (text[:length] for length in range(len(text)))


def with_any_byte_flipped(text: bytes) -> Iterator[bytes]:
    for at_byte, byte in enumerate(text):
        flipped = byte ^ FLIPS[at_byte % len(FLIPS)]
        yield text[:at_byte] + bytes([flipped]) + text[at_byte + 1 :]


def with_more_behind_it(text: bytes) -> Iterator[bytes]:
    yield text + text


@pytest.mark.parametrize("name", [CATALOG, RESERVATIONS])
@pytest.mark.parametrize("spoiled", [cut_anywhere, with_any_byte_flipped, with_more_behind_it])
def test_a_file_that_is_not_as_it_was_written_is_set_aside(
    tmp_path: Path,
    whole: dict[str, bytes],
    name: str,
    spoiled: Callable[[bytes], Iterator[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept(tmp_path)
    for text in spoiled(whole[name]):
        (tmp_path / name).write_bytes(text)
        assert kept.restore(0.0) == (0, 0)
        is_set_aside(kept.directory, name, kept)
    assert {each.getMessage() for each in caplog.records} == {"damaged state was moved aside"}


def test_a_catalog_of_another_release_is_set_aside_and_its_version_named(
    tmp_path: Path, whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    text, written_at = opened(whole[CATALOG])
    newer = text.replace(b'"version":1', b'"version":2').replace(b'"workers"', b'"fleet"')
    (tmp_path / CATALOG).write_bytes(b"".join(sealed([newer], written_at)))
    Kept(tmp_path).restore(0.0)
    (record,) = caplog.records
    assert "$.version" in vars(record)["reason"]
    assert opened((tmp_path / f"{CATALOG}.damaged").read_bytes())[0] == newer


def test_of_two_files_the_whole_one_counts(tmp_path: Path, whole: dict[str, bytes]) -> None:
    (tmp_path / CATALOG).write_bytes(whole[CATALOG])
    (tmp_path / RESERVATIONS).write_bytes(whole[RESERVATIONS][:-1])
    kept = Kept(tmp_path)
    assert kept.restore(0.0) == (0, 0)
    assert sorted(kept.selector.catalog.workers) == [1, 2]
    (tmp_path / RESERVATIONS).write_bytes(whole[RESERVATIONS])
    (tmp_path / CATALOG).write_bytes(b"")
    kept = Kept(tmp_path)
    assert kept.restore(0.0) == (0, 2)  # there is no rank for them
    assert kept.selector.catalog.workers == {}


def test_a_file_that_cannot_be_read_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / CATALOG).mkdir()
    kept = Kept(tmp_path)
    assert kept.restore(0.0) == (0, 0)
    assert (tmp_path / f"{CATALOG}.damaged").is_dir()


def test_what_does_not_fit_other_settings_is_dropped_alone(tmp_path: Path) -> None:
    filled(tmp_path).save(30.0)
    after = Kept(tmp_path, DrivenSelector(queue_threshold=1.0))  # wants max_num_batched_tokens
    assert after.restore(30.0) == (0, 2)
    assert [w.lifecycle for w in after.selector.catalog.matching(None, None)] == 2 * ["incomplete"]
