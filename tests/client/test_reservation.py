"""What a reservation reports, and what it weighs."""

import json

from lean_selector.client.reservation import Reservation


def paths(reservation: Reservation) -> list[str]:
    found = []
    while (call := reservation.next_report()) is not None:
        found.append(call.path.rpartition("/")[2])
        reservation.reported()
    return found


def test_a_report_follows_from_what_the_service_does_not_know() -> None:
    reservation = Reservation(10, reservation_id="r")
    reservation.track_output(4)
    assert paths(reservation) == []
    reservation.output(1)
    assert paths(reservation) == ["prefill_complete"]
    reservation.output(11)  # 21 tokens are five blocks, the prompt's two among them
    assert paths(reservation) == ["output_block"] * 3
    reservation.output(5)  # never goes back
    assert paths(reservation) == []
    reservation.output(99)
    reservation.ended = True
    assert paths(reservation) == []


def test_without_a_block_size_only_prefill_is_reported() -> None:
    reservation = Reservation(10)
    reservation.output(100)
    assert paths(reservation) == ["prefill_complete"]


def test_the_weight_of_a_request_fades_to_nothing() -> None:
    reservation = Reservation(0, reservation_id="r", expected_output_tokens=8)
    reservation.track_output(4)
    reservation.output(12)
    reservation.reported()
    bodies = []
    while (call := reservation.next_report()) is not None:
        bodies.append(json.loads(call.json() or b""))
        reservation.reported()
    assert [body["decay_fraction"] for body in bodies] == [0.5, 0.0, 0.0]
