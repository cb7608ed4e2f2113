"""Who is asked when nobody chooses, and when a model is known not to be there."""

from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.upstreams import Directory, Rotation
from tests.support.driven_selector import DrivenSelector

ONE, TWO = "http://a:1", "http://b:1"


class Known:
    """A directory and the selector whose catalog it reads."""

    def __init__(self, *named: str) -> None:
        self.selector = DrivenSelector(use_kv_events=False)
        rotation = Rotation(EjectionSettings(), 0.0)
        self.directory = Directory(named, rotation, self.selector.selector.catalog)

    def register(self, worker_id: int, model: str, url: str, block_size: int | None = 16) -> None:
        """Without a block size it cannot be chosen."""
        self.selector.register(worker_id, model_name=model, endpoint=url, block_size=block_size)
        self.directory.look()


def test_a_worker_that_cannot_be_chosen_yet_serves_its_model_in_turn() -> None:
    known = Known(ONE, TWO)
    known.register(1, "m", ONE, None)
    known.register(2, "n", TWO)
    assert not known.directory.is_complete
    assert known.directory.may_serve("m") == [ONE]
    known.register(1, "m", ONE)
    assert known.directory.is_complete


def test_base_urls_of_workers_are_known_by_their_ids() -> None:
    known = Known(ONE)
    for worker_id, url in ((1, ONE + "/v1"), (2, TWO), (3, TWO)):
        known.register(worker_id, "m", url)
    assert known.directory.bases_of({2, 3}) == [TWO]
    assert known.directory.bases_of({1, 2}) == [ONE, TWO]
    assert known.directory.bases_of({9}) == []


def test_workers_that_were_only_found_may_be_joined_by_others() -> None:
    known = Known()
    known.register(1, "m", ONE)
    assert not known.directory.is_complete
    assert known.directory.may_serve("another") is None
