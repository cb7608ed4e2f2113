"""Who is asked when nobody chooses, and when a model is known not to be there."""

from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.directory import Directory, Row
from lean_selector.gateway.rotation import Rotation

ONE, TWO = "http://a:1", "http://b:1"


def directory(*named: str) -> Directory:
    return Directory(named, Rotation(EjectionSettings(), 0.0))


def test_a_worker_that_cannot_be_chosen_yet_serves_its_model_in_turn() -> None:
    workers = directory(ONE, TWO)
    workers.take([Row(1, "m", ONE, can_be_chosen=False), Row(2, "n", TWO)])
    assert not workers.is_complete
    assert workers.may_serve("m") == [ONE]
    workers.take([Row(1, "m", ONE), Row(2, "n", TWO)])
    assert workers.is_complete


def test_base_urls_of_workers_are_known_by_their_ids() -> None:
    workers = directory(ONE)
    workers.take([Row(1, "m", ONE + "/v1"), Row(2, "m", TWO), Row(3, "m", TWO)])
    assert workers.bases_of({2, 3}) == [TWO]
    assert workers.bases_of({1, 2}) == [ONE, TWO]
    assert workers.bases_of({9}) == []


def test_workers_that_were_only_found_may_be_joined_by_others() -> None:
    workers = directory()
    workers.take([Row(1, "m", ONE)])
    assert not workers.is_complete
    assert workers.may_serve("another") is None
