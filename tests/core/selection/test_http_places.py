"""Which workers are at which HTTP endpoint, as the catalog changes."""

from lean_selector.core.selection.shapes import WorkerSpec
from tests.support.driven_selector import DrivenSelector


def sharing(driven: DrivenSelector, worker_id: int) -> list[int]:
    catalog = driven.selector.catalog
    return list(catalog.places.sharing(catalog.workers[worker_id].spec))


def at(driven: DrivenSelector, address: str) -> list[int]:
    return list(driven.selector.catalog.places.at_address(address))


def test_workers_share_an_endpoint_in_whatever_spelling_and_model() -> None:
    driven = DrivenSelector()
    driven.register(1, endpoint="http://Host:8000")
    driven.register(2, endpoint="host:8000/v1/", model_name="other")
    driven.register(3, endpoint="http://host:8000/engine-b")
    assert sharing(driven, 1) == [2]
    assert sharing(driven, 2) == [1]
    assert sharing(driven, 3) == []
    assert at(driven, "host:8000") == [1, 2, 3]


def test_an_engine_may_be_registered_as_a_worker_for_each_of_its_ranks() -> None:
    driven = DrivenSelector()
    driven.register(1, endpoint="http://h:1", data_parallel_size=2)
    driven.register(2, endpoint="http://h:1", data_parallel_start_rank=2, data_parallel_size=2)
    assert sharing(driven, 1) == sharing(driven, 2) == []
    driven.register(3, endpoint="http://h:1", data_parallel_start_rank=1, data_parallel_size=2)
    assert sharing(driven, 1) == sharing(driven, 2) == [3]
    assert sharing(driven, 3) == [1, 2]


def test_a_worker_is_where_it_was_registered_last_until_it_goes() -> None:
    driven = DrivenSelector()
    driven.register(1, endpoint="http://h:1")
    driven.register(1, endpoint="http://h:2")
    driven.register(2, endpoint="http://h:2")
    assert at(driven, "h:1") == []
    assert sharing(driven, 2) == [1]
    driven.register(1, endpoint="http://h:3", model_name="other")
    assert (at(driven, "h:2"), at(driven, "h:3")) == ([2], [1])
    driven.selector.catalog.remove(1)
    assert at(driven, "h:3") == []


def test_what_is_no_http_endpoint_is_nowhere() -> None:
    driven = DrivenSelector()
    for worker_id, endpoint in enumerate(("http://[", "", None)):
        driven.selector.catalog.upsert(WorkerSpec(worker_id=worker_id, endpoint=endpoint))
        assert sharing(driven, worker_id) == []
        driven.selector.catalog.remove(worker_id)
    assert at(driven, "") == []
